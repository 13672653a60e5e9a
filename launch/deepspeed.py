"""DeepSpeed's JSON as flags of a run: each key is honoured, means nothing here and says why, or is refused by name.

Standard library only. Meanings are those of DeepSpeed 0.19.8 (its `runtime/config.py` and `runtime/zero/config.py`).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

AUTO = "auto"


@dataclass(slots=True)
class Reading:
    """What a file comes to. values: fields of RunConfig, and the key that said each; notes: lines for people."""

    path: str
    values: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def put(self, key: str, name: str, value: Any) -> None:  # noqa: ANN401 (JSON)
        """The key decides the field `name`; "auto" leaves it to the flags."""
        if value != AUTO:
            self.values[name], self.keys[name] = value, key

    def refuse(self, key: str, value: Any, why: str) -> None:  # noqa: ANN401
        self.faults.append(f"{self.path}: `{key}` is {json.dumps(value)}, which cannot be honoured: {why}")

    def must(self, key: str, value: Any, rule: str) -> None:  # noqa: ANN401
        self.faults.append(f"{self.path}: `{key}` must be {rule}, but is {json.dumps(value)}")


Reader = Callable[[Reading, str, Any], None]


def _number(name: str, *, whole: bool = False, least: float = 0) -> Reader:
    """A number that is the field `name`; a whole one may be written 5e8."""

    def read(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
        if value == AUTO:
            return
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= least
        if not fits or (whole and value != int(value)):
            kind = f"a whole number of at least {least:g}" if whole else f"a number of at least {least:g}"
            found.must(key, value, kind)
            return
        found.put(key, name, int(value) if whole else float(value))

    return read


def _same(why: str) -> Reader:
    """A key that changes no number of a run here."""

    def read(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
        if value not in (AUTO, None):
            found.notes.append(f"`{key}`: {why}")

    return read


def _only(neutral: tuple[Any, ...], why: str) -> Reader:
    """A key whose feature is not here: only the values that leave it off are taken."""

    def read(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
        if value != AUTO and value not in neutral:
            found.refuse(key, value, why)

    return read


def _block(readers: Mapping[str, Reader]) -> Reader:
    """An object whose own keys are read; an unknown one gets the nearest known one."""

    def read(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
        if not isinstance(value, dict):
            found.must(key, value, "an object")
            return
        _read_keys(found, value, readers, f"{key}.")

    return read


def _read_keys(found: Reading, values: Mapping[str, Any], readers: Mapping[str, Reader], prefix: str) -> None:
    for key, value in values.items():
        if key not in readers:
            near = difflib.get_close_matches(key, readers, n=1)
            hint = f"; nearest: `{prefix}{near[0]}`" if near else ""
            found.faults.append(f"{found.path}: `{prefix}{key}` is no key that is known{hint}; leave it out")
            continue
        readers[key](found, prefix + key, value)


def _switch(name: str, value_if_on: object) -> Reader:
    def read(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
        if value == AUTO:
            return
        if not isinstance(value, bool):
            found.must(key, value, 'true, false or "auto"')
        elif value:
            found.put(key, name, value_if_on)

    return read


def _offload(name: str) -> Reader:
    def device(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
        if value == "nvme":
            found.refuse(key, value, "states are kept in memory; use cpu or none")
        elif value in ("cpu", "none", AUTO):
            found.put(key, name, "none" if value == AUTO else value)
        else:
            found.must(key, value, "none, cpu or nvme")

    speed = _same("how states are moved; the numbers are the same")
    names = (
        "pin_memory",
        "buffer_count",
        "buffer_size",
        "max_in_cpu",
        "pipeline_read",
        "pipeline_write",
        "fast_init",
    )
    return _block(
        {
            "device": device,
            **dict.fromkeys(names, speed),
            "ratio": _only((1, 1.0), "all states are in one place"),
            "nvme_path": _same("no state is kept there"),
        }
    )


_LIMIT = _same("a limit on speed or memory; here one unit is gathered ahead, and the numbers are the same")
_ALWAYS = _same("always so here")
_ZERO: dict[str, Reader] = {
    "stage": _number("zero", whole=True),
    "offload_optimizer": _offload("offload_optimizer"),
    "offload_param": _offload("offload_param"),
    "reduce_bucket_size": _number("bucket_elements", whole=True, least=1),
    **dict.fromkeys(
        (
            "allgather_bucket_size",
            "sub_group_size",
            "stage3_prefetch_bucket_size",
            "stage3_param_persistence_threshold",
            "stage3_model_persistence_threshold",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "stage3_module_granularity_threshold",
        ),
        _LIMIT,
    ),
    **dict.fromkeys(
        ("overlap_comm", "contiguous_gradients", "allgather_partitions", "reduce_scatter"), _ALWAYS
    ),
    "round_robin_gradients": _same("how shards are dealt out; the numbers are the same"),
    "ignore_unused_parameters": _same("a parameter without a gradient has a gradient of zero"),
    "stage3_gather_16bit_weights_on_model_save": _same(
        "`--save-hf DIR`, or `triaxis convert OUT --to file FILE`, writes 16-bit weights from any checkpoint"
    ),
    "load_from_fp32_weights": _ALWAYS,
    "elastic_checkpoint": _same("every checkpoint goes on in any layout"),
    "zero_hpz_partition_size": _only((1,), "parameters have one shard, over all replicas"),
    "zero_quantized_weights": _only((False,), "gathers are not quantised"),
    "zero_quantized_gradients": _only((False,), "reductions are not quantised"),
    "zero_quantized_nontrainable_weights": _only((False,), "gathers are not quantised"),
}


def _zero(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
    if isinstance(value, bool):  # its deprecated form
        found.put(key, "zero", int(value))
        return
    _block(_ZERO)(found, key, value)
    if isinstance(value, dict) and value.get("stage") == AUTO:
        found.notes.append(f"`{key}.stage`: auto leaves the stage to --zero (DeepSpeed would take 0)")


def _optimizer_type(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
    names = {"adamw": "adamw", "adam": "adamw", "sgd": "sgd"}
    if str(value).lower() in names:
        found.put(key, "optimizer", names[str(value).lower()])
    else:
        found.refuse(key, value, "there are AdamW and SGD")


def _betas(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
    if value == AUTO:
        return
    if not isinstance(value, list) or len(value) != 2:
        found.must(key, value, "two numbers")
        return
    for name, beta in zip(("adam_beta1", "adam_beta2"), value, strict=True):
        _number(name)(found, key, beta)


_OPTIMIZER = _block(
    {
        "type": _optimizer_type,
        "params": _block(
            {
                "lr": _number("learning_rate"),
                "betas": _betas,
                "eps": _number("adam_epsilon"),
                "weight_decay": _number("weight_decay"),
                "adam_w_mode": _only((True,), "weight decay is decoupled"),
                "torch_adam": _same("the update is one fused call for each bucket"),
                "bias_correction": _only((True,), "moments are corrected"),
                "momentum": _only((0, 0.0), "SGD has no momentum"),
                "amsgrad": _only((False,), "AdamW only"),
            }
        ),
        "legacy_fusion": _same("not used"),
    }
)
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def _scheduler(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
    if not isinstance(value, dict) or value.get("type") not in _SCHEDULES:
        known = ", ".join(_SCHEDULES)
        found.refuse(
            key, value, f"its type must be one of {known}; or leave it out and use --lr-scheduler-type"
        )
        return
    params = value.get("params", {})
    if not isinstance(params, dict):
        found.must(f"{key}.params", params, "an object")
        return
    found.put(f"{key}.type", "lr_scheduler_type", _SCHEDULES[value["type"]])
    if value["type"] != "WarmupCosineLR":
        found.put(f"{key}.type", "min_learning_rate_ratio", 0.0)
        if params.get("warmup_type", "log") != "linear":
            found.refuse(
                f"{key}.params.warmup_type",
                params.get("warmup_type", "log"),
                'warm-up is linear; say "linear"',
            )
    _read_keys(
        found,
        params,
        {
            "warmup_num_steps": _number("warmup_steps", whole=True),
            "total_num_steps": _number("steps", whole=True, least=1),
            "warmup_max_lr": _number("learning_rate"),
            "warmup_min_lr": _only((0, 0.0), "warm-up begins at 0"),
            "warmup_type": _only(("linear", "log"), "warm-up is linear"),
            "cos_min_ratio": _number("min_learning_rate_ratio"),
            "warmup_min_ratio": _only((0, 0.0), "warm-up begins at 0"),
        },
        f"{key}.params.",
    )


def _dtype_of_sums(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
    if value is None:
        return
    if value in ("fp32", "bf16"):
        found.put(key, "accumulate_dtype", value)
    else:
        found.refuse(key, value, "gradients are summed in fp32 or bf16")


def _removed(name: str) -> Reader:
    def read(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
        used = value.get("enabled", True) if isinstance(value, dict) else bool(value)
        if used:
            found.refuse(key, value, f"there is no {name} (nor in DeepSpeed since 0.19.7)")

    return read


_FP16_NAMES = (
    *("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis"),
    *("min_loss_scale", "auto_cast", "fp16_master_weights_and_grads"),
)
KEYS: dict[str, Reader] = {
    "train_batch_size": _number("global_batch", whole=True, least=1),
    "train_micro_batch_size_per_gpu": _number("per_device_train_batch_size", whole=True, least=1),
    "gradient_accumulation_steps": _number("gradient_accumulation_steps", whole=True, least=1),
    "gradient_clipping": _number("max_grad_norm"),
    "zero_optimization": _zero,
    "bf16": _block(
        {
            "enabled": _switch("dtype", "bf16"),
            "check_grad_overflow": _same("--on-nan decides what a number that is not finite does"),
            "immediate_grad_update": _ALWAYS,
            "bf16_master_weights_and_grads": _only((False,), "master weights are fp32"),
            "bf16_optimizer_states": _only((False,), "moments are fp32"),
        }
    ),
    "fp16": _block(
        {
            "enabled": _only((False,), "there is no loss scaling yet; use bf16"),
            **dict.fromkeys(_FP16_NAMES, _same("of fp16, which is off")),
        }
    ),
    "data_types": _block({"grad_accum_dtype": _dtype_of_sums}),
    "communication_data_type": _only((None, "fp32"), "gradients are reduced in what they are summed in"),
    "prescale_gradients": _same("gradients are sums and the loss carries the scale, so nothing is divided"),
    "gradient_predivide_factor": _same(
        "gradients are sums and the loss carries the scale, so nothing is divided"
    ),
    "optimizer": _OPTIMIZER,
    "scheduler": _scheduler,
    "steps_per_print": _number("logging_steps", whole=True, least=1),
    "wall_clock_breakdown": _same("metrics.jsonl has the parts of every step's time"),
    "memory_breakdown": _same("metrics.jsonl has the peak of every step"),
    "dump_state": _same("the first lines of a run say what it is"),
    "activation_checkpointing": _block(
        {
            "partition_activations": _only((False,), "use --sp, which splits activations over tp"),
            "cpu_checkpointing": _only((False,), "activations stay on the device; use --recompute"),
            "contiguous_memory_optimization": _same("left to the allocator"),
            "number_checkpoints": _same("--recompute keeps each layer's input"),
            "synchronize_checkpoint_boundary": _same("not needed"),
            "profile": _same("not needed"),
        }
    ),
    "tensorboard": _block(
        {
            "enabled": _switch("report_to", "tensorboard"),
            "output_path": _same("events go to --output-dir"),
            "job_name": _same("events go to --output-dir"),
        }
    ),
    "wandb": _block(
        {
            "enabled": _only((False,), "there is tensorboard, and metrics.jsonl"),
            **dict.fromkeys(("group", "team", "project"), _same("of wandb, which is off")),
        }
    ),
    "csv_monitor": _block(
        {
            "enabled": _only((False,), "metrics.jsonl has every step"),
            **dict.fromkeys(("output_path", "job_name"), _same("of csv_monitor, which is off")),
        }
    ),
    "flops_profiler": _only(({"enabled": False},), "metrics.jsonl has MFU; torch's profiler has the rest"),
    "comms_logger": _only(({"enabled": False},), "metrics.jsonl has the bytes of each axis"),
    "tensor_parallel": _block({"autotp_size": _number("tp", whole=True, least=1)}),
    "sequence_parallel_size": _only((1,), "context parallelism is not available yet"),
    "zero_allow_untested_optimizer": _ALWAYS,
    "zero_force_ds_cpu_optimizer": _same("the update is torch's, wherever the states are"),
    "checkpoint": _same("checkpoints are this engine's; see docs/checkpoints.md"),
    "seed": _number("seed", whole=True),
    "disable_allgather": _only((False,), "parameters are gathered"),
    **{
        name: _removed(name)
        for name in (
            *("amp", "nebula", "compression_training", "quantize_training", "sparse_gradients", "eigenvalue"),
            *("sparse_attention", "elasticity", "curriculum_learning", "progressive_layer_drop"),
        )
    },
}


def read_deepspeed(path: str) -> Reading:
    """What a DeepSpeed JSON asks for. ValueError lists every key that cannot be honoured, and why."""
    found = Reading(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"`deepspeed` must be a JSON file, but {path}: {error.strerror}; check the path"
        ) from error
    try:
        values = json.loads(text, object_pairs_hook=_without_duplicates)
    except ValueError as error:
        raise ValueError(f"{path} must be JSON, but: {error}; comments are not part of it") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold an object, but holds {type(values).__name__}")
    _read_keys(found, values, KEYS, "")
    if found.faults:
        raise ValueError("\n".join(found.faults))
    return found


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"`{twice[0]}` stands there twice")
    return dict(pairs)


def combined(found: Reading, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a run out of a file and of the flags that were given. ValueError names both where they differ."""
    faults = [
        f"--{name.replace('_', '-')} {given[name]} and `{found.keys[name]}` {found.values[name]} of {found.path} must "
        "not differ; leave one out"
        for name in found.values
        if name in given and given[name] != found.values[name]
    ]
    if faults:
        raise ValueError("\n".join(faults))
    return {**found.values, **given}
