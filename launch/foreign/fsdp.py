"""FSDP's settings, as the Hugging Face Trainer's `fsdp_config` and Accelerate's YAML have them. Standard library only.

Names stand there with or without `fsdp_` in front; versions 1 and 2 of FSDP say in different keys what is sharded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triaxis.launch.foreign.keys import (
    AUTO,
    Reader,
    Reading,
    only,
    parse_json,
    read_json,
    read_keys,
    same,
    switch,
)

SHARDED: dict[str, tuple[str, Any]] = {
    "FULL_SHARD": ("data_parallel", "fsdp"),
    "SHARD_GRAD_OP": ("zero", 2),
    "NO_SHARD": ("zero", 0),
    "NO_RESHARD": ("zero", 2),
}
"""What a strategy is here: torch's own fully_shard, or the stage that shards the same."""
_STRATEGY_NUMBERS = dict(enumerate(("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"), 1))
"""As files of older versions of Accelerate have them."""
ONE_GROUP = "parameters have one shard, over all replicas; use FULL_SHARD, or --zero 0 to 3"


def _strategy(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
    name = str(_STRATEGY_NUMBERS.get(value, value) if isinstance(value, int) else value).upper()
    if name.startswith("HYBRID"):
        found.refuse(key, value, ONE_GROUP)
    elif name in SHARDED:
        found.put(key, *SHARDED[name])
    else:
        found.must(key, value, f"one of {', '.join(SHARDED)}")


def _reshard(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
    """Version 2's: whether parameters are freed after the forward pass."""
    _strategy(
        found, key, {True: "FULL_SHARD", False: "SHARD_GRAD_OP"}[value] if isinstance(value, bool) else value
    )


def _offload(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
    if value is not True:
        switch("offload_param", "cpu")(found, key, value)
        return
    found.put(key, "offload_optimizer", "cpu")
    if found.values.get("data_parallel") == "fsdp":
        found.put(key, "zero", 3)
        found.put(key, "offload_param", "cpu")


_UNITS = same("each block is gathered as a whole")
_SPEED = same("the next block is gathered while one runs; the numbers are the same")
_INSIDE = same("how it is done inside FSDP; the numbers are the same")
_NO_XLA = "this engine runs on GPUs and CPUs"
_STRATEGIES: dict[str, Reader] = {"sharding_strategy": _strategy, "reshard_after_forward": _reshard}
_KEYS: dict[str, Reader] = {
    "version": only((1, 2), "there are versions 1 and 2"),
    **_STRATEGIES,
    "offload_params": _offload,
    "cpu_offload": _offload,
    **dict.fromkeys(
        (
            "auto_wrap_policy",
            "min_num_params",
            "transformer_layer_cls_to_wrap",
            "transformer_cls_to_wrap",
        ),
        _UNITS,
    ),
    **dict.fromkeys(
        ("backward_prefetch", "backward_prefetch_policy", "forward_prefetch", "limit_all_gathers"), _SPEED
    ),
    "use_orig_params": _INSIDE,
    "sync_module_states": same("initial values are the same on all ranks, from --seed or the model's folder"),
    "cpu_ram_efficient_loading": same("each rank reads what it keeps"),
    "state_dict_type": same(
        "checkpoints are this engine's, and go on in any layout; see docs/checkpoints.md"
    ),
    "activation_checkpointing": switch("recompute", True),
    "activation_checkpointing_offload": only((False,), "activations stay on the device; use --recompute"),
    "mixed_precision_policy": only((None,), "--dtype bf16 keeps fp32 master weights and reduces in fp32"),
    "ignored_modules": only((None,), "every parameter is sharded"),
    "xla": only((False,), _NO_XLA),
    "xla_fsdp_v2": only((False,), _NO_XLA),
    "xla_fsdp_settings": only((None, {}), _NO_XLA),
    "xla_fsdp_grad_ckpt": only((False,), _NO_XLA),
}
FSDP_KEYS: dict[str, Reader] = {**_KEYS, **{f"fsdp_{name}": reader for name, reader in _KEYS.items()}}


def typed(value: Any) -> Any:  # noqa: ANN401
    """A value that was written as text, as what it says: "true" is True, "100" is 100."""
    if not isinstance(value, str):
        return value
    words: dict[str, Any] = {"true": True, "false": False, "none": None, "": None}
    if value.lower() in words:
        return words[value.lower()]
    try:
        return int(value)
    except ValueError:
        return value


def read_fsdp(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
    """The object's keys. What the other version of FSDP reads is left out, as Accelerate always sets both."""
    if not isinstance(value, dict):
        found.must(key, value, "an object")
        return
    values = {name: typed(each) for name, each in value.items()}
    plain = {name.removeprefix("fsdp_"): each for name, each in values.items() if each not in (None, AUTO)}
    unread = {"1": "reshard_after_forward", "2": "sharding_strategy"}.get(str(plain.get("version")), "")
    if unread and len(_STRATEGIES.keys() & plain.keys()) == 2:
        values = {name: each for name, each in values.items() if name.removeprefix("fsdp_") != unread}
        plain.pop(unread)
    if not _STRATEGIES.keys() & plain.keys():
        found.put(key, *SHARDED["FULL_SHARD"])
    prefix = f"{key}." if key else ""
    # Offload asks what is sharded.
    ordered = sorted(values.items(), key=lambda item: item[0].removeprefix("fsdp_") not in _STRATEGIES)
    read_keys(found, dict(ordered), FSDP_KEYS, prefix)


def read_fsdp_config(text: str) -> Reading:
    """`--fsdp_config`: a JSON file, or JSON itself. ValueError where it cannot be read at all."""
    is_json = text.lstrip().startswith("{")
    found = Reading("--fsdp_config" if is_json else text)
    values: Mapping[str, Any] = (
        parse_json(text, "--fsdp_config") if is_json else read_json(text, "fsdp_config")
    )
    read_fsdp(found, "", values)
    return found
