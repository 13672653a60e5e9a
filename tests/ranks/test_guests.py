"""Models of `transformers` that the engine does not build: the same on one rank, on several, and in a plain loop."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from tests.agreement import LEARNING_RATE, Layout, Run, disagreements, run, sequences
from triaxis.models.batch import IGNORED, Batch
from triaxis.models.huggingface.guest import GuestModel, guest_of
from triaxis.models.huggingface.guest_module import guest_module
from triaxis.models.huggingface.guest_weights import TheirFirstValues
from triaxis.models.huggingface.head_loss import head_loss
from triaxis.models.stage import ModelStage, build_stage
from triaxis.parallel.layers.build import Build
from triaxis.parallel.layers.gradient import GradientSlot, give_slot
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.replicas.initialize import fill_module
from triaxis.parallel.replicas.units import Wrapping
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.thread import run_threads

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MORE: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 8},  # tied; norms that begin at zero; a scaled embedding
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6},  # capped logits; windows
    "stablelm": {"use_qkv_bias": True},  # layer norms, which keep float64; untied; partial rotary positions
    "cohere": {"logit_scale": 0.25},  # scaled logits; attention and MLP side by side
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.1},  # a head that asks for the decoder
}


def values_of(family: str, **more: Any) -> dict[str, Any]:
    """A config.json as `transformers` writes it."""
    config = transformers.CONFIG_MAPPING[family](**SIZES | MORE.get(family, {}) | more)
    return dict(config.to_dict())


def guest(family: str, **more: Any) -> GuestModel:
    return guest_of(values_of(family, **more), family)


def filled(model: GuestModel, dtype: torch.dtype) -> Any:
    """Their whole model, as transformers makes it, with the values that ours begins with."""
    config = transformers.CONFIG_MAPPING[model.model_type].from_dict(model.values() | {"dropout": 0.0})
    theirs, first = transformers.AutoModelForCausalLM.from_config(config), TheirFirstValues(model, 0)
    for name, parameter in theirs.named_parameters():
        values = first.read(name, (0,) * parameter.dim(), tuple(parameter.shape))
        parameter.data = values.to(dtype).clone()
    return theirs.train()


@lru_cache(maxsize=8)
def one_rank(family: str, dtype: str) -> Run:
    return run(Layout(), model=guest(family), dtype=dtype, steps=5)


@pytest.mark.parametrize(
    ("family", "dtype", "layout"),
    [
        ("stablelm", "fp64", Layout(dp=4, zero=3)),
        ("stablelm", "fp64", Layout(dp=2, zero=2, recompute=True)),
        ("gemma", "fp32", Layout(dp=4, zero=3)),
        ("gemma", "fp32", Layout(dp=2, zero=1)),
        ("gemma2", "fp32", Layout(dp=4, zero=3, recompute=True)),
        ("cohere", "fp32", Layout(dp=2, zero=0)),
    ],
    ids=str,
)
def test_a_guest_trains_alike_on_every_layout(family: str, dtype: str, layout: Layout) -> None:
    found = run(layout, model=guest(family), dtype=dtype, steps=5)
    assert not disagreements(found, one_rank(family, dtype), dtype)


def plain_loop(model: GuestModel, dtype: torch.dtype, steps: int) -> Run:
    """PyTorch and `transformers` alone: each document a call of its own, the loss their logits' cross entropy."""
    theirs = filled(model, dtype)
    decayed = [p for p in theirs.parameters() if p.dim() > 1]
    rest = [p for p in theirs.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8)
    losses, norms, gradients = [], [], {}
    for number in range(steps):
        rows = sequences(number, 8, model.vocab_size)
        trained = sum(row.trained_tokens() for row in rows)
        losses.append(0.0)
        for row in rows:
            borders = row.documents.borders if row.documents else (0, row.tokens_BL.shape[1])
            for start, stop in pairwise(borders):
                logits = theirs(input_ids=row.tokens_BL[:, start:stop], use_cache=False).logits[0]
                labels = row.labels_BL[0, start:stop]
                loss = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum") / trained
                loss.backward()
                losses[-1] += float(loss.detach())
        if not gradients:
            gradients = {n: p.grad.clone() for n, p in theirs.named_parameters() if p.grad is not None}
        norms.append(float(nn.utils.get_total_norm([p.grad for p in theirs.parameters()])))
        for parameter in theirs.parameters():  # torch's own clipping adds 1e-6 to the norm
            parameter.grad.mul_(min(1.0, 1.0 / norms[-1]))
        optimizer.step()
        optimizer.zero_grad()
    return Run(losses, norms, gradients, {}, True)


@pytest.mark.parametrize(
    ("family", "dtype"), [("stablelm", "fp64"), ("gemma", "fp32"), ("gemma2", "fp32"), ("cohere", "fp32")]
)
def test_a_guest_trains_as_in_a_plain_loop(family: str, dtype: str) -> None:
    wide = {"fp32": torch.float32, "fp64": torch.float64}[dtype]
    expected = plain_loop(guest(family), wide, 5)
    assert not disagreements(one_rank(family, dtype), expected, dtype)


def on_one_rank(make: Callable[[World], Any]) -> Any:
    return run_threads(1, make)[0]


def stage_of(model: GuestModel, world: World, dtype: torch.dtype = torch.float32) -> ModelStage:
    stage = build_stage(model, Build.on(build_mesh(world, Topology()), dtype=dtype))
    fill_module(stage, stage.first_values(0))
    return stage


