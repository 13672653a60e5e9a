"""Runs the trainer on this process's rank or on simulated ones, and says once, clearly, why a run ended."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from triaxis.engine.checkpoint.manifest import SaveError
from triaxis.engine.config import ResolvedRun, RunConfig, SaveStrategy, run_directory
from triaxis.engine.data.tokenizer import open_tokenizer
from triaxis.engine.faults.interruption import Interruption
from triaxis.engine.faults.presence import dead_ranks
from triaxis.engine.faults.replicas import ReplicaError
from triaxis.engine.faults.supervision import Supervision
from triaxis.engine.faults.watchdog import STORAGE_PATIENCE
from triaxis.engine.run.trainer import Summary, train
from triaxis.launch.directory import REQUEUE_NAME
from triaxis.launch.ending import Exit, printable, refuse
from triaxis.launch.environment import Launch
from triaxis.parallel.worlds.failure import RankError
from triaxis.parallel.worlds.meeting import Address, RefusedElsewhere
from triaxis.parallel.worlds.process import open_process_world
from triaxis.parallel.worlds.thread import run_threads

FOR_PEOPLE = (ValueError, OSError, FloatingPointError, RankError, SaveError, ReplicaError)
"""Errors whose message says enough; any other is a fault of ours, and its traceback is kept."""

GRACE_SECONDS = 3.0
WAIT_FOR_CAUSE_SECONDS = 1.5
PATIENCE_SECONDS = 60.0
"""A collective waits that much longer than a hang takes to be noticed, so that the watchdog speaks first."""
ASKING = (signal.SIGTERM, signal.SIGUSR1)


def run_processes(config: RunConfig, resolved: ResolvedRun, launch: Launch) -> int:
    """This process is one rank. Returns the exit code."""
    directory = run_directory(config)
    report = directory / f".failure-{launch.run_id}"
    place = _place(resolved, launch.rank)
    if launch.local_size < launch.size:
        place += f" on {socket.gethostname()}"
    stop = _Stop(resolved, report, speaks=launch.rank == 0)
    if launch.local_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // launch.local_size))

    def end(message: str | None) -> None:
        if message is not None and _first_to_tell(report, message, place):
            print(f"{place}: {message}", file=sys.stderr, flush=True)
        os._exit(Exit.FAILED)

    supervision = Supervision(interruption=stop.interruption, run=launch.run_id, end=end, failure=report)
    try:
        world = open_process_world(
            rank=launch.rank,
            size=launch.size,
            local_rank=launch.local_rank,
            timeout_seconds=config.timeout_seconds,
            operation_seconds=max(config.timeout_seconds, config.hang_timeout + PATIENCE_SECONDS),
            setup_seconds=STORAGE_PATIENCE * config.hang_timeout + PATIENCE_SECONDS,
            device=config.device,
            transport=config.transport,
            address=_address(launch),
            start=launch.run_id,
        )
    except KeyboardInterrupt:
        return stop.exit_code
    except RefusedElsewhere as error:
        if launch.rank == 0:
            refuse("train", error)
        else:
            time.sleep(GRACE_SECONDS)  # rank 0 speaks before the launcher ends it
        error.let_go(launch.rank, launch.size)
        return Exit.REFUSED
    except RuntimeError as error:
        _tell(error, place, report, expected=True)
        return Exit.FAILED
    if world.device.type == "cuda":
        torch.use_deterministic_algorithms(config.deterministic)
        # parts of one long sum are not rounded to 16 bits before they are added
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if launch.size > 1:
        warnings.showwarning = _warns(place)
    try:
        summary = train(config, resolved, world, supervision)
        world.close()
    except KeyboardInterrupt:
        return stop.exit_code
    except Exception as error:  # whatever it is, it is told once and the process ends
        _tell(
            error,
            place,
            report,
            expected=isinstance(error, FOR_PEOPLE),
            dead=lambda: [
                _place(resolved, rank) for rank in dead_ranks(directory, launch.run_id, launch.size)
            ],
        )
        return Exit.FAILED
    report.unlink(missing_ok=True)
    return _ended(summary, speaks=launch.rank == 0)


def run_simulated(config: RunConfig, resolved: ResolvedRun) -> int:
    """Every rank is a thread of this process. Returns the exit code."""
    stop = _Stop(resolved, run_directory(config) / ".failure-simulated", speaks=True)
    if "OMP_NUM_THREADS" not in os.environ and resolved.topology.world_size > 1:
        torch.set_num_threads(1)
    names = [resolved.topology.place(rank) for rank in range(resolved.topology.world_size)]

    def end(message: str | None) -> None:
        if message is not None:  # one of the threads tells it, and ends all
            print(message, file=sys.stderr, flush=True)
            os._exit(Exit.FAILED)

    supervision = Supervision(interruption=stop.interruption, end=end)
    try:
        if resolved.tokenizer is not None:
            open_tokenizer(resolved.tokenizer)  # loads here what is not safe to load in many threads at once
        summaries = run_threads(
            resolved.topology.world_size,
            lambda world: train(config, resolved, world, supervision),
            names=names,
        )
    except KeyboardInterrupt:
        return stop.exit_code
    except Exception as error:  # as above
        if not isinstance(error, FOR_PEOPLE):
            traceback.print_exc()
        notes = "; ".join(getattr(error, "__notes__", []))
        text = (str(error) or repr(error)) + (f"\n  {notes}" if notes else "")
        print(printable(text), file=sys.stderr, flush=True)
        return Exit.FAILED
    return _ended(summaries[0], speaks=True)


def _ended(summary: Summary, *, speaks: bool) -> int:
    """The exit code of a run that ended well; leaves a mark for job scripts if it wants to be started again."""
    if not summary.signal:
        return 0
    if speaks:
        (summary.directory / REQUEUE_NAME).write_text(f"step {summary.steps}\n", encoding="utf-8")
    return Exit.REQUEUE


def _address(launch: Launch) -> Address | None:
    if launch.size == 1:
        return None
    return Address(
        host=launch.host,
        port=launch.port,
        hosted=launch.hosted,
        one_machine=launch.local_size == launch.size,
    )


def _warns(place: str) -> Callable[..., None]:
    """Prints Python's warnings with the rank that has them."""

    def show(message: object, category: type[Warning], filename: str, lineno: int, *_: object) -> None:
        where = f"{Path(filename).name}:{lineno}"
        print(f"{place}: warning: {message} ({category.__name__} at {where})", file=sys.stderr, flush=True)

    return show


