"""What would do where nothing fits: more of these accelerators, or larger ones. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from triaxis.launch.hardware.hardware import hardware_names, load_hardware
from triaxis.launch.pages.plan_json import candidate_json
from triaxis.launch.planner.explain import gigabytes
from triaxis.launch.planner.search import Candidate, Plan, Request, lightest
from triaxis.launch.published.memory_tables import least_accelerators


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """lightest: what needs least of all layouts asked for; least: the fewest of these accelerators that do, if 16,384
    do; larger: presets of which as many as asked for do"""

    plan: Plan
    lightest: Candidate
    least: Candidate | None
    larger: tuple[str, ...]

    def as_json(self) -> Mapping[str, Any]:
        return {
            "lightest": candidate_json(self.lightest),
            "least_gpus": None if self.least is None else self.least.layout.gpus,
            "needed_bytes_per_gpu": self.lightest.memory_bytes,
            "hardware_that_fits": list(self.larger),
        }

    def __str__(self) -> str:
        request, light = self.plan.request, self.lightest
        hardware = request.hardware
        many = f"more than 16,384 × {hardware.name}"
        if self.least is not None:
            each = gigabytes(self.least.memory_bytes)
            many = f"{self.least.layout.gpus:,} × {hardware.name} ({self.least}, {each} each)"
        such = f"such as {', '.join(self.larger[:4])}" if self.larger else "which none of the presets has"
        return (
            f"{request.model.name} with {request.seq:,} tokens a sequence does not fit on {request.gpus:,} × "
            f"{hardware.name} ({gigabytes(hardware.memory_bytes)}): the lightest of {len(self.plan.candidates):,} "
            f"layouts, {light}, needs {gigabytes(light.memory_bytes)} a GPU.\n"
            f"The least that would do: {many}; or {request.gpus:,} GPUs of {gigabytes(light.memory_bytes)}, {such}."
        )


def shortfall(plan: Plan) -> Shortfall:
    """For a plan in which nothing fits."""
    request = plan.request
    return Shortfall(
        plan=plan,
        lightest=lightest(request)[0],
        least=least_accelerators(request.model, request.name, request.hardware, request.seq, request.dtype),
        larger=tuple(name for name in hardware_names() if _fits_on(request, name)),
    )


def _fits_on(request: Request, name: str) -> bool:
    other = load_hardware(name)
    if other.memory_bytes <= request.hardware.memory_bytes or request.dtype not in other.peak_flops:
        return False
    return any(one.fits for one in lightest(replace(request, hardware=other)))
