"""A layout to price: the step's plan, what it is spread over, and the hardware under it. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triaxis.engine.plan import StepPlan
from triaxis.launch.hardware.hardware import Hardware
from triaxis.parallel.places.topology import Axis, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One way to train a model on accelerators."""

    plan: StepPlan
    topology: Topology
    hardware: Hardware

    @property
    def dp(self) -> int:
        return self.topology.dp

    @property
    def tp(self) -> int:
        return self.topology.tp

    @property
    def pp(self) -> int:
        return self.topology.pp

    @property
    def gpus(self) -> int:
        """Accelerators."""
        return self.topology.world_size

    @property
    def zero(self) -> int:
        return self.plan.zero

    @property
    def microbatch(self) -> int:
        """Sequences of one microbatch."""
        return self.plan.microbatch_size

    @property
    def microbatches(self) -> int:
        """Of one step on each rank."""
        return self.plan.microbatches

    @property
    def virtual_stages(self) -> int:
        return self.plan.virtual_stages

    @property
    def recomputes(self) -> bool:
        return self.plan.recompute.repeats_layers

    @property
    def step_tokens(self) -> int:
        """Tokens of one step on all ranks."""
        plan = self.plan
        return self.dp * plan.microbatches * plan.microbatch_size * plan.sequence_length

    def group(self, axis: str) -> Sequence[int]:
        """The ranks of the first rank's group on one axis."""
        stride = 1
        for inner in self.topology.axes:
            if inner == Axis(axis):
                break
            stride *= self.topology.size(inner)
        return range(0, stride * self.topology.size(axis), stride)
