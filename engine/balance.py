"""How evenly a step's tokens were spread over experts, and the biases that move by it: decided on whole numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from triaxis.engine.plan import StepPlan
from triaxis.models.experts import ExpertLayer
from triaxis.parallel.places.topology import Axis
from triaxis.parallel.worlds.mesh import TOKENS, Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How a step's tokens fell on experts. busiest: a layer's busiest expert over its mean, at worst, on every rank
    alike; tokens: int64 per expert over the whole global batch, by the names of this rank's layers."""

    busiest: Tensor
    tokens: dict[str, Tensor]


class Balance:
    """The layers of experts on this rank, in the order of its stages. Making it is collective."""

    def __init__(self, stages: Sequence[nn.Module], mesh: Mesh, plan: StepPlan) -> None:
        self._mesh, self._mixed, self._rate = mesh, plan.model.mixes(), plan.bias_rate
        self.layers = [
            layer for stage in stages for layer in stage.modules() if isinstance(layer, ExpertLayer)
        ]
        for layer in self.layers:
            layer.count(plan.microbatches)
        if self._mixed:  # together, whether this stage has such a layer or not
            self._tokens = mesh.add(TOKENS, mesh.topology.groups(Axis.TP, Axis.CP, Axis.DP))

    @torch.no_grad()
    def settle(self, *, move: bool) -> Load | None:
        """After a step: counts of all ranks that hold other tokens (int64), and, if `move`, the biases by them.

        A skipped step moves nothing. Integers are added exactly in any order, so biases are the same on every layout.
        None for a dense model.
        """
        if not self._mixed:
            return None
        device = self._mesh.world.device
        busiest = torch.zeros((), dtype=torch.float64, device=device)
        tokens: dict[str, Tensor] = {}
        if self.layers:
            sizes = [layer.kind.rule.experts for layer in self.layers]
            counts = torch.cat([layer.tokens_per_expert() for layer in self.layers])
            self._tokens.all_reduce(counts, label="tokens of each expert")
            tokens = {layer.name: row for layer, row in zip(self.layers, counts.split(sizes), strict=True)}
            for layer in self.layers:
                row = tokens[layer.name]
                ratio = row.max().double() * row.numel() / row.sum().clamp_min(1)
                busiest = torch.maximum(busiest, ratio)
                if move:
                    layer.settle(row, self._rate)
        self._mesh.everyone.all_reduce(busiest, largest=True, label="busiest expert")
        return Load(busiest=busiest, tokens=tokens)
