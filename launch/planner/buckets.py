"""How many bytes of unreduced gradients this engine holds under ZeRO 2 and 3: its buckets, followed through backward.

parallel/zero.py fills buckets with consecutive parameters, takes a buffer from a pool when a bucket's first gradient
comes, reduces the bucket when its last one has come, and gives the buffer back once more than two later ones are
under way. The pool keeps buffers by size. A bucket that spans the model (the last norm is registered with the
embedding) needs a second buffer when the next microbatch begins before its reduction is over.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

BUCKET_ELEMENTS: Final = 1 << 25
UNDER_WAY: Final = 2
PASSES: Final = 4  # after which no buffer is new


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """elements of this rank's part; time: when in backward its gradient begins (0 first), until: when it is whole."""

    elements: float
    time: int
    until: int | None = None

    @property
    def last(self) -> int:
        """When the gradient is whole: at once, except a shared weight's."""
        return self.time if self.until is None else self.until


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """elements; when its first gradient comes and its last."""

    elements: float
    first: int
    last: int


def fill(parameters: Sequence[Parameter]) -> list[Bucket]:
    """Consecutive parameters until a bucket holds BUCKET_ELEMENTS."""
    groups: list[list[Parameter]] = []
    size: float = BUCKET_ELEMENTS
    for parameter in parameters:
        if size >= BUCKET_ELEMENTS:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += parameter.elements
    return [
        Bucket(
            elements=sum(member.elements for member in group),
            first=min(member.time for member in group),
            last=max(member.last for member in group),
        )
        for group in groups
    ]


def unreduced_elements(buckets: Sequence[Bucket], passes: int) -> tuple[float, float]:
    """Elements of all buffers made in `passes` backward passes, and of the buckets whose sums are under way then."""
    made, free = 0.0, Counter[float]()
    held: set[int] = set()  # buckets whose reduction is under way
    under_way: deque[int] = deque()
    begin: dict[int, list[Bucket]] = {}
    end: dict[int, list[int]] = {}
    for index, bucket in enumerate(buckets):
        begin.setdefault(bucket.first, []).append(bucket)
        end.setdefault(bucket.last, []).append(index)
    times = sorted({*begin, *end})

    def finish(index: int) -> None:
        if index in held:
            held.remove(index)
            free[buckets[index].elements] += 1

    for _ in range(passes):
        for time in times:
            for bucket in begin.get(time, ()):
                if free[bucket.elements]:
                    free[bucket.elements] -= 1
                else:
                    made += bucket.elements
            for index in end.get(time, ()):
                finish(index)
                held.add(index)
                if index in under_way:
                    under_way.remove(index)
                under_way.append(index)
                while len(under_way) > UNDER_WAY:
                    finish(under_way.popleft())
    return made, sum(buckets[index].elements for index in held) if passes > 1 else 0.0
