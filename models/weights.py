"""A model's weights from elsewhere: each rank reads the rectangles that it holds, a piece at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from triaxis.models.builder import build_model
from triaxis.models.config import ModelConfig
from triaxis.parallel.layers.build import Build
from triaxis.parallel.places.layout import ParameterLayout, layouts_of, named_layouts
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.trace import TraceWorld

Shape = tuple[int, ...]


class Weights(Protocol):
    """Where whole tensors lie: a Hugging Face folder, or a checkpoint."""

    def read(self, name: str, offsets: Shape, sizes: Shape) -> Tensor:
        """A rectangle of the tensor that is called `name` in the whole model."""


def rectangle(layout: ParameterLayout) -> tuple[Shape, Shape]:
    """(offsets, sizes) of the elements of the whole tensor that a piece holds, without padding."""
    offsets, sizes = [0] * len(layout.shape), list(layout.shape)
    if layout.dim is not None:
        offsets[layout.dim], sizes[layout.dim] = layout.start, layout.stop - layout.start
    return tuple(offsets), tuple(sizes)


def filler(weights: Weights) -> Callable[[nn.Parameter], None]:
    """What fills a parameter from `weights`; rows that are padding become zero."""

    @torch.no_grad()
    def fill(parameter: nn.Parameter) -> None:
        first = 0
        for layout in layouts_of(parameter):
            piece = parameter.data.view(-1)[first : first + layout.elements].view(layout.local_shape)
            first += layout.elements
            offsets, sizes = rectangle(layout)
            piece.zero_()
            piece[tuple(slice(0, size) for size in sizes)].copy_(weights.read(layout.name, offsets, sizes))

    return fill


def whole_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Every tensor of the whole model, by name: its shape. Nothing is allocated."""
    world = TraceWorld(0, 1)
    world.device = torch.device("meta")
    stage = build_model(model, Build.on(build_mesh(world, Topology())))
    return {layout.name: layout.shape for _, layout, _ in named_layouts(stage)}
