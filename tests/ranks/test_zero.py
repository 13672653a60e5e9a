"""ZeRO on an ordinary module equals plain AdamW on one rank; gradients of shared parameters count once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.agreement import LENGTH, MODEL, TIED, sequences
from triaxis.engine.optimizer import ShardOptimizer
from triaxis.engine.plan import StepPlan, UpdateRule
from triaxis.engine.step import StepResult, TrainingStep
from triaxis.models.config import ModelConfig
from triaxis.models.fields import with_fields
from triaxis.parallel.layers.declare import declare_replicated, layouts_of
from triaxis.parallel.layers.gradient import slot_of
from triaxis.parallel.places.layout import ParameterLayout
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.replicas.zero import ZeroDataParallel
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.thread import run_threads

SIZE, MICROBATCHES, STEPS = 7, 12, 3
RULE = UpdateRule(name="adamw", weight_decay=0.1)
LEARNING_RATE = 1e-2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.scale = nn.Parameter(torch.ones(SIZE))

    def forward(self, input: Tensor) -> Tensor:
        return input + torch.tanh(self.linear(input)) * self.scale


class Net(nn.Module):
    """283 parameters, a prime: no number of ranks divides them. `side` takes part in some microbatches only."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.side = Layer()
        self.shift = nn.Parameter(torch.zeros(SIZE))
        self.output = nn.Linear(SIZE, 3)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
        self.to(dtype)

    def forward(self, input: Tensor, with_side: bool) -> Tensor:
        hidden = input + self.shift
        for layer in self.layers:
            hidden = layer(hidden)
        output: Tensor = self.output(self.side(hidden) if with_side else hidden)
        return output.square().sum() / 100


def inputs(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(4, SIZE, generator=generator, dtype=torch.float64) for _ in range(MICROBATCHES)]


def plain(share: int) -> dict[str, Tensor]:
    """torch's AdamW over the whole batch; `side` is in every second microbatch of a rank's `share`."""
    net = Net()
    parameters = list(net.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": RULE.weight_decay},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=LEARNING_RATE,
        betas=RULE.betas,
        eps=RULE.epsilon,
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        for number, batch in enumerate(inputs(step)):
            net(batch, number % share % 2 == 0).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in net.named_parameters()}


def held(net: nn.Module, parallel: ZeroDataParallel) -> dict[str, Tensor]:
    """The parameters that forward would use."""
    for bucket in parallel.buckets:
        bucket.gather()
    weights = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    for bucket in parallel.buckets:
        if bucket.sharding.parameters:
            bucket.release()
    return weights


def sharded(
    dp: int,
    zero: int,
    wrap: tuple[type[nn.Module], ...],
    bucket_elements: int,
    dtype: torch.dtype = torch.float64,
) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Each rank's parameters and gathered masters after training."""
    share = MICROBATCHES // dp

    def main(world: World) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        mesh = build_mesh(world, Topology(dp=dp))
        net = Net(dtype)
        declare_replicated(net, mesh.tp.rank)
        parallel = ZeroDataParallel([net], mesh, stage=zero, wrap=wrap, bucket_elements=bucket_elements)
        optimizer = ShardOptimizer(parallel.buckets, RULE)
        for step in range(STEPS):
            parallel.start_step()
            own = inputs(step)[mesh.dp.rank * share : (mesh.dp.rank + 1) * share]
            for number, batch in enumerate(own):
                loss = net(batch.to(dtype), number % 2 == 0)
                parallel.start_backward(0, last=number == share - 1)
                loss.backward()
                parallel.finish_backward(0)
            parallel.synchronize_gradients()
            optimizer.step(LEARNING_RATE, torch.ones((), dtype=torch.float64))
            parallel.publish()
        masters = {segment.layout.name: whole.clone() for segment, whole in parallel.gathered_masters()}
        return held(net, parallel), masters

    return run_threads(dp, main)


