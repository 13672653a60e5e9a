"""One optimizer step on one rank: microbatches through the pipeline, gradients summed, clipped, applied.

batches → token count (world) → forwards and backwards by the schedule (tp, pp; dp overlapped)
        → sums over dp, tp and tied stages → norm and loss (world) → update of the shards → publish (dp)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from triaxis.engine.balance import Balance, Load
from triaxis.engine.config import ConfigError
from triaxis.engine.config import DataParallel as DataParallelKind
from triaxis.engine.optimizer import ShardOptimizer
from triaxis.engine.plan import Precision, StepPlan, stage_layers
from triaxis.engine.state_files import StateFiles
from triaxis.models.batch import Batch, Inputs, Output
from triaxis.models.stage import ModelStage, build_stage
from triaxis.parallel.kernels.table import read_choice
from triaxis.parallel.layers.build import Build
from triaxis.parallel.layers.declare import states_of
from triaxis.parallel.layers.gradient import Deferred
from triaxis.parallel.pipeline.executor import PipelineExecutor
from triaxis.parallel.pipeline.lowering import links, lower
from triaxis.parallel.pipeline.orders import make_schedule
from triaxis.parallel.pipeline.schedule import SCHEDULES, Action, Kind, placement_of
from triaxis.parallel.replicas.data_parallel import DataParallel
from triaxis.parallel.replicas.initialize import Fill
from triaxis.parallel.replicas.units import Wrapping
from triaxis.parallel.replicas.zero import ZeroDataParallel
from triaxis.parallel.worlds.mesh import Mesh

DTYPES = {
    Precision.FP32: torch.float32,
    Precision.FP64: torch.float64,
    Precision.BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
}

LOSS_AND_NORM = "loss and gradient norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The same on every rank.

    loss: mean of the global batch's trained tokens, nats; auxiliary_loss: the sum of single layers' own
    depth_losses: of each extra prediction depth, over as many tokens as `loss`
    grad_norm: before clipping
    """

    loss: float
    grad_norm: float
    clip_coefficient: float
    trained_tokens: int
    skipped: bool = False
    auxiliary_loss: float = 0.0
    depth_losses: tuple[float, ...] = ()
    load: Load | None = None


class Accumulated(NamedTuple):
    """Of a global batch, scalars on the device. further: layers' own losses, if there are some, then the depths'."""

    loss: Tensor
    squared_norm: Tensor
    tokens: Tensor
    further: Sequence[Tensor]


class _Chunk:
    """A model stage as the pipeline drives it, with the step's batches."""

    def __init__(self, stage: ModelStage, index: int, step: TrainingStep) -> None:
        self._stage, self._index, self._step = stage, index, step
        self._waiting: dict[int, Deferred] = {}  # by microbatch, between I and W

    def forward(self, hidden: Tensor | None, microbatch: int) -> Tensor:
        self._step.position = "forward", self._index, microbatch
        step = self._step
        rows = step.plan.microbatch_size * len(step.batches) * step.mesh.dp.size
        inputs = Inputs(
            batch=step.batches[microbatch],
            token_scale=step.scale,
            row_scale=step.loss_scale / rows,
            microbatch=microbatch,
            depth_weight=step.plan.depth_weight,
        )
        output: Output = self._stage(hidden, inputs)
        if output.auxiliary is not None and step.auxiliary is not None:
            step.auxiliary.add_(output.auxiliary)
        if output.depths is not None and step.depths is not None:
            step.depths.add_(output.depths)
        return output.passed_on()

    def before_backward(self, action: Action, *, last: bool) -> None:
        self._begin(action)
        if action.kind is Kind.INPUT:
            self._step.data_parallel.start_inputs(self._index)
        else:
            self._step.data_parallel.start_backward(self._index, last=last)

    def after_backward(self, action: Action) -> None:
        if action.kind is Kind.INPUT:
            self._waiting[action.microbatch] = self._step.data_parallel.finish_inputs(self._index)
        else:
            self._step.data_parallel.finish_backward(self._index)

    @torch.no_grad()
    def add_weight_gradients(self, action: Action, *, last: bool) -> None:
        self._begin(action)
        self._step.data_parallel.start_backward(self._index, last=last)
        for add in self._waiting.pop(action.microbatch):
            add()
        self._step.data_parallel.finish_backward(self._index)

    def _begin(self, action: Action) -> None:
        self._step.position = action.rule.name, self._index, action.microbatch


def build_stages(plan: StepPlan, mesh: Mesh) -> list[ModelStage]:
    """The model stages that this rank holds, one for each chunk, their parameters without memory. Collective."""
    placement = placement_of(plan.schedule, mesh.pp.size, plan.virtual_stages)
    count = len(placement.places)
    cuts = stage_layers(plan.model, count)
    build = Build.on(
        mesh,
        kernels=read_choice(plan.kernels),
        dtype=DTYPES[plan.dtype],
        sequence_parallel=plan.sequence_parallel,
        recompute=plan.recompute.repeats_layers,
        sized_only=True,
        turns=SCHEDULES[plan.schedule].turns,
    )
    return [
        build_stage(plan.model, build, layers=cuts[number], first=number == 0, last=number == count - 1)
        for number in placement.stages[mesh.pp.rank]
    ]


