"""Draws a schedule as a grid of time by rank, in the terminal and as SVG, with its idle time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from triaxis.parallel.palette import colour, ink_on, paler
from triaxis.parallel.pipeline.schedule import Action, Kind, Schedule
from triaxis.parallel.pipeline.walk import Span, by_kind, simulate
from triaxis.parallel.places.legal_values import counted

_BACKWARD_CODES = ("41;97", "43;30", "45;97", "103;30")
CODES = {  # ANSI, by chunk
    Kind.FORWARD: ("44;97", "104;30", "46;30", "106;30"),
    Kind.BACKWARD: _BACKWARD_CODES,
    Kind.INPUT: _BACKWARD_CODES,
    Kind.WEIGHT: ("42;30", "102;30"),
}
PAINTS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "inputs",
    Kind.WEIGHT: "weights",
}


def bubble(schedule: Schedule, *, forward: int = 1, backward: int = 2) -> Fraction:
    """The part of the ranks' time spent waiting; exact, for equal stages and messages that take no time."""
    spans = simulate(schedule, by_kind(forward, backward))
    busy = sum(span.stop - span.start for rank_spans in spans for span in rank_spans)
    return 1 - Fraction(busy) / (schedule.pp * _length(spans))


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the most chunk activations (microbatch × chunk) held at once."""
    peaks = []
    for order in schedule.orders:
        held = peak = 0
        for action in order:
            held += action.rule.holds
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)


def summary(schedule: Schedule, *, forward: int = 1, backward: int = 2) -> str:
    """One line: the bubble in percent, and what is in flight."""
    idle = bubble(schedule, forward=forward, backward=backward)
    unit = "microbatches" if schedule.virtual_stages == 1 else "microbatch chunks"
    counts = " ".join(map(str, in_flight(schedule)))
    return (
        f"{schedule.name}: pp {schedule.pp}, {counted(schedule.microbatches, 'microbatch', 'microbatches')}, "
        f"virtual stages {schedule.virtual_stages}; bubble {float(idle):.1%} ({idle}); "
        f"{unit} in flight per rank: {counts}"
    )


def draw(schedule: Schedule, *, coloured: bool = False, forward: int = 1, backward: int = 2) -> str:
    """A row per rank, a column per time unit; F3: forward of microbatch 3, 1B3: its backward in chunk 1."""
    spans = simulate(schedule, by_kind(forward, backward))
    length = _length(spans)
    with_chunk = schedule.virtual_stages > 1
    width = 1 + max(len(_label(span.action, with_chunk)) for rank_spans in spans for span in rank_spans)
    label_width = len(f"rank {schedule.pp - 1}")
    lines = []
    for rank, rank_spans in enumerate(spans):
        line, now = f"rank {rank}".ljust(label_width) + " |", 0
        for span in rank_spans:
            start, stop = int(span.start), int(span.stop)
            if start == stop:  # weights' half of a backward of one unit
                continue
            line += ("." + " " * (width - 1)) * (start - now)
            cell = _label(span.action, with_chunk).ljust(width * (stop - start) - 1)
            line += (_colour(cell, span.action) if coloured else cell) + " "
            now = stop
        lines.append(line + ("." + " " * (width - 1)) * (length - now) + "|")
    return "\n".join(lines)


def svg(schedule: Schedule, *, forward: int = 1, backward: int = 2) -> str:
    """The same grid as a picture."""
    spans = simulate(schedule, by_kind(forward, backward))
    unit, height, left = 28, 26, 64
    with_chunk = schedule.virtual_stages > 1
    width, bottom = left + unit * _length(spans) + 8, 30 + height * schedule.pp
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{max(width, 760)}" height="{bottom + 8}" '
        f'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="18" font-size="12">{summary(schedule, forward=forward, backward=backward)}</text>',
    ]
    for rank, rank_spans in enumerate(spans):
        top = 28 + height * rank
        parts.append(f'<text x="8" y="{top + 17}">rank {rank}</text>')
        parts.append(
            f'<rect x="{left}" y="{top}" width="{unit * _length(spans) - 1}" height="{height - 2}" '
            f'fill="{colour("idle")}"/>'
        )
        for span in rank_spans:
            x, wide = left + unit * int(span.start), unit * int(span.stop - span.start)
            if not wide:
                continue
            paint = _fill(span.action, schedule.virtual_stages)
            parts.append(
                f'<rect x="{x}" y="{top}" width="{wide - 1}" height="{height - 2}" '
                f'fill="{paint}"/>'
                f'<text x="{x + wide / 2 - 0.5}" y="{top + 16}" text-anchor="middle" fill="{ink_on(paint)}">'
                f"{_label(span.action, with_chunk)}</text>"
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _length(spans: Sequence[Sequence[Span]]) -> int:
    return int(max(rank_spans[-1].stop for rank_spans in spans))


def _label(action: Action, with_chunk: bool) -> str:
    return str(action) if with_chunk else f"{action.kind}{action.microbatch}"


def _fill(action: Action, chunks: int) -> str:
    """Later chunks are paler, down to half."""
    return paler(PAINTS[action.kind], 0.5 * action.chunk / max(1, chunks - 1))


def _colour(cell: str, action: Action) -> str:
    codes = CODES[action.kind]
    return f"\033[{codes[action.chunk % len(codes)]}m{cell}\033[0m"
