"""The picture of a run: loss and throughput by step."""

from __future__ import annotations

from pathlib import Path

from triaxis.engine.run.metrics import METRICS_NAME, read_metrics


def plot_run(directory: Path) -> Path:
    """Draws the run's metrics into `loss.png` beside them: losses above, tokens per second below. Returns its path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, needed once
    from matplotlib.figure import Figure

    rows = read_metrics(directory / METRICS_NAME)
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    loss_axes, speed_axes = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    loss_axes.plot(*_points(rows, "loss"), label="training", linewidth=1)
    held_out = _points(rows, "eval_loss")
    if held_out[0]:
        loss_axes.plot(*held_out, "o-", label="held out", markersize=4)
    loss_axes.set_ylabel("loss, nats per token")
    loss_axes.legend()
    speed_axes.plot(*_points(rows, "tokens_per_s"), linewidth=1, color="tab:green")
    speed_axes.set_ylabel("tokens per second")
    speed_axes.set_ylim(bottom=0)
    speed_axes.set_xlabel("step")
    for axes in (loss_axes, speed_axes):
        axes.grid(alpha=0.3)
    picture = directory / "loss.png"
    figure.savefig(picture, dpi=120)
    return picture


def _points(rows: list[dict[str, object]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of the rows that have the value."""
    pairs = [(row["step"], row[name]) for row in rows if isinstance(row.get(name), (int, float))]
    return [int(str(step)) for step, _ in pairs], [float(str(value)) for _, value in pairs]