def _wrapping(stages: Sequence[ModelStage], plan: StepPlan) -> Wrapping:
    """The modules whose parameters are gathered and reduced together: as the run says, else as the stages do."""
    if plan.min_num_params is not None:
        return Wrapping(least_elements=plan.min_num_params)
    if not plan.wrap:
        return Wrapping(classes=tuple(dict.fromkeys(unit for stage in stages for unit in stage.units())))
    there = {type(part).__name__: type(part) for stage in stages for part in stage.modules()}
    unknown = [name for name in plan.wrap if name not in there]
    if unknown:
        raise ConfigError(
            (
                f"`wrap` must name classes of modules of {plan.model.name}, but {', '.join(unknown)} is none; these "
                f"are: {', '.join(sorted(there))}",
            )
        )
    return Wrapping(classes=tuple(there[name] for name in plan.wrap))


def _make_zero(stages: Sequence[ModelStage], plan: StepPlan, mesh: Mesh, fill: Fill | None) -> DataParallel:
    return ZeroDataParallel(
        stages,
        mesh,
        stage=plan.zero,
        wrap=_wrapping(stages, plan),
        accumulate_dtype=summed_dtype(plan),
        bucket_elements=plan.bucket_elements,
        fill=fill,
    )


def _make_fsdp(stages: Sequence[ModelStage], plan: StepPlan, mesh: Mesh, fill: Fill | None) -> DataParallel:
    from triaxis.parallel.replicas.fsdp import FsdpDataParallel  # torch.distributed is for the process world

    return FsdpDataParallel(
        stages,
        mesh,
        wrap=_wrapping(stages, plan),
        accumulate_dtype=summed_dtype(plan),
        fill=fill,
    )


def _filler(plan: StepPlan, stages: Sequence[ModelStage]) -> Fill | None:
    return None if plan.seed is None else stages[0].first_values(plan.seed)


def summed_dtype(plan: StepPlan) -> torch.dtype:
    """What gradients are summed in."""
    return DTYPES[plan.summed]


Maker = Callable[[Sequence[ModelStage], StepPlan, Mesh, Fill | None], DataParallel]
MAKERS: dict[DataParallelKind, Maker] = {DataParallelKind.ZERO: _make_zero, DataParallelKind.FSDP: _make_fsdp}


