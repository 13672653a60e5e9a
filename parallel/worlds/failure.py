"""What a rank raises when communication fails, and where in the caller's code it happened."""

from __future__ import annotations

import os
import sys
from functools import lru_cache

import torch

INSIDE = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.abspath(__file__)) + os.sep)


class RankError(RuntimeError):
    """Ranks could not communicate: the message names them, their group, operations and call sites."""


def call_site() -> str:
    """`file:line` of the innermost frame that is neither a world, a group nor torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_inside(frame.f_code.co_filename):
        frame = frame.f_back
    return _named(frame.f_code.co_filename, frame.f_lineno)


# Asked at every communication, thousands of times a step: each place is looked at once.


@lru_cache(maxsize=1024)
def _is_inside(name: str) -> bool:
    return name.startswith(INSIDE)


@lru_cache(maxsize=4096)
def _named(name: str, line: int) -> str:
    folder, file = os.path.split(name)
    return f"{os.path.basename(folder)}/{file}:{line}"
