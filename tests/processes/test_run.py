"""`triaxis run`: processes without torchrun's report; the last thing printed is the run's own line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.crash.ranks import arguments, done_steps
from tests.patience import PATIENCE_SECONDS
from tests.runs import prepare
from triaxis.engine.checkpoint.folder import complete_checkpoints
from triaxis.launch.run import _ended, main

pytestmark = pytest.mark.processes
COMMAND = [sys.executable, "-m", "triaxis.launch.cli", "run", "-n", "2"]


def start(folder: Path, *words: str, **flags: object) -> subprocess.Popen[str]:
    given = prepare(folder) | {"dp": 2, "warmup_steps": 0, "output_dir": str(folder / "out")} | flags
    return subprocess.Popen([*COMMAND, *words, *arguments(given)], stderr=subprocess.PIPE, text=True)


def test_a_run_that_fails_has_the_last_word(tmp_path: Path) -> None:
    with start(tmp_path, learning_rate=1e30, steps=50) as run:
        said = run.communicate(timeout=PATIENCE_SECONDS)[1].splitlines()
        assert run.returncode == 1
    assert (
        "nan" in said[-1]
        and "--on-nan skip (at step " in said[-1]
        and said[-1].endswith("looking at its numbers)")
    )
    assert not any(
        word in line for line in said for word in ("Traceback", "torchelastic", "ChildFailed", "exitcode")
    )


def test_a_signal_to_the_launcher_saves_and_asks_for_another_start(tmp_path: Path) -> None:
    with start(tmp_path, steps=10**6, save_steps=10**5) as run:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while done_steps(tmp_path / "out") < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        run.send_signal(signal.SIGTERM)
        said = run.communicate(timeout=PATIENCE_SECONDS)[1]
        assert run.returncode == 75, said
    assert said.splitlines()[-1].startswith("SIGTERM: saved step ")
    assert len(complete_checkpoints(tmp_path / "out")) == 1


def test_ranks_that_saved_themselves_are_not_started_again(tmp_path: Path) -> None:
    """Slurm signals every process of a job: the launcher sees ranks end with 75, and has a restart left."""
    with start(tmp_path, "--max-restarts", "1", steps=10**6, save_steps=10**5) as run:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while done_steps(tmp_path / "out") < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        for rank in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split():
            os.kill(int(rank), signal.SIGTERM)
        said = run.communicate(timeout=PATIENCE_SECONDS)[1]
        assert run.returncode == 75, said
    assert said.count("SIGTERM: saved step ") == 1 and "resumed" not in said


def test_a_run_that_cannot_work_starts_no_process(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["--tp", "3"], "`tp` must divide"),
        (["--nodes", "2"], "`master_addr` must be given"),
        (["--nodes", "2", "--node-rank", "2"], "`node_rank` must be less than nodes 2"),
        (["--threads"], "`--threads` must not be given here"),
    ):
        assert main(["-n", "2", *words]) == 2
        told = capsys.readouterr().err
        assert told.startswith("triaxis run:") and said in told
        assert "torchrun" not in told


def test_a_rank_that_was_killed_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert _ended(3, 4711, -9) == 1
    assert capsys.readouterr().err == "triaxis run: rank 3 (process 4711) was ended by SIGKILL\n"
    assert _ended(0, 1, 75) == 75