@pytest.mark.parametrize(("dp", "zero"), [(1, 3), *((dp, zero) for dp in (2, 3, 4) for zero in range(4))])
@pytest.mark.parametrize(
    ("wrap", "bucket_elements"), [((), 1 << 20), ((), 100), ((Layer,), 1), ((nn.Linear,), 100)]
)
def test_every_stage_equals_plain_adamw(
    dp: int, zero: int, wrap: tuple[type[nn.Module], ...], bucket_elements: int
) -> None:  # B26
    expected = plain(MICROBATCHES // dp)
    assert sum(weight.numel() for weight in expected.values()) == 283
    for weights, _ in sharded(dp, zero, wrap, bucket_elements):
        assert weights.keys() == expected.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dp", [3, 4])
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gathered_masters_are_the_live_weights(dp: int, zero: int, dtype: torch.dtype) -> None:  # B76
    ranks = sharded(dp, zero, (Layer,), 100, dtype)
    for weights, masters in ranks:
        assert masters.keys() == weights.keys()
        assert sum(master.numel() for master in masters.values()) == 283
        for name, master in masters.items():
            assert master.dtype == torch.promote_types(dtype, torch.float32)
            assert torch.equal(master, ranks[0][1][name])
            assert torch.equal(master.to(dtype), weights[name])


RETURNED: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dict": (lambda made: {"hidden": made, "name": "layer", "nothing": None}, lambda given: given["hidden"]),
    "tuple": (lambda made: (None, (made, 3)), lambda given: given[1][0]),
    "two tensors, one of which nobody uses": (lambda made: [made, made.detach()], lambda given: given[0]),
}


