"""Which values would have worked, and how many of something there are: for messages."""

from __future__ import annotations

import math
from collections.abc import Iterable


def divisors(number: int) -> list[int]:
    """In order; pairs are found up to the square root, since a batch may have nine digits."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def nearest(legal: Iterable[int], value: int) -> list[int]:
    """The legal values next below and next above."""
    ordered = sorted(legal)
    return [d for d in ordered if d < value][-1:] + [d for d in ordered if d > value][:1]


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """`1 step`, `2 steps`, `1,000 processes`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def listed(values: Iterable[int]) -> str:
    return " or ".join(str(value) for value in values)
