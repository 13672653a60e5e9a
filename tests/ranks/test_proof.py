"""The proof finds every planted fault, raises no false alarm, and says what is wrong."""

from __future__ import annotations

import itertools
import os
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

import triaxis.engine.step
from tests.agreement import MODEL
from tests.mutations import (
    FAULTS,
    Case,
    Item,
    channels,
    draw_case,
    mutate,
    resolve,
    roll,
    unroll,
    with_program,
)
from triaxis.engine.plan import StepPlan
from triaxis.engine.trace.cluster import trace_cluster
from triaxis.engine.trace.rank import trace_rank
from triaxis.parallel.pipeline.lowering import Compute, Instruction, Receive, Send, lower
from triaxis.parallel.pipeline.lowering import Program as Instructions
from triaxis.parallel.pipeline.orders import make_schedule
from triaxis.parallel.pipeline.schedule import Action, Schedule, ScheduleError
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.programs.operation import Operation
from triaxis.parallel.programs.program import Cluster, Communicate, Program, Segment, Step
from triaxis.parallel.programs.proof import prove
from triaxis.parallel.programs.shrink import smallest
from triaxis.parallel.worlds.recording import Recorder, RecordingWorld
from triaxis.parallel.worlds.trace import TraceWorld

FULL = os.environ.get("TRIAXIS_FULL") == "1"
LAYOUTS = 200 if FULL else 20
MUTATED_LAYOUTS = 8
FAULTS_OF_A_KIND = 40  # ten kinds
ALTERED_SCHEDULES = 3  # of each schedule


def plan(**fields: object) -> StepPlan:
    chosen = {"microbatch_size": 1, "microbatches": 4, "sequence_length": 8, "bucket_elements": 3000} | fields
    return StepPlan(model=replace(MODEL, layers=4), **chosen)  # type: ignore[arg-type]


def drawing() -> random.Random:
    """A fresh sample each run; its seed is in the report's header."""
    return random.Random(int(os.environ["TRIAXIS_SAMPLE_SEED"]))


def cluster_of(case: Case) -> Cluster:
    return trace_cluster(case.plan, case.topology)


def test_correct_layouts_raise_no_alarm() -> None:
    draw = drawing()
    for _ in range(LAYOUTS):
        case = draw_case(draw)
        proof = prove(cluster_of(case))
        assert not proof.faults and not proof.warnings, f"{case}: {[*proof.faults, *proof.warnings][0]}"


@pytest.fixture(scope="module")
def clusters() -> list[tuple[Case, Cluster]]:
    """Correct programs to plant faults in; two with messages between three stages, others as drawn."""
    draw = drawing()
    cases = [
        Case(plan=plan(zero=2), topology=Topology(pp=3, dp=2)),
        Case(
            plan=plan(schedule="interleaved", virtual_stages=2, sequence_parallel=True),
            topology=Topology(tp=2, pp=2),
        ),
        *(draw_case(draw) for _ in range(MUTATED_LAYOUTS - 2)),
    ]
    made = [(case, resolve(cluster_of(case))) for case in cases]
    for case, cluster in made:
        assert prove(cluster).holds, str(case)
        for rank in range(cluster.size):  # taking a program apart and putting it together changes nothing
            program = cluster.program(rank)
            assert list(roll(program, unroll(program)).messages()) == list(program.messages())
    return made


@pytest.mark.parametrize("fault", FAULTS)
def test_every_planted_fault_is_found(fault: str, clusters: list[tuple[Case, Cluster]]) -> None:
    """Of 400 random faults none is missed. Mutants that nobody could tell apart (see `channels`) are not counted."""
    draw = drawing()
    planted = attempts = 0
    while planted < FAULTS_OF_A_KIND:
        attempts += 1
        assert attempts < 50 * FAULTS_OF_A_KIND, "too few mutants differ from what they were made of"
        case, cluster = draw.choice(clusters)
        mutant = mutate(draw, cluster, fault)
        if mutant is not None:
            planted += 1
            assert not prove(mutant[0]).holds, f"{fault} on rank {mutant[1]} of {case}"


