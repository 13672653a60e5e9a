"""Ranks as processes that start in a moment: forked from one that has everything imported."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch._dynamo  # noqa: F401  (which torch's optimizers import in the first step)

import triaxis.launch.ranks  # noqa: F401  (imports torch once, before the forks)
from tests.patience import PATIENCE_SECONDS
from triaxis.launch.train import command


class Ranks:
    """The processes of one start of a run; their stderr goes to one file. Always ended at the end of a `with`.

    before: called in the child with its rank, first of all
    """

    def __init__(
        self,
        size: int,
        flags: Sequence[str],
        log: Path,
        *,
        restarts: int = 0,
        before: Callable[[int], None] = lambda rank: None,
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self.log = log
        self.codes: dict[int, int] = {}
        self.pids = [self._fork(rank, size, port, flags, restarts, before) for rank in range(size)]

    def _fork(
        self,
        rank: int,
        size: int,
        port: int,
        flags: Sequence[str],
        restarts: int,
        before: Callable[[int], None],
    ) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            file = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, 1)
            os.dup2(file, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
            os.environ.update(
                RANK=str(rank),
                WORLD_SIZE=str(size),
                LOCAL_RANK=str(rank),
                LOCAL_WORLD_SIZE=str(size),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                TORCHELASTIC_RUN_ID="test",
                TORCHELASTIC_RESTART_COUNT=str(restarts),
                OMP_NUM_THREADS="1",
            )
            sys.argv = ["train", *flags]
            before(rank)
            command()
        finally:
            os._exit(99)

    def send(self, number: int, *ranks: int) -> None:
        for rank in ranks or range(len(self.pids)):
            if rank not in self.codes:
                os.kill(self.pids[rank], number)

    def running(self) -> bool:
        """Whether any rank still runs; collects the exit codes of the others (negative: a signal)."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
        return len(self.codes) < len(self.pids)

    def wait(self, *ranks: int, seconds: float = PATIENCE_SECONDS) -> list[int | None]:
        """The exit codes, of `ranks` or all, in order; None where a rank still runs after so long."""
        asked = ranks or range(len(self.pids))
        deadline = time.monotonic() + seconds
        while self.running() and any(rank not in self.codes for rank in asked):
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        return [self.codes.get(rank) for rank in asked]

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        if self.running():
            self.send(signal.SIGKILL)
            self.wait()


def arguments(flags: dict[str, object]) -> list[str]:
    """Flags as a command line."""
    given = []
    for name, value in flags.items():
        if isinstance(value, bool):
            given.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            given += [f"--{name}", str(value)]
    return given


def done_steps(output: Path) -> int:
    """Rows in the metrics: steps that a run has finished."""
    try:
        return (output / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def wait_for_steps(ranks: Ranks, output: Path, steps: int, seconds: float = PATIENCE_SECONDS) -> None:
    """Returns once so many are done, or the run is over. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while done_steps(output) < steps and ranks.running():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{done_steps(output)} of {steps} steps after {seconds:g} s: {ranks.said()}")
        time.sleep(0.005)