def _place(resolved: ResolvedRun, rank: int) -> str:
    """`rank 3 (dp 0, pp 1, tp 1)`."""
    return f"rank {rank} ({resolved.topology.place(rank)})"


def _tell(
    error: Exception,
    place: str,
    report: Path,
    *,
    expected: bool,
    dead: Callable[[], list[str]] = list,
) -> None:
    """Prints the failure, unless another rank has told it already.

    The first rank to create the report speaks. One that only lost its peers leaves the cause a moment to come first,
    unless a rank is seen to have died; one with a cause of its own speaks in any case, unless its words are the ones
    already said.
    """
    for number in (*ASKING, signal.SIGINT):  # the launcher ends all ranks as soon as one died: speak first
        signal.signal(number, lambda *_: None)
    lost_peer = isinstance(error, RankError)
    cause = str(error) if expected and str(error) else f"{type(error).__name__}: {error}"
    cause = cause.removeprefix(place.split(" (")[0] + ": ")
    deadline = time.monotonic() + WAIT_FOR_CAUSE_SECONDS
    gone: list[str] = []
    while lost_peer and not gone and not report.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
        gone = dead()
    if gone:
        cause = f"{' and '.join(gone)} died without a word (killed, or crashed); {cause}"
    said = ""
    first = _first_to_tell(report, cause, place, "".join(traceback.format_exception(error)))
    if not first:
        said = report.read_text(encoding="utf-8", errors="replace")
    if first or not (lost_peer or said.startswith(cause + "\n") or not said):
        notes = list(getattr(error, "__notes__", []))
        details = "; ".join(notes if expected else [*notes, f"traceback in {report}"])
        opening, _, rest = cause.partition("\n")
        text = f"{place}: {opening}" + (f" ({details})" if details else "") + f"\n{rest}"
        print(printable(text.rstrip()), file=sys.stderr, flush=True)


def _first_to_tell(report: Path, cause: str, place: str, details: str = "") -> bool:
    """Whether no other rank has told a cause; leaves it in the report."""
    try:
        report.parent.mkdir(parents=True, exist_ok=True)
        with report.open("x", encoding="utf-8") as file:
            file.write(f"{cause}\n\n{place}\n{details}")
    except FileExistsError:
        return False
    except OSError:  # nowhere to write; speaking twice is better than not at all
        pass
    return True


class _Stop:
    """Ctrl-C ends this process within seconds; SIGTERM and SIGUSR1 ask the run to save itself, or end it too.

    Python's own handlers run only between bytecodes of the main thread, which may wait inside a collective. The
    wake-up pipe is written at once, and the thread that reads it decides: before the first step there is nothing to
    save, a run without checkpoints has nowhere to save to, and who asks again is in a hurry.
    exit_code: of this process if it was interrupted
    """

    def __init__(self, resolved: ResolvedRun, report: Path, *, speaks: bool) -> None:
        self.interruption = Interruption()
        self.exit_code: int = Exit.INTERRUPTED
        self._saves = resolved.save_strategy != SaveStrategy.NO
        self._report, self._speaks = report, speaks
        for number in ASKING:
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGINT, _interrupt)
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def _watch(self) -> None:
        while True:
            number = self._reader.recv(1)[0]
            first = not self.interruption.signal
            if number in ASKING:
                if self.interruption.ask(number):
                    continue
                if first and self._saves:
                    self._end_early(number)
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            elif number != signal.SIGINT:
                continue
            time.sleep(GRACE_SECONDS)
            os._exit(self.exit_code)

    def _end_early(self, number: int) -> None:
        self.exit_code = Exit.REQUEUE
        if self._speaks and not self._report.exists():
            name = signal.Signals(number).name
            print(f"{name} before the first step: nothing to save", file=sys.stderr, flush=True)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
