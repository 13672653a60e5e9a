"""`triaxis config …flags of train…`: what the run will be, each value with where it came from. Starts nothing."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from triaxis.engine.advice import flags_of, resolve_or_advise
from triaxis.engine.config import ResolvedRun, RunConfig, warmup_steps_of
from triaxis.launch.command_line import Claim, whole, within
from triaxis.launch.ending import Exit, refuse, run_command
from triaxis.launch.flags import RunParser, config_of, train_parser
from triaxis.launch.hub import located
from triaxis.launch.resolution import Setting, curve_of, model_origin, model_settings, settings_of, sparkline
from triaxis.parallel.places.legal_values import counted

DESCRIPTION = """Prints the run that a command line asks for: every value, and whether a flag, a key of a DeepSpeed or
Accelerate file, the model's folder or a default decided it; then the learning rate of its steps.

  triaxis config --deepspeed ds.json --per_device_train_batch_size 2 --max_steps 100 --lr_scheduler_type cosine

Flags of `triaxis train` describe the run."""

MOST_RANKS = 1_000_000
CURVE_WIDTH = 60


def main(arguments: Sequence[str] | None = None) -> int:
    parser = train_parser("triaxis config", DESCRIPTION, environment=os.environ)
    assert isinstance(parser, RunParser)
    parser.tells_notes = False
    _add_options(parser)
    options = parser.parse_args(arguments)
    try:
        config = located(config_of(options))
        resolved = resolve_or_advise(config, options.ranks or _ranks(config))
        steps = resolved.total_steps
        if steps is None and options.read_data:
            steps = _steps_of_data(config, resolved)
    except (ValueError, OSError) as error:
        return refuse("config", error)
    settings = settings_of(config, resolved, options.sources, steps)
    settings += model_settings(resolved.model, model_origin(config))
    if options.json:
        print(json.dumps(_as_json(config, resolved, settings, steps, options.notes), indent=2))
    else:
        _show(config, settings, steps, options)
    return Exit.DONE


def _add_options(parser: RunParser) -> None:
    group = parser.add_argument_group("this command")
    group.add_argument(
        "--ranks",
        type=within(whole, 1, MOST_RANKS),
        metavar="N",
        help="processes of the run; left out, what the batch sizes decide, or tp × pp × dp",
    )
    group.add_argument("--all", action=Claim, help="show the values that nothing but a default decides, too")
    group.add_argument(
        "--read-data",
        action=Claim,
        default=True,
        help="read the data where the run's length is in epochs, to know its steps (default: True)",
    )
    group.add_argument("--json", action=Claim, help="print one JSON object")


def _ranks(config: RunConfig) -> int:
    """As many as the three batch sizes decide, where all are given; else as the layout asks for."""
    size, total = config.per_device_train_batch_size, config.global_batch
    count = config.gradient_accumulation_steps or config.microbatches
    dp = config.dp or 1
    if config.dp is None and size and count and total and total % (size * count) == 0:
        dp = total // (size * count)
    return config.tp * config.pp * dp


def _steps_of_data(config: RunConfig, resolved: ResolvedRun) -> int:
    from triaxis.engine.data.source import open_source

    source = open_source(
        resolved.data,
        split="train",
        sequence_length=config.seq,
        tokenizer_path=resolved.tokenizer,
        on_bad_sample=config.on_bad_sample,
        pack=config.pack,
        train_inserted=config.train_inserted_think,
        date=config.chat_template_date,
        eval_fraction=config.eval_fraction or None,
    )
    return resolved.steps_of(len(source))


def _as_json(
    config: RunConfig, resolved: ResolvedRun, settings: list[Setting], steps: int | None, notes: Sequence[str]
) -> dict[str, Any]:
    sections: dict[str, dict[str, Any]] = {}
    for setting in settings:
        part = sections.setdefault("model" if setting.section == "the model" else "run", {})
        part[setting.name] = {"value": setting.value, "from": setting.origin}
    return {
        "ranks": resolved.topology.world_size,
        **sections,
        "notes": list(notes),
        "flags": flags_of(config),
        "learning_rate": None
        if steps is None
        else {
            "total_steps": steps,
            "warmup_steps": warmup_steps_of(config, steps),
            "curve": curve_of(config, steps),
        },
    }


def _show(config: RunConfig, settings: list[Setting], steps: int | None, options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    shown = [s for s in settings if options.all or s.origin != "default"]
    for section in dict.fromkeys(setting.section for setting in shown):
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(no_wrap=True, min_width=28)
        table.add_column(overflow="fold")
        table.add_column(overflow="fold", style="dim")
        for setting in (each for each in shown if each.section == section):
            table.add_row(setting.name, Text(_words(setting.value)), Text(setting.origin))
        console.print(f"[bold]{section}[/]")
        console.print(table)
    left = len(settings) - len(shown)
    if left:
        console.print(f"[dim]{left} values more are defaults; --all shows them[/]")
    for note in options.notes:
        console.print(Text(f"note: {note}"))
    _show_curve(console, config, steps)


def _show_curve(console: Any, config: RunConfig, steps: int | None) -> None:  # noqa: ANN401 (rich's)
    if steps is None:
        console.print("[bold]learning rate[/]: its steps follow from the data; --read-data counts them")
        return
    curve = curve_of(config, steps)
    console.print(f"[bold]learning rate[/] over {counted(steps, 'step')}, {config.lr_scheduler_type}")
    console.print(sparkline([rate for _, rate in curve], CURVE_WIDTH))
    warmup = warmup_steps_of(config, steps)
    wanted = {1, warmup, steps // 4, steps // 2, 3 * steps // 4, steps} - {0}
    by_step = dict(curve)
    nearest = sorted({min(by_step, key=lambda known: abs(known - step)) for step in wanted})
    for step in nearest:
        after = ", the last of the warm-up" if step == warmup else ""
        console.print(f"  step {step:>8}  {by_step[step]:.3e}{after}")


def _words(value: Any) -> str:  # noqa: ANN401 (a field of any kind)
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else f"{value}"


if __name__ == "__main__":
    sys.exit(run_command("config", main))
