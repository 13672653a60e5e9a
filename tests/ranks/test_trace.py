"""What the trace world tells of a step is what a real step does: every message, every byte."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import triaxis.parallel.replicas.zero
from tests.agreement import MODEL, sequences
from tests.forked import run_processes
from tests.mutations import Case, draw_case, resolve
from triaxis.engine.plan import Recompute, StepPlan
from triaxis.engine.step import TrainingStep
from triaxis.engine.trace.cluster import trace_cluster
from triaxis.engine.trace.rank import imagined_batches, record_step, trace_rank
from triaxis.models.batch import Batch, Inputs
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.programs.program import SETUP, Cluster, Communicate, MemoryKind, Program, Wait
from triaxis.parallel.programs.proof import prove
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.thread import run_threads
from triaxis.parallel.worlds.trace import TraceWorld

FULL = os.environ.get("TRIAXIS_FULL") == "1"
STATES = (MemoryKind.PARAMETERS, MemoryKind.GRADIENTS, MemoryKind.OPTIMIZER, MemoryKind.OTHER)


def row(
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    order: str = "tp-pp-dp",
    tied: bool = False,
    documents: int = 1,
    virtual_stages: int = 1,
    **plan: object,
) -> Case:
    """One layout under test, with two microbatches of one sequence unless `plan` says otherwise."""
    fields = {"microbatch_size": 1, "microbatches": 2, "sequence_length": 16, "bucket_elements": 3000} | plan
    fields["document_tokens"] = 16 // documents
    model = replace(MODEL, layers=max(2, pp * virtual_stages), tied=tied)
    return Case(
        plan=StepPlan(model=model, virtual_stages=virtual_stages, **fields),  # type: ignore[arg-type]
        topology=Topology(tp=tp, pp=pp, dp=dp, order=order),
    )


FOUR_RANKS = [
    row(dp=4, zero=0),
    row(dp=4, zero=1, dtype="bf16"),
    row(dp=4, zero=2, microbatches=5, bucket_elements=1 << 20),
    row(dp=4, zero=3, recompute=Recompute.FULL, dtype="bf16"),
    row(tp=4, sequence_parallel=True, schedule="gpipe", documents=2),
    row(tp=4, recompute=Recompute.FULL, dtype="fp64"),
    row(pp=4, schedule="1f1b", tied=True, microbatches=5),
    row(pp=4, schedule="gpipe", microbatches=1),
    row(tp=2, dp=2, zero=1, sequence_parallel=True, documents=2),
    row(tp=2, dp=2, zero=2, sequence_parallel=True, order="dp-pp-tp"),
    row(tp=2, dp=2, zero=3, sequence_parallel=True, recompute=Recompute.FULL),
    row(pp=2, dp=2, zero=0, schedule="1f1b", recompute=Recompute.FULL),
    row(pp=2, dp=2, zero=1, schedule="gpipe", tied=True, dtype="bf16"),
    row(pp=2, dp=2, zero=2, tied=True, microbatches=5, schedule="interleaved", virtual_stages=2),
    row(pp=2, dp=2, zero=3, schedule="1f1b", tied=True, microbatches=5),
    row(
        tp=2,
        pp=2,
        sequence_parallel=True,
        recompute=Recompute.FULL,
        microbatches=5,
        schedule="interleaved",
        virtual_stages=2,
    ),
    row(pp=4, schedule="zb-h1", tied=True, microbatches=6),
    row(tp=2, pp=2, sequence_parallel=True, schedule="zb-h1", documents=3, dtype="bf16"),
    row(pp=2, dp=2, zero=2, schedule="zb-h1", tied=True, microbatches=5),
    row(pp=2, dp=2, zero=3, schedule="zb-h1", recompute=Recompute.FULL, microbatches=5),
    row(pp=2, dp=2, zero=2, schedule="zb-v", virtual_stages=2, tied=True, microbatches=5),
    row(pp=2, dp=2, zero=3, schedule="v-half", virtual_stages=2, recompute=Recompute.FULL, microbatches=6),
]
EIGHT_RANKS = [
    row(tp=2, pp=2, dp=2, zero=1, sequence_parallel=True, tied=True, microbatches=5),
    row(tp=2, pp=2, dp=2, zero=3, sequence_parallel=True, recompute=Recompute.FULL, order="pp-tp-dp"),
    row(tp=4, dp=2, zero=2, schedule="gpipe", documents=2),
    row(pp=2, dp=4, zero=3, microbatches=2, schedule="interleaved", virtual_stages=2),
]


def drawn(count: int, **bounds: int) -> Iterator[Case]:
    """A fresh sample each run; its seed is in the report's header."""
    draw = random.Random(int(os.environ["TRIAXIS_SAMPLE_SEED"]))
    for _ in range(count):
        yield draw_case(draw, **bounds)


