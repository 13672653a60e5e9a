"""The buffers of unreduced gradients under ZeRO 2 and 3, followed through backward passes.

The engine takes a buffer from a pool when a bucket's first gradient comes, reduces the bucket when its last one has
come, and gives the buffer back when ReductionQueue says that its reduction must end. The pool keeps buffers by size. A
bucket that spans the model (the last norm is registered with the embedding) needs a second buffer when the next
microbatch begins before its reduction is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from operator import mul
from typing import Final

from triaxis.launch.planner.chunks import Chunk
from triaxis.launch.planner.walk import walked_microbatches
from triaxis.parallel.pipeline.limits import SENDS_UNDER_WAY
from triaxis.parallel.pipeline.orders import make_schedule
from triaxis.parallel.pipeline.schedule import Kind
from triaxis.parallel.replicas.limits import REDUCTIONS_UNDER_WAY
from triaxis.parallel.replicas.reductions import ReductionQueue

SETTLED: Final = 4  # passes through a chunk after which no buffer is new

Pooled = tuple[int, float, float]
"""From a moment of a chunk's backward on: elements of the buffers made, and of the reductions' results under way."""
NOTHING: Final[tuple[Pooled, ...]] = ((-1, 0.0, 0.0),)


@lru_cache(maxsize=8192)
def pooled(chunks: tuple[Chunk, ...], runs: tuple[tuple[int, int], ...]) -> tuple[Pooled, ...]:
    """The last of these backward passes under ZeRO 2 and 3. runs: (chunk, passes through it one after the other)."""
    pool = _Pool()
    course: tuple[Pooled, ...] = NOTHING
    for number, count in runs:
        before: object = None
        for _ in range(count):
            course = pool.run(chunks[number], number)
            if pool.state == before:
                break  # those that follow are the same
            before = pool.state
    return course


class _Pool:
    """The buffers of unreduced gradients, as ZeRO takes and gives them."""

    def __init__(self) -> None:
        self._made, self._reduced = 0.0, 0.0
        self._free = Counter[int]()
        self._queue = ReductionQueue[tuple[int, int]](REDUCTIONS_UNDER_WAY)
        self._under_way: dict[tuple[int, int], tuple[int, int]] = {}  # elements of the buffer, of its result
        self._known: set[int] = set()

    @property
    def state(self) -> object:
        """What the next pass depends on."""
        return self._made, tuple(self._under_way.items())

    def run(self, chunk: Chunk, number: int) -> tuple[Pooled, ...]:
        """A backward pass. number: the chunk's, on its rank."""
        course: list[Pooled] = [(-1, self._made, self._reduced)]
        added = number in self._known
        for moment, begins, bucket, elements in _events(chunk):
            if begins:
                if self._free[elements]:
                    self._free[elements] -= 1
                    continue
                self._made += elements
            else:
                self._reduce((number, bucket), elements, elements if added else 0)
            course.append((moment, self._made, self._reduced))
        self._known.add(number)
        return tuple(course)

    def _reduce(self, key: tuple[int, int], elements: int, result: int) -> None:
        if key in self._queue:
            self._finish(key)
        self._under_way[key] = elements, result
        self._reduced += result
        for earlier in self._queue.issue(key):
            self._finish(earlier)

    def _finish(self, key: tuple[int, int]) -> None:
        buffer, result = self._under_way.pop(key)
        self._free[buffer] += 1
        self._reduced -= result


@lru_cache(maxsize=4096)
def _events(chunk: Chunk) -> tuple[tuple[int, bool, int, int], ...]:
    """(moment, begins, number and elements of the bucket): its buffer is taken in that moment, or is reduced before."""
    events = [(bucket.first, True, bucket.number, bucket.elements) for bucket in chunk.buckets]
    events += [(bucket.whole + 1, False, bucket.number, bucket.elements) for bucket in chunk.buckets]
    return tuple(sorted(events))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A backward pass. chunk: through which; runs: it and those before it (see `pooled`); flying: forward passes of
    each chunk not yet undone when it begins; sent: hidden states and gradients that are kept until they have gone."""

    chunk: int
    runs: tuple[tuple[int, int], ...]
    flying: tuple[int, ...]
    sent: int


@lru_cache(maxsize=8192)
def heaviest_passes(
    schedule: str, pp: int, stage: int, microbatches: int, layers: tuple[int, ...]
) -> tuple[Pass, ...]:
    """The backward passes among the first, until buffers settle, that may be the peak: the latest with most in flight,
    those after it in which new buffers come, and the heaviest through the chunks of the embedding and the head.

    layers: of the rank's chunks
    """
    chunks = len(layers)
    walked = walked_microbatches(schedule, pp, chunks, microbatches)
    window = SETTLED if chunks == 1 else pp * (chunks + 1)
    begun = [0] * chunks
    order: list[int] = []
    flying: list[tuple[int, ...]] = []
    sent: list[int] = []
    made = 0
    for action in make_schedule(schedule, pp, walked, chunks).orders[stage]:
        if action.kind is Kind.FORWARD:
            begun[action.chunk] += 1
            made += chunks > 1 or stage < pp - 1
        elif len(order) < window:
            order.append(action.chunk)
            flying.append(tuple(begun))
            begun[action.chunk] -= 1
            sent.append(min(made, SENDS_UNDER_WAY))
            made += chunks > 1 or stage > 0
    window = len(order)
    weights = [sum(map(mul, counts, layers)) for counts in flying]
    latest = _latest(range(window), weights)
    chosen = {latest}
    for chunk in ([0] if stage == 0 else []) + ([chunks - 1] if stage == pp - 1 else []):
        through = [number for number in range(window) if order[number] == chunk]
        chosen.add(_latest(through, weights))
        if chunks > 1:  # new buffers of a large table may come in any of the first
            chosen.update(through[:SETTLED])
    chosen.update(range(latest + 1, min(SETTLED, window)))
    return tuple(
        Pass(
            chunk=order[number],
            runs=tuple((chunk, min(len(list(run)), SETTLED)) for chunk, run in groupby(order[: number + 1])),
            flying=flying[number],
            sent=sent[number],
        )
        for number in sorted(chosen)
    )


def _latest(numbers: Iterable[int], weights: Sequence[int]) -> int:
    """The last of those with the largest weight."""
    return max(numbers, key=lambda number: (weights[number], number))
