"""A simulation in the terminal: the answer first, then what it is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from triaxis.launch.planner.waiting import waiting_text
from triaxis.parallel.pipeline.schedule import SCHEDULES, ScheduleName
from triaxis.parallel.places.legal_values import counted

GIGA = 1e9
SHOWN = 6


@contextmanager
def showing_progress() -> Iterator[Callable[[int, int], None]]:
    """A bar over the ranks that are traced, where there is a terminal."""
    console = Console(stderr=True)
    with Progress(
        TextColumn("tracing ranks"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    ) as bar:
        task = bar.add_task("trace", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def print_summary(values: Mapping[str, Any], trace: Path | None, report: Path | None) -> None:
    """What the run would do, for people. values: as `result.as_dict` says it."""
    console = Console(highlight=False)
    run, topology, proof = values["run"], values["topology"], values["proof"]
    console.print(
        f"{run['model']}: {run['parameters']:,} parameters on {topology['world_size']:,} × "
        f"{values['hardware']['name']} "
        f"(dp {topology['dp']} × tp {topology['tp']} × pp {topology['pp']}), ZeRO-{run['zero']}, {run['dtype']}, "
        f"{run['schedule']}, {counted(run['microbatches'], 'microbatch', 'microbatches')} of "
        f"{run['microbatch_size']} × {run['sequence_length']} tokens"
        + (f" in {run['documents_a_row']} documents each" if run["documents_a_row"] > 1 else "")
    )
    if not proof["holds"]:
        console.print("[red]the ranks' programs do not fit together:[/red]")
        for fault in proof["faults"][:SHOWN]:
            console.print(f"  {fault}", markup=False)
        return
    console.print(
        f"proved over {counted(proof['ranks'], 'rank')} and {proof['communications']:,} messages: "
        f"{', '.join(item['name'] for item in proof['obligations'] if item['holds'])}"
    )
    for warning in proof["warnings"][:SHOWN]:
        console.print(f"[yellow]warning[/yellow] {warning}")
    _print_memory(console, values)
    _print_time(console, values)
    for what, path in (("timeline for Perfetto", trace), ("report", report)):
        if path is not None:
            console.print(f"{what}: {path}", markup=False)


def _print_memory(console: Console, values: Mapping[str, Any]) -> None:
    memory = values["memory"]
    capacity = values["hardware"]["memory_bytes"]
    verdict = "[green]fits[/green]" if memory["fits"] else "[red]does not fit[/red]"
    console.print(
        f"\nmemory: {verdict}: {memory['needed_bytes'] / GIGA:.1f} GB needed of {capacity / GIGA:.1f} "
        f"({memory['context_bytes'] / GIGA:.1f} for the device's context)"
    )
    if not memory["fits"]:
        run, topology, hardware = values["run"], values["topology"], values["hardware"]
        console.print(
            f"what fits: triaxis plan --model {run['model']} --gpus {topology['world_size']} "
            f"--hardware {hardware['name']} --seq {run['sequence_length']} --global-batch {run['global_batch']} "
            f"--dtype {run['dtype']}"
            + (f" --document-tokens {run['document_tokens']}" if run["document_tokens"] else ""),
            markup=False,
        )
    table = Table("rank", "peak GB", "reserved GB", "at", "made of (GB)", box=None, pad_edge=False)
    fullest = sorted(memory["ranks"], key=lambda entry: -entry["peak_bytes"])
    for entry in fullest[:SHOWN]:
        parts = sorted(entry["breakdown"].items(), key=lambda part: -part[1])
        table.add_row(
            f"{entry['rank']} ({entry['place']})",
            f"{entry['peak_bytes'] / GIGA:.2f}",
            f"{entry['reserved_bytes'] / GIGA:.2f}",
            entry["at"],
            ", ".join(f"{kind} {nbytes / GIGA:.2f}" for kind, nbytes in parts if nbytes > 0.005 * GIGA),
        )
    console.print(table)
    if len(fullest) > SHOWN:
        console.print(f"… and {len(fullest) - SHOWN} more kinds of ranks with less")


def _print_time(console: Console, values: Mapping[str, Any]) -> None:
    time = values["time"]
    console.print(
        f"\nstep: {time['step_seconds']:.3f} s, {time['tokens_per_second']:,.0f} tokens/s "
        f"({time['tokens_per_second_per_gpu']:,.0f} a GPU), MFU {time['mfu']:.1%}, HFU {time['hfu']:.1%}"
    )
    bubbles = time["bubble"]
    console.print(f"idle for want of work, by stage: {', '.join(f'{bubble:.1%}' for bubble in bubbles[:16])}")
    run = values["run"]
    waiting = waiting_text(values["topology"]["pp"], run["microbatches"], run["virtual_stages"])
    if waiting is not None and not SCHEDULES[ScheduleName(run["schedule"])].splits:
        console.print(f"[yellow]warning[/yellow] {waiting}")
    table = Table("lane", "busy s", "waited for s", box=None, pad_edge=False)
    for name, seconds in time["busy_seconds"].items():
        exposed = time["exposed_seconds"].get(name)
        table.add_row(name, f"{seconds:.3f}", "" if exposed is None else f"{exposed:.3f}")
    console.print(table)
    path = ", ".join(f"{part['what']} {part['seconds']:.3f}" for part in time["critical_path"][:SHOWN])
    console.print(f"the step's length is made of (s): {path}", markup=False)