def cluster_of(case: Case, *, every_rank: bool = False, repeat: bool = True) -> Cluster:
    return trace_cluster(case.plan, case.topology, every_rank=every_rank, repeat=repeat)


def real_batches(case: Case, replica: int) -> list[Batch]:
    """The replica's microbatches: random tokens, of the shapes that the trace imagines."""
    plan = case.plan
    rows = sequences(replica, plan.microbatches, plan.model.vocab_size)
    assert plan.microbatch_size == 1 and plan.sequence_length == rows[0].tokens_BL.shape[1]
    documents = imagined_batches(plan)[0].documents
    return [replace(row, documents=documents) for row in rows]


def record(case: Case, world: World) -> Program:
    """What the world's rank really does in the second step of a run."""
    batches = real_batches(case, case.topology.coordinates(world.rank)["dp"])
    return record_step(case.plan, case.topology, world, dry=False, repeat=False, batches=batches)[0]


def memory(program: Program) -> tuple[int, list[tuple[str, dict[MemoryKind, int]]]]:
    """The peak in bytes, and what each step leaves behind by kind."""
    assert program.held is not None
    now = peak = sum(program.held.values())
    left = []
    for step in program.steps:
        left.append((step.label, {kind: net for kind, net in step.segment.memory.net().items() if net}))
        for delta in step.segment.memory.deltas:
            now += delta
            peak = max(peak, now)
    assert now == sum(program.held.values())
    return peak, left


def messages(program: Program) -> list[tuple[str, Communicate | Wait]]:
    return list(program.messages())


SUMS_BYTES = 4096
"""What replicas of these models join for their sums over tp differs by less: its size is each rank's own."""


def without_sites(program: Program) -> list[tuple[str, Communicate | Wait]]:
    """The messages without their call sites: a deputy with nothing to sum does not know where the others sum."""
    return [
        (label, replace(event, site="") if isinstance(event, Communicate) else event)
        for label, event in messages(program)
    ]


def states(program: Program) -> tuple[object, ...]:
    """Bytes of model states before the step by kind, and which reductions their gradients need."""
    assert program.held is not None
    return *(program.held.get(kind) for kind in STATES), program.gradients


# The real engine.


def some_rows() -> list[Case]:
    draw = random.Random(int(os.environ["TRIAXIS_SAMPLE_SEED"]))
    return FOUR_RANKS + EIGHT_RANKS if FULL else [*draw.sample(FOUR_RANKS, 3), draw.choice(EIGHT_RANKS)]


@pytest.mark.parametrize("case", some_rows(), ids=str)
def test_threads_do_what_the_trace_tells(case: Case) -> None:
    """Every call and every byte: what each step leaves behind by kind, and the peak."""
    traced = cluster_of(case, every_rank=True)
    for rank, real in enumerate(run_threads(traced.size, lambda world: record(case, world))):
        told = traced.program(rank)
        assert messages(told) == messages(real), f"rank {rank} of {case}"
        assert states(told) == states(real), f"rank {rank} of {case}"
        assert memory(told) == memory(real), f"rank {rank} of {case}"


