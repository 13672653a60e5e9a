"""What a rank raises when communication fails, and where in the caller's code it happened."""

from __future__ import annotations

import os
import sys

import torch

INSIDE = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.abspath(__file__)) + os.sep)


class RankError(RuntimeError):
    """Ranks could not communicate: the message names them, their group, operations and call sites."""


def call_site() -> str:
    """`file:line` of the innermost frame that is neither a world, a group nor torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(INSIDE):
        frame = frame.f_back
    folder, file = os.path.split(frame.f_code.co_filename)
    return f"{os.path.basename(folder)}/{file}:{frame.f_lineno}"