def altered(draw: random.Random, schedule: Schedule, rank: int) -> Schedule | None:
    """The schedule with two neighbouring actions of one rank exchanged; None if it cannot be carried out."""
    order = list(schedule.orders[rank])
    place = draw.randrange(len(order) - 1)
    order[place], order[place + 1] = order[place + 1], order[place]
    orders = (*schedule.orders[:rank], tuple(order), *schedule.orders[rank + 1 :])
    changed = replace(schedule, orders=orders)
    try:
        lower(changed)
    except ScheduleError:
        return None
    return changed


def test_a_rank_with_another_schedule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own program of a rank whose order differs from the one that the others go by."""
    draw = drawing()
    topology = Topology(tp=2, pp=3)
    for name, virtual_stages in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
        model = replace(MODEL, layers=3 * virtual_stages)
        chosen = replace(plan(schedule=name, virtual_stages=virtual_stages), model=model)
        cluster = resolve(trace_cluster(chosen, topology))
        correct = make_schedule(name, topology.pp, chosen.microbatches, virtual_stages)
        planted = attempts = 0
        while planted < ALTERED_SCHEDULES:
            attempts += 1
            assert attempts < 100 * ALTERED_SCHEDULES, "too few schedules can be carried out"
            rank = draw.randrange(topology.world_size)
            other = altered(draw, correct, topology.coordinates(rank)["pp"])
            if other is None:
                continue
            with monkeypatch.context() as patch:
                patch.setattr(triaxis.engine.step, "make_schedule", lambda *_, other=other, **__: other)
                program = trace_rank(chosen, topology, rank, repeat=False).program
            if channels(program) != channels(cluster.program(rank)):
                planted += 1
                assert not prove(with_program(cluster, rank, program)).holds, f"rank {rank}: {other.orders}"


# Faults that all ranks have in common: nobody waits in vain, and still it is wrong.


Change = Callable[[Communicate], Communicate | None]


def everywhere(cluster: Cluster, change: Change) -> Cluster:
    """Every rank's program with some communications changed, or left out with their waits (None)."""
    programs = []
    for program in cluster.programs:
        items, gone = [], set()
        for item in unroll(program):
            event = item.event and change(item.event)
            if item.event is not None and event is None:
                gone.add(item.handle)
            elif item.handle not in gone:
                items.append(replace(item, event=event))
        programs.append(roll(program, items))
    return replace(cluster, programs=tuple(programs))


SYMMETRIC: dict[str, tuple[Change, str]] = {
    "not reduced": (lambda event: None if event.gradient == 0 else event, "bucket 0 is reduced 0 times, not"),
    "over the wrong group": (
        lambda event: replace(event, group="tp") if event.gradient == 0 else event,
        "must be reduced whole .* over 'dp', but step has .* in group 'tp'",
    ),
    "not whole": (
        lambda event: replace(event, elements=event.elements - 16) if event.gradient == 0 else event,
        r"must be reduced whole \(",
    ),
    "of no bucket": (
        lambda event: replace(event, gradient=99) if event.gradient == 0 else event,
        "a gradient of bucket 99 is reduced, which no rule asks for",
    ),
}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_gradient_that_no_rank_reduces_as_it_must_is_found(zero: int) -> None:
    cluster = resolve(trace_cluster(plan(zero=zero, microbatches=2), Topology(tp=2, dp=2)))
    assert prove(everywhere(cluster, lambda event: event)).holds
    for change, message in SYMMETRIC.values():
        proof = prove(everywhere(cluster, change))
        assert {found.obligation for found in proof.faults} == {"gradients"}
        assert any(re.search(message, found.message) for found in proof.faults), proof.faults


def test_bytes_that_are_never_given_back_are_found() -> None:
    cluster = resolve(trace_cluster(plan(), Topology(dp=2)))
    *before, last = cluster.programs[1].steps
    leaking = replace(last.segment.memory, places=(0,), kinds=(0,), deltas=(64,))
    leak = Step(last.label, Segment(last.segment.events, leaking))
    proof = prove(with_program(cluster, 1, replace(cluster.programs[1], steps=(*before, leak))))
    assert [fault.obligation for fault in proof.faults] == ["memory"]
    assert "rank 1 (dp 1, pp 0, tp 0): the step ends with +" in proof.faults[0].message