def record_and_close(cases: list[Case], world: World) -> list[tuple[Program, dict[MemoryKind, int]]]:
    """Each case's program, and the bytes still held once Gloo has let go of every message."""
    recorded = []
    for case in cases:
        batches = real_batches(case, case.topology.coordinates(world.rank)["dp"])
        recorded.append(
            record_step(case.plan, case.topology, world, dry=False, repeat=False, batches=batches)
        )
    world.close()  # ends Gloo's threads
    return [(found.program, found.meter.held()) for found in recorded]


def allocations(program: Program) -> list[tuple[str, list[tuple[int, int]]]]:
    """In each step: before which event so many bytes were asked for."""
    return [
        (
            step.label,
            [
                (place, delta)
                for place, delta in zip(step.segment.memory.places, step.segment.memory.deltas, strict=True)
                if delta > 0
            ],
        )
        for step in program.steps
    ]


def first_difference(told: Program, real: Program) -> str:
    """The first step whose allocations differ, with the operations of both up to where they do."""
    for one, other in zip(told.steps, real.steps, strict=True):
        places = [
            list(zip(s.segment.memory.places, s.segment.memory.deltas, strict=True)) for s in (one, other)
        ]
        made = [[change for change in changes if change[1] > 0] for changes in places]
        if made[0] != made[1]:
            events = [
                [getattr(event, "operation", "wait") for event in s.segment.events] for s in (one, other)
            ]
            return f"{one.label}\ntold: {made[0]}\nreal: {made[1]}\ntold: {events[0]}\nreal: {events[1]}"
    return "none"


@pytest.mark.processes
@pytest.mark.parametrize("first", range(0, len(FOUR_RANKS), 4))
def test_processes_do_what_the_trace_tells(first: int, tmp_path: Path) -> None:
    """Sixteen layouts on Gloo, four in a launch: every call, every allocation, and what is held in the end.

    When a message's bytes are given back is not told: a thread of Gloo lets go of them when it comes to it. That
    nothing else keeps bytes longer than told is what the threads above show.
    """
    cases = FOUR_RANKS[first : first + 4]
    ranks = run_processes(4, tmp_path, lambda world: record_and_close(cases, world))
    failures = [told for told in ranks if not isinstance(told, list)]
    assert not failures, failures[0]
    for number, case in enumerate(cases):
        traced = cluster_of(case, every_rank=True)
        for rank in range(4):
            where = f"rank {rank} of {case}"
            told, (real, held) = traced.program(rank), ranks[rank][number]
            assert messages(told) == messages(real), where
            assert allocations(told) == allocations(real), f"{where}: {first_difference(told, real)}"
            assert told.held is not None
            assert sum(told.held.values()) == sum(held.values()), where
            for kind in (MemoryKind.PARAMETERS, MemoryKind.GRADIENTS, MemoryKind.OPTIMIZER):
                assert told.held.get(kind) == held.get(kind), f"{kind} of {where}"
            assert told.gradients == real.gradients, where


# The trace against itself: what it leaves out changes nothing.


@pytest.mark.parametrize("case", [*drawn(40 if FULL else 4)], ids=str)
def test_a_deputys_program_is_that_of_the_ranks_it_stands_for(case: Case) -> None:
    traced, every = cluster_of(case), cluster_of(case, every_rank=True)
    for cluster in (traced, every):
        proof = prove(cluster)
        assert not proof.faults and not proof.warnings, str(case)
    own = resolve(traced)
    for rank in range(every.size):
        assert without_sites(own.program(rank)) == without_sites(every.program(rank)), (
            f"rank {rank} of {case}"
        )
        peak, expected = memory(own.program(rank))[0], memory(every.program(rank))[0]
        assert abs(peak - expected) <= 0.01 * expected + SUMS_BYTES, f"rank {rank} of {case}"


