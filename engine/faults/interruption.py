"""A request from outside to save and end. No torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

SAME_REQUEST_SECONDS = 2.0
"""A launcher and a scheduler may both send the signal; within this time it counts once."""


class Interruption:
    """Set by a signal, looked at by the trainer between steps.

    signal: the number of the signal that asked, 0 for none
    """

    def __init__(self) -> None:
        self.signal = 0
        self._awaited = self._over = False
        self._asked_seconds = 0.0

    def ask(self, signal: int) -> bool:
        """Asks for an end after the step; False if the rank must end now: nobody looks yet, or it was asked before."""
        first = not self.signal
        if first:
            self.signal, self._asked_seconds = signal, time.monotonic()
        same = first or time.monotonic() - self._asked_seconds < SAME_REQUEST_SECONDS
        return self._over or (self._awaited and same)

    @contextmanager
    def looked_at(self) -> Iterator[None]:
        """Somebody looks at it between steps; afterwards the rank ends by itself."""
        self._awaited = True
        try:
            yield
        finally:
            self._over = True
