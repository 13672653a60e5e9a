"""A rank's computing beside its lane of data-parallel messages, as parallel/replicas/zero.py drives the two.

Messages run one behind the other. ZeRO 0 and 1 reduce each bucket once, in the last microbatch's backward; ZeRO 2 in
every backward, and ReductionQueue says which are waited for; ZeRO 3 besides gathers a unit's parameters while the one
before computes. What an action takes follows from what is under way when it begins, so it is worked out once for each
such state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from triaxis.launch.planner.chunks import PIECES, ROOT, Chunk, unit_of
from triaxis.launch.planner.profiles import Profile
from triaxis.launch.planner.replicas import Replicas
from triaxis.parallel.programs.operation import Operation
from triaxis.parallel.replicas.limits import REDUCTIONS_UNDER_WAY
from triaxis.parallel.replicas.reductions import ReductionQueue

DIGITS: Final = 6  # of seconds by which states are told apart
EXACT: Final = 12  # the same of layers

Seconds = tuple[float, float, float]
"""Of an action: from its start at least; and from the end of the forward, or of the backward, before it at least."""
Key = tuple[int, int]
"""A bucket under way: the place of its unit (or of none), and its number there."""
Reduction = tuple[Key, float, float]
"""Under way: its bucket; seconds from now to its end, and to add its result."""
Lane = tuple[float, tuple[Reduction, ...]]
"""Seconds from now until the lane is free, and the reductions that nobody has waited for, the oldest first."""
IDLE: Final[Lane] = (0.0, ())
FOREIGN: Final = -2  # the place of another chunk's bucket


def later(lane: Lane, seconds: float) -> Lane:
    """The state of the lane so many seconds on."""
    free, under_way = lane
    if free == 0.0:
        return lane
    if seconds >= free:
        return 0.0, tuple([(bucket, 0.0, added) for bucket, _, added in under_way])
    moved = [(bucket, max(0.0, round(end - seconds, DIGITS)), added) for bucket, end, added in under_way]
    return round(free - seconds, DIGITS), tuple(moved)


def foreign(lane: Lane) -> Lane:
    """The lane as another chunk sees it: none of the buckets is its own."""
    return lane[0], tuple([((FOREIGN, number), end, added) for number, (_, end, added) in enumerate(lane[1])])


def finished(lane: Lane) -> float:
    """Seconds until every reduction is waited for and added."""
    now = 0.0
    for _, end, added in lane[1]:
        now = max(now, end) + added
    return now


class _Course:
    """A rank's clock, its lane and its queue of reductions, while an action runs."""

    def __init__(self, lane: Lane, limit: int | None) -> None:
        self.now, self.free = 0.0, lane[0]
        self.queue = ReductionQueue[Key](limit)
        self.under_way: dict[Key, tuple[float, float]] = {}
        for bucket, end, added in lane[1]:
            self.queue.issue(bucket)
            self.under_way[bucket] = end, added

    def finish(self, bucket: Key) -> None:
        end, added = self.under_way.pop(bucket)
        self.now = max(self.now, end) + added

    def reduce(self, bucket: Key, seconds: float, added: float) -> None:
        """A bucket's gradient is whole: its reduction before is over first, then this one is under way."""
        if bucket in self.under_way:
            self.finish(bucket)
        self.free = max(self.free, self.now) + seconds
        for earlier in self.queue.issue(bucket):
            self.finish(earlier)
        self.under_way[bucket] = self.free, added

    def skip(self, seconds: float, places: int) -> None:
        """So many units more have passed, all like the one before."""
        self.now += seconds
        self.free += seconds
        moved = [
            ((place + places, number), end + seconds, added)
            for (place, number), (end, added) in self.under_way.items()
        ]
        self.queue.drain()
        self.under_way = {}
        for bucket, end, added in moved:
            self.queue.issue(bucket)
            self.under_way[bucket] = end, added

    @property
    def lane(self) -> Lane:
        """The state that the action leaves."""
        reductions = tuple((bucket, end, added) for bucket, (end, added) in self.under_way.items())
        return later((self.free, reductions), self.now)