@pytest.mark.parametrize("family", ["gemma2", "cohere", "opt", "olmoe"])
def test_logits_are_theirs_whatever_their_head_does(family: str) -> None:
    """Caps, scales, experts, and a head that asks for a part of the backbone."""
    model = guest(family)
    tokens_BL = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(1))
    expected = filled(model, torch.float32)(input_ids=tokens_BL, use_cache=False).logits.flatten(0, 1)
    batch = Batch(
        tokens_BL=tokens_BL, labels_BL=tokens_BL, positions_BL=torch.arange(12).repeat(2, 1), documents=None
    )
    found = on_one_rank(lambda world: stage_of(model, world).logits(None, batch))
    assert torch.allclose(found, expected, rtol=0, atol=1e-5)
    assert expected.std() > 0.1


@pytest.mark.parametrize("slots", [False, True], ids=["autograd", "slots"])
def test_the_loss_by_chunks_is_that_of_whole_logits(slots: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triaxis.models.huggingface.head_loss.chunk_tokens", lambda *_, **__: 3)
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(8, 13), nn.Tanh()).double()
    hidden_TD = torch.randn(10, 8, dtype=torch.float64, requires_grad=True)
    labels_T = torch.tensor([1, 12, IGNORED, 0, 3, 3, IGNORED, 7, 2, 11])
    scale = torch.tensor(0.125, dtype=torch.float64)
    expected = F.cross_entropy(head(hidden_TD), labels_T, reduction="sum") * scale
    wanted = torch.autograd.grad(2 * expected, (hidden_TD, *head.parameters()))
    buffers = [torch.full_like(p, 99.0) for p in head.parameters()]
    if slots:
        for parameter, buffer in zip(head.parameters(), buffers, strict=True):
            give_slot(parameter, GradientSlot(lambda buffer=buffer: buffer))  # type: ignore[misc]
    loss = head_loss(head, hidden_TD, labels_T, scale, 13)
    (2 * loss).backward()
    assert torch.allclose(loss, expected, rtol=1e-14)
    found = [hidden_TD.grad, *(buffers if slots else [p.grad for p in head.parameters()])]
    for one, other in zip(found, wanted, strict=True):
        assert one is not None
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-15)


def test_first_values_are_those_of_their_own_initialisation() -> None:
    first = TheirFirstValues(guest("gemma"), 0)
    names = {"model.embed_tokens.weight": (97, 32), "model.layers.1.mlp.up_proj.weight": (48, 32)}
    for name, shape in names.items():
        drawn = first.read(name, (0, 0), shape)
        assert abs(float(drawn.std()) / 0.15 - 1) < 0.1
        assert torch.equal(first.read(name, (3, 1), (4, 5)), drawn[3:7, 1:6])
        assert not torch.equal(TheirFirstValues(guest("gemma"), 1).read(name, (0, 0), shape), drawn)
    assert not first.read("model.norm.weight", (0,), (32,)).any()  # where our own norms begin at one
    other = first.read("model.layers.0.mlp.up_proj.weight", (0, 0), (48, 32))
    assert not torch.equal(other, first.read("model.layers.1.mlp.up_proj.weight", (0, 0), (48, 32)))


def test_drawing_first_values_leaves_the_generator_of_the_process_alone() -> None:
    before = torch.random.get_rng_state()
    TheirFirstValues(guest("gemma"), 0).read("model.embed_tokens.weight", (0, 0), (97, 32))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_buffers_have_values_and_parameters_no_memory() -> None:
    theirs = guest_module(guest("gemma2"))
    assert all(parameter.device.type == "meta" for parameter in theirs.parameters())
    whole = transformers.Gemma2ForCausalLM(theirs.config)
    expected = dict(whole.named_buffers())
    assert expected
    assert all(torch.equal(buffer, expected[name]) for name, buffer in theirs.named_buffers())
    assert guest("gemma2").parameters() == sum(parameter.numel() for parameter in whole.parameters())


def test_units_are_chosen_by_class_or_by_size() -> None:
    def chosen(wrapping: Wrapping) -> list[str]:
        stage = on_one_rank(lambda world: stage_of(guest("stablelm"), world))
        names = {part: name for name, part in stage.named_modules()}
        return [names[unit] for unit in wrapping.units(stage)]

    stage = on_one_rank(lambda world: stage_of(guest("stablelm"), world))
    layers = ["backbone.layers.0", "backbone.layers.1"]
    assert chosen(Wrapping(classes=stage.units())) == layers
    ends = ["backbone.embed_tokens", "head.rest.lm_head"]
    halves = [f"{layer}.{half}" for layer in layers for half in ("self_attn", "mlp")]
    assert chosen(Wrapping(least_elements=3000)) == [ends[0], *halves, ends[1]]
    assert chosen(Wrapping(least_elements=7000)) == layers
    assert chosen(Wrapping(least_elements=10**6)) == []


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"vision_config": {}}, "`vision_config` is {}"),
        ({"is_encoder_decoder": True}, "continue one text"),
        ({"quantization_config": {"bits": 4}}, "quantized weights are not trained"),
        ({"output_router_logits": True}, "set it to false"),
        ({"vocab_size": None}, "`vocab_size` must be a whole number"),
    ],
)
def test_what_cannot_be_a_guest_is_refused_by_its_field(more: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        guest_of(values_of("gemma") | more, "config.json")


@pytest.mark.parametrize(
    ("family", "told"), [("nonsense", "one that transformers knows"), ("vit", "continue")]
)
def test_a_model_that_transformers_cannot_build_is_refused(family: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        guest_module(guest_of(values_of("gemma") | {"model_type": family}, "config.json"))
