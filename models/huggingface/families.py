"""The families of models on the Hugging Face hub that the engine trains itself: names and configurations, as data.

A family says how its config.json becomes our model and back, and which of its tensors have other names or shapes than
ours (places.py). What a family uses and the engine has not is refused by name. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triaxis.models.config import ModelConfig, NormKind
from triaxis.models.fields import DenseFields, PositionKind, fields_of
from triaxis.models.huggingface.fields import Fields, Unsupported, rope_fields
from triaxis.models.huggingface.places import Row
from triaxis.models.kinds import ActivationKind

CONFIG = "config.json"
LAYER = "model.layers.{layer}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model_type. rows: where tensors lie; ignored: theirs that carry nothing; head, embedding: theirs, if tied.

    read: our model out of a config.json; write: the fields of a config.json, or None for a model that it cannot say
    prefix: what some files leave out before every name
    """

    model_type: str
    architecture: str
    read: Callable[[Fields], DenseFields]
    write: Callable[[DenseFields], dict[str, Any] | None]
    rows: tuple[Row, ...] = ()
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
    head: str = "lm_head.weight"
    embedding: str = "model.embed_tokens.weight"
    prefix: str = ""


_GATED = {"silu": ActivationKind.SWIGLU, "swish": ActivationKind.SWIGLU}


def _sizes(fields: Fields) -> dict[str, Any]:
    """What all families with Llama's names call alike."""
    theta, scaling = fields.rope()
    heads = fields.whole("num_attention_heads")
    return {
        "name": Path(fields.origin).parent.name or "model",
        "vocab_size": fields.whole("vocab_size"),
        "hidden_size": fields.whole("hidden_size"),
        "layers": fields.whole("num_hidden_layers"),
        "heads": heads,
        "kv_heads": fields.whole("num_key_value_heads", heads),
        "ffn_size": fields.whole("intermediate_size"),
        "max_positions": fields.whole("max_position_embeddings"),
        "head_dim": fields.get("head_dim"),
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "activation": fields.one_of("hidden_act", _GATED, "silu"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "init_std": fields.number("initializer_range", 0.02),
    }


def _written(model: DenseFields, **more: object) -> dict[str, Any] | None:
    """The same, back; None for a model without Llama's norm, activation and positions."""
    gated = model.activation is ActivationKind.SWIGLU and model.norm is NormKind.RMSNORM
    if not gated or model.positions is not PositionKind.ROPE:
        return None
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "intermediate_size": model.ffn_size,
        "max_position_embeddings": model.max_positions,
        "head_dim": model.head_dim or model.hidden_size // model.heads,
        "rms_norm_eps": model.norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": model.tied,
        "initializer_range": model.init_std,
        "attention_dropout": 0.0,
        **rope_fields(model.rope_theta, model.rope_scaling, model.rope_fraction),
        **more,
    }


def _read_llama(fields: Fields) -> DenseFields:
    bias = fields.flag("attention_bias")
    return DenseFields(
        **_sizes(fields),
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias"),
        tied=fields.flag("tie_word_embeddings"),
    )


def _write_llama(model: DenseFields) -> dict[str, Any] | None:
    if model.qk_norm or model.attention_bias != model.output_bias or model.rope_fraction != 1.0:
        return None
    return _written(model, attention_bias=model.attention_bias, mlp_bias=model.mlp_bias)


def _read_mistral(fields: Fields) -> DenseFields:
    return DenseFields(**_sizes(fields), tied=fields.flag("tie_word_embeddings"))


def _read_qwen2(fields: Fields) -> DenseFields:
    return DenseFields(**_sizes(fields), attention_bias=True, tied=fields.flag("tie_word_embeddings"))


def _write_qwen2(model: DenseFields) -> dict[str, Any] | None:
    plain = not (model.qk_norm or model.output_bias or model.mlp_bias) and model.rope_fraction == 1.0
    return _written(model, use_sliding_window=False) if plain and model.attention_bias else None


def _read_qwen3(fields: Fields) -> DenseFields:
    fields.unused(attention_bias=False)
    sizes = _sizes(fields)
    return DenseFields(
        **sizes | {"head_dim": fields.whole("head_dim", 128)},
        qk_norm=True,
        tied=fields.flag("tie_word_embeddings"),
    )


def _write_qwen3(model: DenseFields) -> dict[str, Any] | None:
    biased = model.attention_bias or model.output_bias or model.mlp_bias
    if biased or not model.qk_norm or model.rope_fraction != 1.0:
        return None
    return _written(model, attention_bias=False, use_sliding_window=False)


def _read_phi3(fields: Fields) -> DenseFields:
    rope = fields.get("rope_parameters", {})
    fraction = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    return DenseFields(
        **_sizes(fields), rope_fraction=float(fraction), tied=fields.flag("tie_word_embeddings")
    )


def _write_phi3(model: DenseFields) -> dict[str, Any] | None:
    biased = model.attention_bias or model.output_bias or model.mlp_bias
    return None if biased or model.qk_norm else _written(model, pad_token_id=None, sliding_window=None)


_GELU = {"gelu_new": ActivationKind.GELU, "gelu_pytorch_tanh": ActivationKind.GELU}


