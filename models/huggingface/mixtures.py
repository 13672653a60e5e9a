"""The families of models with experts on the Hugging Face hub that the engine trains itself. Standard library only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from triaxis.models.config import ModelConfig
from triaxis.models.experts_kind import Experts, RoutingRule
from triaxis.models.fields import DenseFields, fields_of
from triaxis.models.huggingface.dense import LAYER, llama_fields, llama_sizes
from triaxis.models.huggingface.family import Family
from triaxis.models.huggingface.fields import Fields
from triaxis.models.huggingface.places import Row
from triaxis.models.kinds import Dense, GroupedAttention, Kind, Layer

EXPERT = f"{LAYER}mlp.experts.{{expert}}."
STACKED = (
    Row(ours=f"{EXPERT}gate_proj.weight", theirs=f"{LAYER}mlp.experts.gate_up_proj", stacked=True),
    Row(ours=f"{EXPERT}up_proj.weight", theirs=f"{LAYER}mlp.experts.gate_up_proj", stacked=True),
    Row(ours=f"{EXPERT}down_proj.weight", theirs=f"{LAYER}mlp.experts.down_proj", stacked=True),
)
"""How transformers 5 holds experts, and writes them where it is not asked for the hub's way."""


def mixed(plain: ModelConfig, kinds: list[Kind]) -> ModelConfig:
    """The dense model with other feed-forward parts, one for each layer."""
    layers = []
    for number, kind in enumerate(kinds):
        layer = plain.kind(number)
        assert isinstance(layer, Layer)
        layers.append(replace(layer, feed_forward=kind))
    unlike = [number for number, layer in enumerate(layers) if layer != layers[-1]]
    leading = layers[: unlike[-1] + 1] if unlike else []
    return replace(plain, leading=tuple(leading), repeating=(layers[-1],))


