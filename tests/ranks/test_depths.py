"""Extra prediction depths: own targets within documents, the same on every layout, in and out of files."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.agreement import LENGTH, Fault, Layout, Run, disagreements, plan_of, reference_layout, run
from tests.checkpointing import open_step, state_at, train
from tests.ranks.test_experts import MIXED
from triaxis.engine.checkpoint.store import CheckpointStore
from triaxis.engine.config import ConfigError, RunConfig
from triaxis.engine.plan import stage_layers
from triaxis.engine.rules import resolve
from triaxis.engine.step import StepResult, TrainingStep
from triaxis.engine.trace.cluster import trace_cluster
from triaxis.models import builder
from triaxis.models.batch import IGNORED, Batch
from triaxis.models.builder import Stage
from triaxis.models.config import ModelConfig
from triaxis.models.depths import DepthInput, later
from triaxis.models.presets import preset
from triaxis.parallel.programs.proof import prove
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.thread import run_threads

MODEL = replace(MIXED, name="depths", depths=2)
STEPS = 20 if os.environ.get("TRIAXIS_FULL") == "1" else 3
ROWS = {
    "tp2": Layout(tp=2),
    "tp2-sp": Layout(tp=2, sp=True),
    "pp2": Layout(pp=2),
    "pp2-interleaved": Layout(pp=2, schedule="interleaved", virtual_stages=2),
    "pp2-zb": Layout(pp=2, schedule="zb-h1"),
    "dp2-pp2-zbv": Layout(dp=2, pp=2, zero=2, schedule="zb-v", virtual_stages=2),
    "dp2-zero1": Layout(dp=2, zero=1),
    "dp2-zero3": Layout(dp=2, zero=3),
    "ep2-pp2-dp2-zero2": Layout(pp=2, dp=2, ep=2, zero=2),
    "ep4-tp2-dp2-sp-zero3": Layout(tp=2, dp=2, ep=4, sp=True, zero=3),
    "ep2-tp2-pp2-zb-sp": Layout(tp=2, pp=2, ep=2, sp=True, zero=1, schedule="zb-h1", recompute=True),
    "pp2-dp2-zero3": Layout(pp=2, dp=2, zero=3),
}


@functools.cache
def reference(layout: Layout, tied: bool, steps: int) -> Run:
    return run(layout, model=replace(MODEL, tied=tied), steps=steps)


def check(layout: Layout, *, tied: bool = False, steps: int = 3, fault: Fault | None = None) -> list[str]:
    found = run(layout, model=replace(MODEL, tied=tied), steps=steps, fault=fault)
    return disagreements(found, reference(reference_layout(layout), tied, steps), "fp64")


@pytest.mark.parametrize("row", ROWS)
def test_every_layout_trains_the_same_model(row: str) -> None:
    assert check(ROWS[row], steps=STEPS) == []


@pytest.mark.parametrize("row", ["tp2", "pp2-zb", "pp2-dp2-zero3"])
def test_a_head_that_is_the_embedding_agrees_too(row: str) -> None:
    assert check(ROWS[row], tied=True, steps=STEPS) == []


def row_of(sizes: list[int], length: int) -> Batch:
    """A row of documents, each of whose tokens has its follower as label."""
    positions = [position for size in sizes for position in range(size)]
    tokens_BL = torch.arange(length)[None]
    labels = [
        token + 1 if position + 1 < size else IGNORED
        for size, first in zip(sizes, [sum(sizes[:n]) for n in range(len(sizes))], strict=True)
        for position, token in enumerate(range(first, first + size))
    ]
    return Batch(
        tokens_BL=tokens_BL,
        labels_BL=torch.tensor(labels)[None],
        positions_BL=torch.tensor(positions)[None],
        documents=None,
    )


def test_targets_stay_within_their_document() -> None:
    batch = row_of([5, 7], 12)
    ids, labels = later(batch, 1)
    assert ids.tolist() == [1, 2, 3, 4, 4, 6, 7, 8, 9, 10, 11, 11]
    assert labels.tolist() == [2, 3, 4, *[IGNORED] * 2, 7, 8, 9, 10, 11, *[IGNORED] * 2]
    assert [int((later(batch, depth)[1] != IGNORED).sum()) for depth in (1, 2, 4, 20)] == [8, 6, 2, 0]
    other = replace(batch, tokens_BL=batch.tokens_BL + 50 * (torch.arange(12) >= 5))
    assert [found[:5].tolist() for found in later(other, 2)] == [
        found[:5].tolist() for found in later(batch, 2)
    ]


def results(layout: Layout, model: ModelConfig, *, fault: Fault | None = None) -> list[StepResult]:
    def main(world: World) -> list[StepResult]:
        step = open_step(world, layout, model, "sgd, no clip", "fp64")
        if fault is not None:
            fault(step)
        return train(step, layout, range(2))

    ranks = run_threads(layout.size, main)
    assert all(found[0].depth_losses == ranks[0][0].depth_losses for found in ranks)
    return ranks[0]


def test_each_depth_is_reported_apart() -> None:
    expected = results(Layout(), MODEL)
    assert all(len(one.depth_losses) == 2 and min(one.depth_losses) > 0 for one in expected)
    found = results(ROWS["ep2-tp2-pp2-zb-sp"], MODEL)
    for one, other in zip(found, expected, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-10)
        assert one.depth_losses == pytest.approx(other.depth_losses, rel=1e-10)
    plain = results(Layout(), replace(MODEL, depths=0))[0]
    assert plain.loss == pytest.approx(expected[0].loss, rel=1e-12) and plain.depth_losses == ()


def test_a_rank_without_targets_has_a_loss_of_zero() -> None:
    """Documents of two tokens have none at depth 2; nothing is divided by their number."""
    model = replace(MODEL, name="short")

    def short(step: TrainingStep) -> None:
        set_batches = step._set_batches

        def cut(batches: list[Batch], loss_scale: float = 1.0) -> Tensor:
            return set_batches([row_of([2] * (LENGTH // 2), LENGTH) for _ in batches], loss_scale)

        step._set_batches = cut  # type: ignore[method-assign, assignment]

    (first, _) = results(Layout(dp=2, zero=1), model, fault=short)
    assert first.depth_losses == (0.0, 0.0) and 0 < first.grad_norm < float("inf")


def last_stage(change: Callable[[Stage], None]) -> Fault:
    def plant(step: TrainingStep) -> None:
        for stage in step.stages:
            if isinstance(stage, Stage) and stage.head is not None:
                change(stage)

    return plant


def after_the_norm(stage: Stage) -> None:
    through, norm = stage._predict_further, stage.norm
    assert norm is not None
    stage._predict_further = lambda hidden, *rest: through(norm(hidden), *rest)  # type: ignore[method-assign]


def undivided(stage: Stage) -> None:
    through = stage._predict_further
    stage._predict_further = lambda *given: [2 * one for one in through(*given)]  # type: ignore[method-assign]


def mirrored(self: DepthInput, token_TD: Tensor, hidden_TD: Tensor) -> Tensor:
    made: Tensor = self.down(torch.cat((self.hidden_norm(hidden_TD), self.token_norm(token_TD)), dim=-1))
    return made


def across(batch: Batch, depth: int) -> tuple[Tensor, Tensor]:
    moved = [nn.functional.pad(one[:, depth:], (0, depth)) for one in (batch.tokens_BL, batch.labels_BL)]
    return moved[0].reshape(-1), moved[1].reshape(-1)


def alone(step: TrainingStep) -> None:
    """The embedding's gradient is not summed over the ends of the pipeline."""
    step.mesh.groups["ties"].all_reduce = lambda *given, **named: None  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("name", ["mirrored", "after the norm", "not divided", "across documents", "ties"])
