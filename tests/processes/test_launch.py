"""The program as people start it: under torchrun, alone, on threads; and what it says when that cannot work."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.patience import NEVER_SECONDS, PATIENCE_SECONDS
from triaxis.launch.directory import claim_directory

SMALL = ["--seq", "16", "--per_device_train_batch_size", "1", "--eval_batches", "1", "--logging_steps", "1"]
KEYS = {
    *("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "mfu", "peak_mem_bytes", "sent_bytes"),
}
pytestmark = pytest.mark.processes


def train_command(ranks: int, *flags: str) -> list[str]:
    program = ["-m", "triaxis.launch.train", *SMALL, *flags]
    if ranks == 1:
        return [sys.executable, *program]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        *program,
    ]


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **variables}


def run(command: Sequence[str], **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
        env=environment(**variables),
    )


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (8, ["--tp", "2", "--pp", "2", "--dp", "2", "--zero", "1"]),
        pytest.param(8, ["--tp", "4", "--dp", "2"], marks=pytest.mark.full),
        pytest.param(8, ["--pp", "4", "--dp", "2", "--schedule", "interleaved"], marks=pytest.mark.full),
        pytest.param(8, ["--dp", "8", "--zero", "3"], marks=pytest.mark.full),
        pytest.param(2, ["--data-parallel", "fsdp"], marks=pytest.mark.full),
        pytest.param(1, ["--report_to", "tensorboard"], marks=pytest.mark.full),
        pytest.param(1, ["--simulate", "--tp", "2", "--pp", "2", "--dp", "2"], marks=pytest.mark.full),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_a_layout_trains(ranks: int, flags: list[str], tmp_path: Path) -> None:
    done = run(train_command(ranks, *flags, "--steps", "2", "--output-dir", str(tmp_path)))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row.keys() >= KEYS for row in rows)
    assert 4 < rows[0]["loss"] < 7
    assert (tmp_path / "loss.png").stat().st_size > 1000
    assert str(tmp_path / "metrics.jsonl") in done.stderr
    if "tensorboard" in flags:
        assert list(tmp_path.rglob("events.out.tfevents.*"))


def test_simulated_ranks_give_the_numbers_of_processes(tmp_path: Path) -> None:
    flags = ["--tp", "2", "--dp", "2", "--steps", "3", "--dtype", "fp64"]
    losses = []
    for name, ranks, extra in (("processes", 4, []), ("threads", 1, ["--simulate"])):
        folder = tmp_path / name
        done = run(train_command(ranks, *flags, *extra, "--output-dir", str(folder)))
        assert done.returncode == 0, done.stderr
        rows = (folder / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(row)["loss"] for row in rows])
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)


def test_too_few_processes_are_told_once(tmp_path: Path) -> None:
    done = run(train_command(2, "--tp", "2", "--pp", "2", "--output-dir", str(tmp_path)))
    assert done.returncode != 0
    assert done.stderr.count("triaxis train:") == 1
    assert "tp × pp = 4 but 2 processes were started" in done.stderr


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    done = run(train_command(1, "--data", str(tmp_path / "absent.jsonl")))
    assert done.returncode == 2
    assert "absent.jsonl" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_named(tmp_path: Path) -> None:  # B150
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = str(held.getsockname()[1])
        ranks = {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        never = ("--timeout_seconds", str(NEVER_SECONDS))
        done = run(train_command(1, "--dp", "2", "--output-dir", str(tmp_path), *never), **ranks)
    assert done.returncode == 1
    assert f"port {port} of 127.0.0.1:{port} is taken by process {os.getpid()} (" in done.stderr
    assert "choose a free port" in done.stderr and len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr


@pytest.mark.full
def test_jobs_that_start_at_once_choose_ports_of_their_own(tmp_path: Path) -> None:  # B150, B151
    flags = ("--dp", "2", "--steps", "1", "--eval_batches", "0")
    jobs = [
        subprocess.Popen(
            train_command(2, *flags, "--output-dir", str(tmp_path / str(number))),
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        for number in range(4)
    ]
    for job in jobs:
        _, said = job.communicate(timeout=PATIENCE_SECONDS)
        assert job.returncode == 0, said


def rank_processes(parent: int) -> dict[int, int]:
    """Processes of the ranks under a launcher, by rank."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            stat = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        ranks = [v.removeprefix(b"RANK=") for v in variables if v.startswith(b"RANK=")]
        if int(stat[1]) == parent and ranks:
            found[int(ranks[0])] = int(folder.name)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.full), 3])
def test_a_killed_rank_ends_the_run(killed: int, tmp_path: Path) -> None:  # B91
    flags = ["--tp", "2", "--pp", "2", "--steps", "100000", "--output-dir", str(tmp_path)]
    flags += ["--hang_timeout", str(NEVER_SECONDS)]
    with subprocess.Popen(
        train_command(4, *flags), stderr=subprocess.PIPE, text=True, env=environment()
    ) as launcher:
        metrics = tmp_path / "metrics.jsonl"
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.1)
        ranks = rank_processes(launcher.pid)
        assert sorted(ranks) == [0, 1, 2, 3]
        os.kill(ranks[killed], signal.SIGKILL)
        _, text = launcher.communicate(timeout=PATIENCE_SECONDS)
        assert launcher.returncode != 0
        assert f"local_rank: {killed}" in text
        assert all(not Path(f"/proc/{pid}").exists() for pid in ranks.values())


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    """Two runs never write to one folder; once the first has ended, the next may."""
    command = train_command(1, "--steps", "1", "--eval_batches", "0", "--output-dir", str(tmp_path))
    with claim_directory(tmp_path):
        refused = run(command)
    assert refused.returncode == 2
    assert f"another run (process {os.getpid()}) writes to {tmp_path}" in refused.stderr
    assert run(command).returncode == 0
    assert "eval_loss" not in (tmp_path / "metrics.jsonl").read_text()


def test_a_file_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run(train_command(1, "--output-dir", str(tmp_path / "file" / "below")))
    assert done.returncode == 2
    assert "`output_dir` must be a folder that can be written" in done.stderr


@pytest.mark.parametrize(
    ("variables", "word"),
    [
        ({"RANK": "3"}, "WORLD_SIZE"),
        (
            {"RANK": "5", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29777"},
            "less than WORLD_SIZE",
        ),
        ({"RANK": "1", "WORLD_SIZE": "abc", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29777"}, "'abc'"),
    ],
)
def test_a_launchers_mistake_is_named_on_any_rank(variables: dict[str, str], word: str) -> None:  # B156
    done = run(train_command(1), **variables)
    assert done.returncode == 2
    assert word in done.stderr
