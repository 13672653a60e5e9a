"""How far predictions are from published measurements: bands that held 90% of them. Standard library only.

The bands come from runs whose source was left out when the constants were fitted (fit.py writes errors.toml).
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Factors on a prediction between which 90% of measurements lay."""

    low: float
    high: float


def time_band(kind: str) -> Band:
    """Of a step's time. kind: of run, "dense", "experts" or "low_precision"."""
    return _bands()[f"time_{kind}"]


def memory_band() -> Band:
    """Of the fullest rank's memory; the same for every kind of run."""
    return _bands()["memory"]


@cache
def _bands() -> dict[str, Band]:
    text = (Path(__file__).parent / "errors.toml").read_text(encoding="utf-8")
    return {name: Band(**values) for name, values in tomllib.loads(text).items()}
