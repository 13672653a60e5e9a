"""The ranks that hold the same parameters, and what their messages cost. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from triaxis.launch.simulator.timeline import Prices
from triaxis.parallel.programs.operation import Operation
from triaxis.parallel.programs.program import Communicate, Compute
from triaxis.parallel.replicas.cut import Sharding


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """The ranks that hold the same, what they shard, and the bytes of an element of weights and of gradients."""

    prices: Prices
    ranks: tuple[int, ...]
    sharding: Sharding
    weight_bytes: int
    gradient_bytes: int

    def message(self, operation: Operation, elements: int) -> float:
        """Seconds of one: all_gather of parameters; all_reduce or reduce_scatter of gradients."""
        each = self.weight_bytes if operation is Operation.ALL_GATHER else self.gradient_bytes
        event = Communicate(operation, "dp", "", elements, elements * each)
        return self.prices.message(event, self.ranks, 0)

    def reduction(self, elements: int) -> tuple[float, float]:
        """Seconds of a reduction, and of adding this rank's share to those of the microbatches before."""
        if not self.sharding.gradients:
            operation = Operation.REDUCE_SCATTER if self.sharding.states else Operation.ALL_REDUCE
            return self.message(operation, elements), 0.0
        share = self.gradient_bytes * elements // len(self.ranks)
        added = self.prices.operation(Compute("add_", "", 0, 2 * share, share))
        return self.message(Operation.REDUCE_SCATTER, elements), added
