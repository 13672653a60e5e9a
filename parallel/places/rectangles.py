"""Runs of flat elements as rectangles of a tensor, so that shards are named alike on every topology. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

CHUNK_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangle:
    """Part of a tensor. first: its first element in the flat run that it was cut from, where it is contiguous."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int

    @property
    def elements(self) -> int:
        return prod(self.sizes)


def cut_rectangles(
    shape: tuple[int, ...], start: int, stop: int, limit: int = CHUNK_ELEMENTS
) -> Iterator[Rectangle]:
    """Elements [start, stop) of a row-major tensor as rectangles, in order, whole rows together up to `limit` elements.

    Example: [3, 14) of a (4, 4) tensor: row 0 from column 3, rows 1 and 2, row 3 up to column 2.
    """
    inner = prod(shape[1:])
    whole, end = -(-start // inner), stop // inner
    if start % inner:
        yield from _partial_row(shape, start, min(stop, whole * inner), start, limit)
    rows = max(1, limit // inner)
    for row in range(whole, end, rows):
        count = min(rows, end - row)
        yield Rectangle(
            offsets=(row, *(0,) * (len(shape) - 1)),
            sizes=(count, *shape[1:]),
            first=row * inner - start,
        )
    if stop % inner and end >= whole:
        yield from _partial_row(shape, end * inner, stop, start, limit)


def _partial_row(shape: tuple[int, ...], low: int, high: int, start: int, limit: int) -> Iterator[Rectangle]:
    """Elements [low, high) of the whole tensor, all in one row."""
    row, column = divmod(low, prod(shape[1:]))
    for part in cut_rectangles(shape[1:], column, column + high - low, limit):
        yield Rectangle(offsets=(row, *part.offsets), sizes=(1, *part.sizes), first=low - start + part.first)


def covers_once(shape: tuple[int, ...], boxes: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether boxes, by offsets and sizes, hold every element of a tensor exactly once and nothing outside it.

    How often each element is held is a sum of boxes, and so is the whole tensor; two such sums are the same if their
    differences along all dimensions are, which are 1 or -1 at a box's corners and 0 elsewhere.
    Example: [0, 2) and [2, 5) have corners +0 -2 +2 -5, which is +0 -5, the corners of [0, 5).
    """
    corners: Counter[tuple[int, ...]] = Counter()
    ends = list(product((0, 1), repeat=len(shape)))
    for sign, (offsets, sizes) in ((-1, ((0,) * len(shape), shape)), *((1, box) for box in boxes)):
        for end in ends:
            corner = tuple(low + size * at for low, size, at in zip(offsets, sizes, end, strict=True))
            corners[corner] += sign * (-1) ** sum(end)
    return not any(corners.values())
