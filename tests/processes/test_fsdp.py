"""torch's `fully_shard` on Gloo processes trains the thread world's model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.agreement import (
    MODEL,
    TIED,
    Layout,
    collect,
    disagreements,
    plan_of,
    rank_main,
    run,
    sequences,
)
from tests.forked import run_processes
from triaxis.engine.config import DataParallel
from triaxis.engine.plan import StepPlan
from triaxis.engine.step import TrainingStep
from triaxis.models.config import ModelConfig
from triaxis.models.huggingface.folder import open_weights
from triaxis.models.weights import filler
from triaxis.parallel.layers.declare import declare_replicated
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.replicas.fsdp import _widen
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import build_mesh

STEPS = 3
ROWS = [
    (Layout(dp=2, zero=3), MODEL, "adamw, clip 1"),
    (Layout(dp=3, zero=3, recompute=True), TIED, "sgd, clip 0.1"),
    (Layout(tp=2, dp=2, zero=3, sp=True, recompute=True), MODEL, "adamw, clip 1"),
    (Layout(pp=2, dp=2, zero=3), TIED, "sgd, clip 0.1"),
    (Layout(pp=2, dp=2, zero=3, schedule="interleaved", virtual_stages=2), MODEL, "adamw, clip 1"),
    (Layout(tp=2, pp=2, zero=3), MODEL, "sgd, no clip"),
]


@pytest.mark.processes
@pytest.mark.parametrize(("layout", "model", "rule"), ROWS, ids=lambda part: getattr(part, "name", str(part)))
def test_fsdp_trains_the_thread_worlds_model(
    layout: Layout, model: ModelConfig, rule: str, tmp_path: Path
) -> None:
    sharded = replace(layout, data_parallel="fsdp")
    main = rank_main(sharded, model=model, rule=rule, dtype="fp64", steps=STEPS)
    ranks = run_processes(layout.size, tmp_path, main)
    failures = [rank for rank in ranks if not isinstance(rank, tuple)]
    assert not failures, failures[0]
    expected = run(layout, model=model, rule=rule, dtype="fp64", steps=STEPS)
    assert not disagreements(collect(ranks), expected, "fp64")


@pytest.mark.processes
def test_fsdp_trains_a_model_that_transformers_builds(tmp_path: Path) -> None:
    from tests.ranks.test_guests import guest  # loads transformers

    model = guest("stablelm", tie_word_embeddings=True)
    layout = Layout(dp=2, zero=3, recompute=True)
    main = rank_main(replace(layout, data_parallel="fsdp"), model=model, rule="sgd, clip 0.1", steps=STEPS)
    ranks = run_processes(layout.size, tmp_path, main)
    failures = [rank for rank in ranks if not isinstance(rank, tuple)]
    assert not failures, failures[0]
    expected = run(Layout(), model=model, rule="sgd, clip 0.1", steps=STEPS)
    assert not disagreements(collect(ranks), expected, "fp64")


def losses_around_evaluation(world: World, data_parallel: str, dtype: str) -> list[float]:
    """Losses of two steps with an evaluation after each, then the bytes of master weights held."""
    layout = Layout(dp=2, zero=3)
    plan = replace(plan_of(layout, MODEL, "adamw, clip 1", dtype), data_parallel=data_parallel)
    mesh = build_mesh(world, Topology(dp=2))
    step = TrainingStep(plan, mesh)
    share = layout.global_batch() // layout.dp
    losses = []
    for number in range(2):
        rows = sequences(number, layout.global_batch(), MODEL.vocab_size)[mesh.dp.rank * share :][:share]
        losses.append(step.train(rows, 1e-2).loss)
        losses.append(step.evaluate(rows)[0])
    masters = step.state_bytes()["parameters"] + step.state_bytes()["masters"]
    return [*losses, float(masters)]


@pytest.mark.processes
def test_evaluation_between_steps_sees_the_updated_weights(tmp_path: Path) -> None:
    found = run_processes(2, tmp_path, lambda world: losses_around_evaluation(world, "fsdp", "fp64"))
    (tmp_path / "store").unlink(missing_ok=True)
    expected = run_processes(2, tmp_path, lambda world: losses_around_evaluation(world, "zero", "fp64"))
    assert found[0][:-1] == pytest.approx(expected[0][:-1], rel=1e-10)


@pytest.mark.processes
def test_bf16_keeps_masters_in_fp32(tmp_path: Path) -> None:
    found = run_processes(2, tmp_path, lambda world: losses_around_evaluation(world, "fsdp", "bf16"))
    (tmp_path / "store").unlink(missing_ok=True)
    expected = run_processes(2, tmp_path, lambda world: losses_around_evaluation(world, "zero", "bf16"))
    assert found[0][:-1] == pytest.approx(expected[0][:-1], rel=5e-3)
    assert sum(rank[-1] for rank in found) == 4 * MODEL.parameters()


@pytest.mark.processes
@pytest.mark.parametrize("case", ["llama3.2", "gpt2"])
def test_fsdp_begins_with_the_weights_of_a_folder(case: str, tmp_path: Path) -> None:  # N35
    """Rotary tables and other buffers too, which no file holds: the first loss is theirs."""
    from tests.ranks.test_huggingface import make, read_model, their_gradients  # loads transformers
    from tests.ranks.test_huggingface_layouts import ROWS as COUNT
    from tests.ranks.test_huggingface_layouts import rows_of, whole_batch

    theirs = make(case, tmp_path / "in")
    model = read_model(tmp_path / "in")
    _, loss, _ = their_gradients(theirs, whole_batch(rows_of(model)))

    def first_loss(world: World) -> float:
        mesh, share = build_mesh(world, Topology(dp=2)), COUNT // 2
        plan = StepPlan(
            model=model,
            microbatch_size=1,
            microbatches=share,
            sequence_length=16,
            data_parallel=DataParallel.FSDP,
            zero=3,
        )
        step = TrainingStep(plan, mesh, filler(open_weights(tmp_path / "in", model)))
        return step.train(rows_of(model)[mesh.dp.rank * share :][:share], 0.0).loss

    assert run_processes(2, tmp_path, first_loss) == pytest.approx([float(loss)] * 2, rel=1e-5)


@pytest.mark.parametrize(
    ("dtype", "asked", "computed", "reduced"),
    [
        (torch.float32, None, None, torch.float32),
        (torch.bfloat16, None, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.bfloat16),
    ],
)
def test_gradients_are_reduced_in_what_they_are_summed_in(
    dtype: torch.dtype, asked: torch.dtype | None, computed: torch.dtype | None, reduced: torch.dtype
) -> None:
    """--dtype and --accumulate-dtype, as torch's fully_shard is told."""
    module = torch.nn.Linear(4, 4, dtype=dtype)
    module.register_buffer("table", torch.ones(4, dtype=torch.float64))
    declare_replicated(module, 0)
    policy = _widen(module, asked)
    assert (policy.param_dtype, policy.reduce_dtype) == (computed, reduced)
    assert module.weight.dtype == torch.float32  # the master
    assert module.table.dtype == torch.float64
