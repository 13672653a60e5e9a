"""A schedule walked through in time: when each rank computes what. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from triaxis.parallel.pipeline.schedule import KINDS, Action, Kind, Schedule, ScheduleError, order_grid

Durations = Callable[[int, int, Kind], float]
"""How long an action takes, by rank, chunk and kind."""
Links = Callable[[int, int], float]
"""How long a message takes, by the ranks that send and receive it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """When a rank computes an action, in the unit of the durations given."""

    rank: int
    action: Action
    start: float
    stop: float


def by_kind(forward: int, backward: int) -> Durations:
    """The same on every rank; a backward that is done in two halves takes as long as a whole one."""
    times = {
        Kind.FORWARD: forward,
        Kind.BACKWARD: backward,
        Kind.INPUT: backward - backward // 2,
        Kind.WEIGHT: backward // 2,
    }
    return lambda _rank, _chunk, kind: times[kind]


def in_units(_rank: int, _chunk: int, kind: Kind) -> float:
    """Every chunk takes the same time, a backward twice as long as a forward."""
    return KINDS[kind].units


def at_once(_source: int, _target: int) -> float:
    """Messages that take no time."""
    return 0


def simulate(
    schedule: Schedule, durations: Durations = in_units, links: Links = at_once
) -> tuple[tuple[Span, ...], ...]:
    """Per rank, when it computes what: as soon as it is free and what it needs is there.

    Raises ScheduleError, with the grid and the cell of each rank that waits, when the orders get stuck.
    """
    finished: dict[tuple[int, Action], float] = {}
    spans: list[list[Span]] = [[] for _ in schedule.orders]
    progressed = True
    while progressed:
        progressed = False
        for rank, order in enumerate(schedule.orders):
            while len(spans[rank]) < len(order):
                action = order[len(spans[rank])]
                needs = _needs(schedule, rank, action)
                if any(need not in finished for need in needs):
                    break
                free = spans[rank][-1].stop if spans[rank] else 0
                arrivals = [
                    finished[need] + (links(need[0], rank) if need[0] != rank else 0) for need in needs
                ]
                start = max([free, *arrivals])
                stop = start + durations(rank, action.chunk, action.kind)
                spans[rank].append(Span(rank=rank, action=action, start=start, stop=stop))
                finished[rank, action] = stop
                progressed = True
    stuck = {
        rank: len(spans[rank]) for rank, order in enumerate(schedule.orders) if len(spans[rank]) < len(order)
    }
    if stuck:
        cells = [schedule.orders[rank][cell] for rank, cell in stuck.items()]
        waits = "; ".join(f"rank {rank} waits at {action}" for rank, action in zip(stuck, cells, strict=True))
        raise ScheduleError(
            f"the schedule cannot be carried out: {waits}\n{order_grid(schedule.orders, stuck)}"
        )
    return tuple(tuple(rank_spans) for rank_spans in spans)


def _needs(schedule: Schedule, rank: int, action: Action) -> list[tuple[int, Action]]:
    producer = schedule.producer(rank, action)
    needs = [] if producer is None else [producer]
    if action.rule.after is not None:
        needs.append((rank, action.like(action.rule.after)))
    return needs
