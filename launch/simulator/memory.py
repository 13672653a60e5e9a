"""The bytes a rank holds through a step: the peak, what it is made of, the moment, and what is reserved."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from triaxis.parallel.programs.program import KINDS, MemoryKind, Program, Segment, Step

STEADY_TURNS = 8
SMALL_BLOCK, ROUNDING = 1 << 20, 512
SMALL_SEGMENT, LARGE_SEGMENT, LARGE_ROUNDING, HUGE_BLOCK = 2 << 20, 20 << 20, 2 << 20, 10 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """One rank's. label: of the step with the peak; curve: (index of a step, bytes by kind)."""

    peak_bytes: int
    breakdown: Mapping[MemoryKind, int]
    label: str
    curve: tuple[tuple[int, tuple[int, ...]], ...]


def memory_use(program: Program) -> MemoryUse:
    """The peak of a program's step and the level before and at the height of each of its steps."""
    held = program.held or {}
    level = np.array([held.get(kind, 0) for kind in KINDS], dtype=np.int64)
    heights: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    best, best_level, best_step = int(level.sum()), level.copy(), 0
    curve: list[tuple[int, tuple[int, ...]]] = []
    for index, step in enumerate(program.steps):
        key = id(step.segment)
        if key not in heights:
            heights[key] = _height(step.segment)
        highest, net = heights[key]
        top = level + highest
        if int(top.sum()) > best:
            best, best_level, best_step = int(top.sum()), top, index
        curve.append((index, tuple(int(value) for value in top)))
        level = level + net
        curve.append((index, tuple(int(value) for value in level)))
    return MemoryUse(
        peak_bytes=best,
        breakdown={kind: int(value) for kind, value in zip(KINDS, best_level, strict=True) if value},
        label=program.steps[best_step].label if program.steps else "",
        curve=tuple(curve),
    )


def _height(segment: Segment) -> tuple[np.ndarray, np.ndarray]:
    """By kind: the change up to the segment's highest point (its beginning, if it only falls), and to its end."""
    memory = segment.memory
    zero = np.zeros(len(KINDS), dtype=np.int64)
    if not memory.deltas:
        return zero, zero
    changes = np.zeros((len(memory.deltas), len(KINDS)), dtype=np.int64)
    changes[np.arange(len(memory.deltas)), list(memory.kinds)] = memory.deltas
    levels = changes.cumsum(axis=0)
    totals = levels.sum(axis=1)
    top = int(totals.argmax())
    return (levels[top] if totals[top] > 0 else zero), levels[-1]


class CachingAllocator:
    """What PyTorch's CUDA caching allocator reserves for a sequence of allocations: best fit, blocks split and merged.

    Sizes are rounded to 512 bytes; blocks up to 1 MiB are cut from segments of 2 MiB, up to 10 MiB from 20 MiB, larger
    ones have their own, rounded to 2 MiB (c10/cuda/CUDACachingAllocator.cpp). Nothing is given back.
    """

    def __init__(self) -> None:
        self.reserved_bytes = 0
        self._segments = 0
        self._free: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}  # (bytes, segment, offset)
        self._starts: dict[tuple[int, int], int] = {}  # of free blocks: bytes
        self._stops: dict[tuple[int, int], int] = {}  # of free blocks: their offset
        self._taken: dict[int, list[tuple[int, int, int, bool]]] = {}  # by size asked for

    def change(self, delta: int) -> None:
        """An allocation of `delta` bytes, or the end of one of that size."""
        size = -(-abs(delta) // ROUNDING) * ROUNDING
        if delta > 0:
            self._allocate(size)
        elif self._taken.get(size):  # else a part of what was there before the first change
            self._release(*self._taken[size].pop())

    def _allocate(self, size: int) -> None:
        small = size <= SMALL_BLOCK
        free = self._free[small]
        place = bisect_left(free, (size, 0, 0))
        if place < len(free):
            held, segment, offset = free[place]
            self._remove(held, segment, offset, small)
        else:
            held, offset = self._new_segment(size, small), 0
            segment = self._segments
        rest = held - size
        if rest >= ROUNDING if small else rest > SMALL_BLOCK:
            self._add(rest, segment, offset + size, small)
            held = size
        self._taken.setdefault(size, []).append((held, segment, offset, small))

    def _new_segment(self, size: int, small: bool) -> int:
        if small:
            nbytes = SMALL_SEGMENT
        elif size < HUGE_BLOCK:
            nbytes = LARGE_SEGMENT
        else:
            nbytes = -(-size // LARGE_ROUNDING) * LARGE_ROUNDING
        self._segments += 1
        self.reserved_bytes += nbytes
        return nbytes

    def _release(self, held: int, segment: int, offset: int, small: bool) -> None:
        after = self._starts.get((segment, offset + held))
        if after is not None:
            self._remove(after, segment, offset + held, small)
            held += after
        before = self._stops.get((segment, offset))
        if before is not None:
            self._remove(offset - before, segment, before, small)
            held, offset = held + offset - before, before
        self._add(held, segment, offset, small)

    def _add(self, nbytes: int, segment: int, offset: int, small: bool) -> None:
        insort(self._free[small], (nbytes, segment, offset))
        self._starts[segment, offset], self._stops[segment, offset + nbytes] = nbytes, offset

    def _remove(self, nbytes: int, segment: int, offset: int, small: bool) -> None:
        free = self._free[small]
        del free[bisect_left(free, (nbytes, segment, offset))]
        del self._starts[segment, offset], self._stops[segment, offset + nbytes]


def reserved_bytes(program: Program) -> int:
    """What the allocator has reserved by the end of a program's step, its model states made first."""
    allocator = CachingAllocator()
    for nbytes in (program.held or {}).values():
        allocator.change(nbytes)
    for step in _without_steady_repeats(program.steps):
        for delta in step.segment.memory.deltas:
            allocator.change(delta)
    return allocator.reserved_bytes


def _without_steady_repeats(steps: Sequence[Step]) -> list[Step]:
    """Where two segments take turns (one microbatch's forward, another's backward), some turns are like all."""
    acting = [place for place, step in enumerate(steps) if step.acts]
    segments = [steps[place].segment for place in acting]
    dropped: set[int] = set()
    first = 0
    while first + 1 < len(acting):
        last = first + 1
        while last + 1 < len(acting) and segments[last + 1] is segments[last - 1]:
            last += 1
        spare = (last + 1 - first - STEADY_TURNS) // 2 * 2
        if spare > 0 and segments[first] is not segments[first + 1]:
            kept = first + STEADY_TURNS
            dropped.update(range(acting[kept], acting[kept + spare - 1] + 1))
        first = last
    return [step for place, step in enumerate(steps) if place not in dropped]
