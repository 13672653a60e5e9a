"""Fits each GPU generation's five constants to published runs: python -m triaxis.launch.published.fit [FILE] [--write]

Least absolute error in the logarithm of throughput (reweighted least squares, Gauss-Newton), drawn a little towards
what vendors' kernels are known to reach. Cross-validation fits anew without each source in turn and predicts that
source; the bands that hold 90% of what was measured come from there. Needs numpy; nothing else here does.
"""

from __future__ import annotations

import math
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from triaxis.launch.command_line import Claim, Parser
from triaxis.launch.hardware.hardware import Constants, Hardware, reach
from triaxis.launch.published.cost import step_time
from triaxis.launch.published.rows import Run, read_runs
from triaxis.launch.published.score import SHIPPED, predict

LAUNCH: Final = Path(__file__).parents[1]
NAMES: Final = tuple(field.name for field in fields(Constants))
LOWEST: Final = np.log([0.2, 1e8, 0.05, 0.15, 0.02])
HIGHEST: Final = np.log([0.95, 3e11, 0.9, 1.0, 1.0])
EXPECTED: Final = np.log([0.7, 4e9, 0.45, 0.7, 0.25])
SPREAD: Final = np.array([0.5, 1.5, 0.5, 0.3, 0.8])  # of what is expected, in the logarithm
LEAST_RUNS: Final = 8
SMALL: Final = 0.05  # errors under this count as squares
STEP: Final = 0.02
HEADING: Final = (
    "# Factors on a prediction between which 90% of published measurements lay,\n"
    "# their sources left out of the fit. Written by fit.py.\n"
)

Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A run, its hardware as the data sheet has it, and its weight."""

    run: Run
    sheet: Hardware
    weight: float


def sheet_of(hardware: Hardware) -> Hardware:
    """Undoes `reach` for the memory's rate; the curve is made anew anyway."""
    return replace(
        hardware, memory_bytes_per_s=hardware.memory_bytes_per_s / hardware.constants.memory_fraction
    )


def residuals(point: Vector, items: Sequence[Item]) -> Vector:
    """Logarithm of predicted over measured throughput."""
    constants = Constants(**dict(zip(NAMES, np.exp(point).tolist(), strict=True)))
    return np.array(
        [
            np.log(
                step_time(
                    replace(item.run.layout, hardware=reach(item.sheet, constants))
                ).tokens_per_s_per_gpu
                / (item.run.measured_tokens_per_s_per_gpu or 1.0)
            )
            for item in items
        ]
    )


def _loss(errors: Vector, weights: Vector, point: Vector) -> float:
    sizes = np.abs(errors)
    kept = np.where(sizes < SMALL, sizes**2 / (2 * SMALL), sizes - SMALL / 2)
    return float(np.sum(weights * kept) + 0.3 * np.sum(((point - EXPECTED) / SPREAD) ** 2))


def fit(items: Sequence[Item], point: Vector, rounds: int = 20) -> Vector:
    """The best constants' logarithms, from `point` on."""
    weights = np.array([item.weight for item in items])
    errors, damping = residuals(point, items), 1e-2
    loss = _loss(errors, weights, point)
    for _ in range(rounds):
        slopes = np.stack(
            [(residuals(point + STEP * unit, items) - errors) / STEP for unit in np.eye(len(NAMES))],
            axis=1,
        )
        weighted = slopes * (weights / np.maximum(np.abs(errors), SMALL))[:, None]
        square = weighted.T @ slopes + np.diag(0.6 / SPREAD**2)
        slope = weighted.T @ errors + 0.6 * (point - EXPECTED) / SPREAD**2
        before = loss
        for _ in range(5):
            move = np.linalg.solve(square + damping * np.diag(np.diag(square)), slope)
            trial = np.clip(point - move, LOWEST, HIGHEST)
            trial_errors = residuals(trial, items)
            trial_loss = _loss(trial_errors, weights, trial)
            if trial_loss < loss:
                point, errors, loss = trial, trial_errors, trial_loss
                damping = max(damping / 5, 1e-4)
                break
            damping *= 5
        if before - loss < 1e-3 * before:
            break
    return point


