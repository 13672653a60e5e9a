"""A plan as one self-contained page: report.html is the page, here is what it shows, and where. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from triaxis.launch.jobs.artefacts import Job, torchrun_command
from triaxis.launch.pages import present
from triaxis.launch.pages.plan_json import length, mfu
from triaxis.launch.pages.report_plot import HEIGHT, LEFT, TOP, WIDTH, plot
from triaxis.launch.planner.explain import (
    PARTS,
    gigabytes,
    memory_range,
    neighbours,
    parts,
    seconds_range,
    seconds_text,
)
from triaxis.launch.planner.reprice import Repriced, distinct
from triaxis.launch.planner.search import Candidate, Plan
from triaxis.parallel.palette import STAGES, memory_name, style_sheet
from triaxis.parallel.pipeline.draw import summary, svg
from triaxis.parallel.pipeline.orders import make_schedule

TIME_NAMES = {
    "compute": "forward",
    "recompute": "recompute",
    "tensor": "tp",
    "context": "cp",
    "expert": "ep",
    "pipeline": "pp",
    "bubble": "idle",
    "data": "dp",
    "optimizer": "phase",
}
"""The name in the palette of each part of a step."""
RULE = (
    "The fastest layout that fits; of those within 2% of its time the simplest: less pipeline and tensor parallelism, "
    "a lower ZeRO stage, no recomputation."
)
BARS = 6
NODES = 16
STAGES_DRAWN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A piece of a bar. share: of the bar's whole length, in percent."""

    name: str
    text: str
    share: float
    colour: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar of pieces, and what it adds up to."""

    label: str
    total: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """An accelerator in the drawing of the nodes."""

    rank: int
    colour: str
    text: str


def write_report(
    path: Path,
    *,
    plan: Plan,
    chosen: Candidate,
    job: Job,
    tokens: float | None,
    price: float | None,
    simulated: Sequence[Repriced] = (),
) -> None:
    """Writes the page; simulated: layouts priced again by simulation. Raises OSError where it cannot."""
    from jinja2 import Environment, StrictUndefined

    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.from_string(template).render(
        request=plan.request,
        hardware=plan.request.hardware,
        chosen=chosen,
        facts=_facts(plan, chosen, tokens, price),
        columns=[column.replace("-\n", "").replace("\n", " ") for column in present.LAYOUT_COLUMNS],
        rows=[present.priced_cells(one) for one in plan.pareto[:20]],
        pareto_count=len(plan.pareto),
        simulated=[(str(one.candidate), present.simulated_text(one)) for one in simulated],
        why_not=[(one.asked, one.verdict) for one in neighbours(plan, chosen)],
        memory_bars=memory_bars(plan, chosen),
        memory_capacity=100 * plan.request.hardware.memory_bytes / _memory_scale(plan, chosen),
        memory_colours=_used(memory_bars(plan, chosen), memory_name),
        style=style_sheet(),
        time_bars=time_bars(plan, chosen),
        time_colours=[
            (name, colour, PARTS[name]) for name, colour in _used(time_bars(plan, chosen), _time_name)
        ],
        rule=RULE,
        shared_style=(Path(__file__).parents[1] / "simulator" / "page" / "page.css").read_text(
            encoding="utf-8"
        ),
        plot=plot(plan, chosen),
        frame={"left": LEFT, "top": TOP, "width": WIDTH, "height": HEIGHT},
        nodes=nodes(chosen),
        nodes_left=max(0, _node_count(chosen) - NODES),
        stages=[(stage, _stage_colour(stage)) for stage in range(min(chosen.layout.pp, 32))],
        pipeline=pipeline(chosen),
        command=torchrun_command(job),
        job=job,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def _facts(plan: Plan, chosen: Candidate, tokens: float | None, price: float | None) -> list[tuple[str, str]]:
    layout = chosen.layout
    facts = [
        ("step", f"{seconds_text(chosen.seconds)} ({seconds_range(chosen)})"),
        (
            "memory",
            f"{gigabytes(chosen.memory_bytes)} ({memory_range(chosen)}) of {gigabytes(layout.hardware.memory_bytes)}",
        ),
        ("speed", f"{chosen.time.tokens_per_s_per_gpu * layout.gpus:,.0f} tokens/s"),
        ("a GPU", f"{chosen.time.tokens_per_s_per_gpu:,.0f} tokens/s"),
        ("MFU", f"{mfu(chosen):.0%}"),
    ]
    if tokens:
        days, cost = length(chosen, tokens, price)
        facts.append(
            (f"{present.short(tokens)} tokens", f"{days:,.1f} days ({present.days_range(chosen, days)})")
        )
        facts += [] if cost is None else [("cost", f"{cost:,.0f}")]
    facts.append(("priced", f"{len(plan.candidates):,} layouts, {len(plan.fitting):,} fit"))
    return facts


def _shown(plan: Plan, chosen: Candidate) -> tuple[Candidate, ...]:
    """The chosen one, and the best on each of the next topologies."""
    return (chosen, *(one for one in distinct(plan, BARS) if one.topology != chosen.topology))[:BARS]


def _memory_scale(plan: Plan, chosen: Candidate) -> float:
    largest = max(one.memory_bytes for one in _shown(plan, chosen))
    return 1.08 * max(plan.request.hardware.memory_bytes, largest)


def memory_bars(plan: Plan, chosen: Candidate) -> tuple[Bar, ...]:
    """Memory by category, beside the accelerator's."""
    scale = _memory_scale(plan, chosen)
    return tuple(
        _bar(one, one.memory_bytes, one.memory.by_category(), gigabytes, scale, memory_name)
        for one in _shown(plan, chosen)
    )


