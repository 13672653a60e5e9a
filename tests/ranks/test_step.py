"""One optimizer step: exact token means, the norm before and after clipping, the first update, and isolation."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.agreement import LENGTH, MODEL, sequences
from triaxis.engine.plan import StepPlan, UpdateRule, stage_layers
from triaxis.engine.step import StepResult, TrainingStep, build_stages
from triaxis.models.batch import IGNORED, Batch
from triaxis.parallel.kernels.attention import Documents
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.thread import run_threads

PLAN = StepPlan(
    model=replace(MODEL, layers=2, max_positions=128),
    microbatch_size=1,
    microbatches=2,
    sequence_length=LENGTH,
    bucket_elements=3000,
    dtype="fp64",
)
VOCABULARY = PLAN.model.vocab_size


def without_labels(batch: Batch) -> Batch:
    return replace(batch, labels_BL=torch.full_like(batch.labels_BL, IGNORED))


def padded(rows: Sequence[Batch], dp: int) -> list[list[Batch]]:
    """Consecutive rows for each data rank; the last ranks get rows without labels where there are none left."""
    share = -(-len(rows) // dp)
    filled = [*rows, *[without_labels(rows[0])] * (share * dp - len(rows))]
    return [filled[rank * share : (rank + 1) * share] for rank in range(dp)]


def exact_mean(rows: Sequence[Batch]) -> tuple[float, int]:
    """The mean over all trained tokens of the untrained model's loss, by whole logits."""

    def main(world: World) -> tuple[float, int]:
        step = TrainingStep(PLAN, build_mesh(world, Topology()))
        total, tokens = 0.0, 0
        for row in rows:
            logits_TV = step.stages[0].logits(None, row)
            labels_T = row.labels_BL.view(-1)
            total += float(F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORED, reduction="sum"))
            tokens += row.trained_tokens()
        return total / tokens, tokens

    return run_threads(1, main)[0]


@pytest.mark.parametrize(
    ("topology", "zero"),
    [
        (Topology(), 0),
        (Topology(dp=2), 1),
        (Topology(dp=4), 3),
        (Topology(pp=2, dp=2), 2),
        (Topology(tp=2, dp=4), 0),
    ],
    ids=str,
)
def test_evaluation_is_the_exact_token_mean(topology: Topology, zero: int) -> None:  # B40
    """Ten sequences, which neither four ranks nor their microbatches divide, with 0 to 16 trained tokens."""
    rows = sequences(0, 10, VOCABULARY)
    expected, tokens = exact_mean(rows)

    def main(world: World) -> tuple[float, int]:
        mesh = build_mesh(world, topology)
        step = TrainingStep(replace(PLAN, zero=zero), mesh)
        return step.evaluate(padded(rows, topology.dp)[mesh.dp.rank])

    for loss, counted in run_threads(topology.world_size, main):
        assert counted == tokens
        assert loss == pytest.approx(expected, rel=1e-12)


def train_once(
    topology: Topology, rows: Sequence[Batch], **changes: object
) -> list[tuple[StepResult, dict[str, Tensor]]]:
    """One step's result and the masters after it, by name."""
    shares = padded(rows, topology.dp)
    plan = replace(PLAN, microbatches=len(shares[0]), **changes)  # type: ignore[arg-type]

    def main(world: World) -> tuple[StepResult, dict[str, Tensor]]:
        mesh = build_mesh(world, topology)
        step = TrainingStep(plan, mesh)
        result = step.train(shares[mesh.dp.rank], 1e-3)
        masters = step.data_parallel.gathered_masters()
        return result, {segment.layout.name: whole.clone() for segment, whole in masters}

    return run_threads(topology.world_size, main)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("topology", [Topology(dp=2), Topology(dp=4), Topology(pp=2, dp=4)], ids=str)
def test_ranks_with_few_or_no_trained_tokens_count_by_their_tokens(
    topology: Topology, zero: int
) -> None:  # B16
    """Eight sequences; the first data rank's two have no label at all."""
    rows = sequences(0, 8, VOCABULARY)
    rows[:2] = [without_labels(row) for row in rows[:2]]
    ((expected, _),) = train_once(Topology(), rows)
    assert expected.loss == pytest.approx(exact_mean(rows)[0], rel=1e-12)
    for result, masters in train_once(topology, rows, zero=zero):
        assert result.trained_tokens == expected.trained_tokens
        assert result.loss == pytest.approx(expected.loss, rel=1e-10)
        assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-10)
        assert all(bool(master.isfinite().all()) for master in masters.values())


