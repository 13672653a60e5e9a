"""Which values would have worked: for messages that refuse one."""

from __future__ import annotations

from collections.abc import Iterable


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def nearest(legal: Iterable[int], value: int) -> list[int]:
    """The legal values next below and next above."""
    ordered = sorted(legal)
    return [d for d in ordered if d < value][-1:] + [d for d in ordered if d > value][:1]


def nearest_divisors(number: int, value: int) -> str:
    return listed(nearest(divisors(number), value))


def listed(values: Iterable[int]) -> str:
    return " or ".join(str(value) for value in values)
