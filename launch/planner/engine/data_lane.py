"""A rank's computing beside its lane of data-parallel messages, as parallel/replicas/zero.py drives the two.

Messages run one behind the other. ZeRO 0 and 1 reduce each bucket once, in the last microbatch's backward; ZeRO 2 in
every backward, at most UNDER_WAY of them not waited for; ZeRO 3 besides gathers a unit's parameters while the one
before computes. What an action takes follows from what is under way when it begins, so it is worked out once for each
such state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Final

from triaxis.launch.hardware.collectives import collective_seconds
from triaxis.launch.planner.engine.buckets import ROOT, STEPS, UNDER_WAY, Chunk
from triaxis.launch.planner.engine.operators import Operators, Part
from triaxis.launch.planner.engine.pipeline import Seconds
from triaxis.launch.planner.layout import Layout, Recompute

DIGITS: Final = 6  # of seconds by which states are told apart
EXACT: Final = 12  # the same of layers
TINY: Final = 1e-12

Reduction = tuple[int, float, float]
"""Under way: its bucket's number, -1 for another chunk's; seconds from now to its end, and to add its result."""
Lane = tuple[float, tuple[Reduction, ...]]
"""Seconds from now until the lane is free, and the reductions that nobody has waited for, the oldest first."""
IDLE: Final[Lane] = (0.0, ())


def later(lane: Lane, seconds: float) -> Lane:
    """The lane as it is then."""
    free, under_way = lane
    if free == 0.0:
        return lane
    if seconds >= free:
        return 0.0, tuple([(bucket, 0.0, added) for bucket, _, added in under_way])
    moved = [(bucket, max(0.0, round(end - seconds, DIGITS)), added) for bucket, end, added in under_way]
    return round(free - seconds, DIGITS), tuple(moved)


def foreign(lane: Lane) -> Lane:
    """The lane as another chunk sees it."""
    return lane[0], tuple([(-1, end, added) for _, end, added in lane[1]])


def finished(lane: Lane) -> float:
    """Seconds until every reduction is waited for and added."""
    now = 0.0
    for _, end, added in lane[1]:
        now = max(now, end) + added
    return now


class Prices:
    """Seconds of the messages over dp, by elements of a bucket, and of adding one rank's part of a sum."""

    def __init__(self, layout: Layout) -> None:
        self._layout, self._operators, self._ranks = layout, Operators(layout), layout.group("dp")
        self._known: dict[tuple[str, float], float] = {}

    def message(self, operation: str, elements: float) -> float:
        """all_gather of parameters; all_reduce or reduce_scatter of gradients."""
        found = self._known.get((operation, elements))
        if found is None:
            each = self._operators.element if operation == "all_gather" else self._operators.wide
            found = collective_seconds(operation, elements * each, self._ranks, self._layout.hardware)
            self._known[operation, elements] = found
        return found

    def addition(self, elements: float) -> float:
        """Of a reduced part to those of the microbatches before."""
        found = self._known.get(("", elements))
        if found is None:
            nbytes = 3 * self._operators.wide * elements / self._layout.shards
            found = self._known["", elements] = self._operators.seconds([(0.0, nbytes)])
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The prices of one layout's parts. again: forward of a layer in backward; context: what a forward begins with"""

    head: Part
    block: Part
    embedding: Part
    again: float
    context: float

    def part(self, chunk: Chunk, unit: int) -> Part:
        """What a unit of a chunk is."""
        return self.head if unit == 0 else self.block if unit <= chunk.layers else self.embedding

    def forward(self, chunk: Chunk) -> float:
        """Seconds of a chunk's forward that waits for nothing but tensor-parallel messages."""
        block = chunk.layers * _forward(self.block)
        return (
            self.context + block + chunk.first * _forward(self.embedding) + chunk.last * _forward(self.head)
        )

    def backward(self, chunk: Chunk) -> float:
        """The same of its backward."""
        block = chunk.layers * (sum(self.block.steps) + self.again)
        return block + chunk.first * sum(self.embedding.steps) + chunk.last * sum(self.head.steps)


def _forward(part: Part) -> float:
    return part.forward + part.forward_messages


@dataclass(frozen=True, slots=True)
class _Alike:
    """A layout that stands for all that are told to be so; of hardware its id, which it keeps from being another's."""

    told: tuple[object, ...]
    layout: Layout = field(compare=False)


def parts_of(layout: Layout) -> Parts:
    """The prices of its parts: the same however it is sharded and cut into stages."""
    tokens = layout.microbatch, layout.sequence, layout.microbatches
    tensor = layout.tp, layout.sequence_parallel, layout.recompute
    sharded = layout.zero >= 2 and layout.shards > 1
    told = id(layout.hardware), layout.shape, layout.dtype, tokens, tensor, sharded
    return _parts(_Alike(told, layout))


