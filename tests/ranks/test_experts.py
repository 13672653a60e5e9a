"""Experts: every layout trains the same model as one rank, and the published faults are seen."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.agreement import MODEL, Fault, Layout, Run, disagreements, reference_layout, run, sequences
from tests.checkpointing import open_step, state_at, train
from tests.some import some
from triaxis.engine.checkpoint.store import CheckpointStore
from triaxis.engine.step import TrainingStep
from triaxis.engine.trace.cluster import trace_cluster
from triaxis.models.balance import balance_loss, z_loss
from triaxis.models.config import ModelConfig
from triaxis.models.experts import ExpertLayer
from triaxis.models.experts_kind import Experts, GroupScore, RoutingRule, ScoreKind
from triaxis.models.mixtures import with_experts
from triaxis.parallel.layers import experts as moving
from triaxis.parallel.layers.declare import states_of
from triaxis.parallel.layers.experts import bring_back, grouped_linear, plan_exchange, send_to_experts
from triaxis.parallel.layers.gradient import GradientSlot
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.programs.proof import prove
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.thread import run_threads

V3 = RoutingRule(
    experts=8,
    chosen=2,
    scores=ScoreKind.SIGMOID,
    scale=2.5,
    groups=4,
    chosen_groups=2,
    group_score=GroupScore.TWO_BEST,
    choosing_bias=True,
)
MIXED = with_experts(
    replace(MODEL, name="experts"),
    Experts(rule=V3, ffn_size=16, shared_ffn_size=16, sequence_loss=0.01, z_loss=0.001, bias_rate=0.05),
    dense_layers=1,
)
PLAIN = with_experts(
    replace(MODEL, name="plain experts"),
    Experts(rule=RoutingRule(experts=8, chosen=2), ffn_size=16, shared_ffn_size=8, shared_gate=True),
)
ROWS = {
    "tp2": Layout(tp=2),
    "tp2-sp": Layout(tp=2, sp=True),
    "tp4-sp-kv": Layout(tp=4, sp=True),
    "pp2": Layout(pp=2),
    "pp2-interleaved": Layout(pp=2, schedule="interleaved", virtual_stages=2),
    "dp2-zero1": Layout(dp=2, zero=1),
    "dp2-zero3": Layout(dp=2, zero=3),
    "ep2": Layout(dp=2, ep=2),
    "ep2-zero3": Layout(dp=4, ep=2, zero=3),
    "ep4-zero2": Layout(dp=4, ep=4, zero=2),
    "ep2-tp2": Layout(tp=2, ep=2),
    "ep2-tp2-sp": Layout(tp=2, ep=2, sp=True),
    "ep4-tp2-dp2": Layout(tp=2, dp=2, ep=4, zero=1),
    "ep4-tp2-dp2-sp-zero3": Layout(tp=2, dp=2, ep=4, sp=True, zero=3),
    "ep2-tp2-pp2-sp": Layout(tp=2, pp=2, ep=2, sp=True, zero=1),
    "ep2-pp2-dp2-zero2": Layout(pp=2, dp=2, ep=2, zero=2, schedule="gpipe"),
    "ep8-tp2-dp4": Layout(tp=2, dp=4, ep=8, zero=1, sp=True, recompute=True),
    "ep2-recompute": Layout(dp=2, ep=2, zero=1, recompute=True),
    "ep2-pp2-zbv": Layout(pp=2, dp=2, ep=2, zero=2, schedule="zb-v", virtual_stages=2),
    "ep2-pp2-zb": Layout(pp=2, dp=2, ep=2, zero=2, schedule="zb-h1"),
    "ep2-tp2-pp2-zb-sp": Layout(tp=2, pp=2, ep=2, sp=True, zero=1, schedule="zb-h1"),
    "ep2-order": Layout(tp=2, dp=2, pp=2, ep=2, order="tp-dp-pp", zero=1),
}


@functools.cache
def reference(layout: Layout, model: ModelConfig, steps: int) -> Run:
    return run(layout, model=model, steps=steps)


def check(layout: Layout, model: ModelConfig, *, steps: int = 20, fault: Fault | None = None) -> list[str]:
    expected = reference(reference_layout(layout), model, steps)
    return disagreements(run(layout, model=model, steps=steps, fault=fault), expected, "fp64")


@pytest.mark.parametrize(
    "row",
    some(
        ROWS,
        *("tp4-sp-kv", "pp2-interleaved", "dp2-zero3", "ep4-zero2", "ep2-tp2-pp2-sp", "ep4-tp2-dp2-sp-zero3"),
        *("ep8-tp2-dp4", "ep2-pp2-zbv", "ep2-order"),
    ),
)
def test_every_layout_trains_the_same_model(row: str) -> None:
    assert check(ROWS[row], MIXED) == []


@pytest.mark.parametrize(
    "row",
    some(
        ["tp2-sp", "ep2-tp2", "ep4-tp2-dp2-sp-zero3", "ep2-pp2-dp2-zero2"], "tp2-sp", "ep4-tp2-dp2-sp-zero3"
    ),
)
def test_another_family_agrees_too(row: str) -> None:
    assert check(ROWS[row], PLAIN, steps=8) == []


def biases(layout: Layout, dtype: str = "fp32", steps: int = 6) -> dict[str, list[float]]:
    """The choosing biases after some steps, which all ranks of a stage must hold alike."""

    def main(world: World) -> dict[str, list[float]]:
        step = open_step(world, layout, MIXED, "adamw, clip 1", dtype)
        train(step, layout, range(steps))
        return {found.name: tensor.tolist() for stage in step.stages for found, tensor in states_of(stage)}

    told: dict[str, list[float]] = {}
    for found in run_threads(layout.size, main):
        for name, values in found.items():
            assert told.setdefault(name, values) == values, f"{name} differs between ranks"
    return told


@pytest.mark.parametrize("row", ["tp2", "ep2-tp2-pp2-sp", "ep4-tp2-dp2-sp-zero3", "ep8-tp2-dp4"])
def test_the_bias_is_the_same_to_the_bit(row: str) -> None:
    expected = biases(reference_layout(ROWS[row]), "fp64")
    assert len(expected) == 3 and any(any(values) for values in expected.values())
    assert biases(ROWS[row], "fp64") == expected


def counts_twice(layer: ExpertLayer) -> None:
    plain = layer.tokens_per_expert

    def doubled() -> Tensor:
        counts = plain()
        counts[0] *= 2
        return counts

    layer.tokens_per_expert = doubled  # type: ignore[method-assign]


def each_layer(change: Callable[[ExpertLayer], None]) -> Fault:
    def plant(step: TrainingStep) -> None:
        for layer in step.balance.layers:
            change(layer)

    return plant


def gradient_times(factor: float, pick: Callable[[Any], bool]) -> Fault:
    """Scales the reduced gradients of some pieces."""

    def plant(step: TrainingStep) -> None:
        synchronize = step.data_parallel.synchronize_gradients

        def scaled() -> None:
            synchronize()
            for bucket in step.data_parallel.buckets:
                for segment in bucket.segments:
                    if pick(segment.layout):
                        bucket.gradient_shard[segment.start : segment.stop] *= factor

        step.data_parallel.synchronize_gradients = scaled  # type: ignore[method-assign]

    return plant


FAULTS: dict[str, tuple[str, Fault]] = {
    "expert gradients divided by their replicas": (
        "ep2-zero3",
        gradient_times(0.5, lambda layout: ".experts." in layout.name),
    ),
    "expert gradients times ep": ("ep2", gradient_times(2.0, lambda layout: ".experts." in layout.name)),
    "router without its sum over tp": (
        "ep2-tp2",
        gradient_times(0.5, lambda layout: layout.name.endswith("gate.weight")),
    ),
    "counts doubled": ("ep2-recompute", each_layer(counts_twice)),
    "bias not moved": ("ep2", each_layer(lambda layer: setattr(layer, "settle", lambda counts, rate: None))),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name: str) -> None:
    row, fault = FAULTS[name]
    assert check(ROWS[row], MIXED, fault=fault) != []


@pytest.mark.parametrize(
    "name", ["order of arrival", "the wrong inverse", "an empty expert keeps its gradient"]
)
def test_a_fault_in_moving_rows_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "order of arrival":
        monkeypatch.setattr(moving, "_arrival", lambda by_rank, device: torch.arange(sum(map(sum, by_rank))))
    elif name == "the wrong inverse":
        monkeypatch.setattr(moving, "_unsorted", lambda rows, order: rows[order])
    else:
        plain = GradientSlot.add_grouped_products

        def kept(self: GradientSlot, grad: Tensor, input: Tensor, counts: Any) -> None:
            self.empty = False
            plain(self, grad, input, counts)

        monkeypatch.setattr(GradientSlot, "add_grouped_products", kept)
    row = ROWS["ep4-zero2"]
    expected = reference(reference_layout(row), MIXED, 20)
    assert disagreements(run(row, model=MIXED), expected, "fp64") != []


COUNTS = [[3, 0, 1, 2], [0, 4, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
"""Rows of four ranks for four experts, one a rank; the last rank has none."""


def test_rows_reach_their_experts_and_come_back() -> None:
    def main(world: World) -> tuple[list[list[float]], list[list[float]], float, float]:
        mesh = build_mesh(world, Topology(dp=4, ep=4))
        counts = torch.tensor(COUNTS[world.rank])
        rows = int(counts.sum())
        values = torch.arange(2.0 * rows, dtype=torch.float64).view(rows, 2) + 100 * world.rank
        values.requires_grad_()
        exchange = plan_exchange(counts, rows, mesh.ep, world)
        arrived = send_to_experts(values, exchange)
        back = bring_back(arrived, exchange)
        assert torch.equal(back, values)
        other = torch.rand(
            arrived.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(world.rank)
        )
        arrived.backward(other)  # the adjoint: sent · other over all ranks is values · brought back
        assert values.grad is not None
        return (
            arrived.tolist(),
            [list(exchange.sent), list(exchange.received)],
            float((arrived.detach() * other).sum()),
            float((values.detach() * values.grad).sum()),
        )

    ranks = run_threads(4, main)
    assert [len(found[0]) for found in ranks] == [sum(column) for column in zip(*COUNTS, strict=True)]
    assert ranks[1][0] == [[100.0 + 2 * row, 101.0 + 2 * row] for row in range(4)] + [[202.0, 203.0]]
    assert all(ranks[i][1][0][j] == ranks[j][1][1][i] for i in range(4) for j in range(4))
    assert sum(found[2] for found in ranks) == pytest.approx(sum(found[3] for found in ranks), rel=1e-12)


@pytest.mark.parametrize("counts", [(3, 0, 2), (0, 0, 0), (5, 0, 0)], ids=str)
def test_grouped_products_are_single_ones(counts: tuple[int, ...]) -> None:
    torch.manual_seed(2)
    rows, weight = (
        torch.randn(sum(counts), 4, dtype=torch.float64),
        torch.randn(3 * 6, 4, dtype=torch.float64),
    )
    parameter = nn.Parameter(weight.clone())
    input_RI = rows.clone().requires_grad_()
    output = grouped_linear(input_RI, parameter, counts)
    grad = torch.randn_like(output)
    output.backward(grad)
    twin = nn.Parameter(weight.view(3, 6, 4).clone())
    plain_RI = rows.clone().requires_grad_()
    parts = zip(plain_RI.split(list(counts)), twin, strict=True)
    expected = torch.cat([part @ matrix.t() for part, matrix in parts])
    expected.backward(grad)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(input_RI.grad, plain_RI.grad)
    torch.testing.assert_close(
        parameter.grad, (torch.zeros_like(twin) if twin.grad is None else twin.grad).view(18, 4)
    )


def test_an_expert_without_rows_gets_exactly_zero() -> None:
    buffer = torch.full((6, 4), 7.0)  # the last step's gradient
    slot = GradientSlot(lambda: buffer)
    slot.add_grouped_products(torch.ones(2, 2), torch.ones(2, 4), (2, 0, 0))
    assert buffer.tolist() == [[2.0] * 4] * 2 + [[0.0] * 4] * 4
    slot.add_grouped_products(torch.ones(1, 2), torch.ones(1, 4), (0, 0, 1))
    assert buffer.tolist() == [[2.0] * 4] * 2 + [[0.0] * 4] * 2 + [[1.0] * 4] * 2


def test_the_balance_loss_is_one_where_experts_are_even() -> None:
    ids = torch.tensor([[0, 1], [2, 3]] * 4)
    scores = torch.full((8, 4), 0.25, dtype=torch.float64, requires_grad=True)
    loss = balance_loss(scores, ids, rows=2, length=4, first=0, sharing=None)
    assert float(loss.detach()) == pytest.approx(2.0)
    uneven = balance_loss(
        torch.eye(4, dtype=torch.float64)[[0] * 8],
        torch.tensor([[0]] * 8),
        rows=2,
        length=4,
        first=0,
        sharing=None,
    )
    assert float(uneven) == pytest.approx(2 * 4)  # all tokens on one of four experts
    logits = torch.zeros(3, 4, dtype=torch.float64)
    assert float(z_loss(logits)) == pytest.approx(3 * torch.tensor(4.0).log().square().item())


@pytest.mark.parametrize("after", ["ep4-tp2-dp2-sp-zero3", "tp2", "ep2-tp2-pp2-sp"])
def test_a_checkpoint_goes_on_at_another_ep(after: str, tmp_path: Path) -> None:
    before, later = ROWS["ep2-zero3"], ROWS[after]
    later = replace(later, order="tp-pp-dp")

    def save(world: World) -> None:
        step = open_step(world, before, MIXED, "adamw, clip 1", "fp64")
        train(step, before, range(3))
        CheckpointStore(tmp_path, step).save(state_at(3))

    def go_on(world: World) -> list[float]:
        step = open_step(world, later, MIXED, "adamw, clip 1", "fp64")
        store = CheckpointStore(tmp_path, step)
        newest = store.latest()
        assert newest is not None
        store.load(newest)
        return [result.loss for result in train(step, later, range(3, 6))]

    run_threads(before.size, save)
    expected = reference(reference_layout(later), MIXED, 20).losses[3:6]
    for losses in run_threads(later.size, go_on):
        assert losses == pytest.approx(expected, rel=1e-10)


def test_recorded_choices_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(world: World) -> list[tuple[int, ...]]:
        layout = Layout()
        step = open_step(world, layout, PLAIN, "sgd, no clip", "fp64")
        tokens = sequences(0, 1, PLAIN.vocab_size)[0].tokens_BL.numel()
        ids_TK = torch.tensor([[1, 6]]).expand(tokens, 2)
        for layer in step.balance.layers:
            layer.recorded = dict.fromkeys(range(layout.global_batch()), ids_TK)
        load = train(step, layout, range(1))[0].load
        assert load is not None
        return [tuple(row.tolist()) for row in load.tokens.values()]

    for row in run_threads(1, main)[0]:
        assert [expert for expert, tokens in enumerate(row) if tokens] == [1, 6]


@pytest.mark.parametrize("row", ["ep2-tp2-pp2-sp", "ep4-tp2-dp2-sp-zero3", "tp2"])
def test_the_cluster_is_traced_and_proved(row: str) -> None:
    from tests.agreement import plan_of

    layout = ROWS[row]
    cluster = trace_cluster(plan_of(layout, MIXED, "adamw, clip 1", "fp32"), layout.topology())
    proof = prove(cluster)
    assert proof.holds, "\n".join(map(str, proof.faults))
