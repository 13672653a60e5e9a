"""Which values would have worked: for messages that refuse one."""

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


def listed(values: Iterable[int]) -> str:
    return " or ".join(str(value) for value in values)