@lru_cache(maxsize=1024)
def _parts(alike: _Alike) -> Parts:
    operators = Operators(alike.layout)
    block = operators.block()
    full = alike.layout.recompute == Recompute.FULL
    return Parts(
        block=block,
        embedding=operators.embedding(),
        head=operators.head(),
        again=block.again + block.forward_messages if full else 0.0,
        context=operators.seconds((), 2 if alike.layout.shape.rotary else 0),
    )


def prices_of(layout: Layout) -> Prices:
    """Those of its data-parallel group."""
    told = id(layout.hardware), layout.dtype, layout.group("dp"), layout.shards
    return _prices(_Alike(told, layout))


@lru_cache(maxsize=1024)
def _prices(alike: _Alike) -> Prices:
    return Prices(alike.layout)


class Passes:
    """Forward and backward of a chunk. zero: 0 where nothing is sharded; seconds: of both where nothing is waited for
    but tensor-parallel messages."""

    def __init__(self, chunk: Chunk, parts: Parts, prices: Prices, zero: int) -> None:
        self._chunk, self._parts, self._prices, self._zero = chunk, parts, prices, zero
        self._operation = "reduce_scatter" if zero else "all_reduce"
        self.seconds = parts.forward(chunk), parts.backward(chunk)
        self._known: dict[tuple[int, Lane], tuple[float, Lane]] = {}
        self._course: list[tuple[float, int, float, float]] = []
        self._first: tuple[float, Lane, list[tuple[float, float]]] | None = None
        self._units: tuple[float, Lane, dict[int, tuple[float, object]]] | None = None
        self._scripts: dict[int, list[tuple[float, int | None, float, float]]] = {}

    def settled(self) -> tuple[tuple[Seconds, Seconds], Lane]:
        """Seconds of forward and backward once the step is under way, and the lane after a backward."""
        forward, backward = self.seconds
        if self._zero < 2:
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
                found = self._backward_by_units(lane) if self._zero == 3 else self._backward(lane)
            elif self._zero == 3:
                found = self._forward_by_units(lane)
            else:
                found = self.seconds[0], later(lane, self.seconds[0])
            self._known[key] = found
        return found

    def _reduction(self, elements: float) -> tuple[float, float]:
        added = self._prices.addition(elements) if self._zero >= 2 else 0.0
        return self._prices.message(self._operation, elements), added

    def _backward(self, lane: Lane) -> tuple[float, Lane]:
        """ZeRO 0 to 2: buckets are reduced as they fill."""
        course = self._course = self._course or self._filling()
        now, computed, free, under_way = 0.0, 0.0, lane[0], list(lane[1])
        track: list[tuple[float, float]] = []
        same = 0
        for place, (until, bucket, reduction, added) in enumerate(course):
            now += until - computed
            computed = until
            now, free = self._reduce(now, free, under_way, bucket, reduction, added)
            if self._first is None:
                track.append((now, free - now))
                continue
            seconds, after, known = self._first
            then, slack = known[place]
            same = same + 1 if abs(free - now - slack) < TINY else 0
            if same > UNDER_WAY:  # all is as in the first pass that was followed, and so is the rest
                return now + seconds - then, after
        now += self.seconds[1] - computed
        after = later((free, tuple(under_way)), now)
        if self._first is None:
            self._first = now, after, track
        return now, after

    def _filling(self) -> list[tuple[float, int, float, float]]:
        """Seconds of computing until each bucket is whole; its number; those of its reduction and addition."""
        chunk, parts = self._chunk, self._parts
        head = sum(parts.head.steps) if chunk.last else 0.0
        block = sum(parts.block.steps) + parts.again
        whole = {unit: tuple(accumulate(parts.part(chunk, unit).steps)) for unit in (0, 1, chunk.layers + 1)}
        course = []
        for bucket in chunk.completions:
            unit, step = divmod(bucket.last, STEPS)
            within = whole[1 if 0 < unit <= chunk.layers else unit][step]
            until = within if unit == 0 else within + head + (unit - 1) * block
            until += parts.again if 0 < unit <= chunk.layers else 0.0
            course.append((until, bucket.number, *self._reduction(bucket.elements)))
        return course

    def _reduce(
        self, now: float, free: float, under_way: list[Reduction], bucket: int, seconds: float, added: float
    ) -> tuple[float, float]:
        """A bucket's reduction is issued: the moment after, and when the lane is free."""
        sharded = self._zero >= 2
        if sharded and under_way:
            for place, (other, end, more) in enumerate(under_way):
                if other == bucket:  # its reduction before this one is over first
                    del under_way[place]
                    now = max(now, end) + more
                    break
        free = (free if free > now else now) + seconds
        under_way.append((bucket, free, added))
        if sharded and len(under_way) > UNDER_WAY:
            _, end, more = under_way.pop(0)
            now = (now if now > end else end) + more
        return now, free

    # ZeRO 3: a unit's parameters are gathered while the one before computes; sums stand in the lane between. Once a
    # layer leaves everything as the one before it did, those that follow do the same.

    def _forward_by_units(self, lane: Lane) -> tuple[float, Lane]:
        chunk = self._chunk
        units = chunk.units[::-1]
        now = self._parts.context
        rooted = self._gathered(ROOT, now, lane[0])
        ready = free = self._gathered(units[0], now, rooted)
        now = max(now, rooted) if chunk.of_unit[ROOT] else now
        before: tuple[float, ...] = ()
        began, place = now, 0
        while place < len(units):
            unit = units[place]
            following = units[place + 1] if place + 1 < len(units) else None
            coming = free if following is None else self._gathered(following, now, free)
            now = max(now, ready) + _forward(self._parts.part(chunk, unit))
            free = ready = coming
            after = (round(free - now, EXACT),)
            place += 1
            if after == before and 2 < unit <= chunk.layers:
                alike = unit - 2
                now, place = now + alike * (now - began), place + alike
                free = ready = now + after[0]
            before, began = after, now
        return now, later((free, lane[1]), now)

    def _backward_by_units(self, lane: Lane) -> tuple[float, Lane]:
        chunk = self._chunk
        units, layers = chunk.units, chunk.layers
        each = len(chunk.of_unit[1])  # buckets of a layer
        now, under_way = 0.0, list(lane[1])
        ready = free = self._gathered(units[0], now, lane[0])
        before: tuple[object, ...] = ()
        track: dict[int, tuple[float, object]] = {}
        began, place = now, 0
        while place < len(units):
            unit = units[place]
            coming = free
            if place + 1 < len(units):
                coming = free = self._gathered(units[place + 1], now, free)
            now = max(now, ready)
            if place == 0 and chunk.of_unit[ROOT]:
                now = free = self._gathered(ROOT, now, free)
            ready = coming
            base = (unit - 1) * each if 0 < unit <= layers else 0
            for seconds, bucket, reduction, added in self._script(unit):
                now += seconds
                if bucket is not None:
                    now, free = self._reduce(now, free, under_way, bucket - base, reduction, added)
            place += 1
            after = (
                round(free - now, EXACT),
                round(ready - now, EXACT),
                *((bucket + unit * each, round(end - now, EXACT)) for bucket, end, _ in under_way),
            )
            if self._units is not None:
                seconds, end, known = self._units
                then, state = known.get(unit, (0.0, None))
                if after == state:  # and so is the rest
                    return now + seconds - then, end
            track[unit] = now, after
            if after == before and 1 < unit < layers - 2:
                alike = layers - 2 - unit
                more = alike * (now - began)
                now, free, ready, place = now + more, free + more, ready + more, place + alike
                under_way = [(bucket - alike * each, end + more, added) for bucket, end, added in under_way]
            before, began = after, now
        end = later((free, tuple(under_way)), now)
        if self._units is None:
            self._units = now, end, track
        return now, end

    def _script(self, unit: int) -> list[tuple[float, int | None, float, float]]:
        """Of a unit's backward: seconds of computing, then the bucket that is whole, if any, with its reduction and
        addition. All layers have the last one's."""
        chunk, parts = self._chunk, self._parts
        inside = 0 < unit <= chunk.layers
        unit = 1 if inside else unit
        found = self._scripts.get(unit)
        if found is None:
            found = self._scripts[unit] = []
            computing = parts.again if inside else 0.0
            for moment, seconds in enumerate(parts.part(chunk, unit).steps, unit * STEPS):
                computing += seconds
                for bucket in chunk.completing.get(moment, ()):
                    found.append((computing, bucket.number, *self._reduction(bucket.elements)))
                    computing = 0.0
            found.append((computing, None, 0.0, 0.0))
        return found

    def _gathered(self, unit: int, now: float, free: float) -> float:
        """When the lane has gathered a unit that is asked for now."""
        for bucket in self._chunk.of_unit[unit]:
            free = max(free, now) + self._prices.message("all_gather", bucket.elements)
        return free
