"""Layers are cut into contiguous parts, none lost, none empty, the dearest as cheap as possible."""

from __future__ import annotations

import itertools

import pytest

from triaxis.parallel.places import partition
from triaxis.parallel.places.partition import partition_layers


def test_uneven_counts_put_the_longer_parts_first() -> None:  # B45
    assert [len(part) for part in partition_layers(30, 4)] == [8, 8, 7, 7]


def test_every_layer_is_in_one_part_and_none_is_empty() -> None:  # B45
    for layers in range(1, 20):
        for parts in range(1, layers + 1):
            cut = partition_layers(layers, parts, first_extra=1.5, last_extra=3.0)
            assert [layer for part in cut for layer in part] == list(range(layers))
            assert all(len(part) > 0 for part in cut)


@pytest.mark.parametrize("first_extra", [0.0, 1.0, 2.5])
@pytest.mark.parametrize("last_extra", [0.0, 3.0, 20.0])
def test_no_other_cut_is_cheaper(first_extra: float, last_extra: float) -> None:
    costs = [1.0, 4.0, 1.0, 1.0, 2.0, 3.0, 1.0, 1.0]
    parts = 3

    def dearest(bounds: tuple[int, ...]) -> float:
        sums = [sum(costs[start:stop]) for start, stop in itertools.pairwise((0, *bounds, len(costs)))]
        return max(sums[0] + first_extra, *sums[1:-1], sums[-1] + last_extra)

    cut = partition_layers(
        len(costs), parts, layer_cost=costs, first_extra=first_extra, last_extra=last_extra
    )
    least = min(dearest(bounds) for bounds in itertools.combinations(range(1, len(costs)), parts - 1))
    assert dearest(tuple(part.stop for part in cut[:-1])) == least


def test_the_head_makes_the_last_part_shorter() -> None:
    assert [len(part) for part in partition_layers(32, 4, last_extra=2.0)] == [9, 9, 8, 6]


def test_refuses_impossible_numbers() -> None:
    with pytest.raises(ValueError, match="`parts` must be at least 1, but is 0"):
        partition_layers(3, 0)
    with pytest.raises(ValueError, match="is 4 for 3 layers"):
        partition_layers(3, 4)
    with pytest.raises(ValueError, match="one cost for each of 3 layers, but has 2"):
        partition_layers(3, 2, layer_cost=[1.0, 2.0])


@pytest.mark.parametrize("first", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("last", [0.0, 0.648, 0.7, 1.0, 3.2])
def test_layers_alike_are_cut_as_if_all_cuts_were_tried(first: float, last: float) -> None:
    for layers, parts in ((8, 3), (13, 4), (30, 4), (32, 8), (9, 9), (7, 1), (41, 6)):
        tried = partition._cut([float(place) for place in range(layers + 1)], parts, first, last)
        assert partition_layers(layers, parts, first_extra=first, last_extra=last) == tried
