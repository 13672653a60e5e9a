"""The pipeline walked through in time: the engine's own lowered programs, with few microbatches that stand for many.

Compiled once for each schedule, the walk is a maximum and a sum for each computation and each message.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from triaxis.launch.planner.lane import Seconds
from triaxis.parallel.pipeline.lowering import Compute, Program, Receive, Send, lower
from triaxis.parallel.pipeline.orders import make_schedule
from triaxis.parallel.pipeline.schedule import Action, Kind, ScheduleName

RANKS: Final = 8
"""Ranks that are walked of 1F1B; more of them in the middle lengthen the way through, and nothing else."""
SETTLING: Final = 4
"""Microbatches beyond pp after which 1F1B does the same in each."""
GROUPS: Final = 3
"""Groups of pp microbatches after which the interleaved schedule does the same in each."""

Step = tuple[int, int, int, int, int]
"""A computation: its rank; its slot (2 · chunk, and 1 for backward); the places of what the rank did before and of the
message that it waits for (0: none); 1 after a backward. Or a message: -1; its link; the places of what made it, of
what its receive was posted after, and of the message before it. Places count from 1; place 0 is the beginning.
(Plain tuples: millions of them are read in a search.)"""


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


@dataclass(slots=True)
class _Rank:
    """A rank while its program is compiled.

    items: a computation as (-1, code), a send as (to whom, code of what it makes possible there); a code is a plain
    number for an action: many are looked up
    posted: by code, how many computations stand before its receive
    """

    items: list[tuple[int, int, Action]]
    posted: dict[int, int]
    done: int = 0
    latest: int = 0
    turned: int = 0
    places: list[int] = field(default_factory=lambda: [0])
    forwards: list[int] = field(default_factory=list)
    arrived: dict[int, int] = field(default_factory=dict)
    made: dict[int, int] = field(default_factory=dict)


def _rank(number: int, program: Program, pp: int, microbatches: int) -> _Rank:
    items: list[tuple[int, int, Action]] = []
    posted: dict[int, int] = {}
    computed = 0
    for item in program:
        action = item.action
        backward = action.kind is Kind.BACKWARD
        stage = action.chunk * pp + number
        code = (2 * stage + backward) * microbatches + action.microbatch
        if isinstance(item, Compute):
            computed += 1
            items.append((-1, code, action))
        elif isinstance(item, Receive):
            posted[code] = computed
        elif isinstance(item, Send):
            items.append((item.to_rank, code + (-2 if backward else 2) * microbatches, action))
    return _Rank(items, posted)


@lru_cache(maxsize=1024)
def compiled(name: str, pp: int, microbatches: int, chunks: int) -> Walk:
    """The walk of a schedule. Ranks take turns, each as far as it can go: a send waits until its receive is posted, as
    `lower` allows."""
    programs = lower(make_schedule(name, pp, microbatches, chunks))
    ranks = [_rank(number, program, pp, microbatches) for number, program in enumerate(programs)]
    steps: list[Step] = []
    closing = [[0] * chunks for _ in range(pp)]
    sent: dict[tuple[int, int], int] = {}
    progressed = True
    while progressed:
        progressed = False
        for number, rank in enumerate(ranks):
            while rank.done < len(rank.items):
                target, code, action = rank.items[rank.done]
                if target < 0:
                    if code in rank.posted and code not in rank.arrived:
                        break
                    _compute(rank, number, code, action, steps)
                    if rank.turned and action.microbatch == microbatches - 1:
                        closing[number][action.chunk] = rank.latest
                    elif not rank.turned and action.chunk == chunks - 1:
                        rank.forwards.append(rank.latest)
                else:
                    other = ranks[target]
                    if len(other.places) <= other.posted[code]:
                        break
                    made = rank.made[code + (2 if action.kind is Kind.BACKWARD else -2) * microbatches]
                    link = min(number, target) if abs(number - target) == 1 else pp - 1
                    posted = other.places[other.posted[code]]
                    steps.append((-1, link, made, posted, sent.get((number, target), 0)))
                    sent[number, target] = other.arrived[code] = len(steps)
                rank.done += 1
                progressed = True
    return Walk(
        steps=tuple(steps),
        forwards=tuple(tuple(rank.forwards) for rank in ranks),
        last=tuple(rank.latest for rank in ranks),
        closing=tuple(map(tuple, closing)),
    )


def _compute(rank: _Rank, number: int, code: int, action: Action, steps: list[Step]) -> None:
    """The rank's next computation."""
    backward = int(action.kind is Kind.BACKWARD)
    steps.append((number, 2 * action.chunk + backward, rank.latest, rank.arrived.get(code, 0), rank.turned))
    rank.latest, rank.turned = len(steps), backward
    rank.places.append(rank.latest)
    rank.made[code] = rank.latest


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
