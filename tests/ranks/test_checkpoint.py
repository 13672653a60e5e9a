"""Checkpoints: a run that stops and goes on is the run that did not, on its own topology and on any other."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.agreement import MODEL, TIED, Layout, model_for
from tests.checkpointing import Pieces, gathered, open_step, state_at, train, weights_of, whole_states
from triaxis.engine.checkpoint.store import CheckpointStore
from triaxis.engine.step import StepResult
from triaxis.models.config import ModelConfig
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.thread import run_threads

EXACT = [
    (Layout(), "fp32", "adamw, clip 1", MODEL),
    (Layout(dp=2, zero=0), "bf16", "adamw, clip 1", MODEL),
    (Layout(dp=2, zero=1, tp=2, sp=True), "bf16", "adamw, clip 1", TIED),
    (Layout(dp=2, zero=2, pp=2), "fp32", "adamw, clip 1", TIED),
    (Layout(dp=2, zero=3, pp=2, schedule="interleaved", virtual_stages=2), "bf16", "adamw, clip 1", MODEL),
    (Layout(dp=2, zero=1, pp=2, schedule="zb-v", virtual_stages=2), "bf16", "adamw, clip 1", TIED),
    (Layout(dp=3, zero=3, recompute=True), "fp32", "sgd, clip 0.1", MODEL),
]


@pytest.mark.parametrize(
    ("layout", "dtype", "rule", "model"), EXACT, ids=lambda part: getattr(part, "name", str(part))
)
def test_a_resumed_run_is_bit_identical(
    layout: Layout, dtype: str, rule: str, model: ModelConfig, tmp_path: Path
) -> None:  # B71, B75
    def straight(world: World) -> tuple[list[StepResult], list[Tensor]]:
        step = open_step(world, layout, model, rule, dtype)
        results = train(step, layout, range(3))
        return results, weights_of(step)

    def first_half(world: World) -> list[StepResult]:
        step = open_step(world, layout, model, rule, dtype)
        results = train(step, layout, range(1))
        CheckpointStore(tmp_path, step).save(state_at(1))
        return results

    def second_half(world: World) -> tuple[list[StepResult], list[Tensor]]:
        step = open_step(world, layout, model, rule, dtype)
        store = CheckpointStore(tmp_path, step)
        path = store.latest()
        assert path is not None
        assert store.load(path) == state_at(1)
        results = train(step, layout, range(1, 3))
        return results, weights_of(step)

    expected = run_threads(layout.size, straight)
    before = run_threads(layout.size, first_half)
    found = run_threads(layout.size, second_half)
    for rank in range(layout.size):
        assert before[rank] + found[rank][0] == expected[rank][0]
        assert all(map(torch.equal, found[rank][1], expected[rank][1]))


def random_layout(choose: random.Random) -> Layout:
    tp, pp, dp = choose.choice(
        [
            s
            for s in [(t, p, d) for t in (1, 2, 4) for p in (1, 2, 3, 4) for d in (1, 2, 3)]
            if s[0] * s[1] * s[2] <= 8
        ]
    )
    schedule, virtual_stages = choose.choice(
        [("1f1b", 1), ("gpipe", 1)] + [("interleaved", 2), ("zb-v", 2)] * (1 < pp <= 2)
    )
    return Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        zero=choose.randrange(4),
        sp=choose.random() < 0.5,
        schedule=schedule,
        virtual_stages=virtual_stages,
        recompute=choose.random() < 0.2,
        bucket_elements=choose.choice([500, 3000, 1 << 20]),
        order=choose.choice(["tp-pp-dp", "tp-dp-pp"]),
    )


def sampled_pairs() -> list[tuple[Layout, Layout, bool]]:
    choose = random.Random(int(os.environ["TRIAXIS_SAMPLE_SEED"]))
    count = 40 if os.environ.get("TRIAXIS_FULL") == "1" else 8
    return [(random_layout(choose), random_layout(choose), choose.random() < 0.5) for _ in range(count)]


@pytest.mark.parametrize(("saved", "resumed", "tied"), sampled_pairs(), ids=lambda part: str(part))
def test_any_topology_reads_any_others(
    saved: Layout, resumed: Layout, tied: bool, tmp_path: Path
) -> None:  # B66, B81
    model = model_for(saved, tied=tied)
    rule, dtype = "adamw, clip 1", "fp64"
    global_batch = 6  # every dp here divides it

    class Sized(Layout):
        def global_batch(self) -> int:
            return global_batch

    saved, resumed = (
        Sized(**{name: getattr(layout, name) for name in Layout.__dataclass_fields__})
        for layout in (saved, resumed)
    )

    def save(world: World) -> tuple[Pieces, list[StepResult]]:
        step = open_step(world, saved, model, rule, dtype)
        train(step, saved, range(1))
        CheckpointStore(tmp_path, step).save(state_at(1))
        return gathered(step), train(step, saved, range(1, 3))

    def resume(world: World) -> tuple[Pieces, list[StepResult]]:
        step = open_step(world, resumed, model, rule, dtype)
        store = CheckpointStore(tmp_path, step)
        path = store.latest()
        assert path is not None
        store.load(path)
        assert step.optimizer.steps == 1
        return gathered(step), train(step, resumed, range(1, 3))

    at_save, at_load = run_threads(saved.size, save), run_threads(resumed.size, resume)
    expected, found = (whole_states([rank[0] for rank in ranks]) for ranks in (at_save, at_load))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
    for result, reference in zip(at_load[0][1], at_save[0][1], strict=True):
        assert result.loss == pytest.approx(reference.loss, rel=1e-10)
        assert result.grad_norm == pytest.approx(reference.grad_norm, rel=1e-10)
