"""`zero_optimization` of a DeepSpeed JSON. Meanings are those of DeepSpeed 0.19.8 (`runtime/zero/config.py`)."""

from __future__ import annotations

from typing import Any

from triaxis.launch.foreign.keys import AUTO, IN_OUTPUT, Reader, Reading, block, number, only, same, switch


def _offload(name: str) -> Reader:
    def device(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
        if value == "nvme" and name == "offload_param":
            found.refuse(key, value, "parameters are kept in memory; use cpu or none")
        elif value == "nvme":
            pass  # the place is the path beside it
        elif value in ("cpu", "none", AUTO):
            found.put(key, name, "none" if value == AUTO else value)
        else:
            found.must(key, value, "none, cpu or nvme")

    speed = same("how states are moved; the numbers are the same")
    names = (
        "pin_memory",
        "buffer_count",
        "buffer_size",
        "max_in_cpu",
        "pipeline_read",
        "pipeline_write",
        "fast_init",
        "cpuadam_cores_perc",
    )
    return block(
        {
            "device": device,
            **dict.fromkeys(names, speed),
            "ratio": only((1, 1.0), "all states are in one place"),
            "super_offload": only((False,), "states are moved bucket by bucket"),
            "nvme_path": _path,
        }
    )


def _path(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
    """Has a meaning beside a device nvme alone."""


def _offload_optimizer(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
    _offload("offload_optimizer")(found, key, value)
    if not isinstance(value, dict) or value.get("device") != "nvme":
        return
    path = value.get("nvme_path")
    if isinstance(path, str) and path not in ("", "none"):
        found.put(f"{key}.nvme_path", "offload_optimizer", path if "/" in path else f"./{path}")
    else:
        found.must(f"{key}.nvme_path", path, "a folder where the device is nvme")


def _export(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
    """The trained weights, whole and in the run's dtype, as a folder beside the checkpoints."""
    if value is True:
        found.imply(key, "save_hf", f"{IN_OUTPUT}/hf")
    elif value is False:
        found.notes.append(
            f"`{key}`: triaxis convert OUTPUT --to hf DIR writes whole weights from any checkpoint"
        )
    elif value != AUTO:
        found.must(key, value, 'true, false or "auto"')


_LIMIT = same("a limit on speed or memory; here one unit is gathered ahead, and the numbers are the same")
ALWAYS = same("always so here")
ZERO: dict[str, Reader] = {
    "stage": number("zero", whole=True),
    "offload_optimizer": _offload_optimizer,
    "offload_param": _offload("offload_param"),
    "reduce_bucket_size": number("bucket_elements", whole=True, least=1),
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
            # As its own configuration class calls the last six.
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "max_live_parameters",
            "max_reuse_distance",
            "module_granularity_threshold",
        ),
        _LIMIT,
    ),
    **dict.fromkeys(
        ("overlap_comm", "contiguous_gradients", "allgather_partitions", "reduce_scatter"), ALWAYS
    ),
    "round_robin_gradients": same("how shards are dealt out; the numbers are the same"),
    "ignore_unused_parameters": same("a parameter without a gradient has a gradient of zero"),
    **dict.fromkeys(
        (
            "stage3_gather_16bit_weights_on_model_save",
            "gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
        ),
        _export,
    ),
    "cpu_offload": switch("offload_optimizer", "cpu"),
    "cpu_offload_param": switch("offload_param", "cpu"),
    "cpu_offload_params": switch("offload_param", "cpu"),
    **dict.fromkeys(
        (
            "cpu_offload_use_pin_memory",
            "use_multi_rank_bucket_allreduce",
            "use_all_reduce_for_fetch_params",
            "stage3_use_all_reduce_for_fetch_params",
            "allgather_sequential",
            "stage3_allgather_sequential",
            "parameter_alignment",
            "memory_efficient_linear",
            "pipeline_loading_checkpoint",
            "override_module_apply",
            "log_trace_cache_warnings",
            "enable_sanity_checks",
            "legacy_stage1",
        ),
        same("how it is done inside DeepSpeed; the numbers are the same"),
    ),
    "leaf_module": same("each block is gathered as a whole"),
    "compute_grad_norm": only((True,), "the norm is always computed"),
    "zenflow": only((None,), "every update is made in its own step"),
    "save_muon_momentum_buffer_in_memory": only((False,), "there is no Muon"),
    "mics_shard_size": only((-1,), "parameters have one shard, over all replicas"),
    "mics_hierarchical_params_gather": only((False,), "parameters have one shard, over all replicas"),
    "zeropp_loco_param": only((None,), "reductions are not quantised"),
    "load_from_fp32_weights": ALWAYS,
    "elastic_checkpoint": same("every checkpoint goes on in any layout"),
    "zero_hpz_partition_size": only((1,), "parameters have one shard, over all replicas"),
    "zero_quantized_weights": only((False,), "gathers are not quantised"),
    "zero_quantized_gradients": only((False,), "reductions are not quantised"),
    "zero_quantized_nontrainable_weights": only((False,), "gathers are not quantised"),
}


def read_zero(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
    if isinstance(value, bool):  # its deprecated form
        found.put(key, "zero", int(value))
        return
    block(ZERO)(found, key, value)
    if isinstance(value, dict) and value.get("stage") == AUTO:
        found.notes.append(f"`{key}.stage`: auto leaves the stage to --zero (DeepSpeed would take 0)")
