"""`triaxis compare -n 2 …`: what is sharded, and what each switch does, measured with the user's own run and machine.

One short run after the other, each as `triaxis run` starts it: the flags given, and one thing changed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from triaxis.engine.advice import flags_of
from triaxis.engine.config import ConfigError, ResolvedRun, RunConfig
from triaxis.engine.rules import resolve
from triaxis.launch.command_line import Claim, Parser, whole, within
from triaxis.launch.ending import Exit, refuse, run_command
from triaxis.launch.flags import config_of, train_parser
from triaxis.launch.writing import add_overwrite, check_target, written_aside
from triaxis.parallel.palette import colour

DESCRIPTION = """Trains a few steps of your run in every way of sharing its states over data-parallel ranks, then with
one switch changed at a time, and prints what each way takes: memory, time, bytes.

  triaxis compare -n 2 --model tiny --data stdlib --out comparison.svg
  triaxis compare -n 2 --model tiny --data stdlib --zero 1 --hardware hardware.toml     (of triaxis doctor: predictions)

Flags of `triaxis train` describe the run. Let nothing else run meanwhile."""

MOST_RANKS, STEPS, WARMUP_STEPS = 1024, 8, 2

Change = Callable[[RunConfig, ResolvedRun], RunConfig]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A row of the table. does: in words; change: the run with it, of the run as given and what it comes to."""

    name: str
    does: str
    change: Change


def _with(config: RunConfig, resolved: ResolvedRun, **changes: object) -> RunConfig:
    return replace(config, **changes)  # type: ignore[arg-type]


def _flipped(config: RunConfig, resolved: ResolvedRun, *, name: str, on: object, off: object) -> RunConfig:
    return replace(config, **{name: off if getattr(config, name) == on else on})  # type: ignore[arg-type]


def _smaller_microbatches(config: RunConfig, resolved: ResolvedRun) -> RunConfig:
    """The same batch in twice as many microbatches."""
    size = resolved.microbatch_size
    if size % 2:
        raise ConfigError((f"`per_device_train_batch_size` must be even to be halved, but is {size}",))
    return replace(
        config,
        per_device_train_batch_size=size // 2,
        microbatches=None,
        gradient_accumulation_steps=None,
        global_batch=resolved.global_batch,
    )


def _sharing(name: str, does: str, **changes: object) -> Variant:
    fixed: dict[str, Any] = {"data_parallel": "zero", **changes}
    return Variant(name=name, does=does, change=partial(_with, **fixed))


def _switch(name: str, does: str, field: str, on: object, off: object) -> Variant:
    return Variant(name=name, does=does, change=partial(_flipped, name=field, on=on, off=off))


