"""Signals, a killed rank, a stopped rank: real processes, and how their run ends or goes on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.crash.ranks import Ranks, arguments, done_steps, wait_for_steps
from tests.patience import NEVER_SECONDS, PATIENCE_SECONDS
from tests.runs import last_state, prepare, rows
from triaxis.engine.checkpoint.folder import complete_checkpoints
from triaxis.engine.checkpoint.storage import ShardWriter
from triaxis.engine.data.ahead import Ahead
from triaxis.engine.data.loader import Loader
from triaxis.engine.run import inputs
from triaxis.engine.step import TrainingStep, _Chunk
from triaxis.launch import ranks as launch_ranks
from triaxis.launch.checkpoint import main
from triaxis.launch.preprocess import preprocess

pytestmark = pytest.mark.processes

KILLED_AT_12 = """
import os, signal
from triaxis.engine.run.metrics import MetricsWriter
from triaxis.launch.train import command
write = MetricsWriter.write
def write_and_die(self, row):
    write(self, row)
    if (row.step, os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == (12, "1", "0"):
        os.kill(os.getpid(), signal.SIGKILL)
MetricsWriter.write = write_and_die
command()
"""


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    flags = prepare(tmp_path_factory.mktemp("run")) | {"steps": 20, "eval_steps": 9, "save_steps": 1000}
    return flags | {"tp": 2, "lr_scheduler_type": "linear", "async_save": True, "hang_timeout": NEVER_SECONDS}


@pytest.fixture(scope="module")
def straight(flags: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happens to."""
    output = tmp_path_factory.mktemp("straight")
    with Ranks(2, arguments({**flags, "output_dir": str(output)}), output / "log") as ranks:
        assert ranks.wait() == [0, 0], ranks.said()
    return output


@pytest.mark.parametrize(("number", "asked"), [(signal.SIGTERM, (0, 1)), (signal.SIGUSR1, (1,))])
def test_a_signal_saves_and_the_next_start_goes_on(
    number: int, asked: tuple[int, ...], flags: dict[str, Any], straight: Path, tmp_path: Path
) -> None:  # B100
    """To all ranks (twice, as a scheduler and a launcher both send it), or to one: agreed by all, saved once."""
    given = arguments({**flags, "output_dir": str(tmp_path)})
    with Ranks(2, given, tmp_path / "log") as ranks:
        wait_for_steps(ranks, tmp_path, 3)
        ranks.send(number, *asked)
        ranks.send(number, *asked)
        assert ranks.wait() == [75, 75], ranks.said()
        assert len(complete_checkpoints(tmp_path)) == 1
        assert f"{signal.Signals(number).name}: saved step" in ranks.said()
    assert (tmp_path / "requeue").read_text().startswith("step ")
    with Ranks(2, [*given, "--resume", "auto"], tmp_path / "log") as ranks:
        assert ranks.wait() == [0, 0], ranks.said()
    assert rows(tmp_path) == rows(straight)
    assert last_state(tmp_path) == last_state(straight)
    assert not (tmp_path / "requeue").exists()
    assert not list(tmp_path.glob(".alive-*"))


def test_a_rank_that_is_killed_is_named_and_the_others_end(
    flags: dict[str, Any], tmp_path: Path
) -> None:  # B91
    given = arguments({**flags, "steps": 100000, "output_dir": str(tmp_path)})
    with Ranks(2, given, tmp_path / "log") as ranks:
        wait_for_steps(ranks, tmp_path, 3)
        ranks.send(signal.SIGKILL, 1)
        assert ranks.wait() == [1, -9], ranks.said()
        assert "rank 1 (dp 0, pp 0, tp 1) died without a word" in ranks.said()


def test_a_rank_that_hears_nothing_of_a_death_ends_too(flags: dict[str, Any], tmp_path: Path) -> None:  # B91
    """As in a collective that never fails: only the free lock of the dead tells, and a signal does not help."""

    def deaf(rank: int) -> None:
        batches = Ahead.step_batches

        def sleeps(self: Ahead, step: int, first_sample: int) -> Any:
            if rank == 0 and step == 3:
                (tmp_path / "sleeps").touch()
                time.sleep(NEVER_SECONDS)
            return batches(self, step, first_sample)

        Ahead.step_batches = sleeps  # type: ignore[method-assign]

    given = arguments({**flags, "output_dir": str(tmp_path)})
    with Ranks(2, given, tmp_path / "log", before=deaf) as ranks:
        while not (tmp_path / "sleeps").exists() and ranks.running():
            time.sleep(0.02)
        ranks.send(signal.SIGKILL, 1)
        ranks.send(signal.SIGTERM, 0)
        assert ranks.wait() == [1, -9], ranks.said()
        assert "rank 1 (dp 0, pp 0, tp 1) has died; the run was at step 4, reading data" in ranks.said()


def test_a_stopped_rank_is_named_and_who_asks_twice_is_in_a_hurry(
    flags: dict[str, Any], tmp_path: Path
) -> None:  # B91, B100
    """Others write down where they wait. A signal alone cannot end them here; a second one can, within seconds."""
    given = arguments({**flags, "steps": 100000, "output_dir": str(tmp_path)})
    stops = at_call((_Chunk, "forward", 9), lambda: os.kill(os.getpid(), signal.SIGSTOP), rank=1)
    with Ranks(2, [*given, "--hang-timeout", "15"], tmp_path / "log", before=stops) as ranks:
        assert ranks.wait(0) == [1], ranks.said()
        said = ranks.said()
    assert "rank 1 (dp 0, pp 0, tp 1) gives no sign of life; rank 0 waits in " in said
    report = (tmp_path / "hang" / "rank-0.txt").read_text()
    assert "training (" in report and "last operation by group:\n  world (0, 1): number" in report
    assert "all_reduce at layers/collectives.py" in report and "run/trainer.py" in report
    assert not (tmp_path / "hang" / "rank-1.txt").exists()
    other = tmp_path / "other"
    with Ranks(2, arguments({**flags, "steps": 10**6, "output_dir": str(other)}), tmp_path / "log2") as ranks:
        wait_for_steps(ranks, other, 3)
        ranks.send(signal.SIGSTOP, 1)
        ranks.send(signal.SIGTERM, 0)
        assert ranks.wait(0, seconds=2.5) == [None]
        ranks.send(signal.SIGTERM, 0)
        assert ranks.wait(0) == [130], ranks.said()


def test_a_signal_before_the_first_step_says_that_nothing_was_due(
    flags: dict[str, Any], tmp_path: Path
) -> None:  # B101
    def never_meet(rank: int) -> None:
        def wait(**_: object) -> None:
            (tmp_path / f"waits-{rank}").touch()
            time.sleep(NEVER_SECONDS)

        launch_ranks.open_process_world = wait  # type: ignore[assignment]

    given = arguments({**flags, "output_dir": str(tmp_path)})
    with Ranks(2, given, tmp_path / "log", before=never_meet) as ranks:
        while len(list(tmp_path.glob("waits-*"))) < 2:
            time.sleep(0.02)
        ranks.send(signal.SIGUSR1)
        assert ranks.wait() == [75, 75], ranks.said()
        assert ranks.said() == "SIGUSR1 before the first step: nothing to save\n"


def test_torchrun_restarts_and_the_run_goes_on_by_itself(
    flags: dict[str, Any], straight: Path, tmp_path: Path
) -> None:
    """No --resume is given: the launcher's count of restarts says that it is the same run."""
    given = arguments({**flags, "save_steps": 5, "async_save": False, "output_dir": str(tmp_path)})
    script = tmp_path / "train.py"
    script.write_text(KILLED_AT_12)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "--max-restarts", "1", str(script), *given],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "resumed at step 10" in done.stderr
    assert rows(tmp_path) == rows(straight)
    assert last_state(tmp_path) == last_state(straight)


