"""Counted bytes per step and axis equal their lower bounds (docs/architecture.md, speed)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from tests.agreement import LENGTH, MODEL, TIED, sequences
from triaxis.engine.plan import StepPlan
from triaxis.engine.step import DTYPES, TrainingStep
from triaxis.models.config import ModelConfig
from triaxis.models.fields import with_fields
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.replicas.cut import ALIGNMENT_ELEMENTS
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.thread import run_threads

SMALL = with_fields(MODEL, layers=2, kv_heads=8, vocab_size=67)
TOKENS_BYTES, SUMS_BYTES = 8, 16  # the control messages: trained tokens; loss and squared norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One rank's traffic of its second optimizer step, and its buckets."""

    groups: dict[str, int]
    messages: dict[str, int]
    elements: int
    padded_elements: int
    buckets: int


def traffic(
    topology: Topology, model: ModelConfig = SMALL, *, microbatches: int = 1, **changes: object
) -> list[Sent]:
    plan = StepPlan(
        model=model,
        microbatch_size=1,
        microbatches=microbatches,
        sequence_length=LENGTH,
        bucket_elements=5000,
    )
    plan = replace(plan, **changes)  # type: ignore[arg-type]

    def main(world: World) -> Sent:
        mesh = build_mesh(world, topology)
        step = TrainingStep(plan, mesh)
        count = topology.dp * microbatches
        share = slice(mesh.dp.rank * microbatches, (mesh.dp.rank + 1) * microbatches)
        for number in range(2):
            mesh.clear_traffic()
            step.train(sequences(number, count, model.vocab_size)[share], 1e-3)
        buckets = step.data_parallel.buckets
        return Sent(
            groups=mesh.sent_bytes(),
            messages=dict(mesh.everyone.traffic.messages),
            elements=sum(bucket.elements for bucket in buckets),
            padded_elements=sum(bucket.padded_elements for bucket in buckets),
            buckets=len(buckets),
        )

    return run_threads(topology.world_size, main)


def half(size_bytes: int, ranks: int) -> int:
    """A reduce-scatter or an all-gather of `size_bytes`: what each rank must send."""
    return size_bytes * (ranks - 1) // ranks


def reduced(size_bytes: int, ranks: int) -> int:
    """An all-reduce: both halves."""
    return 2 * half(size_bytes, ranks)


def control(ranks: int) -> int:
    return sum(2 * size * (ranks - 1) // ranks for size in (TOKENS_BYTES, SUMS_BYTES))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize(
    ("dtype", "accumulate_dtype", "dp"), [("fp32", None, 3), ("bf16", None, 2), ("bf16", "bf16", 2)]
)
def test_data_parallel_bytes(
    dtype: str, accumulate_dtype: str | None, dp: int, microbatches: int, zero: int
) -> None:  # B160
    """2·Ψ·(n-1)/n; ZeRO-2 reduces, and ZeRO-3 also gathers twice, for each microbatch."""
    ranks = traffic(
        Topology(dp=dp), microbatches=microbatches, zero=zero, dtype=dtype, accumulate_dtype=accumulate_dtype
    )
    weight_bytes = DTYPES[dtype].itemsize
    gradient_bytes = DTYPES[accumulate_dtype].itemsize if accumulate_dtype else max(weight_bytes, 4)
    reductions = {0: 1, 1: 1, 2: microbatches, 3: microbatches}[zero]
    gathers = {0: 0, 1: 1, 2: 1, 3: 2 * microbatches}[zero]
    for sent in ranks:
        assert sent.elements == SMALL.parameters()
        assert 0 <= sent.padded_elements - sent.elements < sent.buckets * dp * ALIGNMENT_ELEMENTS
        if zero == 0:
            expected = reduced(gradient_bytes * sent.padded_elements, dp)
        else:
            expected = half(reductions * gradient_bytes * sent.padded_elements, dp)
            expected += half(gathers * weight_bytes * sent.padded_elements, dp)
        assert sent.groups == {"dp": expected, "world": control(dp)}
        assert sent.messages == {"all_reduce": 2}


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_one_microbatch_moves_twice_the_parameters(zero: int) -> None:
    for sent in traffic(Topology(dp=4), zero=zero):
        assert sent.groups["dp"] == reduced(4 * sent.padded_elements, 4)


def test_zero_3_moves_three_times_the_parameters() -> None:
    for sent in traffic(Topology(dp=4), zero=3):
        assert sent.groups["dp"] == 3 * half(4 * sent.padded_elements, 4)


