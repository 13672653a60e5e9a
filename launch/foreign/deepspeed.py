"""DeepSpeed's JSON as flags of a run: each key is honoured, means nothing here and says why, or is refused by name.

Standard library only. Meanings are those of DeepSpeed 0.19.8 (its `runtime/config.py` and `runtime/zero/config.py`).
"""

from __future__ import annotations

from typing import Any

from triaxis.launch.foreign.deepspeed_updates import read_optimizer, read_scheduler
from triaxis.launch.foreign.deepspeed_zero import ALWAYS, read_zero
from triaxis.launch.foreign.keys import (
    Reader,
    Reading,
    block,
    number,
    off,
    only,
    read_json,
    read_keys,
    same,
    switch,
    truth,
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


def _autotp(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
    if value != 0:  # its "off"
        number("tp", whole=True, least=1)(found, key, value)


def _recompute_interval(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
    """0 is off; with one kept input in n layers, n more are computed at once: here it is one."""
    if isinstance(value, int) and value > 1:
        found.refuse(key, value, "--recompute keeps every layer's input; use 1, or 0 for none")
    elif value == 1:
        found.put(key, "recompute", True)


_TENSOR_PARALLEL: dict[str, Reader] = {
    "autotp_size": _autotp,
    "dtype": same("--dtype, or bf16.enabled, is the dtype of parameters"),
    "tp_overlap_comm": ALWAYS,
    "vocab_parallel_lm_head": ALWAYS,
    "vocab_parallel_ce_backend": only(("torch",), "the loss of a cut vocabulary is this engine's"),
    **dict.fromkeys(("tensor_parallel", "tp"), block({"tp_size": number("tp", whole=True, least=1)})),
    **dict.fromkeys(
        ("injection_policy_tuple", "partition_config"), same("each layer says itself how it is cut")
    ),
}
_FP16: dict[str, Reader] = {
    "enabled": switch("dtype", "fp16"),
    "loss_scale": number("loss_scale"),
    "initial_scale_power": number("initial_scale_power", whole=True),
    "loss_scale_window": number("loss_scale_window", whole=True, least=1),
    "hysteresis": number("hysteresis", whole=True, least=1),
    "consecutive_hysteresis": truth("consecutive_hysteresis"),
    "min_loss_scale": number("min_loss_scale"),
    "auto_cast": same("ids are whole numbers, and there is no other input"),
    "fp16_master_weights_and_grads": only((False,), "master weights are fp32"),
}


def _fp16(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
    """Its settings mean nothing where it is off."""
    is_off = isinstance(value, dict) and not value.get("enabled", False)
    unused = {name: same("of fp16, which is off") for name in _FP16 if name != "enabled"}
    block(_FP16 | unused if is_off else _FP16)(found, key, value)


KEYS: dict[str, Reader] = {
    "train_batch_size": number("global_batch", whole=True, least=1),
    "train_micro_batch_size_per_gpu": number("per_device_train_batch_size", whole=True, least=1),
    "gradient_accumulation_steps": number("gradient_accumulation_steps", whole=True, least=1),
    "gradient_clipping": number("max_grad_norm"),
    "zero_optimization": read_zero,
    "bf16": block(
        {
            "enabled": switch("dtype", "bf16"),
            "check_grad_overflow": same("--on-nan decides what a number that is not finite does"),
            "immediate_grad_update": ALWAYS,
            "bf16_master_weights_and_grads": only((False,), "master weights are fp32"),
            "bf16_optimizer_states": only((False,), "moments are fp32"),
        }
    ),
    "fp16": _fp16,
    "data_types": block(
        {
            "grad_accum_dtype": _dtype_of_sums,
            "param_dtype": only((None,), "--dtype, or bf16.enabled, is the dtype of parameters"),
            "buffer_dtype": only((None,), "tables of positions are fp32"),
            "keep_in_fp32_modules": only(([],), "all parameters have one dtype; master weights are fp32"),
        }
    ),
    "torch_autocast": off("the dtype of products is that of parameters; use bf16"),
    "communication_data_type": only((None, "fp32"), "gradients are reduced in what they are summed in"),
    "seq_parallel_communication_data_type": only(
        (None, "fp32"), "there is no sequence parallelism of this kind"
    ),
    "gradient_allreduce_op": only(("mean",), "the loss is a mean over the global batch's tokens"),
    "managed_gradient_accumulation": only((True,), "a step is all microbatches of the global batch"),
    "prescale_gradients": same("gradients are sums and the loss carries the scale, so nothing is divided"),
    "gradient_predivide_factor": same(
        "gradients are sums and the loss carries the scale, so nothing is divided"
    ),
    "optimizer": read_optimizer,
    "scheduler": read_scheduler,
    "steps_per_print": number("logging_steps", whole=True, least=1),
    "wall_clock_breakdown": same("metrics.jsonl has the parts of every step's time"),
    "memory_breakdown": same("metrics.jsonl has the peak of every step"),
    "dump_state": same("the first lines of a run say what it is"),
    "activation_checkpointing": block(
        {
            "partition_activations": only((False,), "use --sp, which splits activations over tp"),
            "cpu_checkpointing": only((False,), "activations stay on the device; use --recompute"),
            "contiguous_memory_optimization": same("left to the allocator"),
            "number_checkpoints": same("--recompute keeps each layer's input"),
            "synchronize_checkpoint_boundary": same("not needed"),
            "profile": same("not needed"),
        }
    ),
    "tensorboard": block(
        {
            "enabled": switch("report_to", "tensorboard"),
            "output_path": same("events go to --output-dir"),
            "job_name": same("events go to --output-dir"),
        }
    ),
    "wandb": block(
        {
            "enabled": only((False,), "there is tensorboard, and metrics.jsonl"),
            **dict.fromkeys(("group", "team", "project"), same("of wandb, which is off")),
        }
    ),
    "csv_monitor": block(
        {
            "enabled": only((False,), "metrics.jsonl has every step"),
            **dict.fromkeys(("output_path", "job_name"), same("of csv_monitor, which is off")),
        }
    ),
    "flops_profiler": off("metrics.jsonl has MFU; torch's profiler has the rest"),
    "comms_logger": off("metrics.jsonl has the bytes of each axis"),
    "comet": off("there is tensorboard, and metrics.jsonl"),
    "tensor_parallel": block(_TENSOR_PARALLEL),
    "pipeline": block(
        {
            "stages": number("pp", whole=True, least=1),
            "partition": same("layers are cut by their cost"),
            "seed_layers": same("initial values depend on --seed and the parameter's name alone"),
            "activation_checkpoint_interval": _recompute_interval,
            **dict.fromkeys(("pipe_partitioned", "grad_partitioned"), same("--sp splits what stages send")),
            "use_reentrant": same("recompute is this engine's"),
        }
    ),
    "sequence_parallel_size": only((1,), "context parallelism is not available yet"),
    "zero_allow_untested_optimizer": ALWAYS,
    "zero_force_ds_cpu_optimizer": same("the update is torch's, wherever the states are"),
    "checkpoint": same("checkpoints are this engine's; see docs/checkpoints.md"),
    "seed": number("seed", whole=True),
    **dict.fromkeys(
        ("aio", "disable_python_gc", "vocabulary_size", "timers"), same("how it is done inside DeepSpeed")
    ),
    "dataloader_drop_last": same("an epoch is its whole global batches"),
    "use_data_before_expert_parallelism": only((False,), "--order says which ranks are neighbours"),
    "hybrid_engine": off("this engine trains; it does not serve"),
    "disable_allgather": only((False,), "parameters are gathered"),
    **{
        name: _removed(name)
        for name in (
            *("amp", "nebula", "compression_training", "quantize_training", "sparse_gradients", "eigenvalue"),
            *("sparse_attention", "elasticity", "curriculum_learning", "progressive_layer_drop"),
        )
    },
}


def read_deepspeed(path: str) -> Reading:
    """What a DeepSpeed JSON asks for; its faults are among it. ValueError where it cannot be read at all."""
    found, values = Reading(path), read_json(path, "deepspeed")
    read_keys(found, values, KEYS, "")
    halves = [values.get(name) for name in ("bf16", "fp16")]
    if all(isinstance(half, dict) and half.get("enabled") is True for half in halves):
        found.faults.append(f"{path}: `bf16.enabled` and `fp16.enabled` must not both be true; leave one out")
    return found
