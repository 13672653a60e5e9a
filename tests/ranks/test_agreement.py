"""Every layout trains the same model (design: agreement), and planted faults are seen."""

from __future__ import annotations

import functools
import os
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.agreement import (
    MODEL,
    RULES,
    TIED,
    Fault,
    Layout,
    Run,
    assemble,
    disagreements,
    held_weights,
    legal_layouts,
    model_for,
    plan_of,
    reference_layout,
    run,
)
from triaxis.engine.step import TrainingStep
from triaxis.models.batch import IGNORED
from triaxis.models.config import ModelConfig
from triaxis.parallel.places.layout import ParameterLayout
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.thread import run_threads

FULL = os.environ.get("TRIAXIS_FULL") == "1"
SAMPLED = 3

LONG = pytest.mark.full
"""Of the rows that take longest, and of the one that faults are planted in; `make test-full` has them."""

ROWS = [
    pytest.param(Layout(tp=2, pp=2, dp=2, zero=1, sp=True), "adamw, clip 1", marks=LONG),
    pytest.param(Layout(tp=4, pp=1, dp=2, zero=2), "sgd, no clip", marks=LONG),
    (Layout(tp=1, pp=4, dp=2, zero=3, schedule="interleaved", virtual_stages=2), "sgd, clip 0.1"),
    pytest.param(Layout(tp=8, zero=0, sp=True), "adamw, clip 1", marks=LONG),
    (Layout(pp=3, dp=2, zero=2, schedule="gpipe"), "sgd, no clip"),
    pytest.param(Layout(dp=8, zero=3), "sgd, clip 0.1", marks=LONG),
    (Layout(tp=2, pp=4, sp=True, schedule="zb-h1"), "adamw, clip 1"),
    (Layout(pp=3, dp=2, zero=3, recompute=True, schedule="zb-h1"), "sgd, no clip"),
    (Layout(tp=2, pp=2, dp=2, zero=1, sp=True, schedule="zb-v", virtual_stages=2), "adamw, clip 1"),
    (Layout(pp=4, zero=0, schedule="v-half", virtual_stages=2), "sgd, clip 0.1"),
    (Layout(tp=2, pp=2, dp=2, zero=3, sp=True, recompute=True, order="pp-tp-dp"), "sgd, clip 0.1"),
]


@functools.cache
def reference(layout: Layout, model: ModelConfig, rule: str, dtype: str) -> Run:
    return run(layout, model=model, rule=rule, dtype=dtype)


def check(layout: Layout, model: ModelConfig, rule: str, dtype: str, fault: Fault | None = None) -> list[str]:
    expected = reference(reference_layout(layout), model, rule, dtype)
    return disagreements(run(layout, model=model, rule=rule, dtype=dtype, fault=fault), expected, dtype)


def sampled() -> list[tuple[Layout, ModelConfig, str, str]]:
    """A fresh sample each run (its seed is in the report's header), or everything under TRIAXIS_FULL=1."""
    layouts = legal_layouts(8)
    if FULL:  # every layout in both precisions; rules and ties take turns
        rules = list(RULES)
        return [
            (
                layout,
                model_for(layout, tied=(number + turn) % 2 == 0),
                rules[(number + turn) % len(rules)],
                dtype,
            )
            for number, layout in enumerate(layouts)
            for turn, dtype in enumerate(("fp64", "fp32"))
        ]
    draw = random.Random(int(os.environ["TRIAXIS_SAMPLE_SEED"]))
    return [
        (
            layout,
            model_for(layout, tied=draw.random() < 0.5),
            draw.choice(list(RULES)),
            draw.choice(["fp32", "fp64"]),
        )
        for layout in draw.sample(layouts, SAMPLED)
    ]


@pytest.mark.parametrize(
    ("layout", "model", "rule", "dtype"),
    sampled(),
    ids=lambda value: getattr(value, "name", None) or str(value),
)
def test_a_sampled_layout_agrees(
    layout: Layout, model: ModelConfig, rule: str, dtype: str
) -> None:  # B01, B05, B10
    assert check(layout, model, rule, dtype) == []


@pytest.mark.parametrize(("layout", "rule"), ROWS, ids=str)
def test_a_layout_agrees_in_float64(layout: Layout, rule: str) -> None:  # B01, B05, B10
    assert check(layout, model_for(layout, tied=layout.pp > 1), rule, "fp64") == []


@pytest.mark.full
def test_bucket_sizes_do_not_change_training() -> None:  # B26
    layout = Layout(dp=4, zero=2, pp=2, schedule="1f1b")
    for bucket_elements in (1, 256):
        changed = replace(layout, bucket_elements=bucket_elements)
        assert check(changed, model_for(layout), "sgd, no clip", "fp64") == []


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_tied_embeddings_train_alike_in_every_stage(zero: int) -> None:  # B01
    """Plain descent, which shows a gradient that was not summed; both copies equal to the bit after each step."""
    found, expected = (
        run(layout, model=TIED, rule="sgd, no clip", dtype="fp64", steps=4)
        for layout in (Layout(pp=2, dp=2, zero=zero), Layout())
    )
    assert not disagreements(found, expected, "fp64")