def time_bars(plan: Plan, chosen: Candidate) -> tuple[Bar, ...]:
    """The step by part."""
    shown = _shown(plan, chosen)
    scale = 1.02 * max(one.seconds for one in shown)
    return tuple(_bar(one, one.seconds, parts(one.time), seconds_text, scale, _time_name) for one in shown)


def _bar(
    candidate: Candidate,
    total: float,
    pieces: Mapping[str, float],
    told: Callable[[float], str],
    scale: float,
    name_of: Callable[[str], str],
) -> Bar:
    """A bar of the pieces that are not nothing; scale: what the whole length stands for."""
    segments = tuple(
        Segment(
            name=name,
            text=f"{name}: {told(size)}",
            share=100 * size / scale,
            colour=f"var(--{name_of(name)})",
        )
        for name, size in pieces.items()
        if size
    )
    return Bar(label=str(candidate), total=told(total), segments=segments)


def _used(bars: Sequence[Bar], name_of: Callable[[str], str]) -> list[tuple[str, str]]:
    """Every part that some bar shows, with its colour."""
    names = dict.fromkeys(segment.name for bar in bars for segment in bar.segments)
    return [(name, f"var(--{name_of(name)})") for name in names]


def _time_name(part: str) -> str:
    return TIME_NAMES.get(part, "world")


def _node_count(candidate: Candidate) -> int:
    return -(-candidate.layout.gpus // candidate.layout.hardware.gpus_per_node)


def nodes(candidate: Candidate) -> tuple[tuple[Cell, ...], ...]:
    """The accelerators of the first nodes, coloured by pipeline stage."""
    layout = candidate.layout
    topology = layout.topology
    each = layout.hardware.gpus_per_node
    drawn = []
    for node in range(min(NODES, _node_count(candidate))):
        cells = []
        for rank in range(node * each, min((node + 1) * each, layout.gpus)):
            place = topology.coordinates(rank)
            cells.append(
                Cell(
                    rank=rank,
                    colour=_stage_colour(place["pp"]),
                    text=f"rank {rank}: replica {place['dp']}, stage {place['pp']}, tensor part {place['tp']}",
                )
            )
        drawn.append(tuple(cells))
    return tuple(drawn)


def _stage_colour(stage: int) -> str:
    return STAGES[stage % len(STAGES)]


def pipeline(candidate: Candidate) -> tuple[str, str] | None:
    """(picture, words) of the schedule with enough microbatches to see its shape; None without a pipeline."""
    layout = candidate.layout
    if layout.pp == 1 or layout.pp > STAGES_DRAWN:
        return None
    schedule = make_schedule(
        layout.plan.schedule,
        layout.pp,
        min(layout.microbatches, 2 * layout.pp),
        layout.virtual_stages,
    )
    return svg(schedule), summary(schedule)
