"""The timeline: bubbles as the formulas have them, overlap, stragglers, and where the step's length comes from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from triaxis.launch.hardware.collectives import collective_seconds
from triaxis.launch.hardware.hardware import Hardware, Link, load_hardware
from triaxis.launch.simulator.timeline import Disturbance, Prices, Timeline, simulate
from triaxis.parallel.pipeline.lowering import Compute as Action
from triaxis.parallel.pipeline.lowering import Receive, lower
from triaxis.parallel.pipeline.orders import make_schedule
from triaxis.parallel.pipeline.schedule import Kind
from triaxis.parallel.programs.operation import Operation
from triaxis.parallel.programs.program import (
    Cluster,
    Communicate,
    Compute,
    Event,
    Program,
    Segment,
    Step,
    Wait,
)
from triaxis.parallel.programs.proof import prove

UNIT_FLOPS = 1000
FORWARD, BACKWARD = (Compute("mm", "float32", flops * UNIT_FLOPS, 0, 0) for flops in (1, 2))
FREE = Link(latency_s=0.0, bytes_per_s=float("inf"))
UNIT = replace(
    load_hardware("a100-80g"),
    name="unit",
    peak_flops={"fp32": float(UNIT_FLOPS)},
    launch_overhead_s=0.0,
    intra=FREE,
    inter=FREE,
    efficiency=((1.0, 1.0),),
)
"""A device on which a forward takes one second and a message none."""


def pipeline_cluster(name: str, pp: int, microbatches: int, virtual_stages: int, nbytes: int = 4) -> Cluster:
    """The programs of a schedule whose stages are equal: receives posted, waited for before use; sends at the end."""
    schedule = make_schedule(name, pp, microbatches, virtual_stages)
    programs = []
    for instructions in lower(schedule):
        steps: list[Step] = []
        received: dict[object, int] = {}
        receives = sends = 0
        for instruction in instructions:
            action = instruction.action
            if isinstance(instruction, Action):
                events: list[Event] = []
                if action in received:
                    events.append(Wait("pp", Operation.RECEIVE, receives - 1 - received.pop(action)))
                events.append(FORWARD if action.kind is Kind.FORWARD else BACKWARD)
                steps.append(Step(str(action), Segment(tuple(events))))
            elif isinstance(instruction, Receive):
                received[action] = receives
                receives += 1
                event = Communicate(Operation.RECEIVE, "pp", "float32", 1, nbytes, instruction.from_rank)
                steps.append(Step("pipeline", Segment((event,))))
            else:
                event = Communicate(Operation.SEND, "pp", "float32", 1, nbytes, instruction.to_rank)
                steps.append(Step("pipeline", Segment((event,))))
                sends += 1
        waits = tuple(Wait("pp", Operation.SEND, age) for age in reversed(range(sends)))
        programs.append(Program((*steps, Step("pipeline", Segment(waits)))))
    ranks = tuple(range(pp))
    return Cluster(pp, {"pp": (ranks,)}, tuple(programs), ranks, {}, [f"pp {rank}" for rank in ranks])


def bubble(timeline: Timeline) -> float:
    ranks = sum(row.ranks for row in timeline.rows)
    return 1 - sum(row.busy * row.ranks for row in timeline.rows) / (timeline.seconds * ranks)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 2), (4, 8), (4, 3), (8, 32)])
def test_the_bubble_is_exact(name: str, pp: int, microbatches: int) -> None:  # B166
    cluster = pipeline_cluster(name, pp, microbatches, 1)
    assert prove(cluster).holds
    assert bubble(simulate(cluster, Prices(UNIT))) == pytest.approx(
        (pp - 1) / (microbatches + pp - 1), abs=1e-12
    )


@pytest.mark.parametrize(("pp", "microbatches", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 16, 3)])
def test_the_interleaved_bubble_is_exact(pp: int, microbatches: int, chunks: int) -> None:  # B166
    cluster = pipeline_cluster("interleaved", pp, microbatches, chunks)
    assert prove(cluster).holds
    expected = (pp - 1) / (chunks * microbatches + pp - 1)
    assert bubble(simulate(cluster, Prices(UNIT))) == pytest.approx(expected, abs=1e-12)


def two_ranks(*events: Event) -> Cluster:
    program = Program((Step("0F0", Segment(events)),))
    return Cluster(2, {"tp": ((0, 1),)}, (program,), (0, 0), {}, ["tp 0", "tp 1"])


def slow_link() -> Hardware:
    return replace(UNIT, intra=Link(latency_s=0.0, bytes_per_s=100.0), gpus_per_node=2)


def test_a_message_overlaps_with_computation_until_it_is_waited_for() -> None:
    message = Communicate(Operation.ALL_REDUCE, "tp", "float32", 50, 200)
    hardware = slow_link()
    seconds = collective_seconds("all_reduce", 200, (0, 1), hardware)
    assert seconds > 1
    hidden = simulate(
        two_ranks(message, BACKWARD, BACKWARD, Wait("tp", Operation.ALL_REDUCE, 0)), Prices(hardware)
    )
    shown = simulate(
        two_ranks(message, Wait("tp", Operation.ALL_REDUCE, 0), BACKWARD, BACKWARD), Prices(hardware)
    )
    assert hidden.seconds == pytest.approx(max(4.0, seconds))
    assert shown.seconds == pytest.approx(4.0 + seconds)
    assert shown.rows[0].exposed["tp"] == pytest.approx(seconds)
    assert dict(shown.critical)["tp all_reduce"] == pytest.approx(seconds)
    assert sum(part for _, part in shown.critical) == pytest.approx(shown.seconds)


def test_a_straggler_makes_its_partner_idle() -> None:
    cluster = two_ranks(
        BACKWARD,
        Communicate(Operation.ALL_REDUCE, "tp", "float32", 1, 4),
        Wait("tp", Operation.ALL_REDUCE, 0),
    )
    even = simulate(cluster, Prices(UNIT))
    assert len(even.rows) == 1
    assert even.seconds == pytest.approx(2.0, abs=1e-3)
    late = simulate(cluster, Prices(UNIT), Disturbance(slower={1: 1.5}))
    assert late.seconds == pytest.approx(3.0, abs=1e-3)
    assert [row.busy for row in late.rows] == pytest.approx([2.0, 3.0])
    assert [row.idle for row in late.rows] == pytest.approx([1.0, 0.0], abs=1e-3)


def test_a_slow_link_slows_the_groups_on_it() -> None:
    hardware = slow_link()
    cluster = two_ranks(
        Communicate(Operation.ALL_REDUCE, "tp", "float32", 50, 200), Wait("tp", Operation.ALL_REDUCE, 0)
    )
    even = simulate(cluster, Prices(hardware)).seconds
    assert simulate(cluster, Prices(hardware), Disturbance(links={0: 3.0})).seconds == pytest.approx(3 * even)


def test_the_critical_path_adds_up_to_the_step() -> None:
    hardware = replace(UNIT, intra=Link(latency_s=0.1, bytes_per_s=100.0), gpus_per_node=4)
    timeline = simulate(pipeline_cluster("1f1b", 4, 6, 1, nbytes=20), Prices(hardware))
    assert sum(seconds for _, seconds in timeline.critical) == pytest.approx(timeline.seconds)
    assert any(what.startswith("pp ") for what, _ in timeline.critical)


def test_microbatches_in_flight_are_what_the_schedules_keep() -> None:
    """Forwards less backwards at their most, per rank: min(m, p - r) for 1F1B; all for GPipe."""

    def most(name: str, pp: int, microbatches: int, chunks: int) -> list[int]:
        found = []
        for order in make_schedule(name, pp, microbatches, chunks).orders:
            level = high = 0
            for action in order:
                level += 1 if action.kind is Kind.FORWARD else -1
                high = max(high, level)
            found.append(high)
        return found

    assert most("gpipe", 4, 8, 1) == [8] * 4
    assert most("1f1b", 4, 8, 1) == [min(8, 4 - rank) for rank in range(4)]
    assert most("interleaved", 4, 8, 2) == [min(16, 4 + 2 * (4 - rank - 1) + 1) for rank in range(4)]
