"""Every parameter declares its layout: its place in the whole model, on any topology.

A local parameter is one or more *pieces* stacked along dimension 0 (a fused q, k, v weight has three).
Each piece has a `ParameterLayout`. Initial values, gradient sums, the norm, weight decay, shards and
checkpoints are derived from it, and from nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from torch import nn

from triaxis.parallel.worlds.group import Group


class Init(StrEnum):
    NORMAL = "normal"
    ZEROS = "zeros"
    ONES = "ones"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLayout:
    """Where one piece of a local parameter lies in the whole model.

    name: its name in the whole model, the same on every topology
    shape: its global shape
    dim: the dimension cut, or None where it is replicated
    start, stop: the global rows (along `dim`) held here; padding behind them is not counted
    local_shape: the shape held here, padding included
    sums: groups, besides dp, over which the gradient is still partial after backward
    counted: whether this rank counts it in the global norm (each element is counted once over all ranks)
    Example: a (6, 4) weight cut along dim 0 over tp=2 has, on tensor rank 1, start=3, stop=6.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None
    start: int
    stop: int
    local_shape: tuple[int, ...]
    sums: tuple[Group, ...] = ()
    counted: bool = True
    decayed: bool = True
    init: Init = Init.NORMAL
    std: float = 0.02
    tied: bool = False

    @property
    def elements(self) -> int:
        count = 1
        for size in self.local_shape:
            count *= size
        return count


def declare(parameter: nn.Parameter, *layouts: ParameterLayout) -> nn.Parameter:
    """Attaches the layouts of a parameter's pieces, in the order they are stacked along dimension 0."""
    held = sum(layout.elements for layout in layouts)
    assert held == parameter.numel(), f"layouts cover {held} elements of {parameter.numel()}"
    parameter.layouts = layouts  # type: ignore[attr-defined]
    return parameter


def layouts_of(parameter: nn.Parameter) -> tuple[ParameterLayout, ...]:
    """The layouts of a parameter's pieces; a parameter without one is an error."""
    layouts: tuple[ParameterLayout, ...] | None = getattr(parameter, "layouts", None)
    if layouts is None:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} has no layout; declare one where it is made, "
            "or call declare_replicated(module) for a module that is not parallel itself"
        )
    return layouts


def replicated(
    name: str,
    shape: Sequence[int],
    tensor_group: Group,
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
        dim=None,
        start=0,
        stop=0,
        local_shape=tuple(shape),
        sums=(tensor_group,) if sequence_parallel else (),
        counted=tensor_group.rank == 0,
        decayed=decayed,
        init=init,
        std=std,
    )


def declare_replicated(module: nn.Module, tensor_group: Group, prefix: str = "") -> None:
    """Gives every parameter of an ordinary module the layout of a replicated one, named as in the module."""
    for name, parameter in module.named_parameters():
        if getattr(parameter, "layouts", None) is None:
            declare(
                parameter,
                replicated(prefix + name, parameter.shape, tensor_group, decayed=parameter.dim() > 1),
            )


def named_layouts(module: nn.Module) -> Iterator[tuple[nn.Parameter, ParameterLayout, int]]:
    """Each piece of a module: its parameter, its layout and its first element in the flat parameter."""
    for parameter in module.parameters():
        offset = 0
        for layout in layouts_of(parameter):
            yield parameter, layout, offset
            offset += layout.elements
