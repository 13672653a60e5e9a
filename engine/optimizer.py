"""The update: torch's fused functions over runs of each bucket's master shard; it knows nothing of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim.adamw import (
    adamw,  # the functions, not the classes: a class imports torch's compiler, a second a rank
)
from torch.optim.sgd import sgd

from triaxis.engine.plan import Rule, UpdateRule
from triaxis.engine.state_files import StateFiles
from triaxis.parallel.replicas.data_parallel import Shard

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(slots=True)
class Run:
    """A part [start, stop) of a bucket's master shard that is updated alike. state: empty until it is asked for."""

    master: Tensor
    start: int
    stop: int
    state: dict[str, Tensor] = field(default_factory=dict)
    files: StateFiles | None = None

    def adam_state(self) -> dict[str, Tensor]:
        """The counter of updates and the moments that AdamW keeps, zeros at first."""
        if not self.state:
            self.state["step"] = torch.zeros((), dtype=torch.float32, device=self.master.device)
            zeros_like = torch.zeros_like if self.files is None else self.files.zeros_like
            self.state |= {name: zeros_like(self.master) for name in MOMENTS}
        return self.state


Update = Callable[[UpdateRule, Sequence[Run], list[Tensor], float, float], None]


def _adamw(rule: UpdateRule, runs: Sequence[Run], gradients: list[Tensor], rate: float, decay: float) -> None:
    states = [run.adam_state() for run in runs]
    adamw(
        [run.master for run in runs],
        gradients,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        fused=True,
        amsgrad=False,
        beta1=rule.betas[0],
        beta2=rule.betas[1],
        lr=rate,
        weight_decay=decay,
        eps=rule.epsilon,
        maximize=False,
    )


def _sgd(rule: UpdateRule, runs: Sequence[Run], gradients: list[Tensor], rate: float, decay: float) -> None:
    sgd(
        [run.master for run in runs],
        gradients,
        [None for _ in runs],
        fused=True,
        weight_decay=decay,
        momentum=0.0,
        lr=rate,
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )


OPTIMIZERS: dict[Rule, Update] = {Rule.ADAMW: _adamw, Rule.SGD: _sgd}


def _runs(bucket: Shard, decayed: bool, files: StateFiles | None) -> list[Run]:
    """The longest runs of the shard with this weight decay; padding belongs to none."""
    borders: list[tuple[int, int, bool]] = []
    for segment in bucket.segments:
        if borders and borders[-1][1:] == (segment.start, segment.layout.decayed):
            borders[-1] = (borders[-1][0], segment.stop, segment.layout.decayed)
        else:
            borders.append((segment.start, segment.stop, segment.layout.decayed))
    master = bucket.master.detach()
    return [
        Run(master[start:stop], start, stop, files=files) for start, stop, kind in borders if kind is decayed
    ]


class ShardOptimizer:
    """Updates every bucket's master shard from its gradient shard. steps: updates done.

    files: where moments, and masters that are not the parameters themselves, are kept; None: in memory
    """

    def __init__(self, buckets: Sequence[Shard], rule: UpdateRule, files: StateFiles | None = None) -> None:
        self._rule, self._files, self.steps = rule, files, 0
        if files is not None:
            for bucket in buckets:
                bucket.move_master(files.moved)
        self._runs = [
            (bucket, [(decayed, _runs(bucket, decayed, files)) for decayed in (True, False)])
            for bucket in buckets
        ]
        if files is not None:  # room that is missing is missed now, not at the first update
            for _ in self.moments():
                pass

    @torch.no_grad()
    def step(self, learning_rate: float, coefficient: Tensor) -> None:
        """One update, gradients first multiplied by `coefficient` (a scalar tensor)."""
        self.steps += 1
        update = OPTIMIZERS[self._rule.name]
        for bucket, groups in self._runs:
            if not any(runs for _, runs in groups):
                continue
            gradient = bucket.gradient_shard.mul_(coefficient).to(bucket.master.dtype)
            for decayed, runs in groups:
                if runs:
                    gradients = [gradient[run.start : run.stop] for run in runs]
                    update(
                        self._rule,
                        runs,
                        gradients,
                        learning_rate,
                        self._rule.weight_decay if decayed else 0.0,
                    )
            if self._files is not None:
                held = (run for _, runs in groups for run in runs)
                self._files.let_go(tensor for run in held for tensor in (run.master, *run.state.values()))

    def _every_run(self) -> Iterator[tuple[Shard, Run]]:
        for bucket, groups in self._runs:
            for _, runs in groups:
                yield from ((bucket, run) for run in runs)

    def moments(self) -> Iterator[tuple[Shard, int, int, dict[str, Tensor]]]:
        """Each run [start, stop) of a shard and its moments by name, zeros before the first step; SGD has none."""
        for bucket, run in self._every_run():
            state = run.adam_state() if self._rule.name == Rule.ADAMW else {}
            yield bucket, run.start, run.stop, {name: state[name] for name in MOMENTS if name in state}

    def counters(self) -> list[Tensor]:
        """Each run's counter of updates, which bias correction uses (fp32 scalars); none before the first update."""
        return [run.state["step"] for _, run in self._every_run() if "step" in run.state]

    def resume_at(self, steps: int) -> None:
        """The moments are those after `steps` updates."""
        self.steps = steps
        for counter in self.counters():
            counter.fill_(steps)

    def state_bytes(self) -> int:
        """Bytes of the moments."""
        return sum(
            run.state[name].nbytes for _, run in self._every_run() for name in MOMENTS if name in run.state
        )
