"""DeepSeek-V2, its Lite and DeepSeek-V3 on the Hugging Face hub: latents and experts. Standard library only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from triaxis.models.config import ModelConfig, NormKind
from triaxis.models.experts_kind import Experts, GroupScore, RoutingRule, ScoreKind
from triaxis.models.fields import scaling_fields, scaling_of
from triaxis.models.huggingface.dense import LAYER
from triaxis.models.huggingface.family import Family
from triaxis.models.huggingface.fields import Fields, rope_fields
from triaxis.models.huggingface.mixtures import STACKED, experts_in
from triaxis.models.huggingface.places import Row
from triaxis.models.kinds import ActivationKind, Dense, Layer
from triaxis.models.latent_kind import LatentAttention
from triaxis.models.positions import Rope

_METHODS = {"greedy": False, "group_limited_greedy": True}


def _attention(fields: Fields) -> LatentAttention:
    direct = fields.values.get("q_lora_rank", 1536) is None
    return LatentAttention(
        heads=fields.whole("num_attention_heads"),
        latent=fields.whole("kv_lora_rank", 512),
        plain_size=fields.whole("qk_nope_head_dim", 128),
        turned_size=fields.whole("qk_rope_head_dim", 64),
        value_size=fields.whole("v_head_dim", 128),
        query_latent=0 if direct else fields.whole("q_lora_rank", 1536),
    )


def _rule_v2(fields: Fields) -> RoutingRule:
    fields.unused(scoring_func="softmax", norm_topk_prob=False)
    grouped = fields.one_of("topk_method", _METHODS, "greedy")
    return RoutingRule(
        experts=experts_in(fields, 64),
        chosen=fields.whole("num_experts_per_tok"),
        renormalised=False,
        scale=fields.number("routed_scaling_factor", 1.0),
        groups=fields.whole("n_group") if grouped else 1,
        chosen_groups=fields.whole("topk_group") if grouped else 1,
    )


def _rule_v3(fields: Fields) -> RoutingRule:
    fields.unused(scoring_func="sigmoid", topk_method="noaux_tc", rope_interleave=True)
    return RoutingRule(
        experts=experts_in(fields, 256),
        chosen=fields.whole("num_experts_per_tok", 8),
        scores=ScoreKind.SIGMOID,
        renormalised=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 2.5),
        groups=fields.whole("n_group", 8),
        chosen_groups=fields.whole("topk_group", 4),
        group_score=GroupScore.TWO_BEST,
        choosing_bias=True,
    )


def _read(fields: Fields, rule: RoutingRule, *, dense_layers: int, shared: int) -> ModelConfig:
    fields.unused(attention_bias=False, mlp_bias=False, moe_layer_freq=1)
    fields.one_of("hidden_act", {"silu": True, "swish": True}, "silu")
    theta, scaling = fields.rope()
    attention, ffn = _attention(fields), fields.whole("moe_intermediate_size")
    dense = Layer(attention=attention, feed_forward=Dense(ffn_size=fields.whole("intermediate_size")))
    shared_ffn = ffn * fields.get("n_shared_experts", shared)
    sparse = Layer(
        attention=attention, feed_forward=Experts(rule=rule, ffn_size=ffn, shared_ffn_size=shared_ffn)
    )
    layers = fields.whole("num_hidden_layers")
    leading = min(fields.get("first_k_dense_replace", dense_layers), layers)
    return ModelConfig(
        name=Path(fields.origin).parent.name or "model",
        vocab_size=fields.whole("vocab_size"),
        hidden_size=fields.whole("hidden_size"),
        layers=layers,
        max_positions=fields.whole("max_position_embeddings"),
        leading=(dense,) * leading,
        repeating=(sparse,),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        positions=Rope(theta=theta, scaling=None if scaling is None else scaling_of(scaling)),
        tied=fields.flag("tie_word_embeddings"),
        init_std=fields.number("initializer_range", 0.02),
    )


def _parts(model: ModelConfig) -> tuple[LatentAttention, Dense | None, Experts, int] | None:
    """Attention, dense part, experts and the number of dense layers, where these are all there is; else None."""
    layers = [model.kind(number) for number in range(model.layers)]
    plain = [layer for layer in layers if type(layer) is Layer]
    attentions = {layer.attention for layer in plain}
    parts = [layer.feed_forward for layer in plain]
    leading = sum(isinstance(part, Dense) for part in parts)
    if len(plain) < len(layers) or len(attentions) != 1 or len({*parts[:leading]}) > 1:
        return None
    attention, experts = attentions.pop(), parts[-1]
    if not isinstance(attention, LatentAttention) or not isinstance(experts, Experts):
        return None
    dense = parts[0] if isinstance(parts[0], Dense) else None
    swiglu = dense is None or (dense.activation is ActivationKind.SWIGLU and not dense.bias)
    whole = experts.shared_ffn_size and experts.shared_ffn_size % experts.ffn_size == 0
    alike = all(part == experts for part in parts[leading:]) and not experts.shared_gate
    rotary = isinstance(model.positions, Rope) and model.positions.fraction == 1.0
    if not (swiglu and whole and alike and rotary and model.norm is NormKind.RMSNORM):
        return None
    return attention, dense, experts, leading


def _write(model: ModelConfig, *, v3: bool) -> dict[str, Any] | None:
    found = _parts(model)
    if found is None or not isinstance(model.positions, Rope):
        return None
    attention, dense, experts, leading = found
    routing = _written_rule(experts.rule, v3=v3)
    if routing is None:
        return None
    scaling = model.positions.scaling
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.heads,
        "intermediate_size": experts.ffn_size if dense is None else dense.ffn_size,
        "moe_intermediate_size": experts.ffn_size,
        "n_shared_experts": experts.shared_ffn_size // experts.ffn_size,
        "first_k_dense_replace": leading,
        "moe_layer_freq": 1,
        "kv_lora_rank": attention.latent,
        "q_lora_rank": attention.query_latent or None,
        "qk_nope_head_dim": attention.plain_size,
        "qk_rope_head_dim": attention.turned_size,
        "v_head_dim": attention.value_size,
        "max_position_embeddings": model.max_positions,
        "rms_norm_eps": model.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": model.tied,
        "initializer_range": model.init_std,
        **routing,
        **rope_fields(model.positions.theta, None if scaling is None else scaling_fields(scaling)),
    }


def _written_rule(rule: RoutingRule, *, v3: bool) -> dict[str, Any] | None:
    """The routing's fields; None where the family cannot say it."""
    kind = ScoreKind.SIGMOID if v3 else ScoreKind.SOFTMAX
    score = GroupScore.TWO_BEST if v3 else GroupScore.BEST
    grouped = rule.groups > 1
    plain = rule.choosing_bias == v3 and (v3 or not rule.renormalised)
    if rule.scores is not kind or not plain or (grouped and rule.group_score is not score):
        return None
    own: dict[str, Any] = (
        {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": True}
        if v3
        else {"scoring_func": "softmax", "topk_method": "group_limited_greedy" if grouped else "greedy"}
    )
    return {
        "n_routed_experts": rule.experts,
        "num_experts_per_tok": rule.chosen,
        "norm_topk_prob": rule.renormalised,
        "routed_scaling_factor": rule.scale,
        "n_group": rule.groups,
        "topk_group": rule.chosen_groups,
        **own,
    }


def _rows(model: ModelConfig) -> tuple[Row, ...]:
    """Rows that rotary positions turn lie in pairs there: of every head of q, and of the head that all share."""
    layer = model.kind(0)
    assert isinstance(layer, Layer) and isinstance(layer.attention, LatentAttention)
    attention = layer.attention
    heights = {
        "q_proj": attention.head_size,
        "q_b_proj": attention.head_size,
        "kv_a_proj_with_mqa": attention.latent + attention.turned_size,
    }
    names = {part: f"{LAYER}self_attn.{part}.weight" for part in heights}
    return tuple(
        Row(ours=names[part], theirs=names[part], interleaved=(height, attention.turned_size))
        for part, height in heights.items()
    )


DEEPSEEK = (
    Family(
        model_type="deepseek_v2",
        architecture="DeepseekV2ForCausalLM",
        read=lambda fields: _read(fields, _rule_v2(fields), dense_layers=0, shared=2),
        write=lambda model: _write(model, v3=False),
        tables=((), STACKED),
        rows=_rows,
    ),
    Family(
        model_type="deepseek_v3",
        architecture="DeepseekV3ForCausalLM",
        read=lambda fields: _read(fields, _rule_v3(fields), dense_layers=3, shared=1),
        write=lambda model: _write(model, v3=True),
        tables=((), STACKED),
        rows=_rows,
        fp32=("*.e_score_correction_bias",),
        depths=True,
    ),
)