@pytest.mark.parametrize("model", [MODEL, TIED], ids=lambda model: model.name)
def test_every_layout_starts_from_the_same_bits(model: ModelConfig) -> None:  # B06
    def first_weights(layout: Layout) -> dict[str, Tensor]:
        def main(world: World) -> list[tuple[ParameterLayout, Tensor]]:
            mesh = build_mesh(world, Topology(tp=layout.tp, pp=layout.pp, dp=layout.dp))
            return held_weights(TrainingStep(plan_of(layout, model, "sgd, no clip", "fp32"), mesh))

        whole, equal = assemble(run_threads(layout.size, main))
        assert equal
        return whole

    expected = first_weights(Layout())
    for layout in (Layout(tp=2), Layout(tp=4), Layout(pp=2), Layout(tp=2, pp=2, dp=2, zero=3)):
        found = first_weights(layout)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], weight) for name, weight in expected.items()), layout


@pytest.mark.parametrize("rule", ["sgd, no clip", "sgd, clip 0.1"])
@pytest.mark.parametrize("layout", [Layout(tp=4), Layout(tp=2, dp=2)], ids=str)
def test_tensor_ranks_move_every_weight_alike(layout: Layout, rule: str) -> None:  # B11
    """One step of plain descent, whose weights show a factor on a gradient or on the clipping at once."""
    expected, found = (run(one, model=MODEL, rule=rule, steps=1) for one in (Layout(), layout))
    assert found.norms == pytest.approx(expected.norms, rel=1e-12)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=0, atol=1e-14, msg=name)


# Planted faults: each must make the check fail.


def after_synchronize(change: object) -> Fault:
    """A fault in the reduced gradients."""

    def plant(step: TrainingStep) -> None:
        synchronize = step.data_parallel.synchronize_gradients

        def changed() -> None:
            synchronize()
            for bucket in step.data_parallel.buckets:
                for segment in bucket.segments:
                    gradient = bucket.gradient_shard[segment.start : segment.stop]
                    change(segment.layout.name, gradient)  # type: ignore[operator]

        step.data_parallel.synchronize_gradients = changed  # type: ignore[method-assign]

    return plant


def halve(part: str) -> Fault:
    def change(name: str, gradient: Tensor) -> None:
        if part in name:
            gradient.mul_(0.5)

    return after_synchronize(change)


def scale_all(name: str, gradient: Tensor) -> None:
    gradient.mul_(1.0009765625)


def relayout(**changes: object) -> Fault:
    """A fault in what replicated parameters declare."""

    def plant(step: TrainingStep) -> None:
        for bucket in step.data_parallel.buckets:
            bucket.segments = tuple(
                replace(segment, layout=replace(segment.layout, **changes))  # type: ignore[arg-type]
                if segment.layout.sizes == segment.layout.shape
                else segment
                for segment in bucket.segments
            )

    return plant


def mean_of_means(step: TrainingStep) -> None:
    for chunk in step.pipeline.chunks:
        forward = chunk.forward

        def changed(hidden: Tensor | None, microbatch: int, forward: object = forward) -> Tensor:
            tokens = int((step.batches[microbatch].labels_BL != IGNORED).sum())
            count = len(step.batches) * step.mesh.dp.size
            step.scale = step.scale.new_tensor(1.0 / (count * max(tokens, 1)))
            return forward(hidden, microbatch)  # type: ignore[no-any-return, operator]

        chunk.forward = changed  # type: ignore[method-assign]


@functools.cache
def healthy(layout: Layout, model: ModelConfig, dtype: str) -> tuple[str, ...]:
    return tuple(check(layout, model, "adamw, clip 1", dtype))


FAULTS: dict[str, Fault] = {
    "embedding gradient halved": halve("embed_tokens"),
    "norm gradients halved": halve("norm"),
    "norm gradients from half the sequence": relayout(partial=()),
    "replicated parameters counted tp times in the norm": relayout(counted=True),
    "gradients scaled by a constant": after_synchronize(scale_all),
    "mean of microbatch means": mean_of_means,
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.full), "fp64"])
def test_a_planted_fault_is_seen(name: str, dtype: str) -> None:
    layout = Layout(tp=2, pp=2, dp=2, zero=1, sp=True)
    model = model_for(layout)
    assert not healthy(layout, model, dtype), "the layout must agree before the fault is planted"
    assert check(layout, model, "adamw, clip 1", dtype, FAULTS[name])
