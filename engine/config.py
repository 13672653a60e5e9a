"""What a run is asked to do, and what follows from it: one dataclass of flags, resolved into one of facts. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

from triaxis.models.config import ModelConfig
from triaxis.parallel.pipeline.schedule import ScheduleName
from triaxis.parallel.places.topology import Topology


class ConfigError(ValueError):
    """Every fault of a configuration, a line each: field, value, rule, what works."""

    def __init__(self, faults: tuple[str, ...]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


IN_MEMORY = ("none", "cpu")
"""Places of optimizer states that are no folder."""


class DataParallel(StrEnum):
    ZERO = "zero"
    FSDP = "fsdp"


class SaveStrategy(StrEnum):
    """When a run is saved. SIGNAL: only when a signal asks, which all but NO do."""

    NO = "no"
    SIGNAL = "signal"
    STEPS = "steps"
    EPOCH = "epoch"
    TIME = "time"


class Decay(StrEnum):
    COSINE = "cosine"
    LINEAR = "linear"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The flags of `triaxis.launch.train`, as given; `None` is "follows from the others" (see engine/rules.py)."""

    model: str = "tiny"
    model_name_or_path: str | None = None
    init_from: str | None = None
    mtp_depths: int = 0
    mtp_weight: float = 0.3
    router_bias_rate: float | None = None
    data: str = "stdlib"
    data_path: str | None = None
    eval_data: str | None = None
    eval_fraction: float | None = None
    tokenizer: str | None = None
    train_inserted_think: bool = False
    chat_template_date: str | None = None
    seq: int = 128
    pack: bool = True
    on_bad_sample: Literal["error", "skip"] = "error"
    dataloader_num_workers: int = 1
    show_samples: int = 0

    tp: int = 1
    pp: int = 1
    dp: int | None = None
    cp: int = 1
    ep: int = 1
    order: str = "tp-pp-dp"
    sp: bool = False
    data_parallel: DataParallel = DataParallel.ZERO
    zero: int | None = None
    bucket_elements: int | None = None
    wrap: str | None = None
    min_num_params: int | None = None
    schedule: ScheduleName = ScheduleName.ONE_F_ONE_B
    virtual_stages: int | None = None
    simulate: bool = False

    microbatches: int | None = None
    global_batch: int | None = None
    per_device_train_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    steps: int | None = None
    num_train_epochs: float | None = None

    optimizer: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = 1e-3
    lr_scheduler_type: Decay = Decay.COSINE
    warmup_ratio: float | None = None
    warmup_steps: int | None = None
    warmup_type: Literal["linear", "log"] = "linear"
    min_learning_rate_ratio: float = 0.1
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0

    device: Literal["auto", "cuda", "cpu"] = "auto"
    transport: Literal["auto", "gloo"] = "auto"
    deterministic: bool = False
    dtype: Literal["fp32", "fp64", "bf16", "fp16"] = "fp32"
    accumulate_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    loss_scale: float = 0.0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: float = 1.0
    offload_optimizer: str = "none"
    offload_param: Literal["none", "cpu"] = "none"
    recompute: bool = False
    kernels: str | None = None
    seed: int = 0

    output_dir: str = "output"
    save_hf: str | None = None
    save_hf_checkpoints: bool = False
    logging_steps: int = 10
    eval_steps: int | None = None
    eval_batches: int = 8
    report_to: Literal["none", "tensorboard"] = "none"
    timeout_seconds: float = 300.0

    save_strategy: Literal["no", "steps", "epoch", "time"] | None = None
    save_steps: int | None = None
    save_minutes: float | None = None
    save_total_limit: int | None = None
    save_best: bool = False
    async_save: bool = False
    on_save_error: Literal["continue", "stop"] = "continue"
    resume: str | None = None

    hang_timeout: float = 240.0
    on_nan: Literal["stop", "skip"] = "stop"
    spike_factor: float | None = None
    straggler_factor: float = 2.0
    check_collectives: int = 2
    elastic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRun:
    """What follows from the flags, the world's size and the model: every value settled, every rule checked.

    microbatch_size, global_batch: sequences; microbatches: per data-parallel rank and step
    total_steps: None where the run is measured in epochs; see `steps_of`
    tokenizer: as given, or the one that comes with --model_name_or_path; None: bytes
    """

    model: ModelConfig
    topology: Topology
    data: str
    zero: int
    virtual_stages: int
    microbatch_size: int
    microbatches: int
    global_batch: int
    total_steps: int | None
    epochs: float | None
    accumulate_dtype: Literal["fp32", "fp64", "bf16"]
    save_strategy: SaveStrategy = SaveStrategy.NO
    tokenizer: str | None = None

    def steps_of(self, sequences_per_epoch: int, *, done: int = 0, consumed: int = 0) -> int:
        """Optimizer steps of the run: as asked, or the epochs' whole global batches (at least one).

        done, consumed: steps and sequences of the run before it was resumed, perhaps with another global batch
        """
        if self.total_steps is not None:
            return self.total_steps
        assert self.epochs is not None, "resolve sets steps or epochs"
        left = sequences_per_epoch * self.epochs - consumed
        return max(1, done + math.floor(left / self.global_batch))


def warmup_steps_of(config: RunConfig, total_steps: int) -> int:
    """Steps of warm-up: as given, or the ratio of all steps rounded up; at most all steps but the last."""
    asked = config.warmup_steps
    steps = math.ceil((config.warmup_ratio or 0.0) * total_steps - 1e-9) if asked is None else asked
    return min(steps, max(0, total_steps - 1))


def learning_rate_at(
    step: int,
    *,
    total_steps: int,
    warmup_steps: int,
    peak: float,
    minimum_ratio: float,
    decay: Decay | str,
    warmup_type: Literal["linear", "log"] = "linear",
) -> float:
    """The learning rate of one optimizer step, `step` counted from 0.

    The n-th step (n = step + 1) has n / warmup of the peak while n <= warmup ("log": log(1 + n) / log(1 + warmup));
    then it decays over the rest, so that the last step has minimum_ratio of the peak. Warm-up 10, 100 steps, peak
    1e-3, ratio 0.1: the 10th step has 1e-3, the 50th 6.281e-4, the 100th 1e-4.
    """
    number = step + 1
    if number <= warmup_steps and warmup_type == "log":
        return peak * math.log1p(number) / math.log1p(warmup_steps)
    if number <= warmup_steps:
        return peak * number / warmup_steps
    progress = min(1.0, (number - warmup_steps) / max(1, total_steps - warmup_steps))
    remaining = {
        Decay.COSINE: 0.5 * (1.0 + math.cos(math.pi * progress)),
        Decay.LINEAR: 1.0 - progress,
        Decay.CONSTANT: 1.0,
    }[Decay(decay)]
    return peak * (minimum_ratio + (1.0 - minimum_ratio) * remaining)


def learning_rate_of(config: RunConfig, step: int, total_steps: int) -> float:
    """The learning rate of a run's step, counted from 0."""
    return learning_rate_at(
        step,
        total_steps=total_steps,
        warmup_steps=warmup_steps_of(config, total_steps),
        peak=config.learning_rate,
        minimum_ratio=config.min_learning_rate_ratio,
        decay=config.lr_scheduler_type,
        warmup_type=config.warmup_type,
    )


def source_of(config: RunConfig) -> Path | None:
    """The Hugging Face folder that the run began with, whose tokenizer and settings go along with an export."""
    return None if config.model_name_or_path is None else Path(config.model_name_or_path)


def run_directory(config: RunConfig) -> Path:
    """The folder that the run writes to."""
    return Path(config.output_dir)