STRATEGIES: Final = (
    _sharing("DDP", "nothing is sharded", zero=0),
    _sharing("ZeRO-1", "optimizer states", zero=1),
    _sharing("ZeRO-2", "and gradients", zero=2),
    _sharing("ZeRO-3", "and parameters", zero=3),
    Variant(
        name="fsdp",
        does="the same, by torch's fully_shard",
        change=partial(_with, data_parallel="fsdp", zero=None, bucket_elements=None),
    ),
)
SWITCHES: Final = (
    Variant(name="as given", does="", change=lambda config, resolved: config),
    _switch("recompute", "activations again in backward", "recompute", True, False),
    _switch("bf16", "16-bit weights and activations", "dtype", "bf16", "fp32"),
    _switch("attention=plain", "one product under a mask of L × L", "kernels", "attention=plain", None),
    _switch("block=compile", "torch.compile of each layer", "kernels", "block=compile", None),
    Variant(name="accumulation", does="twice as many microbatches", change=_smaller_microbatches),
    _switch("offload", "optimizer states in the host's memory", "offload_optimizer", "cpu", "none"),
    _switch("no prefetch", "batches are made when they are needed", "dataloader_num_workers", 0, 1),
)
"""Each against "as given": a switch that is on already is turned off."""
TABLES: Final = {"sharing": STRATEGIES, "switches": SWITCHES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a variant took. refusal: why it did not run, and then there is nothing else.

    states_bytes: parameters, gradients and optimizer states of the first rank; predicted_bytes: of its whole process
    peak_bytes, sent_bytes: of the first rank, the latter in a step (None for fsdp, whose messages are torch's)
    step_seconds: median behind the first steps
    """

    name: str
    does: str
    refusal: str | None = None
    states_bytes: float | None = None
    predicted_bytes: float | None = None
    peak_bytes: float | None = None
    step_seconds: float | None = None
    tokens_per_s: float | None = None
    sent_bytes: float | None = None
    loss: float | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 if every variant ran or was refused, 1 if one failed, 2 for flags that cannot work."""
    options = _parser().parse_args(arguments)
    try:
        if options.out is not None:
            check_target(options.out, "out", overwrite=options.overwrite)
        base = _short(config_of(options))
        resolved = resolve(base, options.nproc_per_node)
        rows: dict[str, list[Row]] = {}
        asked = options.only or [variant.name for variants in TABLES.values() for variant in variants]
        for title, variants in TABLES.items():
            for variant in variants:
                if variant.name in asked:
                    print(
                        f"{asked.index(variant.name) + 1} of {len(asked)}: {variant.name} …",
                        file=sys.stderr,
                        flush=True,
                    )
                    rows.setdefault(title, []).append(_measured(variant, base, resolved, options))
        if options.out is not None:
            with written_aside(options.out, "out", overwrite=options.overwrite) as aside:
                _draw(rows, aside, f"{resolved.model.name}, {options.nproc_per_node} ranks")
    except (ValueError, OSError) as error:
        return refuse("compare", error)
    if options.json:
        print(json.dumps({title: [asdict(row) for row in found] for title, found in rows.items()}))
    else:
        _show(rows)
    failed = any((row.refusal or "").startswith(FAILED) for found in rows.values() for row in found)
    return Exit.FAILED if failed else Exit.DONE


def _parser() -> Parser:
    parser = train_parser("triaxis compare", DESCRIPTION)
    group = parser.add_argument_group("the comparison")
    count = within(whole, 1, MOST_RANKS)
    group.add_argument("-n", "--nproc-per-node", type=count, required=True, metavar="N", help="ranks")
    group.add_argument(
        "--hardware", metavar="FILE", help="doctor's file: memory is predicted beside what is measured"
    )
    names = [variant.name for variants in TABLES.values() for variant in variants]
    group.add_argument(
        "--only",
        action="append",
        choices=names,
        metavar="ROW",
        help=f"this row; may be repeated ({', '.join(names)})",
    )
    group.add_argument("--out", type=Path, metavar="FILE", help="draw a picture (.svg or .png)")
    group.add_argument("--json", action=Claim, help="print one JSON object instead of tables")
    add_overwrite(parser)
    return parser


def _short(config: RunConfig) -> RunConfig:
    """A few steps of the run, each told, and nothing saved."""
    return replace(
        config,
        steps=config.steps or STEPS,
        num_train_epochs=None,
        warmup_steps=0,
        warmup_ratio=None,
        logging_steps=1,
        eval_steps=None,
        eval_batches=0,
        save_strategy="no",
        save_steps=None,
    )


FAILED, FILE_COLUMNS = "failed", 150


def _measured(variant: Variant, base: RunConfig, given: ResolvedRun, options: argparse.Namespace) -> Row:
    try:
        config = variant.change(base, given)
        resolved = resolve(config, options.nproc_per_node)
    except ConfigError as error:
        return Row(name=variant.name, does=variant.does, refusal=error.faults[0])
    states, predicted = _foreseen(config, resolved, options.hardware)
    with tempfile.TemporaryDirectory(prefix="triaxis-compare-") as folder:
        config = replace(config, output_dir=str(Path(folder) / "run"))
        command = [
            sys.executable,
            "-m",
            "triaxis.launch.run",
            "-n",
            str(options.nproc_per_node),
            *flags_of(config),
        ]
        ran = subprocess.run(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
        )
        if ran.returncode:
            last = (ran.stderr.strip().splitlines() or ["no word"])[-1]
            return Row(name=variant.name, does=variant.does, refusal=f"{FAILED} ({ran.returncode}): {last}")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if "tokens_per_s" in row]
    late = steps[WARMUP_STEPS:] or steps
    rate = statistics.median(row["tokens_per_s"] for row in late)
    return Row(
        name=variant.name,
        does=variant.does,
        states_bytes=states,
        predicted_bytes=predicted,
        peak_bytes=max(row["peak_mem_bytes"] for row in steps),
        step_seconds=resolved.global_batch * config.seq / rate,
        tokens_per_s=rate,
        sent_bytes=None if config.data_parallel == "fsdp" else sum(late[-1]["sent_bytes"].values()),
        loss=steps[-1]["loss"],
    )


def _foreseen(
    config: RunConfig, resolved: ResolvedRun, hardware: str | None
) -> tuple[float | None, float | None]:
    """Bytes of the first rank's model states, and with doctor's file of its whole process; None where not planned."""
    from triaxis.engine.plan import step_plan
    from triaxis.launch.hardware.hardware import load_hardware
    from triaxis.launch.planner.held import stage_memory
    from triaxis.launch.planner.layout import Layout

    if config.data_parallel == "fsdp":
        return None, None
    machine = load_hardware(hardware or "a100-80g")
    layout = Layout(plan=step_plan(config, resolved), topology=resolved.topology, hardware=machine)
    memory = stage_memory(layout, 0)
    states = memory.parameters + memory.gradients + memory.optimizer
    return states, memory.total if hardware else None


def _show(rows: dict[str, list[Row]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console.width = FILE_COLUMNS
    for title, found in rows.items():
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        table.add_column("", no_wrap=True)
        table.add_column("")
        predicts = any(row.predicted_bytes is not None for row in found)
        for heading in (
            "states",
            *["predicted"] * predicts,
            "peak",
            "step",
            "tokens/s",
            "sent a step",
            "loss",
        ):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in found:
            if row.refusal is not None:
                table.add_row(row.name, row.refusal)
                continue
            table.add_row(row.name, row.does, *_cells(row, predicts))
        console.print(table)
        console.print()


def _cells(row: Row, predicts: bool) -> Iterable[str]:
    for nbytes in (row.states_bytes, *[row.predicted_bytes] * predicts, row.peak_bytes):
        yield "–" if nbytes is None else f"{nbytes / 1e6:,.1f} MB"
    yield f"{1e3 * (row.step_seconds or 0):,.0f} ms"
    yield f"{row.tokens_per_s:,.0f}"
    yield "–" if row.sent_bytes is None else f"{row.sent_bytes / 1e6:,.2f} MB"
    yield f"{row.loss:.4f}"


def _draw(rows: dict[str, list[Row]], path: Path, title: str) -> None:
    """Bars of the peak and of the step's time, a pair of panels for each table."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left")
    panels = figure.subplots(2, 2, squeeze=False, height_ratios=[len(found) for found in rows.values()])
    for (name, found), pair in zip(rows.items(), panels, strict=True):
        ran = [row for row in found if row.refusal is None]
        for axes, values, label, paint in (
            (pair[0], [(row.peak_bytes or 0) / 1e6 for row in ran], "peak of a rank, MB", "memory-optimizer"),
            (pair[1], [1e3 * (row.step_seconds or 0) for row in ran], "a step, ms", "forward"),
        ):
            bars = axes.barh([row.name for row in ran], values, color=colour(paint))
            axes.bar_label(bars, fmt="{:,.0f}", padding=3)
            axes.invert_yaxis()
            axes.margins(x=0.15)
            axes.set_title(f"{name}: {label}", loc="left", fontsize=10)
    figure.savefig(path, format="png" if path.suffix == ".png" else "svg")


if __name__ == "__main__":
    sys.exit(run_command("compare", main))
