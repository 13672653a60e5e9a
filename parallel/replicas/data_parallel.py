"""What the optimizer and the step need of data parallelism, whoever shards: our ZeRO or torch's `fully_shard`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from triaxis.parallel.layers.gradient import Deferred
from triaxis.parallel.places.layout import ParameterLayout
from triaxis.parallel.programs.program import MemoryKind
from triaxis.parallel.replicas.cut import Segment
from triaxis.parallel.worlds.group import Group
from triaxis.parallel.worlds.mesh import Mesh

PARTIAL_GRADIENTS = "gradients that are partial"
"""What the sums over further axes say they are for."""


class Shard(Protocol):
    """A bucket, and the flat master weights of it that this rank updates.

    number: its place among the rank's buckets; group: the ranks that hold the same parameters
    segments: what `master` is made of; gradient_shard: its gradient, valid after `synchronize_gradients`
    """

    number: int
    group: Group
    padded_elements: int
    master: Tensor
    gradient_shard: Tensor
    segments: tuple[Segment, ...]

    @property
    def pieces(self) -> tuple[tuple[int, ParameterLayout], ...]:
        """Each piece's first element in the bucket, and its layout."""
        ...

    @property
    def shards(self) -> int:
        """Into how many equal parts the padded bucket is cut; member i of `group` updates part i (or all, if one)."""
        ...

    def move_master(self, moved: Callable[[Tensor], Tensor]) -> None:
        """Puts `master` elsewhere, unless it is the parameters themselves."""
        ...

    def reductions(self, microbatches: int) -> int:
        """How often a step of so many microbatches reduces the bucket's gradient over `group`."""
        ...

    def states(self) -> Iterator[tuple[MemoryKind, Tensor]]:
        """The tensors that are held all the time, or come and go as wholes, and what for."""
        ...


class DataParallel(Protocol):
    """The data-parallel state of a rank's modules (one per pipeline chunk), in the order of an optimizer step."""

    @property
    def buckets(self) -> Sequence[Shard]: ...

    @property
    def reductions_under_way(self) -> int:
        """How many reductions may outlast the backward pass that began them; 0 if none does."""
        ...

    def start_step(self) -> None: ...

    def start_backward(self, chunk: int, *, last: bool) -> None: ...

    def finish_backward(self, chunk: int) -> None: ...

    def start_inputs(self, chunk: int) -> None:
        """Before a backward pass for the gradients of inputs alone: those of weights are put off."""
        ...

    def finish_inputs(self, chunk: int) -> Deferred:
        """After it: what is left to do, between `start_backward` and `finish_backward`."""
        ...

    def synchronize_gradients(self) -> None: ...

    def squared_norm(self) -> Tensor: ...

    def publish(self) -> None: ...

    def gathered_gradients(self) -> Iterator[tuple[Segment, Tensor]]: ...

    def gathered_masters(self) -> Iterator[tuple[Segment, Tensor]]: ...

    def computing_weights(self) -> Iterator[tuple[Segment, Tensor]]: ...

    def state_bytes(self) -> dict[str, int]: ...


def sum_partial_gradients(shards: Sequence[Shard], mesh: Mesh) -> None:
    """P → R over the further axes that layouts declare (tp, tied stages), one message for each group."""
    _sum_what_is_held_twice(shards)
    partial: dict[str, list[Tensor]] = {}
    for shard in shards:
        for segment in shard.segments:
            for name in segment.layout.partial:
                run = shard.gradient_shard[segment.start : segment.stop]
                partial.setdefault(name, []).append(run)
    for name in sorted(partial):  # an order that all ranks share, whatever the order of their pieces
        group, runs = mesh.named(name), partial[name]
        if group.size > 1:
            flat = torch.cat(runs)
            group.all_reduce(flat, label=PARTIAL_GRADIENTS)
            torch._foreach_copy_(runs, list(flat.split([run.numel() for run in runs])))


def _sum_what_is_held_twice(shards: Sequence[Shard]) -> None:
    """Of tied stages that are chunks of this rank; each copy lies in a bucket of its own, cut alike."""
    copies: dict[tuple[str, tuple[int, ...], int], list[Tensor]] = {}
    for shard in shards:
        for segment in shard.segments:
            if segment.layout.twice:
                place = segment.layout.name, segment.layout.offsets, segment.first
                copies.setdefault(place, []).append(shard.gradient_shard[segment.start : segment.stop])
    for one, other in copies.values():
        other.copy_(one.add_(other))


def squared_sum(runs: Iterable[Tensor], device: torch.device) -> Tensor:
    """Σ x² over all runs, a float64 scalar."""
    held = list(runs)
    if not held:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(held)).double().square().sum()
