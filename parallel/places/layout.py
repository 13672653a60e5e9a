"""Every parameter declares its layout: its place in the whole model, on any topology. Pure data, no torch.

A local parameter is one or more *pieces* stacked along dimension 0 (a fused q, k, v weight has three).
Each piece has a `ParameterLayout`. Initial values, gradient sums, the norm, weight decay, buckets, shards and
checkpoints are derived from it, and from nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod

TENSOR_RANKS = "tp"
REPLICAS = "replicas"
EXPERT_REPLICAS = "expert_replicas"


class Init(StrEnum):
    NORMAL = "normal"
    ZEROS = "zeros"
    ONES = "ones"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLayout:
    """Where one piece of a local parameter lies in the whole model. Groups are named as the mesh names them.

    name: its name in the whole model, the same on every topology
    shape: its global shape
    offsets, sizes: the rectangle of it that is held here
    local_shape: the shape held here; what is past `sizes` is padding, always zero
    partial: the groups over which the gradient is still partial after backward, besides its replicas
    replicas: the group whose members hold the same piece of the same place and see other data: gradients are summed,
    and optimizer states sharded, over it
    counted: whether this rank counts it in the global norm (each element is counted once over all ranks)
    outermost: the dimension that is numbered outermost for initial values; a cut along it is one run of the numbers
    tied: the first and the last stage both hold it; twice: both are chunks of one rank
    Example: a (6, 4) weight cut along dim 0 over tp=2 has, on tensor rank 1, offsets (3, 0) and sizes (3, 4).
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_shape: tuple[int, ...]
    partial: tuple[str, ...] = ()
    replicas: str = REPLICAS
    counted: bool = True
    decayed: bool = True
    init: Init = Init.NORMAL
    std: float = 0.02
    outermost: int = 0
    tied: bool = False
    twice: bool = False

    @property
    def elements(self) -> int:
        """Held here, padding included."""
        return prod(self.local_shape)

    @property
    def place(self) -> tuple[slice, ...]:
        """The rectangle as an index of the whole parameter."""
        return tuple(slice(low, low + size) for low, size in zip(self.offsets, self.sizes, strict=True))

    @property
    def unpadded(self) -> tuple[slice, ...]:
        """The rectangle as an index of the local piece."""
        return tuple(slice(size) for size in self.sizes)


def slab(shape: Sequence[int], dim: int, start: int, stop: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of the part of a tensor from `start` to `stop` along one dimension.

    Example: columns 2 and 3 of a (6, 4) tensor: (0, 2) and (6, 2).
    """
    offsets, sizes = [0] * len(shape), list(shape)
    offsets[dim], sizes[dim] = start, stop - start
    return tuple(offsets), tuple(sizes)


def replicated(
    name: str,
    shape: Sequence[int],
    tensor_rank: int,
    *,
    sequence_parallel: bool = False,
    decayed: bool = False,
    init: Init = Init.ONES,
    std: float = 0.02,
) -> ParameterLayout:
    """The layout of a parameter that every tensor rank holds whole.

    Under sequence parallelism each rank sees a part of the tokens, so its gradient is summed over tp.
    """
    return ParameterLayout(
        name=name,
        shape=tuple(shape),
        offsets=(0,) * len(shape),
        sizes=tuple(shape),
        local_shape=tuple(shape),
        partial=(TENSOR_RANKS,) if sequence_parallel else (),
        counted=tensor_rank == 0,
        decayed=decayed,
        init=init,
        std=std,
    )
