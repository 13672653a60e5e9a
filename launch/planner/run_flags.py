"""A priced layout as flags of triaxis.launch.train, and a model as a file that --model takes. No torch."""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, fields

from triaxis.launch.planner.search import Candidate, Request
from triaxis.models.config import ModelConfig
from triaxis.models.fields import DenseFields, fields_of


def run_flags(request: Request, candidate: Candidate, tokens: float | None = None) -> tuple[str, ...]:
    """The flags that start this layout; tokens: the run's length, in whole steps."""
    layout = candidate.layout
    flags = [
        *("--model", request.name, "--seq", str(request.seq), "--global_batch", str(request.global_batch)),
        *("--per_device_train_batch_size", str(layout.microbatch)),
        *("--tp", str(layout.tp), "--pp", str(layout.pp), "--dp", str(layout.dp), "--zero", str(layout.zero)),
        *("--dtype", str(request.dtype)),
    ]
    if layout.plan.sequence_parallel:
        flags.append("--sp")
    if layout.recomputes:
        flags.append("--recompute")
    if layout.virtual_stages > 1:
        flags += ["--schedule", "interleaved", "--virtual_stages", str(layout.virtual_stages)]
    if request.model.depths:
        flags += ["--mtp_depths", str(request.model.depths)]
    if tokens is not None:
        flags += ["--steps", str(math.ceil(tokens / (request.global_batch * request.seq)))]
    return tuple(flags)


def model_toml(model: ModelConfig) -> str:
    """The model's fields, those that are not the default, as TOML."""
    lines = []
    flat = fields_of(model)
    for field in fields(DenseFields):
        value = getattr(flat, field.name)
        if isinstance(value, dict):
            pairs = ", ".join(f"{k} = {json.dumps(v)}" for k, v in value.items() if v is not None)
            lines.append(f"{field.name} = {{ {pairs} }}")
        elif field.default is MISSING or value != field.default:
            lines.append(f"{field.name} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"
