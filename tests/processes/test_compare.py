"""`triaxis compare` measures what it says: each row is a run of its own, with one thing changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from triaxis.launch import compare
from triaxis.launch.compare import main

pytestmark = pytest.mark.processes

RUN = ["-n", "2", "--model", "tiny", "--data", "stdlib", "--seq", "32", "--steps", "3", "--zero", "1"]
RUN += ["--per-device-train-batch-size", "1", "--global-batch", "4", "--learning-rate", "0.01"]


def test_rows_are_runs_that_agree_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "comparison.svg"
    rows = ["DDP", "ZeRO-3", "accumulation"]
    asked = [word for name in rows for word in ("--only", name)]
    assert main([*RUN, *asked, "--json", "--out", str(picture)]) == 0
    told = json.loads(capsys.readouterr().out)
    ddp, sharded = told["sharing"]
    (refused,) = told["switches"]
    assert [row["name"] for row in (ddp, sharded, refused)] == rows
    assert refused["refusal"] == "`per_device_train_batch_size` must be even to be halved, but is 1"
    assert ddp["loss"] == pytest.approx(sharded["loss"], abs=1e-6)
    # fp32 at dp 2: 16 bytes a parameter, or half of them; ZeRO-3 gathers twice and reduces once, for each of
    # two microbatches, where DDP sends each gradient twice by half
    assert ddp["states_bytes"] == pytest.approx(2 * sharded["states_bytes"], rel=1e-3)
    assert sharded["sent_bytes"] == pytest.approx(3 * ddp["sent_bytes"], rel=0.01)
    assert all(row["peak_bytes"] > 1e8 and row["step_seconds"] > 0 for row in (ddp, sharded))
    assert picture.read_text().startswith("<?xml")


def test_what_cannot_work_is_refused_before_any_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-n", "2", "--model", "tiny", "--tp", "3"]) == 2
    told = capsys.readouterr()
    assert "`tp`" in told.err and " of " not in told.out
    (tmp_path / "picture.svg").write_text("mine")
    assert main([*RUN, "--out", str(tmp_path / "picture.svg")]) == 2
    assert "picture.svg exists" in capsys.readouterr().err


def test_a_run_that_fails_is_a_row_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare.sys, "executable", "/bin/false")
    assert main([*RUN, "--only", "DDP"]) == 1
    assert "failed (1)" in capsys.readouterr().out
