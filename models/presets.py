"""The models known by name, and models out of files. Standard library only.

Sizes are those of the published checkpoints; positions are those of their pretraining configuration.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from pathlib import Path
from typing import Any

from triaxis.models.config import ModelConfig, NormKind
from triaxis.models.fields import PositionKind, config_from_fields, dense_model
from triaxis.models.huggingface.families import CONFIG, attention_window, model_of, more_layers, read_config
from triaxis.models.kinds import ActivationKind
from triaxis.models.mixtures import MIXTURES
from triaxis.models.reading import read_small_file

_SUFFIXES = (".toml", ".json")


def _llama(
    name: str,
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    positions: int,
    theta: float,
) -> ModelConfig:
    return dense_model(
        name=name,
        vocab_size=vocab,
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        ffn_size=ffn,
        max_positions=positions,
        rope_theta=theta,
    )


def _llama2(name: str, *, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int) -> ModelConfig:
    return _llama(
        name,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=32000,
        positions=4096,
        theta=10000.0,
    )


def _machine(name: str, *, hidden: int, heads: int, kv_heads: int, ffn: int) -> ModelConfig:
    """Bytes and a separator for vocabulary; initial weights of 1/√hidden, which learn soon at such sizes."""
    return dense_model(
        name=name,
        vocab_size=257,
        hidden_size=hidden,
        layers=8,
        heads=heads,
        kv_heads=kv_heads,
        ffn_size=ffn,
        max_positions=1024,
        init_std=round(hidden**-0.5, 3),
    )


def _llama3(name: str, *, hidden: int, layers: int, heads: int, ffn: int) -> ModelConfig:
    return _llama(
        name,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=8,
        ffn=ffn,
        vocab=128256,
        positions=8192,
        theta=500000.0,
    )


def _qwen2(
    name: str, *, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int, tied: bool
) -> ModelConfig:
    return dense_model(
        name=name,
        vocab_size=vocab,
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        ffn_size=ffn,
        max_positions=32768,
        norm_eps=1e-6,
        rope_theta=1000000.0,
        attention_bias=True,
        tied=tied,
    )


_MODELS = (
    _machine("tiny", hidden=96, heads=4, kv_heads=2, ffn=256),
    _machine("small", hidden=256, heads=8, kv_heads=4, ffn=704),
    dense_model(
        name="gpt2-124m",
        vocab_size=50257,
        hidden_size=768,
        layers=12,
        heads=12,
        kv_heads=12,
        ffn_size=3072,
        max_positions=1024,
        norm=NormKind.LAYERNORM,
        positions=PositionKind.LEARNED,
        activation=ActivationKind.GELU,
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        tied=True,
    ),
    _llama2("llama2-7b", hidden=4096, layers=32, heads=32, kv_heads=32, ffn=11008),
    _llama2("llama2-13b", hidden=5120, layers=40, heads=40, kv_heads=40, ffn=13824),
    _llama2("llama2-70b", hidden=8192, layers=80, heads=64, kv_heads=8, ffn=28672),
    _llama3("llama3-8b", hidden=4096, layers=32, heads=32, ffn=14336),
    _llama3("llama3-70b", hidden=8192, layers=80, heads=64, ffn=28672),
    _llama3("llama3-405b", hidden=16384, layers=126, heads=128, ffn=53248),
    dense_model(  # DeepSeek-V3's size, depth and vocabulary with every parameter dense; nobody published it
        name="dense-671b",
        vocab_size=129280,
        hidden_size=28672,
        layers=61,
        heads=224,
        kv_heads=16,
        ffn_size=105984,
        max_positions=8192,
    ),
    _qwen2("qwen2.5-0.5b", hidden=896, layers=24, heads=14, kv_heads=2, ffn=4864, vocab=151936, tied=True),
    _qwen2("qwen2.5-1.5b", hidden=1536, layers=28, heads=12, kv_heads=2, ffn=8960, vocab=151936, tied=True),
    _qwen2("qwen2.5-7b", hidden=3584, layers=28, heads=28, kv_heads=4, ffn=18944, vocab=152064, tied=False),
    _qwen2("qwen2.5-72b", hidden=8192, layers=80, heads=64, kv_heads=8, ffn=29568, vocab=152064, tied=False),
    dense_model(
        name="qwen3-8b",
        vocab_size=151936,
        hidden_size=4096,
        layers=36,
        heads=32,
        kv_heads=8,
        head_dim=128,
        ffn_size=12288,
        max_positions=32768,
        norm_eps=1e-6,
        rope_theta=1000000.0,
        qk_norm=True,
    ),
)

PRESETS: dict[str, ModelConfig] = {config.name: config for config in (*_MODELS, *MIXTURES)}
PRESETS["671b"] = PRESETS["deepseek-v3"]


def preset(name: str) -> ModelConfig:
    """The model known by a name."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name.lower(), PRESETS, n=3, cutoff=0.3)
        raise ValueError(
            f"`name` must be that of a preset, but is {name!r}; these are: {', '.join(near or PRESETS)}"
        )
    return PRESETS[name]


def load_config(name_or_path: str) -> ModelConfig:
    """A preset, or the model whose fields a TOML or JSON file holds (`name` defaults to the file's stem).

    A folder with a config.json, or that file, is a Hugging Face model.
    """
    if name_or_path in PRESETS:
        return PRESETS[name_or_path]
    path = Path(name_or_path)
    if os.path.isdir(path):
        path = path / CONFIG
    if path.suffix not in _SUFFIXES:
        near = difflib.get_close_matches(name_or_path.lower(), PRESETS, n=3, cutoff=0.3)
        raise ValueError(
            f"`model` must be a preset, a .toml or .json file of model fields, or a Hugging Face folder, "
            f"but is {name_or_path!r}; "
            + (f"nearest presets: {', '.join(near)}" if near else f"presets: {', '.join(PRESETS)}")
        )
    text = read_small_file(path, "model")
    try:
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be valid {path.suffix[1:].upper()}, but: {error}") from error
    if not isinstance(values, dict):  # JSON may hold a list
        raise ValueError(f"{path} must hold one object of model fields, but holds {type(values).__name__}")
    if "model_type" in values:
        return model_of(values, str(path))
    return config_from_fields({"name": path.stem, **values}, str(path))


def window_of(name_or_path: str) -> int | None:
    """The tokens that attention may look back at most, where a Hugging Face configuration says so; else None."""
    values = hub_values(name_or_path)
    return None if values is None else attention_window(values)


def depths_in(name_or_path: str) -> int:
    """Layers for extra prediction depths that a Hugging Face folder has behind the model's own."""
    values = hub_values(name_or_path)
    return 0 if values is None else more_layers(values)


def hub_values(name_or_path: str) -> dict[str, Any] | None:
    """The fields of a Hugging Face folder's config.json; None for a preset, or a file of fields of our own."""
    path = Path(name_or_path)
    path = path / CONFIG if os.path.isdir(path) else path
    if name_or_path in PRESETS or path.suffix != ".json":
        return None
    return read_config(path)
