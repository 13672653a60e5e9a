"""Scores the planner against published runs: python -m triaxis.launch.published.score FILE [--json]

Every row that says enough is predicted; the errors count those that the file marks complete (all, if it marks none).
The regret of a source that ran one model in several layouts is the measured time of the layout that the planner
would have chosen over the best measured time, less one.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triaxis.launch.command_line import Claim, Parser
from triaxis.launch.ending import refuse
from triaxis.launch.published.cost import step_time
from triaxis.launch.published.layout import Recipe
from triaxis.launch.published.memory import memory
from triaxis.launch.published.rows import Reading, Run, read_runs
from triaxis.parallel.places.legal_values import counted

SHIPPED = Path(__file__).parent / "data" / "runs.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A run and what the planner says of it. Errors are relative: predicted / measured - 1; None if not measured."""

    run: Run
    tokens_per_s_per_gpu: float
    memory_bytes: float

    @property
    def throughput_error(self) -> float | None:
        """Of throughput."""
        measured = self.run.measured_tokens_per_s_per_gpu
        return self.tokens_per_s_per_gpu / measured - 1 if measured else None

    @property
    def memory_error(self) -> float | None:
        """Of peak memory, read as the row's figure was."""
        measured = self.run.measured_memory_bytes
        return self.memory_bytes / measured - 1 if measured else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Absolute percentage errors of some rows; None where there are none."""

    rows: int
    mean: float | None
    median: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Layouts of one model on one cluster: what the planner's would have cost. regret: 0.03 is 3% slower."""

    source: str
    model: str
    layouts: int
    regret: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """All rows of a file. left_out: why the others could not be predicted."""

    rows: tuple[Scored, ...]
    left_out: tuple[str, ...]

    @property
    def sources(self) -> tuple[str, ...]:
        """In the file's order."""
        return tuple(dict.fromkeys(row.run.source for row in self.rows))

    def throughput(self, keeps: Callable[[Scored], bool] = lambda _: True) -> Errors:
        """Errors of throughput over complete rows that `keeps` takes."""
        return _errors(
            row.throughput_error for row in self.rows if row.run.complete_throughput and keeps(row)
        )

    def memory(self, keeps: Callable[[Scored], bool] = lambda _: True) -> Errors:
        """Errors of memory over complete rows that `keeps` takes."""
        return _errors(row.memory_error for row in self.rows if row.run.complete_memory and keeps(row))

    def choices(self) -> tuple[Choice, ...]:
        """Wherever a source measured one model, batch and cluster in several layouts."""
        groups: dict[tuple[object, ...], dict[tuple[object, ...], list[Scored]]] = {}
        for row in self.rows:
            if row.run.complete_throughput and row.run.measured_tokens_per_s_per_gpu:
                group = groups.setdefault(_question(row.run), {})
                group.setdefault(_answer(row.run.layout), []).append(row)
        return tuple(_choice(layouts) for layouts in groups.values() if len(layouts) > 1)

    def as_dict(self) -> dict[str, Any]:
        """For programs; errors in percent."""
        choices = self.choices()
        return {
            "overall": {
                "throughput": _figures(self.throughput()),
                "throughput_dense_16_bit": _figures(self.throughput(is_dense_16_bit)),
                "memory": _figures(self.memory()),
                "regret": _regret(choices),
            },
            "sources": {
                source: {
                    "throughput": _figures(self.throughput(_from(source))),
                    "memory": _figures(self.memory(_from(source))),
                    "regret": _regret([choice for choice in choices if choice.source == source]),
                }
                for source in self.sources
            },
            "rows": [_row(row) for row in self.rows],
            "left_out": list(self.left_out),
        }


def is_dense_16_bit(row: Scored) -> bool:
    """A model without experts, trained in bf16 or fp16."""
    return row.run.dense and row.run.sixteen_bit


def _from(source: str) -> Callable[[Scored], bool]:
    return lambda row: row.run.source == source


def score(path: Path | str = SHIPPED) -> Score:
    """Predicts every row of a file shaped like data/runs.csv; ValueError for a file that is not."""
    runs, left_out = read_runs(Path(path))
    return Score(rows=tuple(predict(run) for run in runs), left_out=left_out)


def predict(run: Run) -> Scored:
    """The planner's figures for one run."""
    predicted, room = memory(run.layout), run.layout.hardware.memory_bytes
    reading = {  # a full device's fragments are freed
        Reading.ALLOCATED: predicted.allocated,
        Reading.RESERVED: max(predicted.allocated, min(predicted.reserved, room)),
        Reading.DEVICE: max(predicted.allocated, min(predicted.total, room)),
    }[run.memory_reading]
    return Scored(
        run=run, tokens_per_s_per_gpu=step_time(run.layout).tokens_per_s_per_gpu, memory_bytes=reading
    )


def _errors(errors: Iterable[float | None]) -> Errors:
    sizes = [abs(error) for error in errors if error is not None]
    return Errors(
        rows=len(sizes),
        mean=statistics.mean(sizes) if sizes else None,
        median=statistics.median(sizes) if sizes else None,
    )


def _question(run: Run) -> tuple[object, ...]:
    """What must be the same for two layouts to be a choice."""
    at = run.layout
    return (run.source, at.shape, at.hardware.name, at.gpus, at.global_batch, at.sequence, at.dtype)