class TrainingStep:
    """A rank's part of the model, its optimizer, and the step that trains them. Making it is collective.

    fill: gives each parameter its first values; None: random ones by `plan.seed`, or zeros where that is None too
    state_files: where the optimizer's states are kept; None: in memory
    """

    def __init__(
        self, plan: StepPlan, mesh: Mesh, fill: Fill | None = None, state_files: StateFiles | None = None
    ) -> None:
        self.plan, self.mesh = plan, mesh
        dtype = DTYPES[plan.dtype]
        self.stages = build_stages(plan, mesh)
        fill = fill or _filler(plan, self.stages)
        self.data_parallel: DataParallel = MAKERS[plan.data_parallel](self.stages, plan, mesh, fill)
        for layout, state in (found for stage in self.stages for found in states_of(stage)):
            if fill is not None:
                fill(layout, state.view(-1), 0)
        self.balance = Balance(self.stages, mesh, plan)
        self.optimizer = ShardOptimizer(self.data_parallel.buckets, plan.rule, state_files)
        self.batches: Sequence[Batch] = ()
        self.losses: Sequence[Tensor] = ()  # of the latest step's microbatches, on the rank of the last stage
        self.auxiliary: Tensor | None = None  # the losses of this rank's layers, as far as the step has come
        self.depths: Tensor | None = None  # of its extra prediction depths
        self.position: tuple[str, int, int] | None = None  # what was begun last: kind, chunk, microbatch
        self.scale = torch.zeros((), dtype=torch.float64, device=mesh.world.device)
        self.loss_scale = 1.0
        schedule = make_schedule(
            plan.schedule,
            mesh.pp.size,
            plan.microbatches,
            plan.virtual_stages,
            weights_wait=not plan.recompute.repeats_layers,
        )
        tokens = plan.microbatch_size * plan.sequence_length
        programs = lower(schedule)
        self._links = links(programs)
        self.pipeline = PipelineExecutor(
            mesh.pp,
            programs[mesh.pp.rank],
            [_Chunk(stage, index, self) for index, stage in enumerate(self.stages)],
            placement=schedule.placement,
            activation_shape=(
                tokens // (mesh.tp.size if plan.sequence_parallel else 1),
                plan.model.hidden_size,
            ),
            dtype=dtype,
            device=mesh.world.device,
        )

    def connect(self) -> None:
        """Opens every connection that the first step would open. Collective; the end of the set-up."""
        self.mesh.connect()
        self.pipeline.connect(self._links)
        self.mesh.world.settle()

    def train(
        self,
        batches: Sequence[Batch],
        learning_rate: float,
        most_norm: float = math.inf,
        loss_scale: float = 1.0,
    ) -> StepResult:
        """One optimizer step on this data-parallel rank's microbatches.

        With `skip_bad` or a loss scale, no update where loss or norm is not finite, or the norm is above `most_norm`.
        loss_scale: what losses, and so gradients, are multiplied by; nothing that is told or updated is
        """
        made = self.accumulate(batches, loss_scale)
        norm = made.squared_norm.sqrt()
        coefficient = torch.ones_like(norm)
        if self.plan.max_grad_norm > 0:
            limit = self.plan.max_grad_norm * loss_scale
            coefficient = (limit / norm.clamp_min(torch.finfo(norm.dtype).tiny)).clamp_max(1.0)
        told = [made.loss, norm, coefficient, made.tokens.double(), *made.further]
        # The one time that the host waits for the device: for all that it needs, and only then.
        may_skip = self.plan.skip_bad or self.plan.loss_scaling is not None
        found = self.mesh.world.host_values(torch.stack(told)) if may_skip else None
        skipped = found is not None and not (
            math.isfinite(found[0] + found[1]) and found[1] / loss_scale <= most_norm
        )
        if not skipped:
            self.optimizer.step(learning_rate, coefficient if loss_scale == 1.0 else coefficient / loss_scale)
            self.data_parallel.publish()
        load, own = self.balance.settle(move=not skipped), int(self.plan.model.has_losses())
        found = found or self.mesh.world.host_values(torch.stack(told))
        return StepResult(
            loss=found[0] / loss_scale,
            grad_norm=found[1] / loss_scale,
            clip_coefficient=found[2],
            trained_tokens=int(found[3]),
            skipped=skipped,
            auxiliary_loss=sum(found[4 : 4 + own]) / loss_scale,
            depth_losses=tuple(loss / loss_scale for loss in found[4 + own :]),
            load=load,
        )

    def accumulate(self, batches: Sequence[Batch], loss_scale: float = 1.0) -> Accumulated:
        """Reduces the gradients of a global batch. Losses, norm and gradients are multiplied by the scale."""
        self.data_parallel.start_step()
        tokens = self._set_batches(batches, loss_scale)
        self.losses = losses = self.pipeline.run()
        self.batches = ()
        self.data_parallel.synchronize_gradients()
        # On every rank, whether its stage has such a layer, or the extra depths, or not.
        own, depths = self.plan.model.has_losses(), self.plan.model.depths
        sums = torch.zeros(2 + own + depths, dtype=torch.float64, device=self.mesh.world.device)
        if losses and self.mesh.tp.rank == 0:
            sums[0] = torch.stack(losses).double().sum()
        sums[1] = self.data_parallel.squared_norm()
        if self.auxiliary is not None and (self.mesh.tp.rank == 0 or self.plan.sequence_parallel):
            sums[2] = self.auxiliary
        if self.depths is not None and self.mesh.tp.rank == 0:
            sums[2 + own :] = self.depths
        self.auxiliary = self.depths = None
        self.mesh.everyone.all_reduce(sums, label=LOSS_AND_NORM)
        loss, squared_norm, *further = sums
        return Accumulated(loss, squared_norm, tokens, further)

    def evaluate(self, batches: Sequence[Batch]) -> tuple[float, int]:
        """Mean loss over the batches' trained tokens on all ranks, and how many tokens those are."""
        tokens = self._set_batches(batches)
        losses = self.pipeline.run_forward(len(batches))
        self.batches, self.auxiliary, self.depths = (), None, None
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.world.device)
        if losses and self.mesh.tp.rank == 0:
            total += torch.stack(losses).double().sum()
        self.mesh.everyone.all_reduce(total, label="evaluated loss")
        return float(total), int(tokens)

    def _set_batches(self, batches: Sequence[Batch], loss_scale: float = 1.0) -> Tensor:
        """Takes the batches and agrees on the scale of losses: over the global batch's trained tokens."""
        device = self.mesh.world.device
        self.batches = [batch.to(device) for batch in batches]
        if self.plan.model.has_losses():
            self.auxiliary = torch.zeros((), dtype=torch.float64, device=device)
        if self.plan.model.depths:
            self.depths = torch.zeros(self.plan.model.depths, dtype=torch.float64, device=device)
        tokens = torch.zeros((), dtype=torch.int64, device=device)
        if self.mesh.pp.rank == 0 and self.mesh.tp.rank == 0:
            tokens += sum(batch.trained_tokens() for batch in batches)
        self.mesh.everyone.all_reduce(tokens, label="trained tokens")
        self.scale = tokens.clamp_min(1).double().reciprocal()
        self.loss_scale = loss_scale
        if loss_scale != 1.0:
            self.scale *= loss_scale
        return tokens

    def state_bytes(self) -> dict[str, int]:
        """Bytes of this rank's model states by kind."""
        return {**self.data_parallel.state_bytes(), "moments": self.optimizer.state_bytes()}
