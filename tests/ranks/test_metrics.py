"""The rows of metrics.jsonl, the lines on the terminal and the picture."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path

import pytest

from tests.runs import MODEL, prepare, run
from triaxis.engine.run import plot
from triaxis.engine.run.metrics import MetricsWriter, StepRow, read_metrics
from triaxis.engine.run.plot import LivePicture, plot_run, smoothed
from triaxis.engine.run.progress import Progress
from triaxis.parallel.palette import colour, paler

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


def row(step: int, loss: float = 2.0, eval_loss: float | None = None, resumed: bool = False) -> StepRow:
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
        resumed=resumed,
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


def test_an_older_runs_metrics_and_picture_are_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three runs in one folder, none of which saves: no row of an earlier one is lost, and the start says so."""
    flags = prepare(tmp_path) | {"eval_batches": 0, "warmup_steps": 0, "output_dir": str(tmp_path / "out")}
    monkeypatch.setattr("triaxis.engine.run.trainer.plot_run", lambda directory: directory)
    for number, steps in enumerate((1, 2, 3)):
        run({**flags, "steps": steps})
        told = capsys.readouterr().err
        assert ("an older run wrote here: its metrics are now " in told) == (number > 0)
        (tmp_path / "out" / "loss.png").write_text(f"picture {steps}")
    lengths = {path.name: len(read_metrics(path)) for path in (tmp_path / "out").glob("metrics*")}
    assert lengths == {"metrics-1.jsonl": 1, "metrics-2.jsonl": 2, "metrics.jsonl": 3}
    assert (tmp_path / "out" / "loss-1.png").read_text() == "picture 1"
    assert (tmp_path / "out" / "loss-2.png").read_text() == "picture 2"


def test_a_run_from_another_folder_does_not_go_on_in_rows_of_a_third(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows begin after the checkpoint; what stood there was of another run."""
    monkeypatch.setattr("triaxis.engine.run.trainer.plot_run", lambda directory: directory)
    flags = prepare(tmp_path) | {"eval_batches": 0, "warmup_steps": 0}
    run({**flags, "steps": 2, "save_steps": 2, "output_dir": str(tmp_path / "a")})
    run({**flags, "steps": 1, "output_dir": str(tmp_path / "b")})
    run({**flags, "steps": 3, "resume": str(tmp_path / "a"), "output_dir": str(tmp_path / "b")})
    rows = read_metrics(tmp_path / "b" / "metrics.jsonl")
    assert [(row["step"], row.get("resumed")) for row in rows] == [(3, True)]
    assert len(read_metrics(tmp_path / "b" / "metrics-1.jsonl")) == 1


@pytest.mark.parametrize("done", [0, 3])
def test_metrics_that_are_a_link_or_a_fifo_are_not_followed(done: int, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    metrics = tmp_path / "out" / "metrics.jsonl"
    metrics.parent.mkdir()
    metrics.symlink_to(precious)
    with pytest.raises(ValueError, match=r"metrics\.jsonl must be a file, but is a link; move it"):
        MetricsWriter(metrics.parent, done=done)
    metrics.unlink()
    os.mkfifo(metrics)
    with pytest.raises(ValueError, match="but is a FIFO"):
        MetricsWriter(metrics.parent, done=done)
    metrics.unlink()
    (metrics.parent / ".metrics.jsonl.part").symlink_to(precious)
    metrics.write_text('{"step": 1}\n')
    if done:
        with pytest.raises(OSError, match="a link, not a file"):
            MetricsWriter(metrics.parent, done=done)
    assert precious.read_text() == "mine"


def test_the_picture_shows_all_four_and_where_the_run_was_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    with MetricsWriter(tmp_path / "llama") as writer:
        for step in range(1, 201):
            held_out = 4.5 if step == 200 else None
            writer.write(row(step, loss=5.0 + (-1) ** step, resumed=step == 101, eval_loss=held_out))
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    plot_run(tmp_path / "llama")
    (figure,) = drawn
    assert figure.get_suptitle() == "llama · step 200 · loss 6.0000 · held-out loss 4.5000"
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert labels == ["loss, nats per token", "gradient norm", "learning rate", "tokens per second"]
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]  # type: ignore[union-attr]
    assert legend == ["training, each step", "training, over some 4 steps", "held out", "resumed"]
    for axes in figure.axes:
        assert [line for line in axes.get_lines() if list(line.get_xdata()) == [100.5, 100.5]]  # type: ignore[arg-type]
    smooth = next(line for line in figure.axes[0].get_lines() if "over some" in str(line.get_label()))
    assert max(abs(float(value) - 5.0) for value in list(smooth.get_ydata())[20:]) < 0.2  # type: ignore[arg-type]
    assert {line.get_color() for axes in figure.axes for line in axes.get_lines()} <= {
        *(colour(name) for name in ("forward", "dp", "world", "phase", "tp", "backward")),
        paler("forward", 0.55),
    }


def test_smoothing_of_few_and_of_equal_values() -> None:
    assert smoothed([], 3) == []
    assert smoothed([2.0], 3) == [2.0]
    assert smoothed([2.0, 2.0, 2.0], 10) == pytest.approx([2.0, 2.0, 2.0])
    assert smoothed([0.0, 1.0], 1e9) == pytest.approx([0.0, 0.5])


def test_the_picture_is_drawn_as_the_run_goes_and_costs_a_hundredth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of our own: a drawing of 2 seconds comes every 200, one of a moment every 60."""
    now, drawn, takes = [0.0], [], [2.0]

    def draws(directory: Path) -> Path:
        now[0] += takes[0]
        drawn.append(now[0])
        return directory

    monkeypatch.setattr(plot.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(plot, "plot_run", draws)
    picture = LivePicture(tmp_path, speaks=True)
    for _ in range(1000):
        picture.update()
        now[0] += 1.0
    assert drawn == [62.0, 264.0, 466.0, 668.0, 870.0]
    takes[0] = 0.01
    for _ in range(300):
        picture.update()
        now[0] += 1.0
    assert 4 <= len(drawn) - 5 <= 5

    def fails(directory: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plot, "plot_run", fails)
    now[0] += 1000.0
    picture.update()  # the run goes on


def test_a_run_has_a_picture_before_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr("triaxis.engine.run.trainer.plot_run", lambda directory: directory)
    flags = prepare(tmp_path) | {"eval_batches": 0, "warmup_steps": 0, "steps": 3}
    run({**flags, "output_dir": str(tmp_path / "out")})
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not list((tmp_path / "out").glob(".*.part"))


def test_a_picture_that_is_a_link_is_replaced_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    with MetricsWriter(tmp_path) as writer:
        writer.write(row(1))
    (tmp_path / "loss.png").symlink_to(precious)
    plot_run(tmp_path)
    assert precious.read_text() == "mine" and not (tmp_path / "loss.png").is_symlink()
