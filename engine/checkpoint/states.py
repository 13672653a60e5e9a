"""What a rank holds of the whole model's states, by name: "master/…", "exp_avg/…" and "exp_avg_sq/…" of a parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from triaxis.engine.optimizer import ShardOptimizer
from triaxis.parallel.layers.declare import states_of
from triaxis.parallel.places.rectangles import cut_rectangles
from triaxis.parallel.replicas.cut import Segment
from triaxis.parallel.replicas.data_parallel import Shard

Offsets = tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class HeldTensor:
    """The chunks held here of one tensor of global `shape`: their places in it, and views of the live values.

    copies: of chunks of a table that two stages of this rank hold; not stored, but filled
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: dict[Offsets, Tensor] = field(default_factory=dict)
    copies: dict[Offsets, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def fill_copies(self) -> None:
        """After the chunks were read."""
        for offsets, view in self.copies.items():
            view.copy_(self.chunks[offsets])


def held_states(shards: Sequence[Shard], optimizer: ShardOptimizer) -> dict[str, HeldTensor]:
    """This rank's states. Moments that do not exist yet are made, as zeros."""
    return held_masters(shards) | held_moments(optimizer)


def held_masters(shards: Sequence[Shard]) -> dict[str, HeldTensor]:
    """This rank's part of the master weights."""
    held: dict[str, HeldTensor] = {}
    for shard in shards:
        for segment in shard.segments:
            _hold(held, "master", segment, shard.master.detach()[segment.start : segment.stop])
    return held


def held_layer_states(modules: Sequence[nn.Module]) -> dict[str, HeldTensor]:
    """States of layers that no optimizer updates (the choosing bias of experts), which every rank of a stage holds."""
    return {
        f"master/{layout.name}": HeldTensor(
            dtype=tensor.dtype, shape=layout.shape, chunks={layout.offsets: tensor}
        )
        for module in modules
        for layout, tensor in states_of(module)
    }


def held_moments(optimizer: ShardOptimizer) -> dict[str, HeldTensor]:
    """This rank's part of the optimizer's moments, made as zeros where they do not exist yet."""
    held: dict[str, HeldTensor] = {}
    for shard, start, stop, moments in optimizer.moments():
        for segment in shard.segments:
            if start <= segment.start and segment.stop <= stop:
                for kind, moment in moments.items():
                    _hold(held, kind, segment, moment[segment.start - start : segment.stop - start])
    return held


def _hold(held: dict[str, HeldTensor], kind: str, segment: Segment, run: Tensor) -> None:
    """Adds the chunks of the segment's flat run."""
    layout = segment.layout
    tensor = held.setdefault(f"{kind}/{layout.name}", HeldTensor(dtype=run.dtype, shape=layout.shape))
    into = tensor.copies if layout.twice and not layout.counted else tensor.chunks
    for offsets, view in held_chunks(segment, run):
        assert offsets not in into, f"{layout.name} is held twice at {offsets}"
        into[offsets] = view


def held_chunks(segment: Segment, run: Tensor) -> Iterator[tuple[Offsets, Tensor]]:
    """The rectangles of the segment's flat run, without padding, at their offsets in the whole parameter."""
    layout, first = segment.layout, segment.first
    for part in cut_rectangles(layout.local_shape, first, first + run.numel()):
        view = run[part.first : part.first + part.elements].view(part.sizes)
        kept = [
            min(size, held - low)
            for size, held, low in zip(part.sizes, layout.sizes, part.offsets, strict=True)
        ]
        if all(size > 0 for size in kept):
            offsets = tuple(first + low for first, low in zip(layout.offsets, part.offsets, strict=True))
            yield offsets, view[tuple(slice(size) for size in kept)]
