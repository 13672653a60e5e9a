"""`optimizer` and `scheduler` of a DeepSpeed JSON, as DeepSpeed 0.19.8 means them."""

from __future__ import annotations

from typing import Any

from triaxis.launch.foreign.keys import AUTO, Reading, block, number, only, read_keys, same


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
        number(name)(found, key, beta)


_OPTIMIZER = block(
    {
        "type": _optimizer_type,
        "params": block(
            {
                "lr": number("learning_rate"),
                "betas": _betas,
                "eps": number("adam_epsilon"),
                "weight_decay": number("weight_decay"),
                "adam_w_mode": only((True,), "weight decay is decoupled"),
                "torch_adam": same("the update is one fused call for each bucket"),
                "bias_correction": only((True,), "moments are corrected"),
                "momentum": only((0, 0.0), "SGD has no momentum"),
                "amsgrad": only((False,), "AdamW only"),
            }
        ),
        "legacy_fusion": same("not used"),
    }
)
_LEFT_OUT = {"learning_rate": 1e-3, "adam_beta1": 0.9, "adam_beta2": 0.999, "weight_decay": 0.0}
"""What DeepSpeed's AdamW takes where `params` does not say it, nor a flag."""


def read_optimizer(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
    """A scheduler's warmup_max_lr comes after it, and then is the learning rate."""
    _OPTIMIZER(found, key, value)
    if found.values.get("optimizer") == "adamw":
        params = value.get("params", {}) if isinstance(value, dict) else {}
        given = {name for name, theirs in _PARAMS.items() if isinstance(params, dict) and theirs in params}
        for name, left_out in _LEFT_OUT.items():
            if name not in given:
                found.imply(f"{key}.params.{_PARAMS[name]}, left out", name, left_out)


_PARAMS = {
    "learning_rate": "lr",
    "adam_beta1": "betas",
    "adam_beta2": "betas",
    "weight_decay": "weight_decay",
}
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def read_scheduler(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
    if not isinstance(value, dict) or str(value.get("type")) not in _SCHEDULES:
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
    elif "cos_min_ratio" not in params:
        found.put(f"{key}.params.cos_min_ratio", "min_learning_rate_ratio", COSINE_FLOOR)
    if "warmup_num_steps" not in params:
        found.faults.append(
            f"{found.path}: `{key}.params.warmup_num_steps` must be given (DeepSpeed would take 1000); "
            'say how many, or "auto" for --warmup-steps or --warmup-ratio'
        )
    _warmup_type(found, f"{key}.params.warmup_type", params.get("warmup_type", "log"))
    read_keys(found, params, _SCHEDULE_PARAMS, f"{key}.params.")


def _warmup_type(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
    if value in ("linear", "log"):
        found.put(key, "warmup_type", value)
    elif value != AUTO:
        found.must(key, value, "linear or log")


COSINE_FLOOR = 1e-4
"""What WarmupCosineLR leaves of the peak where nothing is said."""
_SCHEDULE_PARAMS = {
    "warmup_num_steps": number("warmup_steps", whole=True),
    "total_num_steps": number("steps", whole=True, least=1),
    "warmup_max_lr": number("learning_rate"),
    "warmup_min_lr": only((0, 0.0), "warm-up begins at 0"),
    "warmup_type": _warmup_type,
    "cos_min_ratio": number("min_learning_rate_ratio"),
    "warmup_min_ratio": only((0, 0.0), "warm-up begins at 0"),
}
