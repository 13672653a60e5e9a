"""The rows of metrics.jsonl, the lines on the terminal and the picture."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from tests.runs import MODEL, prepare, run
from triaxis.engine.run.metrics import MetricsWriter, StepRow, read_metrics
from triaxis.engine.run.plot import plot_run
from triaxis.engine.run.progress import Progress

KEYS = {
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "trained_tokens",
    "tokens_per_s",
    "mfu",
    "peak_mem_bytes",
    "sent_bytes",
}


def row(step: int, loss: float = 2.0, eval_loss: float | None = None) -> StepRow:
    return StepRow(
        step=step,
        loss=loss,
        grad_norm=1.5,
        lr=1e-3,
        tokens=512 * step,
        trained_tokens=500 * step,
        tokens_per_s=1000.0,
        peak_mem_bytes=1 << 20,
        sent_bytes={"tp": 10, "dp": 20},
        eval_loss=eval_loss,
    )


def test_each_row_is_on_disk_at_once(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(row(1))
        writer.write(row(2, eval_loss=2.5))
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    first, second = (json.loads(line) for line in lines)
    assert set(first) == KEYS | {"clip_coefficient"}
    assert set(second) == set(first) | {"eval_loss"}
    assert first["sent_bytes"] == {"tp": 10, "dp": 20}


def test_numbers_that_are_not_finite_stay_readable(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(row(1, loss=float("nan")))
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["loss"] is None


def test_a_rank_that_does_not_speak_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with MetricsWriter(tmp_path / "out", speaks=False) as writer, Progress(5, speaks=False) as progress:
        writer.write(row(1))
        progress.update(row(1))
        progress.announce("hello")
    assert not (tmp_path / "out").exists()
    assert capsys.readouterr() == ("", "")


def test_plain_lines_come_first_last_and_as_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(7, logging_steps=3) as progress:
        for step in range(1, 8):
            progress.update(row(step, eval_loss=2.5 if step == 5 else None))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"step {n}/7" for n in (1, 3, 5, 6, 7)]
    assert "loss 2.0000, grad norm 1.500, lr 1.00e-03, 1,000 tokens/s" in lines[0]
    assert "held-out loss 2.5000" in lines[2]


def test_a_clipped_norm_is_said_to_be_from_before(capsys: pytest.CaptureFixture[str]) -> None:  # B30
    with Progress(2) as progress:
        progress.update(dataclasses.replace(row(1), clip_coefficient=0.0667))
        progress.update(row(2))
    first, second = capsys.readouterr().err.splitlines()
    assert "grad norm 1.500 (before clipping ×0.0667), lr" in first
    assert "grad norm 1.500, lr" in second


def test_a_run_tells_its_cut_and_the_rows_of_its_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # B40, B45
    monkeypatch.setattr("triaxis.engine.run.trainer.plot_run", lambda directory: directory)
    flags = prepare(tmp_path) | {"pp": 2, "steps": 1, "warmup_steps": 0, "eval_batches": 2, "pack": False}
    (tmp_path / "model.json").write_text(json.dumps(MODEL | {"layers": 3}))
    run({**flags, "output_dir": str(tmp_path / "out")})
    told = capsys.readouterr().err
    assert "schedule 1f1b, layers by stage 2/1\n" in told
    assert re.search(r"an evaluation takes 4 of its [5-9]\d* rows, each once\n", told), told


def test_a_cut_off_last_line_is_left_out_and_the_rest_is_drawn(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(row(1))
        writer.write(row(2, eval_loss=2.5))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2
    assert plot_run(tmp_path).read_bytes().startswith(b"\x89PNG")


def test_tensorboard_gets_the_rows_when_asked(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, report_to="tensorboard") as writer:
        writer.write(row(1))
    assert list((tmp_path / "tensorboard").glob("events.*"))
