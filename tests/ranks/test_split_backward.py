"""A backward pass in two halves: every gradient has the bits that 1f1b gives it, whatever else is on."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.agreement import LENGTH, MODEL, TIED, sequences
from triaxis.engine.config import ConfigError, DataParallel, RunConfig
from triaxis.engine.plan import Recompute, StepPlan
from triaxis.engine.rules import resolve
from triaxis.engine.step import TrainingStep, _Chunk
from triaxis.models.config import ModelConfig
from triaxis.models.presets import PRESETS
from triaxis.parallel.layers.gradient import GradientSlot, give_slot, weight_gradient
from triaxis.parallel.pipeline.schedule import Action, ScheduleName
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.replicas import data_parallel
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.thread import run_threads

MICROBATCHES = 5
Found = tuple[list[float], dict[str, Tensor]]


def plan(schedule: ScheduleName, model: ModelConfig = MODEL, **fields: object) -> StepPlan:
    chosen: dict[str, object] = {"microbatches": MICROBATCHES, "bucket_elements": 3000} | fields
    return StepPlan(
        model=replace(model, layers=4),
        microbatch_size=1,
        sequence_length=LENGTH,
        schedule=schedule,
        **chosen,  # type: ignore[arg-type]
    )


def trained(chosen: StepPlan, topology: Topology) -> list[Found]:
    """Two steps' losses and norms, and the gradients of a third, on every rank."""

    def main(world: World) -> Found:
        mesh = build_mesh(world, topology)
        step = TrainingStep(chosen, mesh)
        count = chosen.microbatches
        rows = sequences(0, count * topology.dp, chosen.model.vocab_size)
        own = rows[mesh.dp.rank * count : (mesh.dp.rank + 1) * count]
        results = [step.train(own, 1e-3) for _ in range(2)]
        step.accumulate(own)
        gradients = {
            f"{segment.layout.name} {segment.layout.offsets}": gradient.clone()
            for segment, gradient in step.data_parallel.gathered_gradients()
        }
        return [value for result in results for value in (result.loss, result.grad_norm)], gradients

    return run_threads(topology.world_size, main)


def first_gradients(chosen: StepPlan, topology: Topology) -> dict[str, Tensor]:
    """Of the first step, each whole parameter of each tensor rank, wherever it lies."""

    def main(world: World) -> dict[str, Tensor]:
        mesh = build_mesh(world, topology)
        step = TrainingStep(chosen, mesh)
        count = chosen.microbatches
        rows = sequences(0, count * topology.dp, chosen.model.vocab_size)
        step.accumulate(rows[mesh.dp.rank * count : (mesh.dp.rank + 1) * count])
        return {
            f"{segment.layout.name} {segment.layout.offsets}": gradient.clone()
            for segment, gradient in step.data_parallel.gathered_gradients()
        }

    return {name: it for found in run_threads(topology.world_size, main) for name, it in found.items()}


def alike(one: list[Found], other: list[Found]) -> bool:
    return all(
        mine[0] == yours[0]
        and mine[1].keys() == yours[1].keys()
        and all(torch.equal(mine[1][name], yours[1][name]) for name in mine[1])
        for mine, yours in zip(one, other, strict=True)
    )


ROWS: list[tuple[Topology, dict[str, object]]] = [
    (Topology(), {}),
    (Topology(), {"recompute": Recompute.FULL, "model": TIED}),
    (Topology(pp=4), {"model": TIED}),
    (Topology(pp=2, dp=2), {"zero": 1, "microbatches": 1}),
    (Topology(pp=4, dp=2), {"zero": 2}),
    (Topology(pp=2, dp=2), {"zero": 3, "recompute": Recompute.FULL}),
    (Topology(tp=2, pp=2, dp=2), {"zero": 3, "sequence_parallel": True, "model": TIED}),
]


@pytest.mark.parametrize(("topology", "fields"), ROWS, ids=lambda value: None)
def test_gradients_have_the_bits_of_1f1b(topology: Topology, fields: dict[str, object]) -> None:
    whole, halves = (
        trained(plan(schedule, **fields), topology)  # type: ignore[arg-type]
        for schedule in (ScheduleName.ONE_F_ONE_B, ScheduleName.ZB_H1)
    )
    assert alike(whole, halves)


V_ROWS: list[tuple[Topology, Topology, dict[str, object]]] = [
    (Topology(), Topology(), {}),
    (Topology(), Topology(pp=2), {}),
    (Topology(), Topology(pp=2), {"recompute": Recompute.FULL, "microbatches": 2}),
    (Topology(dp=2), Topology(pp=2, dp=2), {"zero": 2}),
    (Topology(dp=2), Topology(pp=2, dp=2), {"zero": 3, "recompute": Recompute.FULL}),
    (Topology(tp=2), Topology(tp=2, pp=2), {"sequence_parallel": True}),
]


