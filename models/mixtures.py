"""Published models with experts, and a small one for a machine. Standard library only."""

from __future__ import annotations

from dataclasses import replace

from triaxis.models.config import ModelConfig
from triaxis.models.experts_kind import Experts, GroupScore, RoutingRule, ScoreKind
from triaxis.models.fields import dense_model
from triaxis.models.kinds import Kind, Layer


def with_experts(model: ModelConfig, experts: Kind, *, dense_layers: int = 0) -> ModelConfig:
    """The model with experts in place of its MLPs, but in the first `dense_layers`."""
    plain = model.kind(0)
    assert isinstance(plain, Layer)
    mixed = replace(plain, feed_forward=experts)
    return replace(model, leading=(plain,) * dense_layers, repeating=(mixed,))


def _mixtral(name: str, *, hidden: int, layers: int, heads: int, ffn: int, vocab: int) -> ModelConfig:
    plain = dense_model(
        name=name,
        vocab_size=vocab,
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        ffn_size=ffn,
        max_positions=65536 if vocab == 32768 else 32768,
        rope_theta=1000000.0,
    )
    return with_experts(plain, Experts(rule=RoutingRule(experts=8, chosen=2), ffn_size=ffn))


def _qwen3(name: str, *, hidden: int, layers: int, heads: int, ffn: int) -> ModelConfig:
    plain = dense_model(
        name=name,
        vocab_size=151936,
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=4,
        head_dim=128,
        ffn_size=ffn,
        max_positions=32768,
        norm_eps=1e-6,
        rope_theta=1000000.0,
        qk_norm=True,
    )
    rule = RoutingRule(experts=128, chosen=8)
    return with_experts(plain, Experts(rule=rule, ffn_size=ffn, sequence_loss=0.001))


def _machine(name: str, *, hidden: int, heads: int, kv_heads: int, ffn: int) -> ModelConfig:
    """Bytes, 8 experts of which a token takes 2, balanced by the bias: as many parameters a token as `tiny`'s kin."""
    plain = dense_model(
        name=name,
        vocab_size=257,
        hidden_size=hidden,
        layers=8,
        heads=heads,
        kv_heads=kv_heads,
        ffn_size=2 * ffn,
        max_positions=1024,
        init_std=round(hidden**-0.5, 3),
    )
    rule = RoutingRule(
        experts=8,
        chosen=2,
        scores=ScoreKind.SIGMOID,
        choosing_bias=True,
        group_score=GroupScore.TWO_BEST,
    )
    return with_experts(plain, Experts(rule=rule, ffn_size=ffn, bias_rate=1e-2), dense_layers=1)


MIXTURES = (
    _machine("tiny-moe", hidden=96, heads=4, kv_heads=2, ffn=128),
    _mixtral("mixtral-8x7b", hidden=4096, layers=32, heads=32, ffn=14336, vocab=32000),
    _mixtral("mixtral-8x22b", hidden=6144, layers=56, heads=48, ffn=16384, vocab=32768),
    _qwen3("qwen3-30b-a3b", hidden=2048, layers=48, heads=32, ffn=768),
    _qwen3("qwen3-235b-a22b", hidden=4096, layers=94, heads=64, ffn=1536),
)
