"""What a run measured: one row a step in `metrics.jsonl`, and in TensorBoard where asked. Only one rank writes."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from triaxis.engine.plain_files import kind_of, open_plain
from triaxis.parallel.places.legal_values import counted

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


METRICS_NAME = "metrics.jsonl"
PICTURE_NAME = "loss.png"
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One optimizer step.

    step: counted from 1
    loss: mean over the trained tokens of the whole global batch, nats
    grad_norm: before clipping
    clip_coefficient: what the gradients were multiplied by; 1 is not clipped
    tokens: real input tokens (no padding) since the start, all ranks; tokens_per_s: of this step
    trained_tokens: those that had a loss, since the start
    mfu: part of the hardware's peak that the model's flops reach; None where the peak is not known
    sent_bytes: by axis, sent by this rank in this step
    seconds: of this rank in this step: for data, in computing, and waiting for others by the axis's name
    slowest_rank: the one whose own data and computing took longest
    eval_loss: of the model after this step; None where it was not evaluated
    skipped_steps: updates left out so far because of numbers that were not finite; None where none may be
    loss_scale: what fp16's losses were multiplied by in this step; None in other precisions
    auxiliary_loss: of layers with a loss of their own, scaled as it is trained; None without such layers
    mtp_losses: of each extra prediction depth, over as many tokens as `loss`, of which it is no part
    busiest_expert: tokens of a layer's busiest expert over the mean, in the worst layer; None without experts
    resumed: whether the run went on from a checkpoint with this step
    """

    step: int
    loss: float | None
    grad_norm: float | None
    lr: float
    tokens: int
    trained_tokens: int
    tokens_per_s: float
    peak_mem_bytes: int
    sent_bytes: Mapping[str, int]
    seconds: Mapping[str, float] = field(default_factory=dict)
    slowest_rank: int | None = None
    mfu: float | None = None
    clip_coefficient: float = 1.0
    eval_loss: float | None = None
    skipped_steps: int | None = None
    loss_scale: float | None = None
    auxiliary_loss: float | None = None
    mtp_losses: tuple[float, ...] = ()
    busiest_expert: float | None = None
    resumed: bool = False


class MetricsWriter:
    """Writes the rows of a run, each flushed at once. What an older run left in that folder is set aside.

    A row that does not fit on a full disk waits for the next; the run goes on.
    done: steps of this run before it was resumed; their rows stay, later ones are cut off, so that none comes twice
    aside: the new path of an older run's metrics, if there were some
    On a rank that does not speak it does nothing.
    """

    def __init__(
        self, directory: Path, *, speaks: bool = True, report_to: str = "none", done: int = 0
    ) -> None:
        self._file: FileIO | None = None
        self._waiting = b""
        self._tensorboard: SummaryWriter | None = None
        self.aside: Path | None = None
        if not speaks:
            return
        path = directory / METRICS_NAME
        directory.mkdir(parents=True, exist_ok=True)
        kind = kind_of(path) if os.path.lexists(path) else None
        if kind is not None:
            raise ValueError(f"{path} must be a file, but is {kind}; move it, or name another --output-dir")
        if done:
            cut_metrics(path, done)
        else:
            self.aside = set_older_aside(directory)
        self._file = FileIO(open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab")
        self._size_bytes = self._file.tell()
        if report_to == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter  # slow to import, rarely asked for

            self._tensorboard = SummaryWriter(
                str(directory / "tensorboard"), purge_step=done + 1 if done else None
            )

    def write(self, row: StepRow) -> None:
        """Writes one row. A number that is not finite is written as null, which every JSON reader takes."""
        if self._file is None:
            return
        values = values_of(row)
        self._waiting += json.dumps(values, allow_nan=False).encode() + b"\n"
        self._write_waiting(self._file)
        if self._tensorboard is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)) and name != "step":
                    self._tensorboard.add_scalar(name, value, row.step)
            for axis, sent in row.sent_bytes.items():
                self._tensorboard.add_scalar(f"sent_bytes/{axis}", sent, row.step)

    def _write_waiting(self, file: FileIO) -> None:
        """All rows that wait, or none of them."""
        written = 0
        try:
            while written < len(self._waiting):
                written += file.write(self._waiting[written:])
        except OSError as error:
            file.truncate(self._size_bytes)
            file.seek(self._size_bytes)
            if error.errno not in FULL:
                raise
            return
        self._size_bytes += written
        self._waiting = b""

    def close(self) -> None:
        """Raises OSError if the last rows still do not fit."""
        if self._file is not None:
            self._write_waiting(self._file)
            self._file.close()
            if self._waiting:
                rows = self._waiting.count(b"\n")
                lost = f"{counted(rows, 'row')} of {METRICS_NAME} {'is' if rows == 1 else 'are'} lost"
                raise OSError(errno.ENOSPC, f"{lost}: the disk is full")
        if self._tensorboard is not None:
            self._tensorboard.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def values_of(row: StepRow) -> dict[str, object]:
    """The keys and values of a row; what not every run has is a key only where it has a value."""
    values: dict[str, object] = {
        "step": row.step,
        "loss": _finite(row.loss),
        "grad_norm": _finite(row.grad_norm),
        "lr": row.lr,
        "tokens": row.tokens,
        "trained_tokens": row.trained_tokens,
        "tokens_per_s": _finite(row.tokens_per_s),
        "mfu": _finite(row.mfu),
        "peak_mem_bytes": row.peak_mem_bytes,
        "sent_bytes": dict(row.sent_bytes),
        "clip_coefficient": _finite(row.clip_coefficient),
    }
    often = ("eval_loss", "skipped_steps", "loss_scale", "auxiliary_loss", "busiest_expert", "slowest_rank")
    for name in often:
        value = getattr(row, name)
        if value is not None:
            values[name] = _finite(value) if isinstance(value, float) else value
    for depth, loss in enumerate(row.mtp_losses, start=1):
        values[f"mtp_loss_{depth}"] = _finite(loss)
    if row.seconds:
        values["seconds"] = {name: round(seconds, 6) for name, seconds in row.seconds.items()}
    if row.resumed:
        values["resumed"] = True
    return values


def set_older_aside(directory: Path) -> Path | None:
    """Gives the metrics and the picture of an older run names of their own; the metrics' new path, if there were some.

    Example: metrics.jsonl and loss.png become metrics-1.jsonl and loss-1.png, those of a third run metrics-2.jsonl.
    """
    metrics, picture = directory / METRICS_NAME, directory / PICTURE_NAME
    if not metrics.is_file() or not metrics.stat().st_size:
        return None
    number = 1
    while any(os.path.lexists(_numbered(path, number)) for path in (metrics, picture)):
        number += 1
    for path in (metrics, picture):
        with suppress(FileNotFoundError):  # a run that ended early has no picture
            path.rename(_numbered(path, number))
    return _numbered(metrics, number)


def _numbered(path: Path, number: int) -> Path:
    return path.with_stem(f"{path.stem}-{number}")


def cut_metrics(path: Path, done: int) -> None:
    """Leaves the rows of the first `done` steps, in one rename; a missing file stays missing."""
    if not path.exists():
        return
    kept = [row for row in read_metrics(path) if isinstance(row["step"], int) and row["step"] <= done]
    draft = path.with_name(f".{path.name}.part")
    with os.fdopen(open_plain(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in kept)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def read_metrics(path: Path) -> list[dict[str, object]]:
    """The rows of a metrics file; a last line that was cut off while being written is left out."""
    rows: list[dict[str, object]] = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            rows.append(json.loads(line))
    return rows


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