def test_zero_3_moves_no_more_where_the_embedding_is_tied() -> None:
    for sent in traffic(Topology(dp=4), replace(SMALL, tied=True), zero=3):
        assert sent.groups["dp"] == 3 * half(4 * sent.padded_elements, 4)


@pytest.mark.parametrize("zero", [0, 1])
def test_data_parallel_bytes_do_not_grow_with_accumulation(zero: int) -> None:  # B160, B161
    one, eight = (traffic(Topology(dp=2), microbatches=count, zero=zero) for count in (1, 8))
    assert [sent.groups for sent in one] == [sent.groups for sent in eight]


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallel_bytes(tp: int, microbatches: int) -> None:
    """Four all-reduces a layer, one for the embedding and one for the head, of hidden; three numbers a token."""
    hidden_bytes = LENGTH * SMALL.hidden_size * 4
    expected = (4 * SMALL.layers + 2) * reduced(hidden_bytes, tp) + reduced(3 * LENGTH * 4, tp)
    for sent in traffic(Topology(tp=tp), microbatches=microbatches):
        assert sent.groups == {"tp": microbatches * expected, "world": control(tp)}


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("tp", [2, 4])
def test_sequence_parallel_bytes(tp: int, microbatches: int) -> None:
    """The all-reduces' halves. Each column-parallel product's input is kept cut and gathered again in backward."""
    hidden_bytes = LENGTH * SMALL.hidden_size * 4
    halves = 2 * (4 * SMALL.layers + 2) + (2 * SMALL.layers + 1)
    expected = halves * half(hidden_bytes, tp) + reduced(3 * LENGTH * 4, tp)
    norms = reduced(
        (2 * SMALL.layers + 1) * SMALL.hidden_size * 4, tp
    )  # once a step: each saw a part of the tokens
    for sent in traffic(Topology(tp=tp), microbatches=microbatches, sequence_parallel=True):
        assert sent.groups == {"tp": microbatches * expected + norms, "world": control(tp)}


def test_replicated_key_value_heads_are_summed_once_a_step_among_their_holders() -> None:
    model = with_fields(SMALL, kv_heads=2)
    weights = 2 * (model.rotary_size()) * model.hidden_size  # one key and one value head
    for microbatches in (1, 3):
        for sent in traffic(Topology(tp=4), model, microbatches=microbatches):
            assert sent.groups.pop("tp/2") == reduced(model.layers * weights * 4, 2)
            assert set(sent.groups) == {"tp", "world"}


@pytest.mark.parametrize(("schedule", "virtual_stages"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
@pytest.mark.parametrize("microbatches", [4, 8])
def test_pipeline_bytes(microbatches: int, schedule: str, virtual_stages: int) -> None:
    """One hidden tensor per microbatch, boundary and direction."""
    pp = 4
    model = replace(SMALL, layers=8)
    ranks = traffic(
        Topology(pp=pp), model, microbatches=microbatches, schedule=schedule, virtual_stages=virtual_stages
    )
    boundary = microbatches * LENGTH * model.hidden_size * 4
    for rank, sent in enumerate(ranks):
        boundaries = 2 * virtual_stages - (rank == 0) - (rank == pp - 1)
        assert sent.groups == {"pp": boundaries * boundary, "world": control(pp)}


def test_sequence_parallel_boundaries_are_cut_over_tp() -> None:
    for sent in traffic(Topology(tp=2, pp=2), microbatches=2, sequence_parallel=True):
        assert sent.groups["pp"] == 2 * LENGTH // 2 * SMALL.hidden_size * 4


def test_tied_embeddings_are_summed_once_a_step() -> None:
    model = replace(TIED, layers=4)
    ranks = traffic(Topology(pp=4), model, microbatches=4)
    table = reduced(model.vocab_size * model.hidden_size * 4, 2)
    assert [sent.groups.get("ties", 0) for sent in ranks] == [table, 0, 0, table]


def test_a_group_of_one_sends_nothing() -> None:
    (alone,) = traffic(Topology(), TIED, microbatches=2)
    assert alone.groups == {}
    assert alone.messages == {}


def test_only_control_messages_cross_the_world() -> None:
    for sent in traffic(Topology(tp=2, pp=2, dp=2), microbatches=2, zero=1, sequence_parallel=True):
        assert sent.groups["world"] == control(8)
        assert sent.messages == {"all_reduce": 2}
        assert set(sent.groups) == {"tp", "pp", "dp", "world"}
