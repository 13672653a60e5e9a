"""Which reductions of gradients a rank waits for, and when. No torch: the step and whoever plans it ask the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

B = TypeVar("B", bound=Hashable)


class ReductionQueue(Generic[B]):
    """The buckets whose reduction is under way, oldest first.

    limit: how many may be; None: any number. Each holds a buffer as large as its bucket, so the limit bounds memory;
    it must not depend on what has arrived meanwhile, or ranks would differ in memory and in order.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._under_way: deque[B] = deque()

    def __contains__(self, bucket: B) -> bool:
        """Whether a reduction of the bucket is under way: it ends before the next one begins."""
        return bucket in self._under_way

    def issue(self, bucket: B) -> list[B]:
        """Notes that a reduction of `bucket` has begun; returns the buckets whose reductions must end now, in order."""
        if bucket in self._under_way:
            self._under_way.remove(bucket)
        self._under_way.append(bucket)
        ended = []
        while self._limit is not None and len(self._under_way) > self._limit:
            ended.append(self._under_way.popleft())
        return ended

    def drain(self) -> list[B]:
        """All that are left, in order: each must end now."""
        left = list(self._under_way)
        self._under_way.clear()
        return left
