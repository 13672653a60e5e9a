"""Cuts the layers of a model into contiguous parts of nearly equal cost."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import accumulate


def partition_layers(
    layers: int,
    parts: int,
    *,
    layer_cost: float | Sequence[float] = 1.0,
    first_extra: float = 0.0,
    last_extra: float = 0.0,
) -> tuple[range, ...]:
    """The layers of each part: contiguous, none empty, the dearest part as cheap as possible.

    layer_cost: of every layer, or one cost for each
    first_extra, last_extra: what the embedding and the head add to the first and the last part
    Of such cuts the most even one, longer parts first: partition_layers(30, 4) has sizes 8, 8, 7, 7.
    """
    _refuse_impossible(layers, parts)
    costs = (
        [float(layer_cost)] * layers
        if isinstance(layer_cost, (int, float))
        else [float(c) for c in layer_cost]
    )
    if len(costs) != layers:
        raise ValueError(f"`layer_cost` must have one cost for each of {layers} layers, but has {len(costs)}")
    if min(*costs, first_extra, last_extra, 0.0) < 0:
        raise ValueError("`layer_cost`, `first_extra` and `last_extra` must not be negative")
    if len(set(costs)) == 1 and costs[0] > 0:
        return _cut_alike(layers, parts, first_extra / costs[0], last_extra / costs[0])
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    return _cut(before, parts, first_extra, last_extra)


def _refuse_impossible(layers: int, parts: int) -> None:
    if parts < 1:
        raise ValueError(f"`parts` must be at least 1, but is {parts}")
    if parts > layers:
        raise ValueError(
            f"`parts` (pipeline ranks × virtual stages) must be at most the number of layers, "
            f"but is {parts} for {layers} layers; use at most {layers} parts or at least {parts} layers"
        )


def _cut_alike(layers: int, parts: int, first: float, last: float) -> tuple[range, ...]:
    """Layers of one cost: each goes to the part that is cheapest so far, which is as good as trying all cuts."""
    counts, costs = [1] * parts, [1.0] * parts
    costs[0] += first
    costs[-1] += last
    cheapest = [(cost, part) for part, cost in enumerate(costs)]
    heapify(cheapest)
    for _ in range(layers - parts):
        cost, part = cheapest[0]
        counts[part] += 1
        heapreplace(cheapest, (cost + 1, part))
    stops = list(accumulate(counts))
    return tuple(range(stop - count, stop) for stop, count in zip(stops, counts, strict=True))


def _cut(before: list[float], parts: int, first_extra: float, last_extra: float) -> tuple[range, ...]:
    """Dynamic programme over (parts left, first layer): the least (maximal cost, sum of squared costs)."""
    layers = len(before) - 1

    def cost(part: int, start: int, stop: int) -> float:
        extra = (first_extra if part == 0 else 0.0) + (last_extra if part == parts - 1 else 0.0)
        return before[stop] - before[start] + extra

    infinite = (float("inf"), float("inf"))
    best: list[tuple[float, float]] = [infinite] * layers + [(0.0, 0.0)]
    stops: list[list[int]] = []
    for part in reversed(range(parts)):
        now, stop_of = [infinite] * (layers + 1), [0] * (layers + 1)
        for start in range(part, layers):
            for stop in reversed(range(start + 1, layers + 1)):  # on a tie the longer part comes first
                mine, (theirs, squares) = cost(part, start, stop), best[stop]
                candidate = (max(mine, theirs), mine * mine + squares)
                if candidate < now[start]:
                    now[start], stop_of[start] = candidate, stop
        best = now
        stops.insert(0, stop_of)
    ranges, start = [], 0
    for stop_of in stops:
        ranges.append(range(start, stop_of[start]))
        start = stop_of[start]
    return tuple(ranges)
