"""A plan as tables for people. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from triaxis.launch.pages.plan_json import length, mfu, reason
from triaxis.launch.planner.explain import (
    Explanation,
    gigabytes,
    memory_range,
    parts,
    seconds_range,
    seconds_text,
)
from triaxis.launch.planner.reprice import Repriced
from triaxis.launch.planner.search import Candidate
from triaxis.launch.planner.table import Row
from triaxis.launch.planner.waiting import waiting_text
from triaxis.launch.published.memory_tables import Need, States
from triaxis.launch.published.recommended import Recommendation


def days_range(candidate: Candidate, days: float) -> str:
    """`9.1–14.2`: days, with the range of the step."""
    low, high = (days * seconds / candidate.seconds for seconds in candidate.seconds_range)
    return f"{low:,.1f}–{high:,.1f}"


def short(count: float) -> str:
    """`2T`, `300B`, `1.5M`."""
    for unit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= unit:
            return f"{count / unit:g}{suffix}"
    return f"{count:,.0f}"


def simulated_text(found: Repriced) -> str:
    """`66.1 GB (closed form +1.2%), 158.2 s (closed form -0.4%), communication proved`."""
    candidate = found.candidate
    memory = candidate.memory.allocated / found.allocated_bytes - 1
    told = [f"{gigabytes(found.memory_bytes)} (closed form {memory:+.1%} of tensors)"]
    if found.seconds is not None:
        off = candidate.seconds / found.seconds - 1
        told.append(f"{seconds_text(found.seconds)} a step (closed form {off:+.1%})")
    told.append(
        "communication proved" if found.proved else "communication NOT proved: triaxis simulate says why"
    )
    return ", ".join(told) + ("" if found.works or not found.proved else "; does not fit")


def layout_cells(candidate: Candidate) -> tuple[str, ...]:
    """dp, tp, pp, ZeRO, microbatch, recompute, chunks of a layout."""
    layout = candidate.layout
    return (
        str(layout.dp),
        str(layout.tp),
        str(layout.pp),
        str(layout.zero),
        str(layout.microbatch),
        "yes" if layout.recomputes else "no",
        str(layout.virtual_stages) if layout.virtual_stages > 1 else "–",
    )


LAYOUT_COLUMNS = ("dp", "tp", "pp", "ZeRO", "micro-\nbatch", "re-\ncompute", "chunks")


def _on_stage(candidate: Candidate, stage: int) -> str:
    """Which stage limits, where there are several."""
    return (
        f"; stage {stage} of {candidate.layout.pp} is the one that limits" if candidate.layout.pp > 1 else ""
    )


def choice_view(candidate: Candidate, tokens: float | None, price: float | None) -> RenderableType:
    """The chosen layout: memory by category, step by part."""
    hardware = candidate.layout.hardware
    lines = Table.grid(padding=(0, 2))
    held = candidate.memory
    told = ", ".join(f"{name} {gigabytes(size)}" for name, size in held.by_category().items() if size >= 5e7)
    spare = "" if candidate.fits_surely else f" ({_fitting(candidate)})"
    lines.add_row("layout", Text(str(candidate), style="bold"))
    lines.add_row(
        "memory",
        f"{gigabytes(held.total)} ({memory_range(candidate)}) of "
        f"{gigabytes(hardware.memory_bytes)}{spare}: {told}{_on_stage(candidate, held.stage)}",
    )
    lines.add_row(
        "step",
        f"{seconds_text(candidate.seconds)} ({seconds_range(candidate)}): "
        + ", ".join(
            f"{name} {seconds_text(part)}" for name, part in parts(candidate.time).items() if part > 0.0005
        )
        + _on_stage(candidate, candidate.time.stage),
    )
    layout = candidate.layout
    waiting = waiting_text(layout.pp, layout.microbatches, layout.virtual_stages)
    if waiting is not None:
        lines.add_row("", waiting)
    lines.add_row(
        "speed",
        f"{candidate.time.tokens_per_s_per_gpu:,.0f} tokens/s a GPU, "
        f"{candidate.time.tokens_per_s_per_gpu * candidate.layout.gpus:,.0f} in all, MFU {mfu(candidate):.0%}",
    )
    if tokens:
        days, cost = length(candidate, tokens, price)
        lines.add_row(
            "length",
            f"{days:,.1f} days ({days_range(candidate, days)}) for {short(tokens)} tokens"
            + ("" if cost is None else f", {cost:,.0f} at {price:g} a GPU-hour"),
        )
    return lines


def pareto_view(candidates: Iterable[Candidate], most: int) -> RenderableType:
    """Those that no other beats in both memory and time."""
    table = Table(box=None, header_style="bold")
    for column in (*LAYOUT_COLUMNS, "step", "memory", "left"):
        table.add_column(column, justify="right")
    for one in list(candidates)[:most]:
        table.add_row(*priced_cells(one))
    return table


def priced_cells(candidate: Candidate) -> tuple[str, ...]:
    """A layout, its step and its memory with their ranges, and the memory left."""
    return (
        *layout_cells(candidate),
        f"{seconds_text(candidate.seconds)} ({seconds_range(candidate)})",
        f"{gigabytes(candidate.memory_bytes)} ({memory_range(candidate)})",
        gigabytes(candidate.margin_bytes),
    )


def table_view(rows: Iterable[tuple[Row, tuple[Recommendation, ...]]]) -> RenderableType:
    """The decision table, and under each row the planner's own best and what others publish."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("model")
    for column in ("GPUs", *LAYOUT_COLUMNS, "GB", "tokens/s\na GPU", "MFU"):
        table.add_column(column, justify="right")
    table.add_column("")
    notes: list[str] = []
    for row, published in rows:
        mark = "*" if row.size.note else ""
        notes += [f"* {row.size.note}"] if mark else []
        table.add_row(
            row.size.name + mark,
            str(row.size.gpus),
            *_priced(row.candidate),
            _fitting(row.candidate),
            style="bold",
        )
        if row.best is not None:
            table.add_row("  search", "", *_priced(row.best), reason(row))
        for one in published:
            cells = (str(one.dp or "–"), str(one.tp), str(one.pp), "–", str(one.microbatch or "–"), "–")
            table.add_row(
                "  published",
                str(one.gpus),
                *cells,
                str(one.virtual_stages or "–"),
                "",
                "",
                "",
                one.text,
                style="dim",
            )
    return Group(table, *notes)


