"""Where a run is, and what a checkpoint must hold of that for a run to go on from it. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triaxis.engine.checkpoint.folder import MANIFEST
from triaxis.engine.checkpoint.manifest import RunState, damaged
from triaxis.engine.loss_scale import LossScale

NUMBERS = (int, float)
FIRST_COUNTERS = ("step", "samples", "tokens", "loss")
WHOLE = (
    *("step", "samples", "tokens", "trained_tokens", "skipped_steps", "skipped_in_a_row", "norms"),
    "overflows",
)
SCALE_KEYS = {"value": float, "patience": int, "clean": int}
SET_KEYS = {"name": str, "fingerprint": str, "weight": int, "begun": int, "taken": int}
ROW_KEYS = ("tokens", "labels", "positions", "documents")


@dataclass(slots=True, kw_only=True)
class Counters:
    """Where a run is, the same on every rank. loss: the latest; skipped_*: updates.

    samples, tokens: consumed, tokens without padding; trained_tokens: those with a loss
    overflows: updates left out since a gradient left fp16's range; the learning rate waits for them
    scale: of losses, with fp16
    norm_average: of the gradient norms of updates, the later the heavier; norms: how many there were
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    loss: float = float("nan")
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    norm_average: float = 0.0
    norms: int = 0
    overflows: int = 0
    scale: LossScale | None = None
    best_eval_loss: float | None = None

    @classmethod
    def restored(cls, state: RunState) -> Counters:
        counts = state.extra["counters"]
        assert isinstance(counts, dict)
        scale = counts.get("scale")
        return cls(**{**counts, "scale": None if scale is None else LossScale(**scale)})


def check_run_state(state: RunState, path: Path) -> None:
    """Raises CheckpointError unless the state of the checkpoint at `path` has all that a run goes on from."""
    extra = state.extra
    if not _is_whole(state.sampler.get("rows")):
        raise _lacks(path, "state.sampler.rows", "a whole number")
    if not _has_sets(state.sampler):
        raise _lacks(path, "state.sampler.sets", "sets of data, each with its weight and its samples")
    facts = extra.get("facts")
    if not isinstance(facts, dict) or not _is_whole(facts.get("global_batch")):
        raise _lacks(path, "state.extra.facts", "what decided the run's numbers, with its global_batch")
    counts = extra.get("counters")
    if not isinstance(counts, dict) or not _counts(counts):
        raise _lacks(path, "state.extra.counters", f"numbers of {', '.join(Counters.__slots__)}")
    row = extra.get("replayed_row")
    if not isinstance(row, dict) or row.keys() != set(ROW_KEYS) or not all(map(_is_row, row.items())):
        raise _lacks(path, "state.extra.replayed_row", f"lists of whole numbers {', '.join(ROW_KEYS)}")


def _lacks(path: Path, key: str, what: str) -> Exception:
    return damaged(path, MANIFEST, f"is no run's to go on from: `{key}` must be {what}")


def _has_sets(sampler: Mapping[str, Any]) -> bool:
    """Whether a sampler has the sets of data that `Mix.saved` writes, or none, as earlier versions do."""
    if "sets" not in sampler:
        return True
    lists = [sampler["sets"], sampler.get("away")]
    if not all(isinstance(entries, list) for entries in lists):
        return False
    whole = all(_is_set(entry) for entries in lists for entry in entries)
    since, samples = sampler.get("since"), sampler.get("samples")
    return whole and type(since) is int and type(samples) is int and 0 <= since <= samples and bool(lists[0])


def _is_set(entry: object) -> bool:
    if not isinstance(entry, dict) or entry.keys() != SET_KEYS.keys():
        return False
    kinds = all(type(entry[key]) is kind for key, kind in SET_KEYS.items())
    return kinds and entry["weight"] > 0 and 0 <= entry["begun"] <= entry["taken"]


def _is_whole(value: object) -> bool:
    return type(value) is int and value >= 0


def _counts(counts: Mapping[str, object]) -> bool:
    """Whether they are counters' numbers. One that came later than the checkpoint may be missing."""
    known = all(name in Counters.__slots__ for name in counts)
    return known and all(name in counts for name in FIRST_COUNTERS) and all(map(_is_count, counts.items()))


def _is_count(item: tuple[str, object]) -> bool:
    name, value = item
    if name in WHOLE:
        return _is_whole(value)
    if name == "scale":
        return value is None or _is_scale(value)
    return isinstance(value, NUMBERS) or (value is None and name == "best_eval_loss")


def _is_scale(value: object) -> bool:
    if not isinstance(value, dict) or value.keys() != SCALE_KEYS.keys():
        return False
    return (
        all(type(value[key]) is kind and value[key] >= 0 for key, kind in SCALE_KEYS.items())
        and value["value"] > 0
    )


def _is_row(item: tuple[str, object]) -> bool:
    name, values = item
    if values is None:
        return name == "documents"
    return isinstance(values, list) and all(type(value) is int for value in values)
