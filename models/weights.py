"""A model's weights from elsewhere: each rank reads the rectangles that it holds, a piece at a time."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from triaxis.models.config import ModelConfig
from triaxis.models.stage import build_stage
from triaxis.parallel.layers.build import Build
from triaxis.parallel.layers.declare import named_layouts, states_of
from triaxis.parallel.places.layout import ParameterLayout
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.replicas.initialize import Fill, by_rectangles
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.trace import TraceWorld

Shape = tuple[int, ...]


class Weights(Protocol):
    """Where whole tensors lie: a Hugging Face folder, or a checkpoint."""

    def read(self, name: str, offsets: Shape, sizes: Shape) -> Tensor:
        """A rectangle of the tensor that is called `name` in the whole model."""


def filler(weights: Weights) -> Fill:
    """What fills runs of parameters from `weights`; rows that are padding become zero."""

    def fill(layout: ParameterLayout, view: Tensor, offsets: Shape) -> None:
        view.copy_(weights.read(layout.name, offsets, tuple(view.shape)))

    return by_rectangles(fill)


def whole_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Every tensor of the whole model, by name: its shape. Nothing is allocated."""
    world = TraceWorld(0, 1, "meta")
    stage = build_stage(model, Build.on(build_mesh(world, Topology())))
    shapes = {layout.name: layout.shape for _, layout, _ in named_layouts(stage)}
    return shapes | {layout.name: layout.shape for layout, _ in states_of(stage)}
