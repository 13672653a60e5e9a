"""What parameters declare of themselves, attached to them and read back: the layouts of their pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, cast

from torch import Tensor, nn

from triaxis.parallel.places.layout import ParameterLayout, replicated

Layouts = tuple[ParameterLayout, ...]


class _Declared(Protocol):
    layouts: Layouts


def declare(parameter: nn.Parameter, *layouts: ParameterLayout) -> nn.Parameter:
    """Attaches the layouts of a parameter's pieces, in the order they are stacked along dimension 0."""
    held = sum(layout.elements for layout in layouts)
    assert held == parameter.numel(), f"layouts cover {held} elements of {parameter.numel()}"
    cast(_Declared, parameter).layouts = layouts
    return parameter


def declare_state(tensor: Tensor, layout: ParameterLayout) -> Tensor:
    """Attaches the layout of a state without a gradient, which is saved and exported, and alike on all ranks."""
    cast(_Declared, tensor).layouts = (layout,)
    return tensor


def states_of(module: nn.Module) -> Iterator[tuple[ParameterLayout, Tensor]]:
    """The declared states of a module (buffers), each with its layout."""
    for tensor in module.buffers():
        for layout in getattr(tensor, "layouts", ()):
            yield layout, tensor


def layouts_of(parameter: nn.Parameter) -> Layouts:
    """The layouts of a parameter's pieces; empty if none were declared."""
    layouts: Layouts = getattr(parameter, "layouts", ())
    return layouts


def declare_replicated(module: nn.Module, tensor_rank: int, prefix: str = "") -> None:
    """Gives every parameter of an ordinary module the layout of a replicated one, named as in the module."""
    for name, parameter in module.named_parameters():
        if not layouts_of(parameter):
            layout = replicated(prefix + name, parameter.shape, tensor_rank, decayed=parameter.dim() > 1)
            declare(parameter, layout)


def declared(module: nn.Module) -> dict[nn.Parameter, Layouts]:
    """The layouts of all parameters of a module. Raises ValueError that names one without."""
    found: dict[nn.Parameter, Layouts] = {}
    for name, parameter in module.named_parameters():
        found[parameter] = layouts_of(parameter)
        if not found[parameter]:
            raise ValueError(
                f"every parameter must have a layout, but `{name}` of shape {tuple(parameter.shape)} has none; "
                "declare one where it is made, or call declare_replicated(module) for a module that is not "
                "parallel itself"
            )
    return found


def pieces(values: Tensor, layouts: Sequence[ParameterLayout]) -> Iterator[tuple[ParameterLayout, Tensor]]:
    """The pieces of a parameter's values (or of its gradient), each as a view in its local shape."""
    flat, first = values.view(-1), 0
    for layout in layouts:
        yield layout, flat[first : first + layout.elements].view(layout.local_shape)
        first += layout.elements


def named_layouts(module: nn.Module) -> Iterator[tuple[nn.Parameter, ParameterLayout, int]]:
    """Each piece of a module: its parameter, its layout and its first element in the flat parameter."""
    for parameter, layouts in declared(module).items():
        first = 0
        for layout in layouts:
            yield parameter, layout, first
            first += layout.elements
