"""Published models with experts, and a small one for a machine. Standard library only."""

from __future__ import annotations

from dataclasses import replace

from triaxis.models.config import ModelConfig
from triaxis.models.experts_kind import Experts, GroupScore, RoutingRule, ScoreKind
from triaxis.models.fields import dense_model
from triaxis.models.kinds import Dense, Kind, Layer
from triaxis.models.latent_kind import LatentAttention
from triaxis.models.positions import Rope


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


def _latent(
    name: str,
    *,
    hidden: int,
    layers: int,
    heads: int,
    dense_layers: int,
    dense_ffn: int,
    experts: Experts,
    vocab: int,
    query_latent: int = 1536,
    theta: float = 10000.0,
) -> ModelConfig:
    """DeepSeek-V2's shape: the first layers dense, latents of 512, heads of 128 + 64 and of 128."""
    attention = LatentAttention(
        heads=heads,
        latent=512,
        plain_size=128,
        turned_size=64,
        value_size=128,
        query_latent=query_latent,
    )
    dense = Layer(attention=attention, feed_forward=Dense(ffn_size=dense_ffn))
    return ModelConfig(
        name=name,
        vocab_size=vocab,
        hidden_size=hidden,
        layers=layers,
        max_positions=4096,
        leading=(dense,) * dense_layers,
        repeating=(Layer(attention=attention, feed_forward=experts),),
        norm_eps=1e-6,
        positions=Rope(theta=theta),
        init_std=0.006,
    )


def _v2_experts(
    experts: int, ffn: int, *, groups: int = 1, chosen_groups: int = 1, scale: float = 1.0
) -> Experts:
    """Two shared experts, weights not renormalised, a group is worth its best expert."""
    rule = RoutingRule(
        experts=experts,
        chosen=6,
        renormalised=False,
        scale=scale,
        groups=groups,
        chosen_groups=chosen_groups,
    )
    return Experts(rule=rule, ffn_size=ffn, shared_ffn_size=2 * ffn, sequence_loss=0.001)


def _v3_experts(
    experts: int, ffn: int, *, chosen: int = 8, groups: int = 1, chosen_groups: int = 1, scale: float
) -> Experts:
    """One shared expert, sigmoid scores, balanced by the bias and, within a sequence, by a small loss."""
    rule = RoutingRule(
        experts=experts,
        chosen=chosen,
        scores=ScoreKind.SIGMOID,
        scale=scale,
        groups=groups,
        chosen_groups=chosen_groups,
        group_score=GroupScore.TWO_BEST,
        choosing_bias=True,
    )
    return Experts(rule=rule, ffn_size=ffn, shared_ffn_size=ffn, sequence_loss=1e-4)


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


def _tiny_v3() -> ModelConfig:
    """Bytes, DeepSeek-V3's parts in small: latents, a shared expert, groups, the bias; the first layer dense."""
    attention = LatentAttention(
        heads=4, latent=32, plain_size=16, turned_size=8, value_size=16, query_latent=48
    )
    experts = replace(_v3_experts(8, 96, chosen=2, groups=4, chosen_groups=2, scale=1.0), bias_rate=1e-2)
    return ModelConfig(
        name="tiny-v3",
        vocab_size=257,
        hidden_size=96,
        layers=4,
        max_positions=1024,
        leading=(Layer(attention=attention, feed_forward=Dense(ffn_size=288)),),
        repeating=(Layer(attention=attention, feed_forward=experts),),
        norm_eps=1e-6,
        init_std=0.1,
    )


MIXTURES = (
    _machine("tiny-moe", hidden=96, heads=4, kv_heads=2, ffn=128),
    _tiny_v3(),
    _mixtral("mixtral-8x7b", hidden=4096, layers=32, heads=32, ffn=14336, vocab=32000),
    _mixtral("mixtral-8x22b", hidden=6144, layers=56, heads=48, ffn=16384, vocab=32768),
    _qwen3("qwen3-30b-a3b", hidden=2048, layers=48, heads=32, ffn=768),
    _qwen3("qwen3-235b-a22b", hidden=4096, layers=94, heads=64, ffn=1536),
    _latent(
        "deepseek-v2-lite",
        hidden=2048,
        layers=27,
        heads=16,
        dense_layers=1,
        dense_ffn=10944,
        experts=_v2_experts(64, 1408),
        vocab=102400,
        query_latent=0,
    ),
    _latent(
        "deepseek-v2",
        hidden=5120,
        layers=60,
        heads=128,
        dense_layers=1,
        dense_ffn=12288,
        experts=_v2_experts(160, 1536, groups=8, chosen_groups=3, scale=16.0),
        vocab=102400,
    ),
    _latent(
        "deepseek-v3",
        hidden=7168,
        layers=61,
        heads=128,
        dense_layers=3,
        dense_ffn=18432,
        experts=_v3_experts(256, 2048, groups=8, chosen_groups=4, scale=2.5),
        vocab=129280,
    ),
    _latent(
        "kimi-k2",
        hidden=7168,
        layers=61,
        heads=64,
        dense_layers=1,
        dense_ffn=18432,
        experts=_v3_experts(384, 2048, scale=2.827),
        vocab=163840,
        theta=50000.0,
    ),
)