class Passes:
    """Forward and backward of a chunk. seconds: of both where nothing is waited for but tensor-parallel messages."""

    def __init__(self, chunk: Chunk, profile: Profile, replicas: Replicas) -> None:
        self.chunk, self._replicas = chunk, replicas
        self._sharding = replicas.sharding
        self._limit = REDUCTIONS_UNDER_WAY if self._sharding.gradients else None
        self._start = profile.start.seconds
        kinds = dict.fromkeys(chunk.units)
        self._forward = {name: unit_of(profile, name).forward.seconds for name in kinds}
        self._pieces = {
            name: tuple(piece.seconds for piece in unit_of(profile, name).backward) for name in kinds
        }
        self._backward = {name: sum(pieces) for name, pieces in self._pieces.items()}
        self.seconds = (
            self._start + sum(count * self._forward[name] for name, count in chunk.counts),
            sum(count * self._backward[name] for name, count in chunk.counts),
        )
        self._known: dict[tuple[int, Lane], tuple[float, Lane]] = {}
        self._filling: list[tuple[float, Key, float, float]] = []
        self._scripts: dict[object, list[tuple[float, int, float, float]]] = {}
        self._gathers: dict[int, float] = {}

    def settled(self) -> tuple[tuple[Seconds, Seconds], Lane]:
        """Seconds of forward and backward once the step is under way, and the lane after a backward."""
        forward, backward = self.seconds
        if not self._sharding.gradients:
            return ((forward,) * 3, (backward,) * 3), IDLE
        _, lane = self.run(1, self.run(0, self.run(1, IDLE)[1])[1])
        return (self._after(0, lane), self._after(1, lane)), lane

    def _after(self, backward: int, lane: Lane) -> Seconds:
        """With an idle lane, after a forward, and after a backward that leaves the lane so."""
        between = self.run(0, lane)[1]
        return self.run(backward, IDLE)[0], self.run(backward, between)[0], self.run(backward, lane)[0]

    def run(self, backward: int, lane: Lane) -> tuple[float, Lane]:
        """Seconds of a forward (0) or backward (1) that begins with the lane so, and the lane at its end."""
        key = backward, lane
        found = self._known.get(key)
        if found is None:
            if backward:
                found = self._by_units(lane) if self._sharding.parameters else self._by_buckets(lane)
            elif self._sharding.parameters:
                found = self._forward_by_units(lane)
            else:
                found = self.seconds[0], later(lane, self.seconds[0])
            self._known[key] = found
        return found

    def _by_buckets(self, lane: Lane) -> tuple[float, Lane]:
        """Backward where parameters are whole: buckets are reduced as they fill."""
        course, computed = _Course(lane, self._limit), 0.0
        self._filling = self._filling or list(self._fills())
        for until, bucket, reduction, added in self._filling:
            course.now += until - computed
            computed = until
            course.reduce(bucket, reduction, added)
        course.now += self.seconds[1] - computed
        return course.now, course.lane

    def _fills(self) -> Iterable[tuple[float, Key, float, float]]:
        """Seconds of computing until each bucket is whole; the bucket; those of its reduction and addition."""
        before = [0.0]
        for name in self.chunk.units:
            before.append(before[-1] + self._backward[name])
        for bucket in self.chunk.completions:
            place, piece = divmod(bucket.whole, PIECES)
            until = before[place] + sum(self._pieces[self.chunk.units[place]][: piece + 1])
            yield until, (ROOT, bucket.number), *self._replicas.reduction(bucket.elements)

    # ZeRO 3: a unit's parameters are gathered while the one before computes; sums stand in the lane between. Once a
    # unit leaves everything as one of its kind before it did, those of that kind that follow do the same.

    def _forward_by_units(self, lane: Lane) -> tuple[float, Lane]:
        chunk = self.chunk
        places = range(len(chunk.units) - 1, -1, -1)
        now = self._start
        rooted = self._gathered(ROOT, now, lane[0])
        ready = free = self._gathered(places[0], now, rooted)
        now = max(now, rooted) if chunk.of_unit[ROOT] else now
        before, began = -1.0, now
        left = self._alike_forward()
        place = places[0]
        while place >= 0:
            coming = free if place == 0 else self._gathered(place - 1, now, free)
            now = max(now, ready) + self._forward[chunk.units[place]]
            free = ready = coming
            after = round(free - now, EXACT)
            if after == before and left[place] > 1:
                alike = left[place] - 1  # the last of them sees another kind come
                now, place = now + alike * (now - began), place - alike
                free = ready = now + after
            before, began = after, now
            place -= 1
        return now, later((free, lane[1]), now)

    def _alike_forward(self) -> Sequence[int]:
        """For each place: how many units of its kind follow in a row in forward order."""
        units = self.chunk.units
        found = [0] * len(units)
        for place in range(1, len(units)):
            if units[place] == units[place - 1]:
                found[place] = found[place - 1] + 1
        return found

    def _by_units(self, lane: Lane) -> tuple[float, Lane]:
        chunk = self.chunk
        units = chunk.units
        course = _Course(lane, self._limit)
        ready = course.free = self._gathered(0, 0.0, course.free)
        before: object = None
        began, place = 0.0, 0
        while place < len(units):
            coming = course.free
            if place + 1 < len(units):
                coming = course.free = self._gathered(place + 1, course.now, course.free)
            course.now = max(course.now, ready)
            if place == 0 and chunk.of_unit[ROOT]:
                course.now = course.free = self._gathered(ROOT, course.now, course.free)
            ready = coming
            for seconds, number, reduction, added in self._script(place):
                course.now += seconds
                if number >= 0:
                    course.reduce((place, number), reduction, added)
            now = course.now
            after = (
                units[place],
                round(course.free - now, EXACT),
                round(ready - now, EXACT),
                *(
                    (at - place, number, round(end - now, EXACT))
                    for (at, number), (end, _) in course.under_way.items()
                ),
            )
            alike = chunk.alike[place] - 2  # the last but one sees another kind come
            if after == before and alike > 0:
                course.skip(alike * (now - began), alike)
                ready += alike * (now - began)
                place += alike
            before, began = after, course.now
            place += 1
        return course.now, course.lane

    def _script(self, place: int) -> list[tuple[float, int, float, float]]:
        """Of a unit's backward: seconds of computing, then the bucket that is whole (-1: none), its reduction and
        addition. Units of one kind have one."""
        chunk, name = self.chunk, self.chunk.units[place]
        found = self._scripts.get(name)
        if found is None:
            found = self._scripts[name] = []
            computing, number = 0.0, 0
            for moment, seconds in enumerate(self._pieces[name], place * PIECES):
                computing += seconds
                for bucket in chunk.completing.get(moment, ()):
                    found.append((computing, number, *self._replicas.reduction(bucket.elements)))
                    computing, number = 0.0, number + 1
            found.append((computing, -1, 0.0, 0.0))
        return found

    def _gathered(self, place: int, now: float, free: float) -> float:
        """When the lane has gathered the parameters of a unit that are asked for now."""
        held = self.chunk.of_unit[place]
        if not held:
            return free
        if place not in self._gathers:
            self._gathers[place] = sum(self._replicas.message(Operation.ALL_GATHER, b.elements) for b in held)
        return max(free, now) + self._gathers[place]
