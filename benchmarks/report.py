"""What the measurements say: medians with their spread, ratios round by round, a table and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cases import Case
from benchmarks.stacks import OURS, Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A figure over the rounds."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f}–{self.most:.2f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A figure of a run, and whether more is better. scale, unit: how the table prints it."""

    name: str
    unit: str
    scale: float
    more_is_better: bool
    value: Callable[[Case, Measurement], float]


QUANTITIES = (
    Quantity(
        name="tokens_per_cpu_second",
        unit="tokens/CPU-s",
        scale=1.0,
        more_is_better=True,
        value=lambda case, run: case.tokens_per_step / run.cpu_seconds,
    ),
    Quantity(
        name="tokens_per_second",
        unit="tokens/s",
        scale=1.0,
        more_is_better=True,
        value=lambda case, run: case.tokens_per_step / run.step_seconds,
    ),
    Quantity(
        name="peak_rss_bytes",
        unit="peak MiB/rank",
        scale=2.0**-20,
        more_is_better=False,
        value=lambda case, run: float(run.peak_rss_bytes),
    ),
)

Rounds = dict[str, list[Measurement | None]]  # by stack; None where a run failed


def spread(values: Sequence[float]) -> Spread:
    return Spread(median=statistics.median(values), least=min(values), most=max(values))


def ratios(case: Case, rounds: Rounds, peer: str, quantity: Quantity) -> Spread | None:
    """Ours over the peer's, each round against the peer's run of that round; None without a whole one."""
    pairs = zip(rounds.get(OURS, []), rounds.get(peer, []), strict=False)
    found = [quantity.value(case, a) / quantity.value(case, b) for a, b in pairs if a and b]
    return spread(found) if found else None


def case_report(case: Case, rounds: Rounds) -> dict[str, object]:
    """Everything about one case, for JSON."""
    stacks: dict[str, object] = {}
    for name, runs in rounds.items():
        done = [run for run in runs if run]
        if not done:
            continue
        figures = {q.name: _plain(spread([q.value(case, run) for run in done])) for q in QUANTITIES}
        over = {q.name: ratios(case, rounds, name, q) for q in QUANTITIES} if name != OURS else {}
        stacks[name] = {
            **figures,
            "step_over_its_products": _plain(spread(floor)) if (floor := over_products(done)) else None,
            "sent_bytes_per_step": done[-1].sent_bytes,
            "losses": [done[-1].first_loss, done[-1].last_loss],
            "ours_over_it": {key: _plain(value) for key, value in over.items() if value},
        }
    size, layout = case.size, case.layout
    return {
        "hidden": size.hidden,
        "layers": size.layers,
        "dtype": case.dtype,
        "layout": {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp},
        "tokens_per_step": case.tokens_per_step,
        "stacks": stacks,
    }


def case_table(case: Case, rounds: Rounds) -> str:
    """The case for a terminal: a line for each stack, its figures and, after ×, ours over the peer's."""
    lines = [f"{case.title}: {case.tokens_per_step} tokens a step; median, and ours ÷ theirs (least–most)"]
    for name, runs in rounds.items():
        done = [run for run in runs if run]
        if not done:
            lines.append(f"  {name:<10} failed")
            continue
        cells = []
        for quantity in QUANTITIES:
            middle = statistics.median(quantity.value(case, run) for run in done) * quantity.scale
            ratio = ratios(case, rounds, name, quantity) if name != OURS else None
            cells.append(f"{middle:9.0f} {quantity.unit} {f'×{ratio}' if ratio else '':<18}")
        lines.append(f"  {name:<10}" + " ".join(cells) + _bytes_cell(done[-1]) + _floor_cell(done))
    return "\n".join(lines)


def over_products(runs: Sequence[Measurement]) -> list[float]:
    """CPU seconds of a step over those of its matrix products alone, in the same run."""
    return [run.cpu_seconds / run.product_seconds for run in runs if run.product_seconds]


def _floor_cell(runs: Sequence[Measurement]) -> str:
    found = over_products(runs)
    return f"; {spread(found)} × its products" if found else ""


def _bytes_cell(run: Measurement) -> str:
    if run.sent_bytes is None:
        return ""
    cells = [f"{name} {count / 2**20:.2f}" for name, count in sorted(run.sent_bytes.items())]
    return f" sent, MiB a step over ranks: {', '.join(cells) or 'none'}"


def _plain(value: Spread) -> dict[str, float]:
    return {"median": value.median, "min": value.least, "max": value.most}


def draw(results: Sequence[tuple[Case, Rounds]], path: Path) -> None:
    """A panel for each quantity: ours over each peer's for every case, with the spread; above 1 is more."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.5 + 1.3 * len(results), 9), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(QUANTITIES), 1, sharex=True, squeeze=False)[:, 0]
    peers = list(dict.fromkeys(name for _, rounds in results for name in rounds if name != OURS))
    width = 0.8 / max(1, len(peers))
    for axes, quantity in zip(panels, QUANTITIES, strict=True):
        for number, peer in enumerate(peers):
            found = [
                (place, ratios(case, rounds, peer, quantity)) for place, (case, rounds) in enumerate(results)
            ]
            bars = [(place, ratio) for place, ratio in found if ratio]
            axes.bar(
                [place + (number - (len(peers) - 1) / 2) * width for place, _ in bars],
                [ratio.median for _, ratio in bars],
                width,
                yerr=(
                    [ratio.median - ratio.least for _, ratio in bars],
                    [ratio.most - ratio.median for _, ratio in bars],
                ),
                label=peer,
            )
        axes.axhline(1.0, color="black", linewidth=1)
        better = "more" if quantity.more_is_better else "less"
        axes.set_ylabel(f"{quantity.unit}\nours ÷ theirs ({better} is better)")
    panels[0].legend()
    labels = [f"h{case.size.hidden}\n{case.dtype}\n{case.layout}" for case, _ in results]
    panels[-1].set_xticks(range(len(labels)), labels)
    panels[-1].set_xlabel("hidden size, and tp,pp,dp")
    figure.savefig(path, dpi=120)