def experts_in(fields: Fields, default: int) -> int:
    """How many experts a layer has, by any of the names that versions of transformers gave the number."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return fields.whole(next((name for name in names if fields.get(name) is not None), names[0]), default)


def sparse_layers(fields: Fields, layers: int) -> list[bool]:
    """Which layers have experts: every `decoder_sparse_step`-th, but those in `mlp_only_layers`."""
    step, dense = fields.whole("decoder_sparse_step", 1), fields.get("mlp_only_layers", [])
    return [number not in dense and (number + 1) % step == 0 for number in range(layers)]


def experts_of(model: ModelConfig) -> tuple[DenseFields, list[Kind]] | None:
    """The model with dense layers in place of its experts, as flat fields, and its feed-forward kinds; None if it
    has no experts, or another attention than those fields can say."""
    layers = [model.kind(number) for number in range(model.layers)]
    if not model.experts() or not all(
        type(layer) is Layer and isinstance(layer.attention, GroupedAttention) for layer in layers
    ):
        return None
    kinds = [layer.feed_forward for layer in layers if isinstance(layer, Layer)]
    dense = next((kind for kind in kinds if isinstance(kind, Dense)), Dense(ffn_size=model.hidden_size))
    plain = replace(layers[0], feed_forward=dense)  # type: ignore[type-var]
    return fields_of(replace(model, leading=(), repeating=(plain,))), kinds


def _losses(fields: Fields) -> dict[str, Any]:
    """The balancing loss is trained if config.json asks for it (`output_router_logits`), by each sequence."""
    wanted = fields.flag("output_router_logits")
    return {"sequence_loss": fields.number("router_aux_loss_coef", 0.001) if wanted else 0.0}


def _read_mixtral(fields: Fields) -> ModelConfig:
    plain = DenseFields(**llama_sizes(fields), tied=fields.flag("tie_word_embeddings")).composed()
    rule = RoutingRule(experts=experts_in(fields, 8), chosen=fields.whole("num_experts_per_tok", 2))
    kind = Experts(rule=rule, ffn_size=fields.whole("intermediate_size"), **_losses(fields))
    return mixed(plain, [kind] * plain.layers)


def _write_mixtral(model: ModelConfig) -> dict[str, Any] | None:
    found = experts_of(model)
    if found is None:
        return None
    plain, kinds = found
    kind = kinds[0]
    alike = all(one == kind for one in kinds) and isinstance(kind, Experts)
    if (
        not alike
        or not isinstance(kind, Experts)
        or kind.shared_ffn_size
        or plain.qk_norm
        or plain.attention_bias
    ):
        return None
    rule = kind.rule
    if rule != RoutingRule(experts=rule.experts, chosen=rule.chosen):
        return None
    sizes = llama_fields(replace(plain, ffn_size=kind.ffn_size), sliding_window=None)
    counts = {"num_local_experts": rule.experts, "num_experts_per_tok": rule.chosen}
    return None if sizes is None else {**sizes, **counts, **_written_losses(kind)}


def _written_losses(kind: Experts) -> dict[str, Any]:
    return {"router_aux_loss_coef": kind.sequence_loss, "output_router_logits": kind.sequence_loss > 0}


def _read_qwen(fields: Fields, *, qwen2: bool) -> ModelConfig:
    sizes = llama_sizes(fields)
    if not qwen2:
        fields.unused(attention_bias=False)
    plain = DenseFields(
        **sizes,
        attention_bias=qwen2 and fields.flag("qkv_bias", True),
        qk_norm=not qwen2,
        tied=fields.flag("tie_word_embeddings"),
    ).composed()
    rule = RoutingRule(
        experts=experts_in(fields, 60 if qwen2 else 128),
        chosen=fields.whole("num_experts_per_tok", 4 if qwen2 else 8),
        renormalised=fields.flag("norm_topk_prob"),
    )
    kind = Experts(
        rule=rule,
        ffn_size=fields.whole("moe_intermediate_size", 1408 if qwen2 else 768),
        shared_ffn_size=fields.whole("shared_expert_intermediate_size", 5632) if qwen2 else 0,
        shared_gate=qwen2,
        **_losses(fields),
    )
    dense = Dense(ffn_size=fields.whole("intermediate_size"))
    return mixed(plain, [kind if sparse else dense for sparse in sparse_layers(fields, plain.layers)])


def _write_qwen(model: ModelConfig, *, qwen2: bool) -> dict[str, Any] | None:
    found = experts_of(model)
    if found is None:
        return None
    plain, kinds = found
    kind = next(one for one in kinds if isinstance(one, Experts))
    rule = kind.rule
    plainest = RoutingRule(experts=rule.experts, chosen=rule.chosen, renormalised=rule.renormalised)
    shared = bool(kind.shared_ffn_size and kind.shared_gate)
    norms = plain.qk_norm != qwen2 and plain.attention_bias == qwen2
    if rule != plainest or shared != qwen2 or not norms or plain.output_bias or plain.mlp_bias:
        return None
    dense = next((one for one in kinds if isinstance(one, Dense)), None)
    sizes = llama_fields(replace(plain, ffn_size=dense.ffn_size if dense else kind.ffn_size))
    if sizes is None:
        return None
    only = [number for number, one in enumerate(kinds) if isinstance(one, Dense)]
    own = (
        {"qkv_bias": True, "shared_expert_intermediate_size": kind.shared_ffn_size}
        if qwen2
        else {"attention_bias": False}
    )
    return {
        **sizes,
        **own,
        "num_experts": rule.experts,
        "num_experts_per_tok": rule.chosen,
        "norm_topk_prob": rule.renormalised,
        "moe_intermediate_size": kind.ffn_size,
        "decoder_sparse_step": 1,
        "mlp_only_layers": only,
        "use_sliding_window": False,
        **_written_losses(kind),
    }


def _renamed_experts(block: str, names: tuple[str, str, str]) -> tuple[Row, ...]:
    return tuple(
        Row(ours=f"{EXPERT}{ours}_proj.weight", theirs=f"{LAYER}{block}.experts.{{expert}}.{theirs}.weight")
        for ours, theirs in zip(("gate", "up", "down"), names, strict=True)
    )


_QWEN2_SHARED = tuple(
    Row(
        ours=f"{LAYER}mlp.shared_experts.{part}_proj.weight",
        theirs=f"{LAYER}mlp.shared_expert.{part}_proj.weight",
    )
    for part in ("gate", "up", "down")
)

MIXTURES = (
    Family(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        read=_read_mixtral,
        write=_write_mixtral,
        tables=(
            (
                Row(ours=f"{LAYER}mlp.gate.weight", theirs=f"{LAYER}block_sparse_moe.gate.weight"),
                *_renamed_experts("block_sparse_moe", ("w1", "w3", "w2")),
            ),
            STACKED,
        ),
    ),
    Family(
        model_type="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        read=lambda fields: _read_qwen(fields, qwen2=True),
        write=lambda model: _write_qwen(model, qwen2=True),
        tables=(_QWEN2_SHARED, (*_QWEN2_SHARED, *STACKED)),
    ),
    Family(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        read=lambda fields: _read_qwen(fields, qwen2=False),
        write=lambda model: _write_qwen(model, qwen2=False),
        tables=((), STACKED),
    ),
)
