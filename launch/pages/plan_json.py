"""A plan as JSON for programs. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from triaxis.launch.hardware.hardware import Hardware
from triaxis.launch.planner.explain import Explanation, difference, parts
from triaxis.launch.planner.reprice import Repriced
from triaxis.launch.planner.search import Candidate, Plan
from triaxis.launch.planner.table import Row
from triaxis.launch.published.memory_tables import Need, States
from triaxis.launch.published.recommended import Recommendation
from triaxis.models.config import ModelConfig

DAY_SECONDS = 86400.0


def mfu(candidate: Candidate) -> float:
    """Model FLOPs over the accelerators' peak (causal attention counted by half, recompute not counted)."""
    layout = candidate.layout
    plan = layout.plan
    flops = plan.model.flops_per_token(plan.attended_tokens)
    return flops * candidate.time.tokens_per_s_per_gpu / layout.hardware.peak(plan.dtype)


def length(candidate: Candidate, tokens: float, price: float | None) -> tuple[float, float | None]:
    """(days, cost) of training on `tokens`; price: of one accelerator for an hour."""
    layout = candidate.layout
    seconds = tokens / (candidate.time.tokens_per_s_per_gpu * layout.gpus)
    return seconds / DAY_SECONDS, None if price is None else price * layout.gpus * seconds / 3600


def reason(row: Row) -> str:
    """Why the planner's own best differs from the row, or that it does not."""
    if row.best is None:
        return "nothing fits"
    if row.best.topology == row.candidate.topology:
        return "the same topology"
    if not row.candidate.fits:
        return "the row does not fit"
    return f"the row takes {difference(row.best, row.candidate)}"


def candidate_json(candidate: Candidate) -> dict[str, Any]:
    """Everything about one layout, in bytes and seconds; the ranges held nine of ten published runs."""
    layout = candidate.layout
    return {
        "dp": layout.dp,
        "tp": layout.tp,
        "pp": layout.pp,
        "zero": layout.zero,
        "microbatch": layout.microbatch,
        "recompute": layout.recomputes,
        "schedule": str(layout.plan.schedule) if layout.pp > 1 else None,
        "virtual_stages": layout.virtual_stages,
        "sp": layout.plan.sequence_parallel,
        "memory_bytes": candidate.memory_bytes,
        "memory_range_bytes": list(candidate.memory_range),
        "memory": candidate.memory.by_category(),
        "fits": candidate.fits,
        "fits_surely": candidate.fits_surely,
        "step_seconds": candidate.seconds,
        "step_range_seconds": list(candidate.seconds_range),
        "time": parts(candidate.time),
        "tokens_per_s_per_gpu": candidate.time.tokens_per_s_per_gpu,
        "mfu": mfu(candidate),
    }


def row_json(row: Row, published: Iterable[Recommendation]) -> dict[str, Any]:
    """A row of the decision table."""
    return {
        "model": row.size.name,
        "gpus": row.size.gpus,
        "parameters": row.size.model.parameters(),
        "note": row.size.note,
        **candidate_json(row.candidate),
        "best": None if row.best is None else candidate_json(row.best),
        "reason": reason(row),
        "published": [one.as_json() for one in published],
    }


def plan_json(
    plan: Plan, chosen: Candidate | None, command: str | None, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """A whole plan; `chosen` None where nothing fits."""
    request = plan.request
    return {
        "request": {
            "model": request.name,
            "parameters": request.model.parameters(),
            "gpus": request.gpus,
            "hardware": request.hardware.name,
            "memory_bytes": request.hardware.memory_bytes,
            "seq": request.seq,
            "document_tokens": request.document_tokens,
            "mtp_depths": request.model.depths,
            "global_batch": request.global_batch,
            "dtype": request.dtype,
        },
        "priced": len(plan.candidates),
        "fitting": len(plan.fitting),
        "best": None if chosen is None else candidate_json(chosen),
        "pareto": [candidate_json(one) for one in plan.pareto],
        "command": command,
        **extra,
    }


def memory_json(
    model: ModelConfig, gpus: int, hardware: Hardware, states: Iterable[States], needs: Iterable[Need]
) -> dict[str, Any]:
    """The memory tables."""
    parts_of = ("engine", "stage", "name", "parameters", "gradients", "optimizer", "buffers", "total")
    return {
        "model": model.name,
        "gpus": gpus,
        "hardware": hardware.name,
        "states": [{part: getattr(one, part) for part in parts_of} for one in states],
        "needs": [
            {
                "model": need.name,
                "parameters": need.model.parameters(),
                "least": None if need.least is None else need.least.layout.gpus,
                "recommended": None if need.recommended is None else need.recommended.layout.gpus,
            }
            for need in needs
        ],
    }


def explanation_json(found: Explanation) -> dict[str, Any]:
    """Why one layout lost."""
    return {
        "wish": dict(found.wish),
        "verdict": found.verdict,
        "layout": None if found.candidate is None else candidate_json(found.candidate),
    }


def repriced_json(found: Repriced) -> dict[str, Any]:
    """A layout priced again by simulation, beside the closed forms."""
    return {
        "layout": candidate_json(found.candidate),
        "proved": found.proved,
        "works": found.works,
        "memory_bytes": found.memory_bytes,
        "allocated_bytes": found.allocated_bytes,
        "step_seconds": found.seconds,
    }
