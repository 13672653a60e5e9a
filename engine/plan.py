"""The one record of a step: everything that training, tracing and planning need to know of it. No torch.

A run's flags say what is asked (`RunConfig`), the rules settle it (`ResolvedRun`), and `step_plan` makes the record
that the step is built from. What the step is spread over is not in it: that is the topology, which goes beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

from triaxis.engine.config import DataParallel, ResolvedRun, RunConfig
from triaxis.engine.loss_scale import LossScaling
from triaxis.models.config import ModelConfig
from triaxis.parallel.pipeline.schedule import ScheduleName
from triaxis.parallel.places.partition import partition_layers
from triaxis.parallel.replicas.limits import DEFAULT_BUCKET_ELEMENTS


class Precision(StrEnum):
    """What weights and activations are held and multiplied in."""

    FP32 = "fp32"
    FP64 = "fp64"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return {"fp32": 4, "fp64": 8, "bf16": 2, "fp16": 2}[self]

    @property
    def summed(self) -> Precision:
        """What gradients are summed in unless it is said: fp32 at least."""
        return Precision.FP64 if self is Precision.FP64 else Precision.FP32


class Recompute(StrEnum):
    """What backward computes again instead of keeping it: nothing, or all of a layer but its input."""

    NONE = "none"
    FULL = "full"

    @property
    def repeats_layers(self) -> bool:
        return self is Recompute.FULL


class Rule(StrEnum):
    """An optimizer's name."""

    ADAMW = "adamw"
    SGD = "sgd"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRule:
    """adamw (Loshchilov and Hutter 2019) or sgd without momentum; weight decay spares norms and biases."""

    name: Rule = Rule.ADAMW
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What a step needs to know of a run. microbatch_size, sequence_length: sequences, tokens.

    wrap: classes of modules that are units of ZeRO's and fsdp's; min_num_params: or the innermost modules with so many
    parameters; without either, layers, embedding and head
    accumulate_dtype: of summed gradients; None: as `Precision.summed` says
    depth_weight: of the mean loss of extra prediction depths (DeepSeek-V3: λ)
    bias_rate: what a bias that chooses experts moves by after a step; None: as its layer says
    skip_bad: leave the model as it is where the loss or the gradient norm is not finite, or the norm leaps
    seed: of the initial values; None: they are not made, as a trace needs none
    loss_scaling: of fp16, whose overflows leave updates out; None: losses are as they are
    document_tokens: the mean length of the documents that a trace imagines; None: a row is one. Training has its own
    kernels: what does an operation where it is not torch's own, `norm=compile,attention=flash`
    """

    model: ModelConfig
    microbatch_size: int
    microbatches: int
    sequence_length: int
    schedule: ScheduleName = ScheduleName.ONE_F_ONE_B
    virtual_stages: int = 1
    sequence_parallel: bool = False
    recompute: Recompute = Recompute.NONE
    data_parallel: DataParallel = DataParallel.ZERO
    zero: int = 0
    bucket_elements: int = DEFAULT_BUCKET_ELEMENTS
    wrap: tuple[str, ...] = ()
    min_num_params: int | None = None
    dtype: Precision = Precision.FP32
    accumulate_dtype: Precision | None = None
    max_grad_norm: float = 1.0
    depth_weight: float = 0.3
    rule: UpdateRule = field(default_factory=UpdateRule)
    bias_rate: float | None = None
    skip_bad: bool = False
    seed: int | None = 0
    loss_scaling: LossScaling | None = None
    kernels: str = ""
    document_tokens: int | None = None

    @property
    def documents_a_row(self) -> int:
        """As many as bring their mean length nearest to `document_tokens`."""
        return max(1, round(self.sequence_length / (self.document_tokens or self.sequence_length)))

    @property
    def attended_tokens(self) -> int:
        """Tokens of a document, rounded: what attention's work for a token grows with."""
        return round(self.sequence_length / self.documents_a_row)

    @property
    def summed(self) -> Precision:
        """What gradients are summed in."""
        return self.accumulate_dtype or Precision(self.dtype).summed


@lru_cache(maxsize=4096)
def stage_layers(model: ModelConfig, stages: int) -> tuple[range, ...]:
    """The layers of each model stage, cut by parameters: the head weighs as much as its share of the first layer.

    An extra prediction depth, which the last stage has, weighs its own parameters and the head once more.
    """
    first = model.layer_parameters()
    costs = [model.layer_parameters(layer) / first for layer in range(model.layers)]
    head = (1 + model.depths) * model.embedding_parameters() / first
    head += sum(map(model.depth_parameters, range(model.depths))) / first
    return partition_layers(model.layers, stages, layer_cost=costs, first_extra=0.0, last_extra=head)


def step_plan(config: RunConfig, resolved: ResolvedRun) -> StepPlan:
    """What a run's step needs to know, out of its flags and what follows from them."""
    return StepPlan(
        model=resolved.model,
        microbatch_size=resolved.microbatch_size,
        microbatches=resolved.microbatches,
        sequence_length=config.seq,
        schedule=config.schedule,
        virtual_stages=resolved.virtual_stages,
        sequence_parallel=config.sp,
        recompute=Recompute.FULL if config.recompute else Recompute.NONE,
        data_parallel=config.data_parallel,
        zero=resolved.zero,
        bucket_elements=config.bucket_elements or DEFAULT_BUCKET_ELEMENTS,
        wrap=tuple(name.strip() for name in (config.wrap or "").split(",") if name.strip()),
        min_num_params=config.min_num_params,
        dtype=Precision(config.dtype),
        accumulate_dtype=Precision(resolved.accumulate_dtype),
        max_grad_norm=config.max_grad_norm,
        depth_weight=config.mtp_weight,
        rule=UpdateRule(
            name=Rule(config.optimizer),
            weight_decay=config.weight_decay,
            betas=(config.adam_beta1, config.adam_beta2),
            epsilon=config.adam_epsilon,
        ),
        bias_rate=config.router_bias_rate,
        skip_bad=config.on_nan == "skip",
        seed=config.seed,
        loss_scaling=_loss_scaling(config) if config.dtype == "fp16" else None,
        kernels=config.kernels or "",
    )


def _loss_scaling(config: RunConfig) -> LossScaling:
    return LossScaling(
        fixed=config.loss_scale,
        initial_power=config.initial_scale_power,
        window=config.loss_scale_window,
        hysteresis=config.hysteresis,
        consecutive=config.consecutive_hysteresis,
        least=config.min_loss_scale,
    )
