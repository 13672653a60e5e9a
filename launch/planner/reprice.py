"""The best of a search priced again by the engine's own program: traced, proved and timed. Imports torch when asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from triaxis.launch.planner.search import Candidate, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Repriced:
    """A candidate and its price by simulation. proved: the ranks' programs fit together; without it no time is known.

    memory_bytes: of the device, reserved and context; allocated_bytes: of tensors, at the peak
    """

    candidate: Candidate
    memory_bytes: float
    allocated_bytes: float
    seconds: float | None
    proved: bool

    @property
    def works(self) -> bool:
        return self.proved and self.memory_bytes <= self.candidate.layout.hardware.memory_bytes


def reprice(candidate: Candidate) -> Repriced:
    """The layout's step as the simulator runs it; several seconds for a large model."""
    from triaxis.launch.simulator.run import simulate_run  # imports torch

    layout = candidate.layout
    found = simulate_run(layout.plan, layout.topology, layout.hardware)
    return Repriced(
        candidate=candidate,
        memory_bytes=float(found.needed_bytes),
        allocated_bytes=float(max(use.peak_bytes for use in found.memory.values())),
        seconds=None if found.timeline is None else found.timeline.seconds,
        proved=found.proof.holds,
    )


def reprice_best(plan: Plan, count: int, tell: Callable[[str], None]) -> tuple[Repriced, ...]:
    """The best on each of the `count` best topologies, priced again; those that work first, the fastest of them first.

    tell: hears which is under way.
    """
    found: list[Repriced] = []
    chosen = distinct(plan, count)
    for number, candidate in enumerate(chosen, 1):
        tell(f"simulating {number} of {len(chosen)}: {candidate}")
        found.append(reprice(candidate))
    return tuple(sorted(found, key=lambda one: (not one.works, one.seconds or 0.0)))


def distinct(plan: Plan, count: int) -> Sequence[Candidate]:
    """The plan's best, and the best on each of the next topologies."""
    best = [plan.best] if plan.best is not None else []
    found = {one.topology: one for one in best}
    for one in plan.fitting:
        found.setdefault(one.topology, one)
    return tuple(found.values())[:count]
