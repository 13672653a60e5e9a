"""How long something takes, told in a unit that is as slow as the machine is at the moment."""

from __future__ import annotations

import os
from collections.abc import Callable

YARDSTICK_ITEMS = 2_000_000


def yardsticks(work: Callable[[], object]) -> float:
    """The CPU time of the work, its processes included, over that of a fixed piece of plain Python beside it.

    The piece takes about an eighth of a second on the machines of 2024: 10 yardsticks are some 1.3 seconds there.
    """
    unit = _cpu_seconds(_plain_python)
    spent = _cpu_seconds(work)
    return spent / ((unit + _cpu_seconds(_plain_python)) / 2)


def _cpu_seconds(work: Callable[[], object]) -> float:
    before = os.times()
    work()
    return sum(os.times()[:4]) - sum(before[:4])


def _plain_python() -> int:
    seen: dict[int, int] = {}
    for number in range(YARDSTICK_ITEMS):
        seen[number % 1009] = seen.get(number % 997, 0) + number
    return len(seen)