def _read_gpt2(fields: Fields) -> DenseFields:
    fields.unused(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    hidden, heads = fields.whole("n_embd", 768), fields.whole("n_head", 12)
    return DenseFields(
        name=Path(fields.origin).parent.name or "gpt2",
        vocab_size=fields.whole("vocab_size", 50257),
        hidden_size=hidden,
        layers=fields.whole("n_layer", 12),
        heads=heads,
        kv_heads=heads,
        ffn_size=fields.whole("n_inner", 4 * hidden),
        max_positions=fields.whole("n_positions", fields.get("n_ctx", 1024)),
        norm=NormKind.LAYERNORM,
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        positions=PositionKind.LEARNED,
        activation=fields.one_of("activation_function", _GELU, "gelu_new"),
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        tied=fields.flag("tie_word_embeddings", True),
        init_std=fields.number("initializer_range", 0.02),
    )


def _write_gpt2(model: DenseFields) -> dict[str, Any] | None:
    biased = model.attention_bias and model.output_bias and model.mlp_bias
    same = model.kv_heads == model.heads and model.head_dim is None
    layered = model.norm is NormKind.LAYERNORM and model.positions is PositionKind.LEARNED
    if not (biased and same and layered and model.activation is ActivationKind.GELU) or model.qk_norm:
        return None
    return {
        "vocab_size": model.vocab_size,
        "n_embd": model.hidden_size,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_inner": model.ffn_size,
        "n_positions": model.max_positions,
        "layer_norm_epsilon": model.norm_eps,
        "activation_function": "gelu_new",
        "tie_word_embeddings": model.tied,
        "initializer_range": model.init_std,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


def _gpt2_rows() -> tuple[Row, ...]:
    block = "transformer.h.{layer}."
    rows = [
        Row(ours="model.embed_tokens.weight", theirs="transformer.wte.weight"),
        Row(ours="model.embed_positions.weight", theirs="transformer.wpe.weight"),
    ]
    for kind in ("weight", "bias"):
        matrix = kind == "weight"
        rows += [
            Row(
                ours=f"{LAYER}self_attn.{part}_proj.{kind}",
                theirs=f"{block}attn.c_attn.{kind}",
                transposed=matrix,
            )
            for part in "qkv"
        ]
        rows += [
            Row(ours=f"{LAYER}{ours}.{kind}", theirs=f"{block}{theirs}.{kind}", transposed=matrix)
            for ours, theirs in (
                ("self_attn.o_proj", "attn.c_proj"),
                ("mlp.up_proj", "mlp.c_fc"),
                ("mlp.down_proj", "mlp.c_proj"),
            )
        ]
        rows += [
            Row(ours=f"{LAYER}input_layernorm.{kind}", theirs=f"{block}ln_1.{kind}"),
            Row(ours=f"{LAYER}post_attention_layernorm.{kind}", theirs=f"{block}ln_2.{kind}"),
            Row(ours=f"model.norm.{kind}", theirs=f"transformer.ln_f.{kind}"),
        ]
    return tuple(rows)


_PHI3_ROWS = tuple(
    Row(ours=f"{LAYER}{ours}.weight", theirs=f"{LAYER}{theirs}.weight")
    for ours, theirs in (
        ("self_attn.q_proj", "self_attn.qkv_proj"),
        ("self_attn.k_proj", "self_attn.qkv_proj"),
        ("self_attn.v_proj", "self_attn.qkv_proj"),
        ("mlp.gate_proj", "mlp.gate_up_proj"),
        ("mlp.up_proj", "mlp.gate_up_proj"),
    )
)

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family(model_type="llama", architecture="LlamaForCausalLM", read=_read_llama, write=_write_llama),
        Family(model_type="qwen2", architecture="Qwen2ForCausalLM", read=_read_qwen2, write=_write_qwen2),
        Family(model_type="qwen3", architecture="Qwen3ForCausalLM", read=_read_qwen3, write=_write_qwen3),
        Family(
            model_type="gpt2",
            architecture="GPT2LMHeadModel",
            read=_read_gpt2,
            write=_write_gpt2,
            rows=_gpt2_rows(),
            ignored=("*.attn.bias", "*.attn.masked_bias"),
            embedding="transformer.wte.weight",
            prefix="transformer.",
        ),
        Family(
            model_type="mistral",
            architecture="MistralForCausalLM",
            read=_read_mistral,
            write=lambda model: None if model.attention_bias or model.mlp_bias else _write_llama(model),
        ),
        Family(
            model_type="phi3",
            architecture="Phi3ForCausalLM",
            read=_read_phi3,
            write=_write_phi3,
            rows=_PHI3_ROWS,
        ),
    )
}
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
    """Our model out of a config.json."""
    return family_of(values, origin).read(Fields(values, origin)).composed()


def attention_window(values: Mapping[str, Any]) -> int | None:
    """The tokens that attention looks back at most, where the configuration says so and uses it."""
    window = values.get("sliding_window")
    used = values.get("use_sliding_window", values.get("model_type") in ("mistral", "phi3", "mixtral"))
    return int(window) if window and used else None


def config_json(model: ModelConfig, dtype: str, source: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """config.json of a model: its source's with another dtype, or that of the first family that can say it."""
    if source is not None:
        return {**source, "dtype": dtype, "torch_dtype": dtype}
    fields = fields_of(model)
    for family in FAMILIES.values():
        told = family.write(fields)
        if told is not None:
            return {
                "architectures": [family.architecture],
                "model_type": family.model_type,
                "dtype": dtype,
                "torch_dtype": dtype,
                **told,
            }
    raise Unsupported(
        f"{model.name} must be a model that one of {', '.join(FAMILIES)} can say, to be exported, but none can: "
        "its norms, biases and positions go together in none of them"
    )