@pytest.mark.parametrize("case", [*drawn(40 if FULL else 4, microbatches=9)], ids=str)
def test_what_is_repeated_is_what_is_run(case: Case) -> None:
    """All microbatches run, or those that repeat stood in for: the same messages, computations and bytes."""
    repeated, run = cluster_of(case), cluster_of(case, repeat=False)
    for told, expected in zip(repeated.programs, run.programs, strict=True):
        assert [step.label for step in told.steps] == [step.label for step in expected.steps]
        for one, other in zip(told.steps, expected.steps, strict=True):
            assert one.segment.events == other.segment.events, f"step {one.label} of {case}"
        assert memory(told) == memory(expected), str(case)


def test_a_sum_that_no_layout_declares_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = row(tp=2, dp=2, zero=1, sequence_parallel=True)
    assert prove(cluster_of(case)).holds
    monkeypatch.setattr(triaxis.parallel.replicas.zero, "sum_partial_gradients", lambda buckets, groups: None)
    with pytest.raises(
        ValueError, match=r"dp 0, pp 0, tp 0: gradients summed over .* are \{\}, but declared"
    ):
        cluster_of(case)


# What is saved, counted by autograd itself; and what is not there.


def test_activations_are_what_autograd_saves() -> None:
    """In a real forward pass: the storages that autograd was given to keep, but for states, batch and output."""
    case = row(sequence_parallel=True, microbatches=1)
    (program,) = cluster_of(case).programs
    forward = next(step for step in program.steps if step.label == "0F0")
    told = forward.segment.memory.net()[MemoryKind.ACTIVATIONS]

    def main(world: World) -> int:
        step = TrainingStep(case.plan, build_mesh(world, case.topology))
        batch = real_batches(case, 0)[0]
        kept = [*step.stages[0].parameters(), *step.stages[0].buffers(), step.scale]
        kept += [batch.tokens_BL, batch.labels_BL, batch.positions_BL]
        known = {tensor.untyped_storage().data_ptr() for tensor in kept}
        saved: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            inputs = Inputs(batch=batch, token_scale=step.scale, row_scale=1.0)
            loss = step.stages[0](None, inputs).loss
        saved.pop(loss.untyped_storage().data_ptr(), None)
        return sum(saved.values())

    assert run_threads(1, main) == [told]


ONE_REAL_RANK = [
    row(tied=True, microbatches=3),
    row(recompute=Recompute.FULL, microbatches=3),
    row(dp=2, zero=2, microbatches=3),
    row(dp=2, zero=3, microbatches=3),
]


@pytest.mark.parametrize("case", ONE_REAL_RANK, ids=str)
def test_the_peak_is_what_pytorch_allocates(case: Case) -> None:
    """PyTorch's own account of its allocator, over a real step of one rank (fp32: other kernels have scratch)."""
    program = trace_rank(case.plan, case.topology, 0).program
    assert program.held is not None
    told = memory(program)[0] - sum(program.held.values())
    step = TrainingStep(case.plan, build_mesh(TraceWorld(0, case.topology.world_size), case.topology))
    batches = real_batches(case, 0)
    step.train(batches, 1e-3)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step.train(batches, 1e-3)
    events = profile.profiler.kineto_results.events()
    peak = max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))
    assert abs(told - peak) <= 0.01 * peak


def held_by(**fields: object) -> list[int]:
    """The peak beyond what is there before a step, of four ranks with one or two chunks each of equal layers."""
    found = row(pp=4, microbatches=8, **fields)  # type: ignore[arg-type]
    case = replace(found, plan=replace(found.plan, model=replace(MODEL, layers=16)))
    programs = cluster_of(case)
    return [
        memory(programs.program(rank))[0] - sum(programs.program(rank).held.values()) for rank in range(4)
    ]


@pytest.mark.parametrize(("schedule", "chunks"), [("zb-h1", 1), ("zb-v", 2)])
def test_what_was_recomputed_does_not_wait_for_weights(schedule: str, chunks: int) -> None:  # N71
    """At most 1F1B's peak and what one microbatch leaves for its weights, which is less than it keeps without
    recomputation; if weights waited, the last rank would hold several times that."""
    whole = held_by(schedule="1f1b", recompute=Recompute.FULL)
    kept = held_by(schedule="1f1b")[-1]  # of one microbatch, as the last rank has one in flight
    halves = held_by(schedule=schedule, virtual_stages=chunks, recompute=Recompute.FULL)
    assert max(halves) <= max(whole) + kept


