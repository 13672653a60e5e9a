"""Experts under torchrun, from the command line: trained, resumed at another layout, exported, balanced."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from triaxis.launch.convert import main as convert
from triaxis.launch.simulate import main as simulate

pytestmark = pytest.mark.processes

FLAGS = ["--seq", "32", "--per_device_train_batch_size", "1", "--global-batch", "8"]


def launched(ranks: int, *arguments: str, model: str = "tiny-moe") -> str:
    """What a run under torchrun prints; it must end well."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, "-m", "triaxis.launch.train", "--model", model, *FLAGS, *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.timeout(900)
def test_experts_train_and_go_on_elsewhere(tmp_path: Path) -> None:
    run = ["--steps", "6", "--save_steps", "3", "--output-dir", str(tmp_path / "run")]
    told = launched(8, "--tp", "2", "--pp", "2", "--dp", "2", "--ep", "2", "--sp", "--zero", "1", *run)
    assert "experts over 2" in told
    found = rows(tmp_path / "run")
    assert all(row["busiest_expert"] >= 1 for row in found)
    assert {"ep", "tokens"} <= set(found[-1]["sent_bytes"])
    onwards = ["--steps", "8", "--resume", "auto", "--output-dir", str(tmp_path / "run")]
    launched(2, "--dp", "2", "--ep", "2", "--zero", "3", *onwards)
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, 9))


@pytest.mark.timeout(900)
def test_deepseek_v3_in_small_learns(tmp_path: Path) -> None:
    layout = ["--tp", "2", "--pp", "2", "--ep", "2", "--sp"]
    launched(4, *layout, "--mtp-depths", "1", "--steps", "20", "--output-dir", str(tmp_path), model="tiny-v3")
    losses = [row["loss"] for row in rows(tmp_path)]
    assert len(losses) == 20 and losses[-1] < losses[0] - 1
    further = [row["mtp_loss_1"] for row in rows(tmp_path)]
    assert further[-1] < further[0] - 1


def test_the_same_run_is_simulated_and_refused(capsys: pytest.CaptureFixture[str]) -> None:
    layout = (
        "--gpus 8 --tp 2 --pp 2 --ep 2 --model tiny-moe --seq 64 --microbatches 4 --hardware h100-80g --json"
    )
    assert simulate(layout.split()) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["proof"]["holds"] and told["traffic"]["sent_bytes_per_rank"]["ep"] > 0
    assert simulate(["--gpus", "8", "--ep", "3", "--model", "tiny-moe", "--hardware", "h100-80g"]) != 0
    assert "`ep` must divide" in capsys.readouterr().err
    assert simulate(["--gpus", "8", "--ep", "2", "--model", "tiny", "--hardware", "h100-80g"]) != 0
    assert "has no experts to spread" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_bias_keeps_experts_busy(tmp_path: Path) -> None:
    launched(
        4,
        "--dp",
        "4",
        "--ep",
        "2",
        "--steps",
        "100",
        "--learning_rate",
        "4e-3",
        "--output-dir",
        str(tmp_path),
    )
    found = rows(tmp_path)
    assert max(row["busiest_expert"] for row in found[-10:]) <= 1.5
    assert found[-1]["loss"] < found[0]["loss"] - 2


def test_there_is_no_family_for_this_router_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sigmoid router with a bias is DeepSeek's, whose attention this model has not."""
    launched(1, "--steps", "1", "--save_steps", "1", "--output-dir", str(tmp_path / "run"))
    assert convert([str(tmp_path / "run"), "--to", "hf", str(tmp_path / "hf")]) == 2
    assert "to be exported, but none can" in capsys.readouterr().err