def test_a_planted_fault_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults that every layout has alike are seen against a reference without them."""
    layout, fault = ROWS["pp2"], None
    reference(reference_layout(layout), False, 3)
    if name == "mirrored":
        monkeypatch.setattr(DepthInput, "forward", mirrored)
    elif name == "across documents":
        monkeypatch.setattr(builder, "later", across)
    else:
        faults = {
            "after the norm": last_stage(after_the_norm),
            "not divided": last_stage(undivided),
            "ties": alone,
        }
        fault = faults[name]
    assert check(layout, fault=fault) != []


@pytest.mark.parametrize("after", ["ep4-tp2-dp2-sp-zero3", "pp2-interleaved"])
def test_a_checkpoint_goes_on_elsewhere(after: str, tmp_path: Path) -> None:
    before, later_on = ROWS["ep2-pp2-dp2-zero2"], ROWS[after]

    def save(world: World) -> None:
        step = open_step(world, before, MODEL, "adamw, clip 1", "fp64")
        train(step, before, range(1))
        CheckpointStore(tmp_path, step).save(state_at(1))

    def go_on(world: World) -> list[float]:
        step = open_step(world, later_on, MODEL, "adamw, clip 1", "fp64")
        store = CheckpointStore(tmp_path, step)
        newest = store.latest()
        assert newest is not None
        store.load(newest)
        return [one.loss for one in train(step, later_on, range(1, 3))]

    run_threads(before.size, save)
    expected = reference(reference_layout(later_on), False, 3).losses[1:]
    assert run_threads(later_on.size, go_on)[0] == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("row", ["ep2-pp2-dp2-zero2", "ep4-tp2-dp2-sp-zero3", "pp2-zb"])
def test_the_cluster_is_traced_and_proved(row: str) -> None:
    layout = ROWS[row]
    prove(trace_cluster(plan_of(layout, MODEL, "adamw, clip 1", "fp32"), layout.topology()))


def test_published_counts_with_a_depth() -> None:
    """DeepSeek-V3: 11,610,068,224 parameters of the depth's own, beside embedding and head (11.5 B in its README)."""
    plain, deep = preset("deepseek-v3"), replace(preset("deepseek-v3"), depths=1)
    assert plain.parameters() == 671_026_419_200
    assert deep.parameters() - plain.parameters() == 11_610_068_224
    assert len(stage_layers(deep, 16)[-1]) == len(stage_layers(plain, 16)[-1]) - 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"mtp_weight": 0.1}, "`mtp_weight` must be left out without extra prediction depths, but is 0.1"),
        (
            {"mtp_depths": 1, "data_parallel": "fsdp"},
            "`mtp_depths` must be 0 with data_parallel fsdp, but is 1",
        ),
        ({"mtp_depths": -1}, "`mtp_depths` must be finite and 0 or more, but is -1"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        resolve(RunConfig(**flags), 1)