def test_sums_that_differ_in_size_are_found() -> None:
    cluster = trace_cluster(plan(zero=1, sequence_parallel=True), Topology(tp=2, dp=2))
    rank, (first, *rest) = next((rank, sizes) for rank, sizes in cluster.sizes.items() if sizes[0])
    proof = prove(replace(cluster, sizes={**cluster.sizes, rank: (first + 1, *rest)}))
    assert [fault.obligation for fault in proof.faults] == ["agreement"]
    assert f"rank {rank}: {first + 1}" in proof.faults[0].message


def exchange(size: int, rows: Callable[[int, int], int]) -> Cluster:
    """A cluster whose ranks record an uneven all_to_all, in which member i gives j rows(i, j) rows of two elements."""
    programs = []
    for rank in range(size):
        recorder = Recorder()
        group = RecordingWorld(TraceWorld(rank, size), recorder).new_group("ep", [range(size)])
        given, taken = [rows(rank, j) for j in range(size)], [rows(i, rank) for i in range(size)]
        group.all_to_all(
            torch.empty(sum(taken), 2), torch.empty(sum(given), 2), output_rows=taken, input_rows=given
        )
        events = tuple(event for event in recorder.events if event.group == "ep")  # type: ignore[union-attr]
        programs.append(Program((Step("0F0", Segment(events)),)))
    ranks = tuple(range(size))
    return Cluster(size, {"ep": (ranks,)}, tuple(programs), ranks, {}, [f"ep {rank}" for rank in ranks])


def test_every_part_of_an_uneven_exchange_is_taken_as_it_is_given() -> None:
    """Whoever changes one count, and the counts alone, is found; also where ranks are alike otherwise."""
    for size in (2, 3, 4):
        for rows in (lambda i, j: (i + 2 * j) % 4, lambda i, j: 3):
            cluster = exchange(size, rows)
            assert prove(cluster).holds
            for rank, other in itertools.product(range(size), repeat=2):
                (step,) = cluster.program(rank).steps
                event = step.segment.events[0]
                assert isinstance(event, Communicate)
                gives = (*event.gives[:other], event.gives[other] + 2, *event.gives[other + 1 :])
                segment = Segment((replace(event, gives=gives), *step.segment.events[1:]))
                wrong = replace(cluster.program(rank), steps=(Step(step.label, segment),))
                (fault,) = prove(with_program(cluster, rank, wrong)).faults
                assert fault.obligation == "agreement"
                assert (
                    f"place {rank} gives {gives[other]} elements of which place {other} takes"
                    in fault.message
                )


# What a fault says.


def test_a_fault_names_ranks_places_actions_and_source_lines() -> None:
    """A rank of the second stage takes microbatch 1 before 0."""
    cluster = resolve(trace_cluster(plan(), Topology(tp=2, pp=2)))
    program = cluster.program(3)
    items = unroll(program)
    receives = [place for place, item in enumerate(items) if item.event and item.event.operation == "receive"]
    one, other = receives[:2]
    items[one], items[other] = (
        replace(items[one], event=items[other].event),
        replace(items[other], event=items[one].event),
    )
    (fault,) = prove(with_program(cluster, 3, roll(program, items))).faults
    assert fault.obligation == "channels" and fault.ranks == (1, 3)
    for told in (
        "rank 3 (dp 0, pp 1, tp 1), step pipeline: receive of 256 float32 (F1 for stage 1) from place 0 in group 'pp'",
        "rank 1 (dp 0, pp 0, tp 1), step pipeline: send of 256 float32 (F0 for stage 1) to place 1 in group 'pp'",
        "at pipeline/executor.py:",
    ):
        assert told in fault.message


def test_a_collective_is_told_with_its_action() -> None:
    cluster = resolve(trace_cluster(plan(), Topology(tp=2, pp=2)))
    program = cluster.program(3)
    place = next(place for place, step in enumerate(program.steps) if step.label == "0B2")
    items = [item for item in unroll(program) if item.step != place]
    faults = prove(with_program(cluster, 3, roll(program, items))).faults
    assert any("step 0B2: all_reduce" in fault.message and "at layers/" in fault.message for fault in faults)