@pytest.mark.parametrize("what", RETURNED)
def test_modules_may_return_anything(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: AttributeError, since the hook that gathers for backward took the output for a tensor."""
    pack, unpack = RETURNED[what]
    expected, forward, call = plain(MICROBATCHES // 2), Layer.forward, nn.Module.__call__
    monkeypatch.setattr(Layer, "forward", lambda self, input: pack(forward(self, input)))

    def unpacked(self: Layer, input: Tensor) -> Tensor:
        return unpack(call(self, input))

    monkeypatch.setattr(Layer, "__call__", unpacked)
    for weights, _ in sharded(2, 3, (Layer,), 100):
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-12, atol=1e-14)


def test_a_wrong_stage_is_one_clear_error() -> None:
    def main(world: World) -> None:
        ZeroDataParallel([], build_mesh(world, Topology()), stage=4)

    with pytest.raises(ValueError, match="`zero` must be 0, 1, 2 or 3, but is 4"):
        run_threads(1, main)


# Forced gradients: what the norm counts and what is summed.


def plan_of(model: ModelConfig, zero: int) -> StepPlan:
    return StepPlan(
        model=model,
        microbatch_size=1,
        microbatches=1,
        sequence_length=LENGTH,
        zero=zero,
        bucket_elements=3000,
        dtype="fp64",
        rule=UpdateRule(name="sgd"),
    )


def forced(
    topology: Topology,
    model: ModelConfig,
    zero: int,
    value: Callable[[ParameterLayout, dict[str, int]], float],
) -> list[tuple[StepResult, dict[str, float]]]:
    """A step whose reduced gradients are zero, but `value` in the first element of every piece.

    Returns the result, and how far each piece's first element moved at a learning rate of one.
    """

    def main(world: World) -> tuple[StepResult, dict[str, float]]:
        mesh = build_mesh(world, topology)
        step = TrainingStep(plan_of(model, zero), mesh)

        def first_elements() -> dict[str, float]:
            return {s.layout.name: float(t.reshape(-1)[0]) for s, t in step.data_parallel.gathered_masters()}

        def force() -> None:
            for bucket in step.data_parallel.buckets:
                bucket.gradient_shard.zero_()
                for segment in bucket.segments:
                    if segment.first == 0:
                        bucket.gradient_shard[segment.start] = value(segment.layout, mesh.coordinates)

        synchronize = step.data_parallel.synchronize_gradients

        def changed() -> None:
            synchronize()
            force()

        step.data_parallel.synchronize_gradients = changed  # type: ignore[method-assign]
        before = first_elements()
        rows = sequences(0, topology.dp, model.vocab_size)
        result = step.train(rows[mesh.dp.rank : mesh.dp.rank + 1], 1.0)
        return result, {name: before[name] - after for name, after in first_elements().items()}

    return run_threads(topology.world_size, main)


SHORT, SHORT_TIED = with_fields(MODEL, layers=2, kv_heads=8), replace(TIED, layers=2)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_norm_spans_pipeline_stages(zero: int) -> None:  # B05
    """Local norms 3 and 4: the norm is 5 on all, and every gradient is multiplied by 0.2."""
    forces = {"model.embed_tokens.weight": 3.0, "lm_head.weight": 4.0}
    ranks = forced(Topology(pp=2, dp=2), SHORT, zero, lambda layout, _: forces.get(layout.name, 0.0))
    for result, moved in ranks:
        assert result.grad_norm == pytest.approx(5.0, rel=1e-12)
        assert result.clip_coefficient == pytest.approx(0.2, rel=1e-12)
        for name, distance in moved.items():
            assert distance == pytest.approx(0.2 * forces.get(name, 0.0), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_replicated_gradients_count_once(zero: int) -> None:  # B10
    """Shards with a total square of 9 and a replicated gradient of 4: 5, where counting per rank gives 8.544."""
    forces = {"model.layers.0.mlp.down_proj.weight": 1.5, "model.norm.weight": 4.0}
    for result, _ in forced(
        Topology(tp=4, dp=2), SHORT, zero, lambda layout, _: forces.get(layout.name, 0.0)
    ):
        assert result.grad_norm == pytest.approx(5.0, rel=1e-12)


def test_replicated_key_value_heads_count_once() -> None:  # B10
    """Two heads on four ranks."""
    name = "model.layers.0.self_attn.k_proj.weight"
    model = with_fields(SHORT, kv_heads=2)
    for result, _ in forced(Topology(tp=4), model, 0, lambda layout, _: 3.0 * (layout.name == name)):
        assert result.grad_norm == pytest.approx(math.sqrt(2 * 9), rel=1e-12)


@pytest.mark.parametrize("pp", [1, 2])
def test_tied_embeddings_count_once(pp: int) -> None:  # B10
    name = "model.embed_tokens.weight"
    for result, _ in forced(Topology(pp=pp), SHORT_TIED, 0, lambda layout, _: 3.0 * (layout.name == name)):
        assert result.grad_norm == pytest.approx(3.0, rel=1e-12)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_tied_embedding_gradients_are_summed_over_stages_and_data_ranks(zero: int) -> None:  # B01
    """1 and 3 on the first stage, 10 and 20 on the last: 34 wherever it is held (gradients are sums)."""
    forces = {(0, 0): 1.0, (0, 1): 3.0, (1, 0): 10.0, (1, 1): 20.0}

    def main(world: World) -> Tensor:
        mesh = build_mesh(world, Topology(pp=2, dp=2))
        step = TrainingStep(plan_of(SHORT_TIED, zero), mesh)
        parallel = step.data_parallel
        parallel.start_step()
        parallel.start_backward(0, last=True)
        for bucket in parallel.buckets:
            for member in bucket.members:
                slot = slot_of(member)
                assert slot is not None
                if layouts_of(member)[0].tied:
                    slot.add(
                        torch.full(member.shape, forces[mesh.pp.rank, mesh.dp.rank], dtype=torch.float64)
                    )
        parallel.finish_backward(0)
        parallel.synchronize_gradients()
        (gradient,) = (t.clone() for s, t in parallel.gathered_gradients() if s.layout.tied)
        return gradient

    for gradient in run_threads(4, main):
        assert torch.equal(gradient, torch.full_like(gradient, 34.0))


@pytest.mark.parametrize("zero", range(4))
def test_each_value_is_made_by_one_rank(zero: int) -> None:
    """A module that was made without memory: every rank fills its part, and all hold the same whole."""
    dp = 3

    def main(world: World) -> tuple[dict[str, Tensor], int]:
        mesh = build_mesh(world, Topology(dp=dp))
        with torch.device("meta"):
            net = Net()
        declare_replicated(net, mesh.tp.rank)
        filled = 0

        def fill(layout: ParameterLayout, run: Tensor, first: int) -> None:
            nonlocal filled
            filled += run.numel()
            run.copy_(torch.arange(first, first + run.numel()) + len(layout.name) / 100)

        parallel = ZeroDataParallel([net], mesh, stage=zero, wrap=(Layer,), bucket_elements=100, fill=fill)
        return held(net, parallel), filled

    ranks = run_threads(dp, main)
    assert sum(filled for _, filled in ranks) == sum(parameter.numel() for parameter in Net().parameters())
    for weights, _ in ranks:
        for name, weight in weights.items():
            assert torch.equal(weight.view(-1), torch.arange(weight.numel()) + len(name) / 100), name
