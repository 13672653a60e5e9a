"""`triaxis doctor`, or `python -m triaxis.launch.doctor`: what this machine has, how fast it is, and a file of that."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from triaxis.launch.command_line import Claim, Parser, number, whole, within
from triaxis.launch.ending import Exit, refusal, refuse, run_command
from triaxis.launch.writing import add_overwrite, check_target, write_text
from triaxis.parallel.places.legal_values import counted

if TYPE_CHECKING:
    from triaxis.launch.hardware.machine import Item
    from triaxis.launch.hardware.measure import Rates

DESCRIPTION = """Says what this machine has (GPUs, links, NCCL or Gloo, kernels, and why others are not there), measures
matrix products and collectives on all ranks at once for about 20 seconds, without GPUs also the memory that a rank's
process has before it has a model (context_bytes), and writes hardware.toml, which
`triaxis plan --hardware hardware.toml` and `triaxis simulate` take."""

MOST_RANKS, MOST_SECONDS = 1024, 3600.0


def _parser() -> Parser:
    parser = Parser(prog="triaxis doctor", description=DESCRIPTION)
    parser.add_argument(
        "--measure", action=Claim, default=True, help="measure too; --no-measure only says what there is"
    )
    parser.add_argument(
        "--ranks",
        type=within(whole, 1, MOST_RANKS),
        help="processes to measure with (default: one a GPU, or without GPUs one a core)",
    )
    parser.add_argument(
        "--seconds",
        type=within(number, 0.1, MOST_SECONDS),
        default=20.0,
        help="length of the measurement (default: %(default)s)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("hardware.toml"), help="the file to write (default: %(default)s)"
    )
    add_overwrite(parser)
    parser.add_argument("--json", action=Claim, help="print one JSON object instead of tables")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.measure:
        try:
            check_target(options.out, "out", overwrite=options.overwrite)
        except ValueError as error:
            return refuse("doctor", error)
    from triaxis.launch.hardware.machine import inspect_machine  # imports torch

    sections = inspect_machine()
    if not options.json:
        _show(sections)
    found: dict[str, object] = {
        section: {item.name: asdict(item) for item in items} for section, items in sections.items()
    }
    if options.measure:
        from triaxis.launch.hardware.measure import default_ranks, measure_machine

        ranks = options.ranks or default_ranks()
        if not options.json:
            print(
                f"\nmeasuring with {counted(ranks, 'rank')} for {options.seconds:g} s …",
                flush=True,
            )
        try:
            rates = measure_machine(ranks, options.seconds)
            write_text(options.out, _toml(rates), "out", overwrite=options.overwrite)
        except (ValueError, OSError, RuntimeError) as error:
            print(refusal("doctor", f"the measurement failed: {error}"), file=sys.stderr)
            return Exit.FAILED
        found["measured"] = _measured(rates) | {"file": str(options.out)}
        if not options.json:
            _show_rates(rates)
            print(f"\nwrote {options.out}: triaxis plan --hardware {options.out} …")
    if options.json:
        print(json.dumps(found, indent=2))
    return 0


def _toml(rates: Rates) -> str:
    from triaxis.launch.hardware.measured import hardware_toml

    return hardware_toml(
        name=f"{rates.device} on {platform.node() or 'this machine'}",
        source=f"measured by triaxis doctor with {counted(rates.ranks, 'rank')} at once",
        memory_bytes=rates.memory_bytes,
        memory_bytes_per_s=rates.memory_bytes_per_s,
        launch_overhead_s=rates.launch_overhead_s,
        products=rates.products,
        collectives=rates.collectives,
        ranks=rates.ranks,
        context_bytes=rates.context_bytes,
    )


def _measured(rates: Rates) -> dict[str, object]:
    return {
        "ranks": rates.ranks,
        "memory_bytes": rates.memory_bytes,
        "context_bytes": rates.context_bytes,
        "memory_bytes_per_s": rates.memory_bytes_per_s,
        "launch_overhead_s": rates.launch_overhead_s,
        "products": [
            {"dtype": dtype, "flops": flops, "flops_per_s": rate}
            for (dtype, flops), rate in rates.products.items()
        ],
        "collectives": [
            {"operation": operation, "bytes": nbytes, "seconds": seconds}
            for (operation, nbytes), seconds in rates.collectives.items()
        ],
    }


def _show(sections: dict[str, tuple[Item, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    for section, items in sections.items():
        table = Table(show_header=False, box=None, pad_edge=False)
        for item in items:
            table.add_row("[green]✓[/]" if item.present else "[yellow]–[/]", item.name, item.detail)
        console.print(f"[bold]{section}[/]")
        console.print(table)


def _show_rates(rates: Rates) -> None:
    from rich.console import Console
    from rich.table import Table

    dtypes = list(dict.fromkeys(dtype for dtype, _ in rates.products))
    console = Console(highlight=False)
    console.print("[bold]matrix products, GFLOP/s a rank[/]")
    table = Table(box=None)
    table.add_column("n × n × n", justify="right")
    for dtype in dtypes:
        table.add_column(dtype, justify="right")
    for flops in sorted({flops for _, flops in rates.products}):
        found = (rates.products.get((dtype, flops)) for dtype in dtypes)
        cells = ("–" if rate is None else f"{rate / 1e9:,.1f}" for rate in found)
        table.add_row(str(round((flops / 2) ** (1 / 3))), *cells)
    console.print(table)
    console.print(
        f"memory {rates.memory_bytes_per_s / 1e9:,.1f} GB/s a rank; an operation on nothing "
        f"{rates.launch_overhead_s * 1e6:.1f} µs"
    )
    if rates.context_bytes is not None:
        console.print(f"a rank's process without a model {rates.context_bytes / 1e6:,.0f} MB")
    if rates.collectives:
        operations = list(dict.fromkeys(operation for operation, _ in rates.collectives))
        console.print(f"[bold]collectives over {counted(rates.ranks, 'rank')}, ms[/]")
        table = Table(box=None)
        table.add_column("bytes", justify="right")
        for operation in operations:
            table.add_column(operation, justify="right")
        for nbytes in sorted({nbytes for _, nbytes in rates.collectives}):
            cells = (f"{rates.collectives[operation, nbytes] * 1e3:,.3f}" for operation in operations)
            table.add_row(f"{nbytes:,.0f}", *cells)
        console.print(table)


if __name__ == "__main__":
    sys.exit(run_command("doctor", main))