def by_generation(runs: Sequence[Run]) -> dict[str, list[Item]]:
    """Complete runs of each generation; dense 16-bit ones weigh twice the others."""
    groups: dict[str, list[Item]] = {}
    for run in runs:
        if run.complete_throughput and run.measured_tokens_per_s_per_gpu:
            hardware = run.layout.hardware
            weight = 1.0 if run.dense and run.sixteen_bit else 0.5
            item = Item(run=run, sheet=sheet_of(hardware), weight=weight)
            groups.setdefault(hardware.generation, []).append(item)
    return groups


def start_of(items: Sequence[Item]) -> Vector:
    """The constants as they are."""
    constants = items[0].run.layout.hardware.constants
    return np.log([getattr(constants, name) for name in NAMES])


def left_out(items: Sequence[Item], point: Vector) -> list[tuple[Run, float]]:
    """Every run with its residual when its source was not in the fit."""
    found: list[tuple[Run, float]] = []
    for source in dict.fromkeys(item.run.source for item in items):
        others = [item for item in items if item.run.source != source]
        own = [item for item in items if item.run.source == source]
        constants = fit(others, point, rounds=6) if len(others) >= LEAST_RUNS else EXPECTED
        errors = residuals(constants, own)
        found += [(item.run, float(error)) for item, error in zip(own, errors, strict=True)]
    return found


def _band(name: str, ratios: Sequence[float]) -> str:
    """TOML of the factors between which 90% of `ratios`, measured over predicted, lie."""
    low, high = np.quantile(np.array(ratios), [0.05, 0.95])
    return f"[{name}]\nlow = {math.floor(100 * low) / 100}\nhigh = {math.ceil(100 * high) / 100}\n"


def _percentages(errors: Sequence[float]) -> str:
    sizes = [abs(np.expm1(error)) for error in errors]
    return f"mean {statistics.mean(sizes):.1%}, median {statistics.median(sizes):.1%} ({len(sizes)} rows)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints constants, errors and bands; writes constants.toml and errors.toml if asked."""
    parser = Parser(prog="triaxis.launch.published.fit", description=__doc__)
    parser.add_argument(
        "file", nargs="?", type=Path, default=SHIPPED, help="published runs (default: the shipped ones)"
    )
    parser.add_argument("--write", action=Claim, help="write constants.toml and errors.toml")
    options = parser.parse_args(arguments)
    runs, _ = read_runs(options.file)
    text = (LAUNCH / "hardware" / "constants.toml").read_text(encoding="utf-8")
    held: list[tuple[Run, float]] = []
    for generation, items in by_generation(runs).items():
        if len(items) < LEAST_RUNS:
            held += [
                (item.run, float(e)) for item, e in zip(items, residuals(start_of(items), items), strict=True)
            ]
            continue
        point = fit(items, start_of(items))
        lines = "\n".join(f"{name} = {value:.3g}" for name, value in zip(NAMES, np.exp(point), strict=True))
        print(
            f"[{generation}]\n{lines}\nfitted: {_percentages(residuals(point, items).tolist())}\n", flush=True
        )
        text = re.sub(rf"(?ms)^\[{generation}\]\n.*?(?=^\s*$|\Z)", f"[{generation}]\n{lines}\n", text)
        held += left_out(items, point)
    dense = [error for run, error in held if run.dense and run.sixteen_bit]
    print(f"sources left out, dense 16 bits: {_percentages(dense)}")
    print(f"sources left out, all: {_percentages([error for _, error in held])}\n")
    bands = [
        _band(f"time_{kind}", [float(np.exp(error)) for run, error in held if run.layout.kind == kind])
        for kind in ("dense", "low_precision", "experts")
    ]
    spaces = [predict(run).memory_error for run in runs if run.complete_memory]
    bands.append(_band("memory", [1 / (1 + error) for error in spaces if error is not None]))
    print("\n".join(bands))
    if options.write:
        (LAUNCH / "hardware" / "constants.toml").write_text(text, encoding="utf-8")
        (LAUNCH / "planner" / "errors.toml").write_text("\n".join([HEADING, *bands]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
