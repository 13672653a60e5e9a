"""Signals, a killed rank, a stopped rank: real processes, and how their run ends or goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.crash.ranks import Ranks, arguments, wait_for_steps
from tests.runs import last_state, prepare, rows
from triaxis.engine.checkpoint.folder import complete_checkpoints
from triaxis.engine.data.loader import Loader
from triaxis.launch import ranks as launch_ranks

pytestmark = pytest.mark.processes

KILLED_AT_12 = """
import os, signal
from triaxis.engine.metrics import MetricsWriter
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
    return flags | {"tp": 2, "lr_scheduler_type": "linear", "async_save": True}


@pytest.fixture(scope="module")
def straight(flags: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happens to."""
    output = tmp_path_factory.mktemp("straight")
    with Ranks(2, arguments({**flags, "output_dir": str(output)}), output / "log") as ranks:
        assert ranks.wait(60) == [0, 0], ranks.said()
    return output


@pytest.mark.parametrize(("number", "asked"), [(signal.SIGTERM, (0, 1)), (signal.SIGUSR1, (1,))])
def test_a_signal_saves_and_the_next_start_goes_on(
    number: int, asked: tuple[int, ...], flags: dict[str, Any], straight: Path, tmp_path: Path
) -> None:
    """To all ranks (twice, as a scheduler and a launcher both send it), or to one: agreed by all, saved once."""
    given = arguments({**flags, "output_dir": str(tmp_path)})
    with Ranks(2, given, tmp_path / "log") as ranks:
        wait_for_steps(ranks, tmp_path, 3)
        ranks.send(number, *asked)
        ranks.send(number, *asked)
        assert ranks.wait(15) == [75, 75], ranks.said()
        assert len(complete_checkpoints(tmp_path)) == 1
        assert f"{signal.Signals(number).name}: saved step" in ranks.said()
    assert (tmp_path / "requeue").read_text().startswith("step ")
    with Ranks(2, [*given, "--resume", "auto"], tmp_path / "log") as ranks:
        assert ranks.wait(60) == [0, 0], ranks.said()
    assert rows(tmp_path) == rows(straight)
    assert last_state(tmp_path) == last_state(straight)
    assert not (tmp_path / "requeue").exists()
    assert not list(tmp_path.glob(".alive-*"))


def test_a_rank_that_is_killed_is_named_and_the_others_end(flags: dict[str, Any], tmp_path: Path) -> None:
    given = arguments({**flags, "steps": 100000, "output_dir": str(tmp_path)})
    with Ranks(2, given, tmp_path / "log") as ranks:
        wait_for_steps(ranks, tmp_path, 3)
        ranks.send(signal.SIGKILL, 1)
        started = time.monotonic()
        assert ranks.wait(15) == [1, -9], ranks.said()
        assert time.monotonic() - started < 15
        assert "rank 1 (dp 0, pp 0, tp 1) died without a word" in ranks.said()


def test_a_rank_that_hears_nothing_of_a_death_ends_too(flags: dict[str, Any], tmp_path: Path) -> None:
    """As in a collective that never fails: only the free lock of the dead tells, and a signal does not help."""

    def deaf(rank: int) -> None:
        batches = Loader.step_batches

        def sleeps(self: Loader, step: int, **named: Any) -> Any:
            if rank == 0 and step == 3:
                (tmp_path / "sleeps").touch()
                time.sleep(60)
            return batches(self, step, **named)

        Loader.step_batches = sleeps  # type: ignore[method-assign]

    given = arguments({**flags, "output_dir": str(tmp_path)})
    with Ranks(2, given, tmp_path / "log", before=deaf) as ranks:
        while not (tmp_path / "sleeps").exists() and ranks.running():
            time.sleep(0.02)
        ranks.send(signal.SIGKILL, 1)
        ranks.send(signal.SIGTERM, 0)
        assert ranks.wait(15) == [1, -9], ranks.said()
        assert "rank 1 (dp 0, pp 0, tp 1) has died; the run was at step 4, training" in ranks.said()


def test_a_stopped_rank_is_named_and_who_asks_twice_is_in_a_hurry(
    flags: dict[str, Any], tmp_path: Path
) -> None:
    """Others write down where they wait. A signal alone cannot end them here; a second one can, within seconds."""
    given = arguments({**flags, "steps": 100000, "output_dir": str(tmp_path)})
    with Ranks(2, [*given, "--hang-timeout", "6"], tmp_path / "log") as ranks:
        wait_for_steps(ranks, tmp_path, 3)
        ranks.send(signal.SIGSTOP, 1)
        assert ranks.wait(40, 0) == [1], ranks.said()
        said = ranks.said()
    assert "rank 1 (dp 0, pp 0, tp 1) gives no sign of life; rank 0 waits in " in said
    report = (tmp_path / "hang" / "rank-0.txt").read_text()
    assert "training (" in report and "last operation by group:\n  world (0, 1): number" in report
    assert "all_reduce at parallel/collectives.py" in report and "engine/trainer.py" in report
    assert not (tmp_path / "hang" / "rank-1.txt").exists()
    other = tmp_path / "other"
    with Ranks(2, arguments({**flags, "steps": 10**6, "output_dir": str(other)}), tmp_path / "log2") as ranks:
        wait_for_steps(ranks, other, 3)
        ranks.send(signal.SIGSTOP, 1)
        ranks.send(signal.SIGTERM, 0)
        assert ranks.wait(2.5, 0) == [None]
        ranks.send(signal.SIGTERM, 0)
        assert ranks.wait(5, 0) == [130], ranks.said()


def test_a_signal_before_the_first_step_says_that_nothing_was_due(
    flags: dict[str, Any], tmp_path: Path
) -> None:
    def never_meet(rank: int) -> None:
        def wait(**_: object) -> None:
            (tmp_path / "waits").touch()
            time.sleep(30)

        launch_ranks.open_process_world = wait  # type: ignore[assignment]

    given = arguments({**flags, "output_dir": str(tmp_path)})
    with Ranks(2, given, tmp_path / "log", before=never_meet) as ranks:
        while not (tmp_path / "waits").exists():
            time.sleep(0.02)
        ranks.send(signal.SIGUSR1)
        assert ranks.wait(5) == [75, 75], ranks.said()
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
        timeout=100,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "resumed at step 10" in done.stderr
    assert rows(tmp_path) == rows(straight)
    assert last_state(tmp_path) == last_state(straight)