def _answer(at: Recipe) -> tuple[object, ...]:
    """What a planner chooses."""
    return (at.dp, at.tp, at.pp, at.cp, at.ep, at.microbatch, at.virtual_stages, at.zero, at.recompute)


def _choice(layouts: dict[tuple[object, ...], list[Scored]]) -> Choice:
    measured = {
        answer: statistics.mean(row.run.measured_tokens_per_s_per_gpu or 0.0 for row in rows)
        for answer, rows in layouts.items()
    }
    chosen = max(layouts, key=lambda answer: layouts[answer][0].tokens_per_s_per_gpu)
    run = layouts[chosen][0].run
    return Choice(
        source=run.source,
        model=run.name.split(" ×")[0],
        layouts=len(layouts),
        regret=max(measured.values()) / measured[chosen] - 1,
    )


def _figures(errors: Errors) -> dict[str, float | int | None]:
    return {
        "rows": errors.rows,
        "mean_absolute_percentage_error": _percent(errors.mean),
        "median_absolute_percentage_error": _percent(errors.median),
    }


def _percent(share: float | None) -> float | None:
    return None if share is None else round(100 * share, 3)


def _regret(choices: Sequence[Choice]) -> dict[str, float | int | None]:
    regrets = [choice.regret for choice in choices]
    return {
        "choices": len(regrets),
        "mean_percent": _percent(statistics.mean(regrets)) if regrets else None,
        "worst_percent": _percent(max(regrets)) if regrets else None,
    }


def _row(row: Scored) -> dict[str, Any]:
    return {
        "source": row.run.source,
        "run": row.run.name,
        "complete_throughput": row.run.complete_throughput,
        "predicted_tokens_per_s_per_gpu": row.tokens_per_s_per_gpu,
        "measured_tokens_per_s_per_gpu": row.run.measured_tokens_per_s_per_gpu,
        "throughput_error_percent": _percent(row.throughput_error),
        "complete_memory": row.run.complete_memory,
        "predicted_memory_bytes": row.memory_bytes,
        "measured_memory_bytes": row.run.measured_memory_bytes,
        "memory_error_percent": _percent(row.memory_error),
    }


def print_score(found: Score) -> None:
    """Tables for people: rows, sources, all."""
    from rich.console import Console  # noqa: PLC0415  (not for --json)
    from rich.markup import escape
    from rich.table import Table  # noqa: PLC0415

    console = Console(width=None if sys.stdout.isatty() else 160)
    rows = Table(title="Rows (a star: not complete, not counted)")
    for heading in (
        "source",
        "run",
        "tokens/s/GPU predicted",
        "measured",
        "error",
        "GB predicted",
        "measured",
        "error",
    ):
        rows.add_column(heading, justify="left" if heading in ("source", "run") else "right")
    for row in found.rows:
        star = "" if row.run.complete_throughput else "*"
        measured, used = row.run.measured_tokens_per_s_per_gpu, row.run.measured_memory_bytes
        rows.add_row(
            escape(row.run.source[:40]),
            escape(row.run.name),
            f"{row.tokens_per_s_per_gpu:.0f}",
            f"{measured:.0f}{star}" if measured else "",
            _signed(row.throughput_error),
            f"{row.memory_bytes / 1e9:.1f}",
            f"{used / 1e9:.1f}{'' if row.run.complete_memory else '*'}" if used else "",
            _signed(row.memory_error),
        )
    console.print(rows)
    table = Table(title="Absolute percentage errors")
    for heading in ("source", "rows", "mean", "median", "memory rows", "mean", "median", "choices", "regret"):
        table.add_column(heading, justify="left" if heading == "source" else "right")
    choices = found.choices()
    for source in found.sources:
        _summary(table, source, found, choices, _from(source))
    table.add_section()
    _summary(table, "dense, 16 bits", found, [], is_dense_16_bit)
    _summary(table, "all", found, choices, lambda _: True)
    console.print(table)
    if found.left_out:
        console.print(
            f"{counted(len(found.left_out), 'row')} without what a prediction needs; first: {found.left_out[0]}",
            markup=False,
        )


def _signed(error: float | None) -> str:
    return "" if error is None else f"{error:+.1%}"


def _summary(
    table: Any,  # noqa: ANN401  (rich is imported late)
    name: str,
    found: Score,
    choices: Sequence[Choice],
    keeps: Callable[[Scored], bool],
) -> None:
    speed, space = found.throughput(keeps), found.memory(keeps)
    from rich.markup import escape

    mine = [choice.regret for choice in choices if name in (choice.source, "all")]
    cells = []
    for errors in (speed, space):
        shares = ["" if share is None else f"{share:.1%}" for share in (errors.mean, errors.median)]
        cells += [str(errors.rows), *shares]
    table.add_row(
        escape(name), *cells, str(len(mine)) if mine else "", f"{statistics.mean(mine):.1%}" if mine else ""
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 2 for a file that cannot be read."""
    parser = Parser(
        prog="triaxis.launch.published.score",
        description="Predicts published runs and prints the errors per row, per source and overall.",
    )
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        default=SHIPPED,
        help="a CSV file shaped like runs.csv (default: the shipped runs)",
    )
    parser.add_argument("--json", action=Claim, help="print one JSON object for programs")
    options = parser.parse_args(arguments)
    try:
        found = score(options.file)
    except ValueError as error:
        return refuse("plan", error)
    if options.json:
        print(json.dumps(found.as_dict()))
    else:
        print_score(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
