"""The report's plot of time against memory: what lies where. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from triaxis.launch.planner.explain import gigabytes, seconds_text
from triaxis.launch.planner.search import Candidate, Plan

POINTS = 1500
LEFT, TOP, WIDTH, HEIGHT = 56, 12, 700, 320
"""Of the plot, in its own units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A layout in the plot of time and memory; kind: other, pareto or chosen."""

    x: float
    y: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A mark on an axis of the plot."""

    at: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Step time to the right, memory upwards. error: left, right, top and bottom of the chosen one's error bars."""

    points: tuple[Point, ...]
    across: tuple[Tick, ...]
    up: tuple[Tick, ...]
    capacity_y: float
    error: tuple[float, float, float, float]


def plot(plan: Plan, chosen: Candidate) -> Plot:
    """All that fit and take at most twice the chosen one's time, and what lies on the Pareto front."""
    near = [one for one in plan.fitting if one.seconds <= 2 * chosen.seconds][:POINTS]
    if chosen not in near:
        near.append(chosen)
    first = 0.97 * min(one.seconds for one in near)
    earliest, latest = chosen.seconds_range
    first, last = min(first, earliest), max(1.02 * max(one.seconds for one in near), latest)
    capacity = plan.request.hardware.memory_bytes
    top = 1.08 * capacity

    def x(seconds: float) -> float:
        return LEFT + WIDTH * (seconds - first) / (last - first)

    def y(nbytes: float) -> float:
        return TOP + HEIGHT * (1 - nbytes / top)

    front = set(map(id, plan.pareto))

    def kind(one: Candidate) -> str:
        return "chosen" if one == chosen else "pareto" if id(one) in front else "other"

    points = [
        Point(
            x=round(x(one.seconds), 1),
            y=round(y(one.memory_bytes), 1),
            kind=kind(one),
            text=f"{one}: {seconds_text(one.seconds)}, {gigabytes(one.memory_bytes)}",
        )
        for one in near
    ]
    points.sort(key=lambda point: ("other", "pareto", "chosen").index(point.kind))
    least, most = chosen.memory_range
    return Plot(
        points=tuple(points),
        across=tuple(Tick(at=round(x(value), 1), text=seconds_text(value)) for value in _ticks(first, last)),
        up=tuple(Tick(at=round(y(value * 1e9), 1), text=f"{value:g}") for value in _ticks(0, top / 1e9)),
        capacity_y=round(y(capacity), 1),
        error=(
            round(x(earliest), 1),
            round(x(latest), 1),
            round(y(most), 1),
            round(y(least), 1),
        ),
    )


def _ticks(low: float, high: float) -> list[float]:
    """Four to nine round values between the two."""
    step = 10.0 ** int(f"{(high - low):e}".split("e")[1])
    while (high - low) / step < 4:
        step /= 2 if round(step / 10 ** int(f"{step:e}".split("e")[1])) != 5 else 2.5
    first = int(low / step) + (low % step > 0)
    return [step * index for index in range(first, int(high / step) + 1)]