@pytest.mark.parametrize("case", EIGHT_RANKS[:2], ids=str)
def test_bytes_are_what_groups_count(case: Case) -> None:  # B160
    """What a program's messages come to is what the groups of a real rank have sent, each counting by itself."""
    traced = resolve(cluster_of(case))

    def main(world: World) -> dict[str, int]:
        mesh = build_mesh(world, case.topology)
        step = TrainingStep(case.plan, mesh)
        mesh.clear_traffic()
        step.train(real_batches(case, mesh.dp.rank), 1e-3)
        return mesh.sent_bytes()

    for rank, counted in enumerate(run_threads(traced.size, main)):
        sent: Counter[str] = Counter()
        for label, event in messages(traced.program(rank)):
            if label != SETUP and isinstance(event, Communicate) and event.operation != "receive":
                size = len(traced.members(event.group, rank))
                parts = {"send": size, "all_reduce": 2 * (size - 1)}.get(event.operation.split()[0], size - 1)
                sent[event.group] += event.nbytes * parts // size
        assert dict(sent) == counted


@pytest.mark.parametrize(("zero", "dtype"), [(0, "bf16"), (1, "fp32"), (2, "bf16"), (3, "bf16")])
def test_model_states_are_what_the_engine_counts(zero: int, dtype: str) -> None:
    case = row(tp=2, dp=2, zero=zero, dtype=dtype)
    traced = cluster_of(case, every_rank=True)

    def main(world: World) -> dict[str, int]:
        step = TrainingStep(case.plan, build_mesh(world, case.topology))
        step.train(real_batches(case, world.rank // 2), 1e-3)
        return {
            **step.state_bytes(),
            "step counters": sum(counter.nbytes for counter in step.optimizer.counters()),
        }

    for rank, counted in enumerate(run_threads(4, main)):
        held = traced.program(rank).held
        assert held is not None
        assert held[MemoryKind.PARAMETERS] == counted["parameters"]
        assert held[MemoryKind.GRADIENTS] == counted["gradients"]
        assert (
            held[MemoryKind.OPTIMIZER] == counted["masters"] + counted["moments"] + counted["step counters"]
        )
        assert held.get(MemoryKind.GATHERED, 0) == 0


def test_a_rank_of_70b_takes_no_memory() -> None:
    """A sixteenth of the layers on one rank: tens of gigabytes are told of, and none is touched."""
    script = """
import torch
from triaxis.engine.run.peak import peak_memory_bytes
from triaxis.engine.plan import StepPlan
from triaxis.engine.trace.rank import trace_rank
from triaxis.models.presets import load_config
from triaxis.parallel.places.topology import Topology

plan = StepPlan(model=load_config("llama3-70b"), microbatch_size=1, microbatches=1, sequence_length=4096, dtype="bf16")
traced = trace_rank(plan, Topology(pp=16), 15)
print(sum(traced.program.held.values()), peak_memory_bytes(torch.device("cpu")))
"""
    told = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    held_bytes, resident_bytes = map(int, told.split())
    assert held_bytes > 7e10 and resident_bytes < 1e9


@pytest.mark.parametrize("tied", [False, True])
def test_pieces_are_the_models_parameters(tied: bool) -> None:
    """What the ranks of one replica hold is every element of the model, padding aside."""
    case = row(tp=2, pp=2, dp=2, zero=3, tied=tied)
    held: dict[tuple[str, tuple[int, ...]], int] = {}
    for rank in range(4):
        for bucket in trace_rank(case.plan, case.topology, rank).buckets:
            for _, layout in bucket.pieces:
                held[layout.name, layout.offsets] = math.prod(layout.sizes)
    assert sum(held.values()) == case.plan.model.parameters()