def test_a_batch_without_trained_tokens_gives_zero_and_no_nan() -> None:
    rows = [without_labels(row) for row in sequences(0, 4, VOCABULARY)]
    for result, masters in train_once(Topology(dp=2), rows, zero=1):
        assert (result.loss, result.grad_norm, result.trained_tokens) == (0.0, 0.0, 0)
        assert all(bool(master.isfinite().all()) for master in masters.values())


@pytest.mark.parametrize("dp", [1, 2])
def test_microbatches_are_weighted_by_their_tokens(dp: int) -> None:  # B15
    """10 tokens with a loss sum of 20 and 90 with 90: 1.10, where the mean of the means is 1.50."""
    rows = []
    for trained in (10, 90):
        labels_BL = torch.full((1, 100), IGNORED)
        labels_BL[:, :trained] = 1
        tokens_BL, positions_BL = torch.ones(1, 100, dtype=torch.int64), torch.arange(100)[None]
        rows.append(
            Batch(tokens_BL=tokens_BL, labels_BL=labels_BL, positions_BL=positions_BL, documents=None)
        )

    def main(world: World) -> float:
        mesh = build_mesh(world, Topology(dp=dp))
        step = TrainingStep(replace(PLAN, sequence_length=100, microbatches=2 // dp), mesh)
        (chunk,) = step.pipeline.chunks
        forward = chunk.forward

        def with_known_sum(hidden: Tensor | None, microbatch: int) -> Tensor:
            known = {10: 20.0, 90: 90.0}[step.batches[microbatch].trained_tokens()]
            return forward(hidden, microbatch) * 0.0 + known * step.scale

        chunk.forward = with_known_sum  # type: ignore[method-assign]
        return step.train(padded(rows, dp)[mesh.dp.rank], 1e-3).loss

    assert run_threads(dp, main) == [pytest.approx(1.10, rel=1e-12)] * dp


@pytest.mark.parametrize(("layers", "pp"), [(30, 4), (10, 3), (7, 2)])
def test_stages_hold_every_layer_once(layers: int, pp: int) -> None:  # B45
    model = replace(PLAN.model, layers=layers)
    assert [layer for cut in stage_layers(model, pp) for layer in cut] == list(range(layers))

    def main(world: World) -> int:
        stages = build_stages(replace(PLAN, model=model), build_mesh(world, Topology(pp=pp)))
        return sum(parameter.numel() for stage in stages for parameter in stage.parameters())

    assert sum(run_threads(pp, main)) == model.parameters()


def in_one(rows: Sequence[Batch]) -> Batch:
    """The rows as one microbatch."""
    borders = {0}
    for number, row in enumerate(rows):
        own = (0, LENGTH) if row.documents is None else row.documents.borders
        borders |= {number * LENGTH + border for border in own}
    return Batch(
        tokens_BL=torch.cat([row.tokens_BL for row in rows]),
        labels_BL=torch.cat([row.labels_BL for row in rows]),
        positions_BL=torch.cat([row.positions_BL for row in rows]),
        documents=Documents(borders=tuple(sorted(borders))),
    )


def test_accumulation_gives_what_one_microbatch_gives() -> None:  # B15
    """Four sequences with 0 to 16 trained tokens, in one microbatch and in four."""
    rows = sequences(0, 4, VOCABULARY)
    rule = UpdateRule(name="sgd")
    ((together, masters),) = train_once(Topology(), [in_one(rows)], microbatch_size=4, rule=rule)
    ((apart, others),) = train_once(Topology(), rows, rule=rule)
    assert apart.loss == pytest.approx(together.loss, rel=1e-12)
    assert apart.grad_norm == pytest.approx(together.grad_norm, rel=1e-12)
    for name, master in masters.items():
        torch.testing.assert_close(others[name], master, rtol=0, atol=1e-14, msg=name)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_no_bucket_size_changes_a_step(microbatches: int, zero: int) -> None:  # B26
    """One element (every parameter is larger), 1 KiB, 1 MiB, and a bucket larger than the model, on four replicas."""
    rows = sequences(0, 4 * microbatches, VOCABULARY)
    rule = UpdateRule(name="sgd")
    ((expected, masters),) = train_once(Topology(), rows, rule=rule)
    for bucket_elements in (1, 1024 // 8, (1 << 20) // 8, 1 << 25):
        ranks = train_once(Topology(dp=4), rows, zero=zero, rule=rule, bucket_elements=bucket_elements)
        for result, found in ranks:
            assert result.loss == pytest.approx(expected.loss, rel=1e-12)
            assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-12)
            for name, weight in masters.items():
                torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-14, msg=name)


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_clipped_gradients_have_the_norm_asked_for(zero: int) -> None:  # B30
    limit = 0.1

    def main(world: World) -> tuple[StepResult, float]:
        mesh = build_mesh(world, Topology(tp=2, dp=2))
        step = TrainingStep(replace(PLAN, zero=zero, max_grad_norm=limit), mesh)
        rows = sequences(0, 4, VOCABULARY)
        result = step.train(rows[2 * mesh.dp.rank : 2 * mesh.dp.rank + 2], 1e-3)
        squared = step.data_parallel.squared_norm()
        mesh.everyone.all_reduce(squared)
        return result, float(squared.sqrt())

    for result, clipped in run_threads(4, main):
        assert result.grad_norm > limit
        assert clipped <= limit * (1 + 1e-6)
        assert clipped == pytest.approx(result.grad_norm * result.clip_coefficient, rel=1e-10)


def test_the_first_update_is_the_first() -> None:
    """AdamW's first update is the learning rate times the gradient's sign (bias corrected), whatever came before."""

    def main(world: World) -> tuple[float, float]:
        step = TrainingStep(replace(PLAN, rule=UpdateRule(epsilon=0.0)), build_mesh(world, Topology()))
        step.evaluate(sequences(1, 2, VOCABULARY))
        before = torch.cat([w.flatten() for _, w in step.data_parallel.gathered_masters()])
        step.train(sequences(0, 2, VOCABULARY), 1e-3)
        gradients = torch.cat([g.flatten() for _, g in step.data_parallel.gathered_gradients()])
        after = torch.cat([w.flatten() for _, w in step.data_parallel.gathered_masters()])
        moved = (after - before)[gradients != 0]
        return float((moved + 1e-3 * gradients[gradients != 0].sign()).abs().max()), len(moved) / len(
            gradients
        )

    ((off, share),) = run_threads(1, main)
    assert off < 1e-12
    assert share > 0.5


def losses_of(step: TrainingStep, number: int) -> tuple[float, float]:
    rows = sequences(number, 4, VOCABULARY)
    rank = step.mesh.dp.rank
    result = step.train(rows[2 * rank : 2 * rank + 2], 1e-3)
    return result.loss, result.grad_norm


def test_runs_in_one_process_do_not_disturb_one_another() -> None:
    """Two runs of other seeds and stages, step by step in turns, and each alone: the same bits."""
    plans = [replace(PLAN, seed=1, zero=2), replace(PLAN, seed=2, zero=3, max_grad_norm=0.1)]

    def alone(world: World) -> list[list[tuple[float, float]]]:
        mesh = build_mesh(world, Topology(dp=2))
        found = []
        for plan in plans:
            step = TrainingStep(plan, mesh)
            found.append([losses_of(step, number) for number in range(3)])
        return found

    def in_turns(world: World) -> list[list[tuple[float, float]]]:
        mesh = build_mesh(world, Topology(dp=2))
        steps = [TrainingStep(plan, mesh) for plan in plans]
        turns = [[losses_of(step, number) for step in steps] for number in range(3)]
        return [[turn[run] for turn in turns] for run in range(len(plans))]

    separate = run_threads(2, alone)
    assert separate[0][0] != separate[0][1]
    assert run_threads(2, in_turns) == separate


def test_evaluation_between_steps_changes_nothing() -> None:
    def main(world: World, evaluates: bool) -> list[tuple[float, float]]:
        step = TrainingStep(replace(PLAN, zero=3), build_mesh(world, Topology(dp=2)))
        found = []
        for number in range(3):
            found.append(losses_of(step, number))
            if evaluates:
                step.evaluate(sequences(9, 3, VOCABULARY))
        return found

    assert run_threads(2, lambda world: main(world, True)) == run_threads(2, lambda world: main(world, False))


@pytest.mark.parametrize("zero", range(4))
def test_a_step_that_nobody_holds_gives_its_memory_back(zero: int) -> None:
    """Before, autograd's hooks held every step, its weights and its states, until the process ended."""

    def main(world: World) -> list[weakref.ref[object]]:
        step = TrainingStep(replace(PLAN, zero=zero), build_mesh(world, Topology(dp=2)))
        losses_of(step, 0)
        held = [step, step.data_parallel, *step.data_parallel.buckets, *step.stages[0].parameters()]
        return [weakref.ref(item) for item in held]

    found = [reference for rank in run_threads(2, main) for reference in rank]
    for _ in range(2):  # the nodes of autograd first, then what they held
        gc.collect()
    assert [reference() for reference in found] == [None] * len(found)
