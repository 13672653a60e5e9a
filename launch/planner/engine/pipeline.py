"""The pipeline of this engine walked through: its own schedule, with few microbatches that stand for many.

Receives are posted where `parallel.schedule.lower` puts them (a test compares the two). Compiled once for each
structure, the walk is a maximum and a sum for each computation and each message.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from triaxis.parallel.pipeline.schedule import Kind, Schedule, ScheduleName, make_schedule

RANKS: Final = 8
"""That are walked of 1F1B; more of them in the middle lengthen the way through, and nothing else."""
SETTLING: Final = 4  # microbatches beyond pp after which 1F1B does the same in each
GROUPS: Final = 3  # of pp microbatches after which the interleaved schedule does

Step = tuple[int, int, int, int, int]
"""A computation: rank, slot (2 · chunk, and 1 for backward), places of what the rank did before and of the message that
it waits for (0: none), 1 after a backward. Or a message: -1, the link, places of what made it, of what its receive was
posted after, and of the message before it. Places count from 1; place 0 is the beginning."""
Seconds = tuple[float, float, float]
"""Of an action: from its start at least, and from the end of the forward or backward before it at least."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Walk:
    """steps, each after what it needs. Places by rank: forwards, of its last chunk's; last, of its last action;
    closing, of each chunk's backward of the last microbatch."""

    steps: tuple[Step, ...]
    forwards: tuple[tuple[int, ...], ...]
    last: tuple[int, ...]
    closing: tuple[tuple[int, ...], ...]


def walked_microbatches(schedule: str, pp: int, chunks: int, microbatches: int) -> int:
    """As many, or so few that those left out do as their like before them."""
    if schedule == ScheduleName.GPIPE:
        return microbatches
    if chunks == 1:
        return min(microbatches, pp + SETTLING)
    return min(microbatches, GROUPS * pp + microbatches % pp)


@lru_cache(maxsize=1024)
def compiled(name: str, pp: int, microbatches: int, chunks: int) -> Walk:
    """The walk of a schedule."""
    schedule = make_schedule(name, pp, microbatches, chunks)
    steps: list[Step] = []
    latest, before = [0] * pp, [0] * pp  # places of a rank's latest computation, and of the one before it
    computes = [False] * pp  # whether that computation is the last that stands in its program
    turned = [0] * pp  # whether it is a backward
    forwards: list[list[int]] = [[] for _ in range(pp)]
    closing = [[0] * chunks for _ in range(pp)]
    arrived: dict[tuple[int, bool, int], int] = {}
    made: dict[tuple[int, bool, int], int] = {}
    sent: dict[tuple[int, int], int] = {}
    for begins, stage, backward, microbatch in _events(schedule):
        rank, chunk = stage % pp, stage // pp
        place = len(steps) + 1
        if begins:
            awaits = arrived.get((stage, backward, microbatch), 0)
            steps.append((rank, 2 * chunk + backward, latest[rank], awaits, turned[rank]))
            before[rank], latest[rank], computes[rank] = latest[rank], place, True
            turned[rank] = int(backward)
            made[stage, backward, microbatch] = place
            if not backward and chunk == chunks - 1:
                forwards[rank].append(place)
            if backward and microbatch == microbatches - 1:
                closing[rank][chunk] = place
            continue
        further = stage - 1 if backward else stage + 1
        if not 0 <= further < pp * chunks:
            continue
        target = further % pp
        posted = before[target] if computes[target] else latest[target]
        link = min(rank, target) if abs(rank - target) == 1 else pp - 1
        steps.append((-1, link, made[stage, backward, microbatch], posted, sent.get((rank, target), 0)))
        sent[rank, target] = arrived[further, backward, microbatch] = place
        computes[rank] = False
    return Walk(
        steps=tuple(steps),
        forwards=tuple(map(tuple, forwards)),
        last=tuple(latest),
        closing=tuple(map(tuple, closing)),
    )


def _events(schedule: Schedule) -> list[tuple[bool, int, bool, int]]:
    """(begins, model stage, backward, microbatch) of all computations' beginnings and ends, in the order of
    `simulate`'s time, in which backward takes twice as long as forward; ends before beginnings."""
    pp = schedule.pp
    stages = pp * schedule.virtual_stages
    ended: dict[tuple[int, bool, int], int] = {}
    free, done = [0] * pp, [0] * pp
    orders = [
        [(action.chunk * pp + rank, action.kind is Kind.BACKWARD, action.microbatch) for action in order]
        for rank, order in enumerate(schedule.orders)
    ]
    events: list[list[tuple[int, bool, tuple[int, bool, int]]]] = [[] for _ in range(pp)]
    progressed = True
    while progressed:
        progressed = False
        for rank, order in enumerate(orders):
            while done[rank] < len(order):
                action = stage, backward, microbatch = order[done[rank]]
                need = stage + 1 if backward else stage - 1
                start = free[rank]
                if 0 <= need < stages:
                    needed = ended.get((need, backward, microbatch))
                    if needed is None:
                        break
                    start = max(start, needed)
                free[rank] = ended[action] = start + (2 if backward else 1)
                events[rank] += ((start, True, action), (free[rank], False, action))
                done[rank] += 1
                progressed = True
    timed = sorted((event for of_rank in events for event in of_rank), key=lambda event: event[:2])
    return [(begins, *action) for _, begins, action in timed]


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """Seconds. ends: of each rank's last action; each: that one more microbatch takes, as all those in the middle do;
    closing: by rank and chunk, the end of the last microbatch's backward."""

    ends: tuple[float, ...]
    each: float
    closing: tuple[tuple[float, ...], ...]


@lru_cache(maxsize=4096)
def walk(
    course: Walk, hops: tuple[float, ...], seconds: tuple[tuple[Seconds, ...], ...], period: int
) -> Walked:
    """hops: seconds of each link, from a rank to the next; seconds: by rank and slot; period: microbatches after which
    all is alike."""
    times = [0.0]
    for rank, slot, first, second, third in course.steps:
        before, time = times[first], times[second]
        if before > time:
            time = before
        if rank >= 0:
            action = seconds[rank][slot]
            time, other = time + action[0], before + action[1 + third]
            times.append(other if other > time else time)
        else:
            other = times[third]
            times.append((other if other > time else time) + hops[slot])
    each = 0.0
    for places in course.forwards:
        if len(places) > period:
            each = max(each, (times[places[-1]] - times[places[-1 - period]]) / period)
    return Walked(
        ends=tuple(times[place] for place in course.last),
        each=each,
        closing=tuple(tuple(times[place] for place in chunks) for chunks in course.closing),
    )
