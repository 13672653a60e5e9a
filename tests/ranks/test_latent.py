"""Latent attention: every layout trains the same model as one rank, and the published faults are seen."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from math import prod

import pytest
import torch
from torch import Tensor

from tests.agreement import (
    MODEL,
    TIED,
    Fault,
    Layout,
    Run,
    disagreements,
    plan_of,
    reference_layout,
    run,
)
from tests.ranks.test_experts import V3
from tests.some import some
from triaxis.engine.trace.cluster import trace_cluster
from triaxis.models import latent as layer_module
from triaxis.models.batch import Batch, Inputs, SequenceContext
from triaxis.models.builder import build_model
from triaxis.models.config import ModelConfig
from triaxis.models.experts_kind import Experts
from triaxis.models.kinds import Layer
from triaxis.models.latent import score_scale
from triaxis.models.latent_kind import LatentAttention
from triaxis.models.mixtures import with_experts
from triaxis.models.parts import build_part
from triaxis.models.positions import Rope, YarnScaling
from triaxis.models.presets import PRESETS
from triaxis.models.rotary import rotary_tables
from triaxis.parallel.layers.build import Build
from triaxis.parallel.layers.declare import named_layouts, states_of
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.programs.proof import prove
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.thread import run_threads
from triaxis.parallel.worlds.trace import TraceWorld

YARN = YarnScaling(factor=4.0, original_positions=8, mscale=0.7, mscale_all_dim=1.0)
HEADS = LatentAttention(heads=8, latent=12, plain_size=6, turned_size=4, value_size=5, query_latent=10)


def with_latents(model: ModelConfig, name: str, attention: LatentAttention) -> ModelConfig:
    """The model with another attention in every layer."""
    layer = model.kind(0)
    assert isinstance(layer, Layer)
    return replace(
        model, name=name, repeating=(replace(layer, attention=attention),), positions=Rope(scaling=YARN)
    )


LATENTS = with_latents(MODEL, "latents", HEADS)
PLAIN = with_latents(TIED, "queries without a latent", replace(HEADS, query_latent=0))
MIXED = with_experts(
    replace(LATENTS, name="latents and experts"),
    Experts(rule=V3, ffn_size=16, shared_ffn_size=16, sequence_loss=0.01, bias_rate=0.05),
    dense_layers=1,
)
ROWS = {
    "tp2": Layout(tp=2),
    "tp4-sp": Layout(tp=4, sp=True),
    "tp8-sp": Layout(tp=8, sp=True),
    "pp2-interleaved": Layout(pp=2, schedule="interleaved", virtual_stages=2),
    "dp2-zero1": Layout(dp=2, zero=1),
    "tp2-dp2-zero2": Layout(tp=2, dp=2, zero=2),
    "tp2-pp2-dp2-sp-zero3": Layout(tp=2, pp=2, dp=2, sp=True, zero=3, schedule="gpipe"),
    "tp2-sp-recompute": Layout(tp=2, sp=True, recompute=True),
}
EXPERT_ROWS = {
    "ep2-tp2": Layout(tp=2, ep=2),
    "ep2-tp2-pp2-sp-zero1": Layout(tp=2, pp=2, ep=2, sp=True, zero=1),
    "ep4-tp2-dp2-sp-zero3": Layout(tp=2, dp=2, ep=4, sp=True, zero=3),
    "ep2-dp4-zero2": Layout(dp=4, ep=2, zero=2),
}


@functools.cache
def reference(layout: Layout, model: ModelConfig) -> Run:
    return run(layout, model=model)


def check(layout: Layout, model: ModelConfig, fault: Fault | None = None) -> list[str]:
    return disagreements(
        run(layout, model=model, fault=fault), reference(reference_layout(layout), model), "fp64"
    )


@pytest.mark.parametrize(
    "row", some(ROWS, "tp8-sp", "pp2-interleaved", "tp2-pp2-dp2-sp-zero3", "tp2-sp-recompute")
)
def test_every_layout_trains_the_same_model(row: str) -> None:
    assert check(ROWS[row], LATENTS) == []


@pytest.mark.parametrize("row", some(["tp2", "tp4-sp", "tp2-pp2-dp2-sp-zero3", "dp2-zero1"], "tp4-sp"))
def test_queries_without_a_latent_agree_too(row: str) -> None:
    assert check(ROWS[row], PLAIN) == []


@pytest.mark.parametrize("row", some(EXPERT_ROWS, "ep2-tp2-pp2-sp-zero1", "ep4-tp2-dp2-sp-zero3"))
def test_latents_and_experts_agree_together(row: str) -> None:
    assert check(EXPERT_ROWS[row], MIXED) == []


class _Unsummed(torch.autograd.Function):
    """`shared_by_ranks` without its sum: each rank keeps the gradient of its own heads."""

    @staticmethod
    def forward(ctx, part_TD, group, sequence_parallel):  # type: ignore[no-untyped-def]
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        if not sequence_parallel:
            return part_TD.clone()
        whole_TD = part_TD.new_empty(len(part_TD) * group.size, part_TD.shape[1])
        group.all_gather(whole_TD, part_TD.contiguous())
        return whole_TD

    @staticmethod
    def backward(ctx, grad_TD):  # type: ignore[no-untyped-def]
        if ctx.sequence_parallel:
            grad_TD = grad_TD.chunk(ctx.group.size)[ctx.group.rank]
        return grad_TD.clone(), None, None


@pytest.mark.parametrize("row", some(["tp2", "tp4-sp"], "tp4-sp"))
def test_a_shared_head_without_its_sum_is_seen(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = reference(reference_layout(ROWS[row]), LATENTS)
    monkeypatch.setattr(layer_module, "shared_by_ranks", _Unsummed.apply)
    assert disagreements(run(ROWS[row], model=LATENTS), expected, "fp64") != []


def test_latents_replicas_without_their_sum_are_seen() -> None:
    def plant(step) -> None:  # type: ignore[no-untyped-def]
        synchronize = step.data_parallel.synchronize_gradients

        def halved() -> None:
            synchronize()
            for bucket in step.data_parallel.buckets:
                for segment in bucket.segments:
                    if segment.layout.name.endswith("q_a_proj.weight"):
                        bucket.gradient_shard[segment.start : segment.stop] *= 0.5

        step.data_parallel.synchronize_gradients = halved

    assert check(ROWS["tp4-sp"], LATENTS, fault=plant) != []


def plain_attention(
    hidden_TD: Tensor,
    weights: dict[str, Tensor],
    kind: LatentAttention,
    rows: int,
    scale: float,
    tables: Tensor,
) -> Tensor:
    """The plain twin of the layer on one rank, by the paper's equations and scores of L × L."""

    def normed(part: Tensor, weight: Tensor) -> Tensor:
        return weight * part * (part.square().mean(-1, keepdim=True) + 1e-6).rsqrt()

    def turned(part: Tensor) -> Tensor:
        cos, sin = tables
        first, second = part.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    heads, n, r = kind.heads, kind.plain_size, kind.turned_size
    source = hidden_TD
    if kind.query_latent:
        source = normed(hidden_TD @ weights["q_a_proj.weight"].t(), weights["q_a_layernorm.weight"])
    up = weights["q_b_proj.weight" if kind.query_latent else "q_proj.weight"]
    query = (source @ up.t()).view(rows, -1, heads, n + r)
    both = hidden_TD @ weights["kv_a_proj_with_mqa.weight"].t()
    latent, rope = both.split((kind.latent, r), dim=-1)
    made = normed(latent, weights["kv_a_layernorm.weight"]) @ weights["kv_b_proj.weight"].t()
    key, value = made.view(rows, -1, heads, n + kind.value_size).split((n, kind.value_size), dim=-1)
    scores = torch.einsum("blhn,bmhn->bhlm", query[..., :n], key)
    scores = scores + torch.einsum(
        "blhr,bmr->bhlm", turned(query[..., n:]), turned(rope.view(rows, -1, 1, r))[:, :, 0]
    )
    length = query.shape[1]
    scores = scores * scale * (n + r) ** -0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    mixed = torch.einsum("bhlm,bmhv->blhv", scores.softmax(-1), value)
    return mixed.flatten(0, 1).flatten(1) @ weights["o_proj.weight"].t()


PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "none": lambda patch: None,
    "m in place of its square": lambda patch: patch.setattr(
        layer_module, "score_scale", lambda model: score_scale(model) ** 0.5
    ),
    "the norm also over the shared head": lambda patch: patch.setattr(
        layer_module.LatentAttentionLayer, "_keys_and_values", norm_over_all
    ),
    "the shared head not turned": lambda patch: patch.setattr(
        layer_module.LatentAttentionLayer, "_rotated", queries_alone_turned
    ),
}


def norm_over_all(self, latent_TC, turned_TR, context):  # type: ignore[no-untyped-def]
    whole = torch.cat((latent_TC, turned_TR), dim=-1)
    inverse = (whole.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    return KEYS_AND_VALUES(self, latent_TC, turned_TR * inverse, context)


def queries_alone_turned(self, heads_TO, context, size, first):  # type: ignore[no-untyped-def]
    return ROTATED(self, heads_TO, context, size, first) if first else heads_TO


KEYS_AND_VALUES = layer_module.LatentAttentionLayer._keys_and_values
ROTATED = layer_module.LatentAttentionLayer._rotated


@pytest.mark.parametrize("model", [LATENTS, PLAIN], ids=lambda model: model.name)
@pytest.mark.parametrize("fault", PLANTED)
def test_the_layer_is_its_plain_twin(model: ModelConfig, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[fault](monkeypatch)
    found, expected = layer_and_twin(model)
    same = torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    assert same == (fault == "none")


def layer_and_twin(model: ModelConfig) -> tuple[Tensor, Tensor]:
    """One layer's output on two rows of 9 tokens, and its twin's."""
    layer = model.kind(0)
    assert isinstance(layer, Layer) and isinstance(model.positions, Rope)
    kind = layer.attention
    assert isinstance(kind, LatentAttention)
    cos, sin = rotary_tables(
        9, kind.turned_size, model.positions, dtype=torch.float64, device=torch.device("cpu")
    )

    def main(world) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        build = Build.on(build_mesh(world, Topology()), dtype=torch.float64)
        module = build_part(kind, model, build, "a")
        generator = torch.Generator().manual_seed(1)
        weights = {}
        for parameter, layout, first in named_layouts(module):
            piece = parameter.data.view(-1)[first : first + layout.elements].view(layout.shape)
            piece.copy_(torch.randn(layout.shape, generator=generator, dtype=torch.float64) * 0.4)
            weights[layout.name.removeprefix("a.")] = piece
        tokens_BL, positions_BL = torch.zeros(2, 9, dtype=torch.long), torch.arange(9).repeat(2, 1)
        batch = Batch(tokens_BL=tokens_BL, labels_BL=tokens_BL, positions_BL=positions_BL, documents=None)
        inputs = Inputs(batch=batch, token_scale=torch.ones(()), row_scale=1.0)
        tables = (cos.repeat(2, 1)[:, None], sin.repeat(2, 1)[:, None])
        hidden = torch.randn(18, model.hidden_size, generator=generator, dtype=torch.float64)
        context = SequenceContext(inputs=inputs, cos_T1E=tables[0], sin_T1E=tables[1])
        with torch.no_grad():
            twin = plain_attention(
                hidden, weights, kind, 2, score_scale(model), torch.stack((cos[:, None], sin[:, None]))
            )
            return module(hidden, context), twin

    return run_threads(1, main)[0]


def test_scores_are_scaled_as_published() -> None:
    yarn = YarnScaling(factor=40.0, original_positions=4096, mscale=1.0, mscale_all_dim=1.0)
    assert yarn.score_scale() * 192**-0.5 == pytest.approx(0.135234, abs=1e-6)  # DeepSeek-V3
    lite = replace(yarn, mscale=0.707, mscale_all_dim=0.707)
    assert lite.score_scale() * 192**-0.5 == pytest.approx(0.114721, abs=1e-6)
    assert lite.magnitude() == yarn.magnitude() == 1.0
    assert replace(yarn, mscale_all_dim=None).score_scale() == 1.0


@pytest.mark.parametrize(("row", "model"), [("tp4-sp", LATENTS), ("tp2-pp2-dp2-sp-zero3", PLAIN)])
def test_the_cluster_is_traced_and_proved(row: str, model: ModelConfig) -> None:
    layout = ROWS[row]
    cluster = trace_cluster(plan_of(layout, model, "adamw, clip 1", "fp32"), layout.topology())
    proof = prove(cluster)
    assert proof.holds, "\n".join(map(str, proof.faults))


@pytest.mark.parametrize("row", EXPERT_ROWS)
def test_latents_and_experts_are_traced_and_proved(row: str) -> None:
    layout = EXPERT_ROWS[row]
    cluster = trace_cluster(plan_of(layout, MIXED, "adamw, clip 1", "fp32"), layout.topology())
    proof = prove(cluster)
    assert proof.holds, "\n".join(map(str, proof.faults))


def test_ranks_of_deepseek_v3_hold_the_published_count() -> None:
    """tp 8, pp 2, ep 16: what the 32 ranks of one ep group of each stage hold, each rectangle once."""
    model = PRESETS["deepseek-v3"]
    topology = Topology(tp=8, pp=2, dp=16, ep=16)
    held: dict[tuple[str, tuple[int, ...]], int] = {}
    experts = set()
    for rank in range(32):
        mesh = build_mesh(TraceWorld(rank, 256, "meta"), topology)
        last = mesh.pp.rank == 1
        layers = range(31, 61) if last else range(31)
        stage = build_model(
            model, Build.on(mesh, sequence_parallel=True), layers=layers, first=not last, last=last
        )
        layouts = [layout for _, layout, _ in named_layouts(stage)] + [
            layout for layout, _ in states_of(stage)
        ]
        held |= {(layout.name, layout.offsets): prod(layout.sizes) for layout in layouts}
        experts.add(sum(".experts." in layout.name for layout in layouts))
    assert sum(held.values()) == model.parameters() == 671_026_419_200
    assert experts == {16 * 3 * 28, 16 * 3 * 30}
