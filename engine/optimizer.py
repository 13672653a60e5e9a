"""The update: one torch optimizer per bucket over runs of its master shard, fused; it knows nothing of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from triaxis.engine.plan import Rule, UpdateRule
from triaxis.parallel.replicas.data_parallel import Shard

MOMENTS = ("exp_avg", "exp_avg_sq")


def _adamw(rule: UpdateRule, groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.0, betas=rule.betas, eps=rule.epsilon, fused=True)


def _sgd(rule: UpdateRule, groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.0, fused=True)


OPTIMIZERS = {Rule.ADAMW: _adamw, Rule.SGD: _sgd}


def _runs(bucket: Shard) -> list[tuple[int, int, bool]]:
    """The shard's longest runs (start, stop, decayed); padding belongs to none."""
    runs: list[tuple[int, int, bool]] = []
    for segment in bucket.segments:
        decayed = segment.layout.decayed
        if runs and runs[-1][1] == segment.start and runs[-1][2] == decayed:
            runs[-1] = (runs[-1][0], segment.stop, decayed)
        else:
            runs.append((segment.start, segment.stop, decayed))
    return runs


def _adam_state(optimizer: torch.optim.Optimizer, master: Tensor) -> dict[str, Tensor]:
    """The state that torch's fused AdamW keeps of a tensor, made as it would make it."""
    state: dict[str, Tensor] = optimizer.state[master]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
        state |= {name: torch.zeros_like(master) for name in MOMENTS}
    return state


class ShardOptimizer:
    """Updates every bucket's master shard from its gradient shard. steps: updates done."""

    def __init__(self, buckets: Sequence[Shard], rule: UpdateRule) -> None:
        self._rule, self.steps = rule, 0
        self._updates: list[tuple[Shard, torch.optim.Optimizer, list[tuple[Tensor, int, int]]]] = []
        for bucket in buckets:
            groups: list[dict[str, object]] = []
            places: list[tuple[Tensor, int, int]] = []
            for decayed in (True, False):
                runs = [run for run in _runs(bucket) if run[2] is decayed]
                masters = [bucket.master.detach()[start:stop] for start, stop, _ in runs]
                places += [(m, start, stop) for m, (start, stop, _) in zip(masters, runs, strict=True)]
                if masters:
                    groups.append({"params": masters, "weight_decay": rule.weight_decay if decayed else 0.0})
            if groups:
                self._updates.append((bucket, OPTIMIZERS[rule.name](rule, groups), places))

    @torch.no_grad()
    def step(self, learning_rate: float, coefficient: Tensor) -> None:
        """One update, gradients first multiplied by `coefficient` (a scalar tensor)."""
        self.steps += 1
        for bucket, optimizer, places in self._updates:
            gradient = bucket.gradient_shard.mul_(coefficient).to(bucket.master.dtype)
            for master, start, stop in places:
                master.grad = gradient[start:stop]
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()
            for master, _, _ in places:
                master.grad = None

    def moments(self) -> Iterator[tuple[Shard, int, int, dict[str, Tensor]]]:
        """Each run [start, stop) of a shard and its moments by name, zeros before the first step; SGD has none."""
        for bucket, optimizer, places in self._updates:
            for master, start, stop in places:
                state = _adam_state(optimizer, master) if self._rule.name == "adamw" else {}
                yield bucket, start, stop, {name: state[name] for name in MOMENTS if name in state}

    def resume_at(self, steps: int) -> None:
        """The moments are those after `steps` updates."""
        self.steps = steps
        for _, optimizer, _ in self._updates:
            for state in optimizer.state.values():
                if "step" in state:
                    state["step"].fill_(steps)

    def state_bytes(self) -> int:
        """Bytes of the moments."""
        return sum(
            value.nbytes
            for _, optimizer, _ in self._updates
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor) and value.dim() > 0
        )
