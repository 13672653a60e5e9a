"""Layouts: any rectangle of a parameter has the values that the whole one has there; none may be missing."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch import Tensor, nn

from triaxis.engine.plan import StepPlan
from triaxis.engine.trace.rank import rank_layouts
from triaxis.models.presets import PRESETS
from triaxis.parallel.layers.declare import declare_replicated, declared
from triaxis.parallel.places.layout import ParameterLayout, slab
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.replicas import initialize
from triaxis.parallel.replicas.initialize import normal_elements, random_values

SHAPE = (4, 6, 5)
CUTS = [
    ((0, 0, 0), (4, 6, 5)),
    ((2, 0, 0), (2, 6, 5)),
    ((0, 3, 0), (4, 2, 5)),
    ((1, 2, 3), (2, 3, 1)),
    ((3, 0, 1), (1, 6, 4)),
    ((4, 0, 0), (0, 6, 5)),
]


def piece(
    offsets: tuple[int, ...], sizes: tuple[int, ...], outermost: int, padding: int = 0
) -> tuple[ParameterLayout, Tensor]:
    local_shape = (sizes[0] + padding, *sizes[1:])
    layout = ParameterLayout(
        name="weight",
        shape=SHAPE,
        offsets=offsets,
        sizes=sizes,
        local_shape=local_shape,
        outermost=outermost,
        std=0.5,
    )
    values = torch.full(local_shape, torch.nan, dtype=torch.float64)
    random_values(3)(layout, values.view(-1), 0)
    return layout, values


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
@pytest.mark.parametrize("outermost", [0, 1, 2])
@pytest.mark.parametrize(("offsets", "sizes"), CUTS)
def test_a_rectangle_has_the_values_of_the_whole(
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    outermost: int,
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = normal_elements(3, "weight", 0, 120).mul_(0.5)
    order = [outermost, *(dim for dim in range(3) if dim != outermost)]
    whole = torch.empty(SHAPE, dtype=torch.float64)
    whole.permute(order).copy_(numbers.view([SHAPE[dim] for dim in order]))
    monkeypatch.setattr(initialize, "CHUNK_ELEMENTS", chunk)
    layout, values = piece(offsets, sizes, outermost, padding=2)
    assert torch.equal(values[layout.unpadded], whole[layout.place])
    assert not values[sizes[0] :].any()


def test_a_slab_is_cut_along_one_dimension() -> None:
    assert slab((6, 4), 1, 2, 4) == ((0, 2), (6, 2))


def test_a_parameter_without_a_layout_is_named() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    declare_replicated(net[0], 0)
    with pytest.raises(ValueError, match=r"`1\.weight` of shape \(2, 3\) has none"):
        declared(net)


@pytest.mark.parametrize("virtual_stages", [1, 2])
@pytest.mark.parametrize("name", ["qwen2.5-72b", "gpt2-124m"])
def test_what_all_ranks_hold_is_the_model(name: str, virtual_stages: int) -> None:
    """Without memory: 145 GB would not be there."""
    model = PRESETS[name]
    topology = Topology(tp=4, pp=2, dp=2)
    plan = StepPlan(
        model=model, microbatch_size=1, microbatches=4, sequence_length=128, virtual_stages=virtual_stages
    )
    held: dict[str, set[tuple[int, ...]]] = {}
    elements = 0
    for rank in range(8):
        for chunk in rank_layouts(plan, topology, rank):
            for layout in chunk:
                places = held.setdefault(layout.name, set())
                if layout.offsets not in places:
                    places.add(layout.offsets)
                    elements += prod(layout.sizes)
    assert elements == model.parameters()