Place = tuple[Any, str, int]
"""An owner, the name of its function, and the call of it in which something happens (from 1)."""


def at_call(place: Place, act: Callable[[], None], rank: int | None = None) -> Callable[[int], None]:
    """Makes a rank, or every rank, do something at the beginning of that call."""
    owner, name, number = place

    def before(own: int) -> None:
        if rank not in (None, own):
            return
        function, left = getattr(owner, name), [number]

        def acts(*given: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                act()
            return function(*given, **named)

        setattr(owner, name, acts)

    return before


FAILS: dict[str, tuple[Place, str]] = {
    "forward": ((_Chunk, "forward", 9), "at step 5, training"),
    "backward": ((_Chunk, "before_backward", 9), "at step 5, training (forward of chunk 0"),
    "data": ((Loader, "step_batches", 5), "at step 5, reading data"),
    "save": ((ShardWriter, "write_data", 1), "at step 5, saving"),
    "evaluation": ((TrainingStep, "evaluate", 1), "at step 5, evaluating"),
}


@pytest.mark.parametrize(
    "where",
    [
        "forward",
        "data",
        *(pytest.param(w, marks=pytest.mark.full) for w in ("backward", "save", "evaluation")),
    ],
)
def test_a_rank_that_fails_says_when_and_all_end(where: str, tmp_path: Path) -> None:  # B90
    """The second stage of the first replica of two; the others say nothing, and nobody waits for a timeout."""

    def fail() -> None:
        raise KeyError("planted")

    place, told = FAILS[where]
    flags = prepare(tmp_path) | {
        "tp": 1,
        "pp": 2,
        "dp": 2,
        "eval_steps": 5,
        "save_steps": 5,
        "warmup_steps": 1,
    }
    given = arguments({**flags, "output_dir": str(tmp_path / "out")})
    with Ranks(4, given, tmp_path / "log", before=at_call(place, fail, rank=1)) as ranks:
        assert ranks.wait() == [1] * 4, ranks.said()
        last = ranks.said().splitlines()[-1]
        assert last.startswith(f"rank 1 (dp 0, pp 1, tp 0): KeyError: 'planted' ({told}"), ranks.said()
        assert ranks.said().count("planted") == 1
    report = Path(last.rpartition("traceback in ")[2].removesuffix(")"))
    assert "in fail\n" in report.read_text() and told in report.read_text()


def test_a_fault_of_the_data_has_its_step_and_a_warning_its_rank(tmp_path: Path) -> None:
    """Errors for people keep where they happened, as faults of ours do; before, a bad token had neither."""

    def spoil(rank: int) -> None:
        read, calls = Loader.step_batches, [0]

        def reads(self: Loader, step: int, **named: Any) -> Any:
            calls[0] += 1
            if rank == 1 and calls[0] == 2:
                warnings.warn("planted warning", stacklevel=1)
            if rank == 1 and calls[0] == 3:
                raise ValueError("planted token")
            return read(self, step, **named)

        Loader.step_batches = reads  # type: ignore[method-assign]

    flags = prepare(tmp_path) | {"dp": 2, "warmup_steps": 1, "output_dir": str(tmp_path / "out")}
    with Ranks(2, arguments(flags), tmp_path / "log", before=spoil) as ranks:
        assert ranks.wait() == [1, 1], ranks.said()
        said = ranks.said()
    assert "rank 1 (dp 1, pp 0, tp 0): warning: planted warning (UserWarning at " in said
    assert said.splitlines()[-1] == "rank 1 (dp 1, pp 0, tp 0): planted token (at step 3, reading data)"


def test_what_only_one_rank_lacks_is_told_once_with_its_rank_and_machine(tmp_path: Path) -> None:
    """Before, the others read that SIGTERM came before the first step."""

    def lacks(rank: int) -> None:
        if rank == 1:
            sys.argv += ["--data", str(tmp_path / "absent.jsonl")]

    flags = prepare(tmp_path) | {"dp": 3, "warmup_steps": 1, "output_dir": str(tmp_path / "out")}
    with Ranks(3, arguments(flags), tmp_path / "log", before=lacks) as ranks:
        assert ranks.wait() == [2, 2, 2], ranks.said()
        said = ranks.said()
    assert f"triaxis train:\n  rank 1 on {socket.gethostname()}:\n  `data` must be" in said
    assert said.count("absent.jsonl") == 1 and len(said.splitlines()) == 3, said


def test_a_rank_that_never_comes_is_named_in_the_time_asked_for(tmp_path: Path) -> None:
    flags = prepare(tmp_path) | {"dp": 3, "timeout_seconds": 3, "output_dir": str(tmp_path / "out")}
    here = [tmp_path / f"here-{rank}" for rank in range(3)]

    def two_start_together(rank: int) -> None:
        here[rank].touch()
        while not all(path.exists() for path in here):
            time.sleep(0.01)
        if rank == 1:
            os._exit(7)

    with Ranks(3, arguments(flags), tmp_path / "log", before=two_start_together) as ranks:
        assert ranks.wait() == [1, 7, 1], ranks.said()
        said = ranks.said()
    assert len(said.splitlines()) == 1
    assert (
        "within 3 s, but without rank 1 (here: " in said
        and ": ranks 0, 2)" in said
        and "at 127.0.0.1:" in said
    )


def test_a_nan_ends_every_process_with_one_message(flags: dict[str, Any], tmp_path: Path) -> None:  # B96
    def spoil(rank: int) -> None:
        forward, done = _Chunk.forward, [0]

        def spoils(self: _Chunk, hidden: Any, microbatch: int) -> Any:
            done[0] += 1
            output = forward(self, hidden, microbatch)
            return output * float("nan") if rank == 1 and done[0] == 7 else output

        _Chunk.forward = spoils  # type: ignore[method-assign]

    given = arguments({**flags, "tp": 1, "dp": 2, "output_dir": str(tmp_path)})
    with Ranks(2, given, tmp_path / "log", before=spoil) as ranks:
        assert ranks.wait() == [1, 1], ranks.said()
        assert ranks.said().count("step 4: loss nan, gradient norm nan (from the loss of rank 1)") == 1


def test_a_broken_index_is_told_once_and_ends_every_process(tmp_path: Path) -> None:  # B121
    flags = prepare(tmp_path) | {"dp": 2, "eval_data": None, "data": str(tmp_path / "x")}
    preprocess(tmp_path / "train.jsonl", tmp_path / "x")
    index = tmp_path / "x.idx"
    os.truncate(index, index.stat().st_size - 3)
    given = arguments({**flags, "output_dir": str(tmp_path / "out")})
    with Ranks(2, given, tmp_path / "log") as ranks:
        assert ranks.wait() == [1, 1], ranks.said()
        assert ranks.said().count(f"{index}: the size of an index of 24 sequences") == 1


ASKED_IN: dict[str, tuple[Place, list[int]]] = {
    "the index of the data": ((inputs, "open_source", 1), []),
    "the making of the model": ((TrainingStep, "__init__", 1), []),
    "the first step": ((_Chunk, "forward", 2), [1]),
    "accumulation": ((_Chunk, "before_backward", 6), [3]),
    "an evaluation": ((TrainingStep, "evaluate", 1), [4]),
    "an asynchronous save": ((ShardWriter, "write_data", 2), [4, 8]),
}


@pytest.mark.parametrize(
    "where", [pytest.param(w, marks=[pytest.mark.full] * (w == "accumulation")) for w in ASKED_IN]
)
def test_a_signal_at_any_moment_ends_with_a_whole_checkpoint_or_says_why_not(
    where: str, flags: dict[str, Any], tmp_path: Path
) -> None:  # B101
    def ask() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)

    place, saved = ASKED_IN[where]
    own = {
        "steps": 10**6,
        "eval_steps": 4,
        "save_steps": 4,
        "tp": 1,
        "dp": 2,
        "lr_scheduler_type": "constant",
    }
    given = arguments({**flags, **own, "output_dir": str(tmp_path)})
    with Ranks(2, given, tmp_path / "log", before=at_call(place, ask)) as ranks:
        assert ranks.wait() == [75, 75], ranks.said()
        said = ranks.said()
    steps = [int(path.name[5:]) for path in complete_checkpoints(tmp_path)]
    assert steps[: len(saved)] == saved and len(steps) <= len(saved) + 1, (steps, said)
    last = f"saved step {steps[-1]}" if saved else "before the first step: nothing to save"
    assert f"SIGTERM{':' * bool(saved)} {last}" in said
    assert not saved or main(["verify", str(tmp_path)]) == 0
    assert not list(tmp_path.glob("checkpoints/.tmp-*"))


