"""The families of models on the Hugging Face hub that the engine trains itself, and what their config.json says.

A family says how its config.json becomes our model and back, and which of its tensors have other names or shapes than
ours (places.py). What a family uses and the engine has not is refused by name. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triaxis.models.config import ModelConfig
from triaxis.models.huggingface.deepseek import DEEPSEEK
from triaxis.models.huggingface.dense import DENSE
from triaxis.models.huggingface.family import BLOCK, Family
from triaxis.models.huggingface.fields import Fields, Unsupported
from triaxis.models.huggingface.guest import guest_of
from triaxis.models.huggingface.mixtures import MIXTURES

CONFIG = "config.json"
FAMILIES: dict[str, Family] = {family.model_type: family for family in (*DENSE, *MIXTURES, *DEEPSEEK)}
"""By model_type; a model made from scratch is exported as the first that can say it."""


def read_config(path: Path) -> dict[str, Any]:
    """The fields of a config.json. ValueError where it is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"`{path}` must be a config.json, but cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"`{path}` must hold an object, but holds {type(values).__name__}")
    return values


def family_of(values: Mapping[str, Any], origin: str) -> Family:
    """The family of a config.json. Unsupported, with the list of families, for another."""
    found = FAMILIES.get(str(values.get("model_type")))
    if found is None:
        raise Unsupported(
            f"{origin}: `model_type` must be one of {', '.join(FAMILIES)} for tp and pp, "
            f"but is {values.get('model_type')!r}"
        )
    return found


def model_of(values: Mapping[str, Any], origin: str) -> ModelConfig:
    """Our model out of a config.json; a guest of `transformers`, where it is of no family of ours."""
    if values.get("model_type") not in FAMILIES:
        return guest_of(values, origin)
    _check_quantized(values, origin)
    return family_of(values, origin).read(Fields(values, origin))


def _check_quantized(values: Mapping[str, Any], origin: str) -> None:
    """Weights may be held in 8-bit blocks, which are widened as they are read; in nothing else."""
    told = values.get("quantization_config")
    if told is None:
        return
    blocks = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    if not isinstance(told, dict) or any(told.get(name) != value for name, value in blocks.items()):
        raise Fields(values, origin).refuse(
            "quantization_config",
            f"only fp8 in blocks of {BLOCK} × {BLOCK} is read; give what it was made of",
        )


def attention_window(values: Mapping[str, Any]) -> int | None:
    """The tokens that attention looks back at most, where the configuration says so and uses it."""
    window = values.get("sliding_window")
    used = values.get("use_sliding_window", values.get("model_type") in ("mistral", "phi3", "mixtral"))
    return int(window) if window and used else None


def more_layers(values: Mapping[str, Any]) -> int:
    """Layers behind the model's own, which predict further tokens (extra prediction depths)."""
    return int(values.get("num_nextn_predict_layers") or 0)


def _told_depths(family: Family | None, model: ModelConfig) -> dict[str, Any]:
    """How many extra prediction depths there are; without this field, `transformers` takes one for granted."""
    return {"num_nextn_predict_layers": model.depths} if family is not None and family.depths else {}


def config_json(model: ModelConfig, dtype: str, source: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """config.json of a model: its source's with another dtype, or that of the first family that can say it."""
    if source is not None:
        known = FAMILIES.get(str(source.get("model_type")))
        whole = {name: value for name, value in source.items() if name != "quantization_config"}
        return {**whole, "dtype": dtype, "torch_dtype": dtype, **_told_depths(known, model)}
    for family in FAMILIES.values():
        told = family.write(model)
        if told is not None:
            return {
                "architectures": [family.architecture],
                "model_type": family.model_type,
                "dtype": dtype,
                "torch_dtype": dtype,
                **told,
                **_told_depths(family, model),
            }
    raise Unsupported(
        f"{model.name} must be a model that one of {', '.join(FAMILIES)} can say, to be exported, but none can: "
        "its norms, biases and positions go together in none of them"
    )
