"""Runs the trainer on this process's rank or on simulated ones, and says once, clearly, why a run ended."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

import torch

from triaxis.engine.config import ResolvedRun, RunConfig
from triaxis.engine.trainer import train
from triaxis.launch.environment import Launch
from triaxis.parallel.failure import RankError
from triaxis.parallel.process_world import open_process_world
from triaxis.parallel.thread_world import run_threads

FOR_PEOPLE = (ValueError, OSError, FloatingPointError, RankError)
"""Errors whose message says enough; any other is a fault of ours, and its traceback is kept."""

EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130
GRACE_SECONDS = 3.0
WAIT_FOR_CAUSE_SECONDS = 1.5


def run_processes(config: RunConfig, resolved: ResolvedRun, launch: Launch) -> int:
    """This process is one rank. Returns the exit code."""
    end_on_signals()
    if launch.local_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // launch.local_size))
    report = Path(config.output_dir) / f".failure-{launch.run_id}"
    try:
        world = open_process_world(
            rank=launch.rank,
            size=launch.size,
            local_rank=launch.local_rank,
            timeout_seconds=config.timeout_seconds,
        )
    except (RuntimeError, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt):
            return EXIT_INTERRUPTED
        _tell(error, _place(resolved, launch.rank), report, expected=True)
        return EXIT_FAILURE
    try:
        train(config, resolved, world)
        world.close()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:  # whatever it is, it is told once and the process ends
        _tell(error, _place(resolved, launch.rank), report, expected=isinstance(error, FOR_PEOPLE))
        return EXIT_FAILURE
    report.unlink(missing_ok=True)
    return 0


def run_simulated(config: RunConfig, resolved: ResolvedRun) -> int:
    """Every rank is a thread of this process. Returns the exit code."""
    end_on_signals()
    if "OMP_NUM_THREADS" not in os.environ and resolved.topology.world_size > 1:
        torch.set_num_threads(1)
    names = [_axes(resolved, rank) for rank in range(resolved.topology.world_size)]
    try:
        run_threads(resolved.topology.world_size, lambda world: train(config, resolved, world), names=names)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:  # as above
        if not isinstance(error, FOR_PEOPLE):
            traceback.print_exc()
        notes = "; ".join(getattr(error, "__notes__", []))
        print((str(error) or repr(error)) + (f" ({notes})" if notes else ""), file=sys.stderr, flush=True)
        return EXIT_FAILURE
    return 0


def _place(resolved: ResolvedRun, rank: int) -> str:
    """`rank 3 (dp 0, pp 1, tp 1)`."""
    return f"rank {rank} ({_axes(resolved, rank)})"


def _axes(resolved: ResolvedRun, rank: int) -> str:
    places = resolved.topology.coordinates(rank)
    return f"dp {places['dp']}, pp {places['pp']}, tp {places['tp']}"


def _tell(error: Exception, place: str, report: Path, *, expected: bool) -> None:
    """Prints the failure, unless another rank has told it already.

    The first rank to create the report speaks. One that only lost its peers leaves the cause a moment to come first;
    one with a cause of its own speaks in any case, unless its words are the ones already said.
    """
    for number in (
        signal.SIGTERM,
        signal.SIGINT,
    ):  # the launcher ends all ranks as soon as one died: speak first
        signal.signal(number, lambda *_: None)
    lost_peer = isinstance(error, RankError)
    cause = str(error) if expected and str(error) else f"{type(error).__name__}: {error}"
    deadline = time.monotonic() + WAIT_FOR_CAUSE_SECONDS
    while lost_peer and not report.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    first = True
    try:
        report.parent.mkdir(parents=True, exist_ok=True)
        with report.open("x", encoding="utf-8") as file:
            file.write(f"{cause}\n\n{place}\n{''.join(traceback.format_exception(error))}")
    except FileExistsError:
        first = False
        said = report.read_text(encoding="utf-8", errors="replace")
    except OSError:  # nowhere to write; speaking twice is better than not at all
        pass
    if first or not (lost_peer or said.startswith(cause + "\n") or not said):
        details = "" if expected else f" (traceback in {report})"
        print(
            f"{place}: {cause.removeprefix(place.split(' (')[0] + ': ')}{details}",
            file=sys.stderr,
            flush=True,
        )


def end_on_signals() -> None:
    """SIGTERM ends like Ctrl-C, and both within seconds, even while this rank waits inside a collective.

    Python's own handlers run only between bytecodes of the main thread; the wake-up pipe is written at once.
    """

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def watch() -> None:
        while reader.recv(1)[0] not in (signal.SIGTERM, signal.SIGINT):
            pass
        time.sleep(GRACE_SECONDS)
        writer.close()
        os._exit(EXIT_INTERRUPTED)

    threading.Thread(target=watch, name="signals", daemon=True).start()