@pytest.mark.parametrize(
    ("number", "to_all"),
    [
        pytest.param(signal.SIGTERM, True, marks=pytest.mark.full),
        pytest.param(signal.SIGTERM, False, marks=pytest.mark.full),
        pytest.param(signal.SIGUSR1, False, marks=pytest.mark.full),
    ],
)
def test_a_signal_to_torchrun_saves_once(
    number: signal.Signals, to_all: bool, flags: dict[str, Any], tmp_path: Path
) -> None:  # B100
    """To its process group, as a terminal or a scheduler sends it, or to torchrun alone, which passes it on."""
    given = arguments({**flags, "steps": 10**6, "output_dir": str(tmp_path)})
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launcher += ["--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]
    started = subprocess.Popen(
        [*launcher, "-m", "triaxis.launch.train", *given],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while done_steps(tmp_path) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        (os.killpg if to_all else os.kill)(started.pid, number)
        _, said = started.communicate(timeout=PATIENCE_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
    assert started.returncode != 0
    assert said.count(f"{number.name}: saved step ") == 1, said
    (path,) = complete_checkpoints(tmp_path)
    assert (tmp_path / "requeue").read_text() == f"step {int(path.name[5:])}\n"


def test_every_path_has_one_writer_where_local_ranks_repeat(tmp_path: Path) -> None:  # B70
    """Two nodes of two ranks, LOCAL_RANK 0, 1, 0, 1, and one folder: what each process opened to write in it."""

    def note(rank: int) -> None:
        os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
        log = (tmp_path / f"opened-{rank}").open("w", buffering=1)

        def opened(event: str, given: tuple[Any, ...]) -> None:
            if event == "open" and not isinstance(given[0], int) and given[2] & (os.O_WRONLY | os.O_RDWR):
                log.write(os.fsdecode(given[0]) + "\n")

        sys.addaudithook(opened)

    flags = prepare(tmp_path) | {"dp": 4, "steps": 4, "save_steps": 2, "warmup_steps": 1}
    given = arguments({**flags, "output_dir": str(tmp_path / "out")})
    with Ranks(4, given, tmp_path / "log", before=note) as ranks:
        assert ranks.wait() == [0] * 4, ranks.said()
    lines = [set((tmp_path / f"opened-{rank}").read_text().splitlines()) for rank in range(4)]
    written = [{path for path in own if path.startswith(str(tmp_path / "out"))} for own in lines]
    assert all(len([path for path in own if "/shard-" in path]) == 2 for own in written)
    assert sum(map(len, written)) == len(set.union(*written))
