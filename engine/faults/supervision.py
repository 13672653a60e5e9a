"""What a launcher gives the trainer: signals to look at, and how to end a run in which nothing moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from triaxis.engine.faults.interruption import Interruption
from triaxis.engine.faults.watchdog import Watchdog
from triaxis.engine.step import TrainingStep
from triaxis.parallel.worlds.mesh import Mesh


class Watch(Protocol):
    """Who is told where the trainer is."""

    def at(self, step: int, phase: str) -> None: ...
    def watch_pipeline(self, training: TrainingStep) -> None: ...


class Unwatched:
    """Nobody."""

    def at(self, step: int, phase: str) -> None: ...
    def watch_pipeline(self, training: TrainingStep) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """Without `end`, nobody watches, and a run that hangs does so for ever.

    run: the same on all ranks, another for each start
    end: tells why the run ends (None: another rank has) and ends the process; called on the watchdog's thread
    failure: the file that appears when a rank has told why the run ends
    """

    interruption: Interruption = field(default_factory=Interruption)
    run: str = "alone"
    end: Callable[[str | None], None] | None = None
    failure: Path | None = None

    @contextmanager
    def watch(self, directory: Path, mesh: Mesh, timeout_seconds: float) -> Iterator[Watch]:
        """Watches this rank while open."""
        if self.end is None:
            yield Unwatched()
            return
        with Watchdog(
            directory=directory,
            run=self.run,
            mesh=mesh,
            timeout_seconds=timeout_seconds,
            end=self.end,
            failure=self.failure or directory / f".failure-{self.run}",
        ) as watchdog:
            yield watchdog
