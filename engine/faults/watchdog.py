"""A thread per rank that ends a run in which nothing moves any more, and says where every rank stood.

moves     a communication was begun, or the trainer came to another step, phase or microbatch
a hang    no move for the timeout: the first rank to notice marks it, all who live write down where they are
a death   the next rank is gone (its lock is free), and this one has not moved for some seconds either
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType, TracebackType

from triaxis.engine.faults.presence import Presence, is_dead, process_name
from triaxis.engine.step import TrainingStep
from triaxis.parallel.places.legal_values import first_of
from triaxis.parallel.worlds.failure import INSIDE
from triaxis.parallel.worlds.mesh import Mesh

HANG_FOLDER = "hang"
STANDARD_LIBRARY = os.path.dirname(os.__file__)
STORAGE_PATIENCE = 10
"""Reading data, building the model, loading and saving may take that many timeouts."""
LOST_SECONDS = 3.0
"""How long a rank may stand still once its neighbour died or the run's failure was told."""
DUMP_SECONDS = 5.0
"""How long the first to notice waits for what the others write down."""


class Watchdog:
    """Watches this rank while it is open; an error that leaves it gets a note of the step and the phase.

    end: tells everyone why the run ends (None: it has been told) and ends this process
    failure: the file that appears when another rank has told why the run ends
    """

    def __init__(
        self,
        *,
        directory: Path,
        run: str,
        mesh: Mesh,
        timeout_seconds: float,
        end: Callable[[str | None], None],
        failure: Path,
    ) -> None:
        self._directory, self._mesh = directory, mesh
        self._timeout_seconds, self._end, self._failure = timeout_seconds, end, failure
        self._trainer = threading.get_ident()
        self._presence = Presence(directory, run, mesh.world.rank, mesh.world.size)
        self._mark = self._presence.folder / HANG_FOLDER
        self._step, self._phase = 0, "starting"
        self._training: TrainingStep | None = None
        self._seen: object = None
        self._moved_seconds = time.monotonic()
        self._interval_seconds = min(1.0, timeout_seconds / 10)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def at(self, step: int, phase: str) -> None:
        """Where the trainer is: the step (from 1) and what it does there."""
        self._step, self._phase = step, phase

    def watch_pipeline(self, training: TrainingStep) -> None:
        """Lets the report say which microbatch the pipeline was at."""
        self._training = training

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(f"at {self._position()}")
        self._closed.set()
        self._presence.close()

    def _watch(self) -> None:
        while not self._closed.wait(self._interval_seconds):
            still_seconds = self._still_seconds()
            patience = STORAGE_PATIENCE if not self._step or self._phase == "saving" else 1
            marked = still_seconds > min(LOST_SECONDS, self._timeout_seconds) and self._mark.exists()
            if still_seconds > self._timeout_seconds * patience or marked:
                self._report_hang(still_seconds)
            elif still_seconds > LOST_SECONDS and self._failure.exists():
                self._finish(None)
            elif still_seconds > LOST_SECONDS and self._presence.neighbour_died():
                dead = (self._presence.rank + 1) % self._presence.size
                self._finish(f"{self._named(dead)} has died; the run was at {self._position()}")

    def _finish(self, message: str | None) -> None:
        if not self._closed.is_set():
            self._end(message)

    def _still_seconds(self) -> float:
        operations = sum(group.operations for group in list(self._mesh.groups.values()))
        position = None if self._training is None else self._training.position
        now, seen = time.monotonic(), (self._step, self._phase, operations, position)
        if seen != self._seen:
            self._seen, self._moved_seconds = seen, now
        return now - self._moved_seconds

    def _report_hang(self, still_seconds: float) -> None:
        """Writes this rank's report; the first to mark the hang then tells it for all, the others only end."""
        try:
            self._mark.open("x").close()
            first = True
        except FileExistsError:
            first = False
        self._dump(still_seconds)
        deadline = time.monotonic() + DUMP_SECONDS * (1 if first else 3)
        ranks = range(self._presence.size)
        while time.monotonic() < deadline and not self._closed.wait(0.05):
            if first and all(self._where(rank) for rank in ranks):
                break
        self._finish(self._told(still_seconds) if first else None)

    def _dump(self, still_seconds: float) -> None:
        folder = self._directory / HANG_FOLDER
        folder.mkdir(exist_ok=True)
        rank = self._presence.rank
        where = self._whereabouts()
        lines = [
            f"{self._named(rank)}, {process_name()}, {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
            f"no progress for {still_seconds:.1f} s at {self._position()}",
            where,
            "last operation by group:",
        ]
        for name, group in self._mesh.groups.items():
            if group.last is not None:
                last = f"{group.last.told(group.ranks)} at {group.last.site}"
                lines.append(f"  {name} {group.ranks}: number {group.operations}, {last}")
        with (folder / f"rank-{rank}.txt").open("w", encoding="utf-8") as file:
            file.write("\n".join([*lines, "stacks, innermost frame first:", ""]))
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        draft = self._presence.folder / f".where-{rank}"
        draft.write_text(where, encoding="utf-8")
        draft.replace(self._presence.folder / f"where-{rank}")

    def _position(self) -> str:
        at = f"step {self._step}, {self._phase}" if self._step else self._phase
        if self._phase == "training" and self._training is not None and self._training.position:
            kind, chunk, microbatch = self._training.position
            at += f" ({kind} of chunk {chunk}, microbatch {microbatch})"
        return at

    def _whereabouts(self) -> str:
        """`waits in …` inside a communication, else `is at file:line`."""
        frame = _own(sys._current_frames().get(self._trainer))
        if frame is None:
            return "is nowhere to be seen"
        if not frame.f_code.co_filename.startswith(INSIDE):
            return f"is at {_place(frame)}"
        while frame.f_back is not None and frame.f_code.co_filename.startswith(INSIDE):
            frame = frame.f_back
        site = _place(frame)
        called = [
            f"{group.last.told(group.ranks)} in group '{name}' {group.ranks} "
            for name, group in self._mesh.groups.items()
            if group.last is not None and group.last.site == site
        ]
        return f"waits in {called[0] if len(called) == 1 else 'a communication '}at {site}"

    def _where(self, rank: int) -> str:
        """What the rank wrote down; empty if it has not (yet)."""
        path = self._presence.folder / f"where-{rank}"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def _told(self, still_seconds: float) -> str:
        """Who is to blame, as far as can be seen: the silent, else those outside any communication, else all wait."""
        ranks = range(self._presence.size)
        where = {rank: self._where(rank) for rank in ranks}
        silent = [f"{self._named(rank)} {self._silence(rank)}" for rank in ranks if not where[rank]]
        busy = [f"{self._named(rank)} {text}" for rank, text in where.items() if text.startswith("is at")]
        waiting = [f"rank {rank} {text}" for rank, text in where.items() if text.startswith("waits")]
        blamed = silent + busy
        shown = blamed or waiting
        told = first_of(shown, 8)
        if blamed and waiting:
            told += f"; {first_of(waiting, 1, separator=', ')}"
        return (
            f"no progress for {still_seconds:.0f} s at {self._position()}: {told}. Every rank's position is in "
            f"{self._directory / HANG_FOLDER}; if a step takes that long, raise --hang-timeout"
        )

    def _silence(self, rank: int) -> str:
        return "has died" if is_dead(self._presence.folder, rank) else "gives no sign of life"

    def _named(self, rank: int) -> str:
        return f"rank {rank} ({self._mesh.topology.place(rank)})"


def _own(frame: FrameType | None) -> FrameType | None:
    """The innermost frame that is neither torch's nor the standard library's."""
    while frame is not None:
        name = frame.f_code.co_filename
        standard = name.startswith((STANDARD_LIBRARY, "<frozen")) and "site-packages" not in name
        if not standard and not name.startswith(INSIDE[0]):
            return frame
        frame = frame.f_back
    return None


def _place(frame: FrameType) -> str:
    """`folder/file:line`."""
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno}"
