"""Accelerate's configuration: its YAML, and what `accelerate launch` makes of it in the environment. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triaxis.engine.plain_files import read_plain
from triaxis.launch.foreign.deepspeed import read_deepspeed
from triaxis.launch.foreign.fsdp import read_fsdp, typed
from triaxis.launch.foreign.keys import AUTO, Reader, Reading, block, number, only, read_keys, same, switch

LAUNCHED = "the environment of accelerate launch"
_LAUNCHERS = same("a launcher's; ranks are started by accelerate launch, torchrun or triaxis run")
_NO_TPU = "this engine runs on GPUs and CPUs"
_PLAIN = ("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_HPU")
_OWN_BLOCK = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config", "MEGATRON_LM": "megatron_lm_config"}


def _distributed_type(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
    if value in _PLAIN:
        found.notes.append(f"`{key}`: replicas are --dp; --zero 0 keeps all states on each, as DDP does")
    elif str(value) not in _OWN_BLOCK:
        found.refuse(key, value, f"it must be one of {', '.join((*_PLAIN, *_OWN_BLOCK))}")


def _precision(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
    if value in ("bf16", "fp16"):
        found.put(key, "dtype", value)
    elif value == "fp8":
        found.refuse(key, value, "there are no fp8 products yet; use bf16")
    elif value not in ("no", None, False):
        found.must(key, value, "no, bf16, fp16 or fp8")


def _file(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
    """The DeepSpeed JSON that is named there is read as if it were given with --deepspeed."""
    if value not in (None, "none"):
        found.others.append(read_deepspeed(str(value)))


def _unless_none(read: Reader) -> Reader:
    """A value that Accelerate may write as "none"."""
    return lambda found, key, value: None if value in (None, "none") else read(found, key, value)


def _device(name: str) -> Reader:
    def read(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
        if value == "nvme":
            found.refuse(
                key, value, "use cpu or none, and --offload-optimizer FOLDER for the optimizer's states"
            )
        elif value == "cpu":
            found.put(key, name, "cpu")
        elif value not in (None, "none"):
            found.must(key, value, "none, cpu or nvme")

    return read


_DEEPSPEED: dict[str, Reader] = {
    "deepspeed_config_file": _file,
    "zero_stage": number("zero", whole=True),
    "gradient_accumulation_steps": _unless_none(number("gradient_accumulation_steps", whole=True, least=1)),
    "gradient_clipping": _unless_none(number("max_grad_norm")),
    "offload_optimizer_device": _device("offload_optimizer"),
    "offload_param_device": _device("offload_param"),
    **dict.fromkeys(
        ("offload_optimizer_nvme_path", "offload_param_nvme_path"), same("no state is kept there")
    ),
    "zero3_init_flag": same("each rank makes, or reads, what it keeps"),
    "zero3_save_16bit_model": same("--save-hf DIR writes the trained model's weights"),
    "deepspeed_moe_layer_cls_names": same("each block is gathered as a whole"),
    **dict.fromkeys(
        (
            "deepspeed_hostfile",
            "deepspeed_multinode_launcher",
            "deepspeed_exclusion_filter",
            "deepspeed_inclusion_filter",
        ),
        _LAUNCHERS,
    ),
}
_MEGATRON: dict[str, Reader] = {
    "tp_degree": number("tp", whole=True, least=1),
    "pp_degree": number("pp", whole=True, least=1),
    "num_micro_batches": number("gradient_accumulation_steps", whole=True, least=1),
    "gradient_clipping": number("max_grad_norm"),
    "sequence_parallelism": switch("sp", True),
    "recompute_activations": switch("recompute", True),
    "use_distributed_optimizer": switch("zero", 1),
    "expert_model_parallel_size": number("ep", whole=True, least=1),
    "context_parallel_size": only((1,), "context parallelism is not available yet"),
}
_PARALLELISM: dict[str, Reader] = {
    "tp_size": number("tp", whole=True, least=1),
    "dp_replicate_size": only((1,), "replicas are not grouped; --zero says what all of them shard"),
    "dp_shard_size": same("replicas are what the number of ranks leaves; --zero says what they shard"),
    "cp_size": only((1,), "context parallelism is not available yet"),
    "sp_size": only((1,), "sequences are not cut over replicas; --sp cuts them over tp"),
    **dict.fromkeys(
        (
            *("cp_backend", "cp_comm_strategy", "sp_backend", "sp_seq_length"),
            *("sp_seq_length_is_variable", "sp_attn_implementation"),
        ),
        same("of a parallelism that is off"),
    ),
}


def _prefixed(prefix: str, readers: Mapping[str, Reader]) -> Reader:
    return block({f"{prefix}{name}": reader for name, reader in readers.items()})


def _compiler(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
    if value is not None and str(value).upper() == "INDUCTOR":
        found.put(key, "kernels", "block=compile")
    elif value is not None and str(value).upper() != "NO":
        found.refuse(key, value, "layers are compiled by torch's inductor; use INDUCTOR, or NO")


_BLOCKS: dict[str, Reader] = {
    "fsdp_config": read_fsdp,
    "deepspeed_config": block(_DEEPSPEED),
    "megatron_lm_config": _prefixed("megatron_lm_", _MEGATRON),
    "parallelism_config": _prefixed("parallelism_config_", _PARALLELISM),
}
ACCELERATE_KEYS: dict[str, Reader] = {
    "compute_environment": only(("LOCAL_MACHINE",), "ranks are started on machines that you reach"),
    "distributed_type": _distributed_type,
    "mixed_precision": _precision,
    "downcast_bf16": only(("no", False), _NO_TPU),
    "use_cpu": switch("device", "cpu"),
    **_BLOCKS,
    "dynamo_config": block(
        {
            "dynamo_backend": _compiler,
            **dict.fromkeys(
                (
                    *("dynamo_mode", "dynamo_use_dynamic", "dynamo_use_fullgraph"),
                    "dynamo_use_regional_compilation",
                ),
                same("layers are compiled one by one, for the shapes they have"),
            ),
        }
    ),
    "dynamo_backend": _compiler,
    "fp8_config": only((None, {}), "there is no fp8 yet; use bf16"),
    **dict.fromkeys(
        (
            *("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port"),
            *("rdzv_backend", "same_network", "gpu_ids", "main_training_function", "mpirun_config"),
            *("enable_cpu_affinity", "debug"),
        ),
        _LAUNCHERS,
    ),
    **dict.fromkeys(
        (
            "tpu_name",
            "tpu_zone",
            "tpu_use_cluster",
            "tpu_use_sudo",
            "tpu_vm",
            "tpu_env",
            "commands",
            "command_file",
        ),
        only((None, False, []), _NO_TPU),
    ),
}


def _read(found: Reading, values: dict[str, Any]) -> Reading:
    """Only the block that the type of distribution names counts; Accelerate may keep others from earlier answers."""
    own = _OWN_BLOCK.get(str(values.get("distributed_type")))
    kept = {
        name: value
        for name, value in values.items()
        if name not in _OWN_BLOCK.values() or name == own or "distributed_type" not in values
    }
    if own == "fsdp_config":
        kept.setdefault(own, {})
    read_keys(found, kept, ACCELERATE_KEYS, "")
    return found


def read_accelerate(path: str) -> Reading:
    """What an Accelerate YAML asks for. ValueError where it cannot be read at all."""
    import yaml

    try:
        with read_plain(Path(path)) as file:
            values = yaml.safe_load(file.read().decode("utf-8"))
    except OSError as error:
        raise ValueError(
            f"`accelerate_config` must be a YAML file, but {path}: {error.strerror}; check the path"
        ) from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path} must be YAML, but: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold keys and values, but holds {type(values).__name__}")
    return _read(Reading(path), values)


_SWITCHES = {
    "ACCELERATE_USE_FSDP": ("FSDP", "fsdp_config", "FSDP_", "fsdp_"),
    "ACCELERATE_USE_DEEPSPEED": ("DEEPSPEED", "deepspeed_config", "ACCELERATE_DEEPSPEED_", ""),
    "ACCELERATE_USE_MEGATRON_LM": ("MEGATRON_LM", "megatron_lm_config", "MEGATRON_LM_", "megatron_lm_"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": (
        "",
        "parallelism_config",
        "PARALLELISM_CONFIG_",
        "parallelism_config_",
    ),
}
"""A variable that is true, and then: the type of distribution, its block, and how variables and keys begin."""
_DEEPSPEED_NAMES = {
    "config_file": "deepspeed_config_file",
    "zero3_init": "zero3_init_flag",
    "moe_layer_cls_names": "deepspeed_moe_layer_cls_names",
}
_VALUES = {
    "ACCELERATE_MIXED_PRECISION": "mixed_precision",
    "ACCELERATE_USE_CPU": "use_cpu",
    "ACCELERATE_DYNAMO_BACKEND": "dynamo_backend",
}
_OF_DEEPSPEED = ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_GRADIENT_CLIPPING")


def read_environment(environment: Mapping[str, str]) -> Reading | None:
    """What `accelerate launch --config_file` asks for, whose processes are told by variables; None without it."""
    if "ACCELERATE_MIXED_PRECISION" not in environment:
        return None
    values: dict[str, Any] = {
        key: typed(environment[name]) for name, key in _VALUES.items() if name in environment
    }
    for switched, (kind, name, prefix, key_prefix) in _SWITCHES.items():
        if environment.get(switched, "").lower() != "true":
            continue
        inner = {
            key_prefix + variable.removeprefix(prefix).lower(): typed(text)
            for variable, text in environment.items()
            if variable.startswith(prefix)
        }
        if kind == "DEEPSPEED":
            inner = {_DEEPSPEED_NAMES.get(key, key): value for key, value in inner.items()}
            inner |= {
                variable.removeprefix("ACCELERATE_").lower(): _plain_number(environment[variable])
                for variable in _OF_DEEPSPEED
                if variable in environment
            }
        values[name] = {key: value for key, value in inner.items() if value is not None}
        if kind:
            values["distributed_type"] = kind
    return _read(Reading(LAUNCHED), values)


def _plain_number(text: str) -> Any:  # noqa: ANN401
    """A number that may have a fraction, or "auto"."""
    try:
        return float(text)
    except ValueError:
        return AUTO if text == AUTO else None
