"""Which values would have worked, and how many of something there are: for messages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


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


def first_of(
    texts: Sequence[str],
    most: int,
    *,
    separator: str = "; ",
    noun: str = "",
    lead: str = "and",
    count: int | None = None,
) -> str:
    """The first `most` texts, and how many more there are: `a; b; and 3 ranks more`.

    noun: what they are, if told; count: how many there are, if `texts` are not all
    """
    left = (count or len(texts)) - most
    more = f"{lead} {counted(left, noun) if noun else left} more"
    return separator.join([*texts[:most], *([more] if left > 0 else [])])
