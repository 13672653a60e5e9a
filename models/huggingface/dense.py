"""The families of dense models on the Hugging Face hub that the engine trains itself. Standard library only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from triaxis.models.config import NormKind
from triaxis.models.fields import DenseFields, PositionKind
from triaxis.models.huggingface.family import Family, dense, flat
from triaxis.models.huggingface.fields import Fields, rope_fields
from triaxis.models.huggingface.places import Row
from triaxis.models.kinds import ActivationKind

LAYER = "model.layers.{layer}."

_GATED = {"silu": ActivationKind.SWIGLU, "swish": ActivationKind.SWIGLU}


def llama_sizes(fields: Fields) -> dict[str, Any]:
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


def llama_fields(model: DenseFields, **more: object) -> dict[str, Any] | None:
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
        **llama_sizes(fields),
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias"),
        tied=fields.flag("tie_word_embeddings"),
    )


def _write_llama(model: DenseFields) -> dict[str, Any] | None:
    if model.qk_norm or model.attention_bias != model.output_bias or model.rope_fraction != 1.0:
        return None
    return llama_fields(model, attention_bias=model.attention_bias, mlp_bias=model.mlp_bias)


def _read_mistral(fields: Fields) -> DenseFields:
    return DenseFields(**llama_sizes(fields), tied=fields.flag("tie_word_embeddings"))


def _read_qwen2(fields: Fields) -> DenseFields:
    return DenseFields(**llama_sizes(fields), attention_bias=True, tied=fields.flag("tie_word_embeddings"))


def _write_qwen2(model: DenseFields) -> dict[str, Any] | None:
    plain = not (model.qk_norm or model.output_bias or model.mlp_bias) and model.rope_fraction == 1.0
    return llama_fields(model, use_sliding_window=False) if plain and model.attention_bias else None


def _read_qwen3(fields: Fields) -> DenseFields:
    fields.unused(attention_bias=False)
    sizes = llama_sizes(fields)
    return DenseFields(
        **sizes | {"head_dim": fields.whole("head_dim", 128)},
        qk_norm=True,
        tied=fields.flag("tie_word_embeddings"),
    )


def _write_qwen3(model: DenseFields) -> dict[str, Any] | None:
    biased = model.attention_bias or model.output_bias or model.mlp_bias
    if biased or not model.qk_norm or model.rope_fraction != 1.0:
        return None
    return llama_fields(model, attention_bias=False, use_sliding_window=False)


def _read_phi3(fields: Fields) -> DenseFields:
    rope = fields.get("rope_parameters", {})
    fraction = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    return DenseFields(
        **llama_sizes(fields), rope_fraction=float(fraction), tied=fields.flag("tie_word_embeddings")
    )


def _write_phi3(model: DenseFields) -> dict[str, Any] | None:
    biased = model.attention_bias or model.output_bias or model.mlp_bias
    return None if biased or model.qk_norm else llama_fields(model, pad_token_id=None, sliding_window=None)


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

DENSE = (
    Family(
        model_type="llama", architecture="LlamaForCausalLM", read=dense(_read_llama), write=flat(_write_llama)
    ),
    Family(
        model_type="qwen2", architecture="Qwen2ForCausalLM", read=dense(_read_qwen2), write=flat(_write_qwen2)
    ),
    Family(
        model_type="qwen3", architecture="Qwen3ForCausalLM", read=dense(_read_qwen3), write=flat(_write_qwen3)
    ),
    Family(
        model_type="gpt2",
        architecture="GPT2LMHeadModel",
        read=dense(_read_gpt2),
        write=flat(_write_gpt2),
        tables=(_gpt2_rows(),),
        ignored=("*.attn.bias", "*.attn.masked_bias"),
        embedding="transformer.wte.weight",
        prefix="transformer.",
    ),
    Family(
        model_type="mistral",
        architecture="MistralForCausalLM",
        read=dense(_read_mistral),
        write=flat(lambda model: None if model.attention_bias or model.mlp_bias else _write_llama(model)),
    ),
    Family(
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        read=dense(_read_phi3),
        write=flat(_write_phi3),
        tables=(_PHI3_ROWS,),
    ),
)
