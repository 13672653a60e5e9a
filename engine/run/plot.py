"""The picture of a run by step, drawn as it goes: loss, gradient norm, learning rate and throughput."""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from triaxis.engine.plain_files import open_plain
from triaxis.engine.run.metrics import METRICS_NAME, PICTURE_NAME, read_metrics
from triaxis.parallel.palette import colour, paler

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, SOFT = "#16181d", "#5d626c"
LEAST_SECONDS = 60.0
SHARE_OF_TIME = 0.01
SMOOTHED_PART = 0.02
"""Of the steps so far: over so many the smoothed loss is an average, the later the heavier."""

Rows = list[dict[str, object]]
Points = tuple[list[int], list[float]]


class LivePicture:
    """A run's picture, drawn anew now and then; that costs at most a hundredth of the run's time.

    speaks: only one rank draws
    """

    def __init__(self, directory: Path, *, speaks: bool) -> None:
        self._directory, self._speaks = directory, speaks
        self._due = time.monotonic() + LEAST_SECONDS

    def update(self) -> None:
        """Draws it if the time has come. A picture that cannot be drawn (a full disk) waits: no run ends of it."""
        began = time.monotonic()
        if not self._speaks or began < self._due:
            return
        with suppress(OSError, ValueError):
            plot_run(self._directory)
        ended = time.monotonic()
        self._due = ended + max(LEAST_SECONDS, (ended - began) / SHARE_OF_TIME)


def plot_run(directory: Path) -> Path:
    """Draws the run's metrics into `loss.png` beside them, in one rename. Returns its path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, needed once
    from matplotlib.figure import Figure

    rows = read_metrics(directory / METRICS_NAME)
    figure = Figure(figsize=(9, 9), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title_of(rows, directory), x=0.01, ha="left", fontsize=12, color=INK)
    axes = figure.subplots(4, 1, sharex=True, height_ratios=(4, 2, 1, 2))
    _draw_losses(axes[0], rows)
    _draw_line(axes[1], rows, "grad_norm", "gradient norm", "phase")
    if any(value > 0 for value in points(rows, "grad_norm")[1]):
        axes[1].set_yscale("log")
    _draw_line(axes[2], rows, "lr", "learning rate", "tp")
    _draw_line(axes[3], rows, "tokens_per_s", "tokens per second", "backward")
    axes[3].set_ylim(bottom=0)
    axes[3].set_xlabel("step", color=SOFT)
    for one in axes:
        for step in resumes(rows):
            one.axvline(step - 0.5, color=colour("world"), linestyle="--", linewidth=1)
        one.grid(color="#e4e5df", linewidth=0.8)
        one.tick_params(colors=SOFT, labelsize=8)
        for name in ("top", "right"):
            one.spines[name].set_visible(False)
    picture, draft = directory / PICTURE_NAME, directory / f".{PICTURE_NAME}.part"
    with os.fdopen(open_plain(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        figure.savefig(file, dpi=110, format="png")
    draft.replace(picture)
    return picture


def title_of(rows: Rows, directory: Path) -> str:
    """Which run it is, how far it is, and how well it does."""
    parts = [directory.resolve().name]
    parts += [f"step {rows[-1]['step']}"] if rows else []
    for name, words in (("loss", "loss"), ("eval_loss", "held-out loss")):
        values = points(rows, name)[1]
        parts += [f"{words} {values[-1]:.4f}"] if values else []
    return " · ".join(parts)


def points(rows: Rows, name: str) -> Points:
    """Steps and values of the rows that have the value."""
    pairs = [(row["step"], row[name]) for row in rows if isinstance(row.get(name), (int, float))]
    return [int(str(step)) for step, _ in pairs], [float(str(value)) for _, value in pairs]


def resumes(rows: Rows) -> list[int]:
    """The steps with which the run went on from a checkpoint."""
    return [int(str(row["step"])) for row in rows if row.get("resumed") is True]


def smoothed(values: list[float], steps: float) -> list[float]:
    """An average over about so many values before each, the later the heavier; the first is itself."""
    keep = math.exp(-1 / max(steps, 1e-9))
    total = weight = 0.0
    found = []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        found.append(total / weight)
    return found


def _draw_losses(axes: Axes, rows: Rows) -> None:
    steps, losses = points(rows, "loss")
    axes.plot(steps, losses, color=paler("forward", 0.55), linewidth=0.8, label="training, each step")
    window = SMOOTHED_PART * len(losses)
    if window >= 1:
        label = f"training, over some {window:.0f} steps"
        axes.plot(steps, smoothed(losses, window), color=colour("forward"), linewidth=1.6, label=label)
    held_out = points(rows, "eval_loss")
    if held_out[0]:
        axes.plot(*held_out, "o-", color=colour("dp"), markersize=3, linewidth=1.2, label="held out")
    if resumes(rows):
        axes.plot([], [], color=colour("world"), linestyle="--", linewidth=1, label="resumed")
    axes.set_ylabel("loss, nats per token", color=SOFT)
    axes.legend(frameon=False, fontsize=9)


def _draw_line(axes: Axes, rows: Rows, name: str, label: str, paint: str) -> None:
    axes.plot(*points(rows, name), color=colour(paint), linewidth=1)
    axes.set_ylabel(label, color=SOFT)