# The smallest pipeline that still shows a fault.


def pipeline(programs: Sequence[Instructions], *, sends_wait: bool) -> Cluster:
    """Ranks that only pass messages on. sends_wait: each send is waited for at once, not at the end."""
    made = []
    for instructions in programs:
        program = Program(tuple(Step(str(instruction), Segment(())) for instruction in instructions))
        items: list[Item] = []
        received: dict[Action, int] = {}
        for number, instruction in enumerate(instructions):
            action = instruction.action
            if isinstance(instruction, Compute):
                items += [Item(number, received[action])] if action in received else []
                continue
            operation, peer = (
                ("send", instruction.to_rank)
                if isinstance(instruction, Send)
                else ("receive", instruction.from_rank)
            )
            if operation == "receive":
                received[action] = number
            label = f"{action.kind}{action.microbatch}"
            items.append(
                Item(
                    number,
                    number,
                    Communicate(Operation(operation), "pp", "float32", 1, 4, peer, "naive.py:1", label),
                )
            )
            if operation == "send" and sends_wait:
                items.append(Item(number, number))
        if not sends_wait:
            items += [
                Item(len(instructions) - 1, number)
                for number, instruction in enumerate(instructions)
                if isinstance(instruction, Send)
            ]
        made.append(roll(program, items))
    ranks = tuple(range(len(made)))
    return Cluster(len(made), {"pp": (ranks,)}, tuple(made), ranks, {}, [f"pp {rank}" for rank in ranks])


def naive(schedule: Schedule) -> list[Instructions]:
    """Each message received and sent where it is used and made, one at a time."""
    programs: list[Instructions] = []
    for rank, order in enumerate(schedule.orders):
        instructions: list[Instruction] = []
        for action in order:
            producer, consumer = schedule.producer(rank, action), schedule.consumer(rank, action)
            instructions += [Receive(producer[0], action)] if producer is not None else []
            instructions.append(Compute(action))
            instructions += [Send(consumer[0], action)] if consumer is not None else []
        programs.append(tuple(instructions))
    return programs


def test_naive_1f1b_shrinks_to_two_stages_and_two_microbatches() -> None:
    def build(pp: int, microbatches: int) -> Cluster:
        return pipeline(naive(make_schedule("1f1b", pp, microbatches)), sends_wait=True)

    stuck = prove(build(8, 16)).faults
    assert [fault.obligation for fault in stuck] == ["progress"]
    found = smallest(build, 8, 16)
    assert found is not None and (found.pp, found.microbatches) == (2, 2)
    (fault,) = found.proof.faults
    assert str(found).startswith("the smallest that shows it has pp 2 and microbatches 2\n  progress: ")
    cycle = (
        "step 0F1→1: send of 1 float32 (F1) to place 1 in group 'pp' at naive.py:1 waits for rank 1 (pp 1)",
        "step 0B0→0: send of 1 float32 (B0) to place 0 in group 'pp' at naive.py:1 waits for rank 0 (pp 0)",
    )
    assert fault.message == f"nobody can go on: rank 0 (pp 0), {cycle[0]}; rank 1 (pp 1), {cycle[1]}"


def test_what_has_no_fault_has_no_smallest() -> None:
    """GPipe sends all forwards before any backward: correct even when naive; what cannot be built is passed over."""

    def build(pp: int, microbatches: int) -> Cluster:
        if pp == 2:
            raise ValueError("no two")
        return pipeline(naive(make_schedule("gpipe", pp, microbatches)), sends_wait=True)

    assert smallest(build, 4, 4) is None


def test_all_our_schedules_hold_as_the_engine_lowers_them() -> None:
    """One queue a rank, strictly in order: for every schedule, up to six stages and seven microbatches."""
    for name, virtual_stages in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)):

        def build(
            pp: int, microbatches: int, name: str = name, virtual_stages: int = virtual_stages
        ) -> Cluster:
            return pipeline(lower(make_schedule(name, pp, microbatches, virtual_stages)), sends_wait=False)

        assert smallest(build, 6, 7) is None, name