@pytest.mark.parametrize("schedule", [ScheduleName.ZB_V, ScheduleName.V_HALF])
@pytest.mark.parametrize(("one", "cut", "fields"), V_ROWS, ids=lambda value: None)
def test_gradients_have_the_bits_of_1f1b_without_a_pipeline(
    one: Topology, cut: Topology, fields: dict[str, object], schedule: ScheduleName
) -> None:
    """Where a parameter's gradient lies differs; the norm, and so an update, sums in another order."""
    whole = first_gradients(plan(ScheduleName.ONE_F_ONE_B, **fields), one)  # type: ignore[arg-type]
    halves = first_gradients(plan(schedule, virtual_stages=2, **fields), cut)
    assert whole.keys() == halves.keys()
    assert [name for name in whole if not torch.equal(whole[name], halves[name])] == []


def test_gradients_of_weights_that_are_left_out_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(plan(ScheduleName.ZB_H1), Topology(pp=2))
    carry_out = _Chunk.add_weight_gradients

    def forgetful(chunk: _Chunk, action: Action, *, last: bool) -> None:
        if action.microbatch == 1:
            del chunk._waiting[1][0]
        carry_out(chunk, action, last=last)

    monkeypatch.setattr(_Chunk, "add_weight_gradients", forgetful)
    assert not alike(expected, trained(plan(ScheduleName.ZB_H1), Topology(pp=2)))


def test_what_is_put_off_is_carried_out_in_order_and_keeps_no_graph() -> None:
    buffer, told = torch.zeros(2, 3), []
    slot = GradientSlot(lambda: buffer)
    slot.on_complete = lambda: told.append(buffer.clone())
    weight = nn.Parameter(torch.ones(2, 3))
    give_slot(weight, slot)
    made = torch.ones(4, 3, requires_grad=True) * 2
    slot.later = later = []
    with torch.no_grad():
        assert weight_gradient(weight, torch.ones(4, 2), made) is None
        slot.take(slot.add, torch.full((2, 3), 0.5))
        slot.finish()
        assert not buffer.any() and not told and len(later) == 3
        assert not any(
            item.requires_grad
            for do in later
            for item in do.args
            if isinstance(item, Tensor)  # type: ignore[attr-defined]
        )
        slot.later = None
        for do in later:
            do()
    assert torch.equal(buffer, torch.full((2, 3), 8.5)) and torch.equal(told[0], buffer)


def test_fully_shard_cannot_split_a_backward() -> None:
    config = RunConfig(
        pp=2, dp=2, schedule=ScheduleName.ZB_H1, data_parallel=DataParallel.FSDP, microbatches=4
    )
    with pytest.raises(ConfigError, match=r"`data_parallel` must be zero with schedule zb-h1, but is fsdp"):
        resolve(config, 4, PRESETS["tiny"])
    assert resolve(replace(config, data_parallel=DataParallel.ZERO), 4, PRESETS["tiny"]).virtual_stages == 1


@pytest.mark.parametrize(
    ("flags", "model", "message"),
    [
        (
            {"virtual_stages": 3},
            "tiny",
            "`virtual_stages` must be 2 with schedule zb-v, but is 3: its stages go",
        ),
        ({"data_parallel": DataParallel.FSDP}, "tiny", "`data_parallel` must be zero with schedule zb-v"),
        ({"pp": 64}, "tiny", "`pp` × `virtual_stages` must be at most the"),
    ],
)
def test_what_a_v_cannot_do_is_refused(flags: dict[str, object], model: str, message: str) -> None:
    config = RunConfig(model=model, pp=2, schedule=ScheduleName.ZB_V, microbatches=4)
    config = replace(config, **flags)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve(config, config.pp)


def test_a_table_that_a_rank_holds_twice_has_one_gradient_and_one_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """N70: a tied table at both ends of a V."""

    def main(world: World) -> list[Tensor]:
        mesh = build_mesh(world, Topology(pp=2))
        step = TrainingStep(plan(ScheduleName.ZB_V, TIED, virtual_stages=2), mesh)
        step.train(sequences(0, MICROBATCHES, TIED.vocab_size), 1e-3)
        return [weight.clone() for it, weight in step.data_parallel.gathered_masters() if it.layout.twice]

    held = run_threads(2, main)
    assert len(held[0]) == 2 and not held[1]
    assert torch.equal(*held[0])
    monkeypatch.setattr(data_parallel, "_sum_what_is_held_twice", lambda shards: None)
    assert not torch.equal(*run_threads(2, main)[0])