def _priced(candidate: Candidate) -> tuple[str, ...]:
    return (
        *layout_cells(candidate),
        f"{candidate.memory_bytes / 1e9:.1f}",
        f"{candidate.time.tokens_per_s_per_gpu:,.0f}",
        f"{mfu(candidate):.0%}",
    )


def _fitting(candidate: Candidate) -> str:
    if candidate.fits_surely:
        return "fits"
    return (
        f"fits, but up to {gigabytes(candidate.memory_range[1])} would be within the range"
        if candidate.fits
        else f"lacks {gigabytes(-candidate.margin_bytes)}"
    )


def memory_view(rows: Iterable[Row]) -> RenderableType:
    """The rows' memory by category."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    found = list(rows)
    table.add_column("GB a GPU")
    for row in found:
        table.add_column(row.size.name, justify="right")
    for name in found[0].candidate.memory.by_category():
        table.add_row(name, *(f"{row.candidate.memory.by_category()[name] / 1e9:.1f}" for row in found))
    return table


def states_view(states: Iterable[States]) -> RenderableType:
    """Model states by engine and stage."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("engine", "stage"):
        table.add_column(column)
    for column in ("parameters", "gradients", "optimizer", "buffers", "GB a GPU"):
        table.add_column(column, justify="right")
    engine = ""
    for one in states:
        cells = (one.parameters, one.gradients, one.optimizer, one.buffers, one.total)
        table.add_row(
            "" if one.engine == engine else one.engine, one.name, *(f"{cell / 1e9:.1f}" for cell in cells)
        )
        engine = one.engine
    return table


def needs_view(needs: Iterable[Need]) -> RenderableType:
    """Least and recommended accelerators by model."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("model")
    for column in ("parameters", "states"):
        table.add_column(column, justify="right")
    for column in ("least", "recommended"):
        table.add_column(column)
    for need in needs:
        count = need.model.parameters()
        table.add_row(
            need.name,
            f"{count / 1e9:,.1f} B",
            f"{18 * count / 1e9:,.0f} GB",
            _need(need.least),
            _need(need.recommended),
        )
    return table


def _need(candidate: Candidate | None) -> str:
    if candidate is None:
        return "more than 16,384"
    return f"{candidate.layout.gpus} ({candidate}, {gigabytes(candidate.memory_bytes)})"


def explanation_view(found: Explanation) -> RenderableType:
    """Why one layout lost, with its numbers."""
    told: list[RenderableType] = [Text(f"{found.asked} {found.verdict}", style="bold")]
    if found.candidate is not None:
        told.append(choice_view(found.candidate, None, None))
    return Group(*told)


def console() -> Console:
    """Numbers keep their one colour; a pipe gets wide lines."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=160)
