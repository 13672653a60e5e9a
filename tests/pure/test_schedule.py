"""Schedules are complete, ordered, free of deadlock, as short and as small as the formulas say."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from triaxis.launch import schedule as command
from triaxis.parallel.pipeline.check import check, check_orders, check_programs
from triaxis.parallel.pipeline.draw import bubble, draw, in_flight, svg
from triaxis.parallel.pipeline.lowering import Compute, Program, Receive, Send, lower
from triaxis.parallel.pipeline.orders import make_forward_schedule, make_schedule
from triaxis.parallel.pipeline.schedule import Action, Kind, Schedule, ScheduleError, looped, vee
from triaxis.parallel.pipeline.walk import simulate

RANKS = range(1, 7)
MICROBATCHES = range(1, 18)


def actions(text: str) -> tuple[Action, ...]:
    return tuple(Action.parse(word) for word in text.split())


def grid() -> Iterator[Schedule]:
    for pp in RANKS:
        for microbatches in MICROBATCHES:
            yield make_schedule("gpipe", pp, microbatches)
            yield make_schedule("1f1b", pp, microbatches)
            yield make_schedule("zb-h1", pp, microbatches)
            yield make_schedule("zb-v", pp, microbatches, 2)
            yield make_schedule("v-half", pp, microbatches, 2)
            for virtual_stages in range(2, 5) if pp > 1 else ():
                yield make_schedule("interleaved", pp, microbatches, virtual_stages)


def test_the_schedules_are_the_known_ones() -> None:
    assert make_schedule("gpipe", 2, 2).orders == (actions("0F0 0F1 0B0 0B1"),) * 2
    assert make_schedule("1f1b", 2, 3).orders == (
        actions("0F0 0F1 0B0 0F2 0B1 0B2"),
        actions("0F0 0B0 0F1 0B1 0F2 0B2"),
    )
    assert make_schedule("interleaved", 2, 2, 2).orders == (
        actions("0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1"),
        actions("0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1"),
    )
    assert make_schedule("zb-h1", 3, 4).orders == (
        actions("0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3"),
        actions("0F0 0F1 0I0 0F2 0I1 0W0 0F3 0I2 0W1 0I3 0W2 0W3"),
        actions("0F0 0I0 0F1 0I1 0F2 0I2 0W0 0F3 0I3 0W1 0W2 0W3"),
    )
    assert make_schedule("1f1b", 1, 2).orders == (actions("0F0 0B0 0F1 0B1"),)


def test_the_lowered_program_is_the_known_one() -> None:
    first, last = lower(make_schedule("1f1b", 2, 2))
    assert " ".join(map(str, first)) == "0F0 0F0→1 0F1 0F1→1 1→0B0 1→0B1 0B0 0B1"
    assert " ".join(map(str, last)) == "0→0F0 0→0F1 0F0 0B0 0B0→0 0F1 0B1 0B1→0"


def test_every_schedule_is_complete_ordered_and_free_of_deadlock() -> None:  # B46
    for schedule in grid():
        check(schedule)
    for virtual_stages in range(1, 5):
        for pp in RANKS:
            for microbatches in MICROBATCHES:
                if virtual_stages == 1 or pp > 1:
                    check(make_forward_schedule(looped(pp, virtual_stages), microbatches))
                if virtual_stages == 2:
                    check(make_forward_schedule(vee(pp), microbatches))


def test_receive_buffers_do_not_pile_up() -> None:
    """Where every rank keeps pace, a rank has posted at most two receives ahead of the computation."""
    for schedule in (
        make_schedule("gpipe", 4, 17),
        make_schedule("1f1b", 4, 17),
        make_forward_schedule(looped(4, 1), 17),
    ):
        for rank, program in enumerate(lower(schedule)):
            waiting = 0
            for instruction in program:
                if isinstance(instruction, Receive):
                    waiting += 1
                elif isinstance(instruction, Compute) and schedule.producer(rank, instruction.action):
                    waiting -= 1
                assert waiting <= 2


def test_microbatches_in_flight() -> None:
    for schedule in grid():
        pp, microbatches, chunks = schedule.pp, schedule.microbatches, schedule.virtual_stages
        for rank, peak in enumerate(in_flight(schedule)):
            limit = {
                "gpipe": microbatches,
                "1f1b": min(microbatches, pp - rank),
                "zb-h1": min(microbatches, pp),
                "zb-v": 2 * pp,
                "v-half": 2 * (pp // 2 + 1),
                "interleaved": min(microbatches * chunks, (chunks - 1) * pp + 2 * (pp - rank - 1) + 1),
            }[schedule.name]
            whole_groups = {
                "interleaved": microbatches % pp == 0,
                "zb-v": microbatches >= 2 * pp - 1,
                "v-half": microbatches >= pp + 1,
            }.get(schedule.name, True)
            assert peak == limit if whole_groups else peak <= limit, (
                schedule.name,
                pp,
                microbatches,
                chunks,
                rank,
            )


@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (1, 2), (3, 5)])
def test_bubble_is_the_formula(forward: int, backward: int) -> None:  # B166
    for schedule in grid():
        if schedule.name in ("zb-h1", "zb-v", "v-half") or (
            schedule.name == "interleaved" and schedule.microbatches % schedule.pp
        ):
            continue
        ends = schedule.pp - 1
        work = schedule.virtual_stages * schedule.microbatches
        assert bubble(schedule, forward=forward, backward=backward) == Fraction(ends, work + ends)


@pytest.mark.parametrize("times", [(1, 1, 1), (2, 3, 1), (2, 3, 2), (10, 12, 7), (5, 9, 5)])
def test_a_bubble_is_filled_with_gradients_of_weights(times: tuple[int, int, int]) -> None:
    """ZB-H1's idle time is (p-1)(F+B-W) where 1F1B's is (p-1)(F+B+W), if W takes no longer than F and B.

    B is the gradients of inputs alone.
    """
    forward, inputs, weights = times
    durations = {
        Kind.FORWARD: forward,
        Kind.INPUT: inputs,
        Kind.WEIGHT: weights,
        Kind.BACKWARD: inputs + weights,
    }
    for pp in RANKS:
        for microbatches in range(pp, 18):
            idle = {}
            for name in ("1f1b", "zb-h1"):
                spans = simulate(make_schedule(name, pp, microbatches), lambda _r, _c, kind: durations[kind])
                length = max(rank_spans[-1].stop for rank_spans in spans)
                idle[name] = length - microbatches * sum(times)
            assert idle["1f1b"] == (pp - 1) * (forward + inputs + weights)
            assert idle["zb-h1"] == (pp - 1) * (forward + inputs - weights)


def test_zb_v_waits_for_nothing_and_v_half_less_than_1f1b() -> None:
    """With F, I and W of one length. 1F1B's chunk is two of theirs, its wait (p-1) · 6 of their units."""
    for pp in RANKS:
        for microbatches in range(2 * pp - 1, 18):
            waits = {}
            for name in ("zb-v", "v-half"):
                spans = simulate(make_schedule(name, pp, microbatches, 2))
                waits[name] = [own[-1].stop - own[0].start - 6 * microbatches for own in spans]
            assert waits["zb-v"] == [0] * pp
            assert max(waits["v-half"]) == (7 * (pp // 2) - 2 * (pp % 2 == 0) if pp > 1 else 0)


def test_weights_of_a_v_add_their_microbatches_in_order() -> None:
    """So that a sum has the bits that 1F1B gives it."""
    for name in ("zb-v", "v-half"):
        for microbatches in (1, 3, 9):
            for order in make_schedule(name, 4, microbatches, 2).orders:
                for chunk in (0, 1):
                    added = [a.microbatch for a in order if a.kind is Kind.WEIGHT and a.chunk == chunk]
                    assert added == list(range(microbatches))


def test_weights_that_do_not_wait_come_right_behind() -> None:  # N71
    for name, chunks in (("zb-h1", 1), ("zb-v", 2), ("v-half", 2)):
        for microbatches in (1, 5, 9):
            schedule = make_schedule(name, 4, microbatches, chunks, weights_wait=False)
            check(schedule)
            for order in schedule.orders:
                pairs = [(a, b) for a, b in itertools.pairwise(order) if a.kind is Kind.INPUT]
                assert len(pairs) == chunks * microbatches
                assert all(b == a.like(Kind.WEIGHT) for a, b in pairs)


def test_a_stage_may_split_what_another_does_whole() -> None:
    """Rank 0 does its backward passes in two, rank 1 whole: messages go to what is there."""
    split, whole = (make_schedule(name, 2, 3) for name in ("zb-h1", "1f1b"))
    mixed = replace(split, orders=(split.orders[0], whole.orders[1]))
    check(mixed)
    assert mixed.consumer(1, Action.parse("0B2")) == (0, Action.parse("0I2"))
    assert mixed.producer(0, Action.parse("0I2")) == (1, Action.parse("0B2"))
    assert mixed.consumer(0, Action.parse("0W2")) is None


def test_a_v_of_stages_hands_over_without_a_message_where_it_turns() -> None:
    """Two ranks, four stages: 0 and 3 on rank 0, 1 and 2 on rank 1."""
    orders = (
        actions("0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1"),
        actions("0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1"),
    )
    schedule = Schedule(name="v", placement=vee(2), microbatches=2, orders=orders)
    check(schedule)
    assert schedule.placement.places == {0: (0, 0), 1: (1, 0), 2: (1, 1), 3: (0, 1)}
    first, second = (" ".join(map(str, program)) for program in lower(schedule))
    assert "0F0→1F0" in second and "1B0→0B0" in second and "0→0F0" in second and "1F0→0" in second
    assert "1→1F0" in first and "1B0→1" in first and "0F0→1" in first


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("0F0 0W0 0I0", "0W0 comes before its gradients of inputs 0I0"),
        ("0F0 0I0 0B0", "0B0 repeats what 0I0 has done"),
        ("0F0 0I0", "never computes 0W0"),
        ("0I0 0F0 0W0", "0I0 comes before its forward 0F0"),
    ],
)
def test_a_backward_that_is_not_split_rightly_is_shown(order: str, message: str) -> None:
    schedule = replace(make_schedule("zb-h1", 1, 1), orders=(actions(order),))
    with pytest.raises(ScheduleError, match=message):
        check_orders(schedule)


def test_messages_that_take_time_arrive_later() -> None:
    spans = simulate(make_schedule("1f1b", 2, 1), links=lambda source, target: 10 * source + target + 0.5)
    assert [(span.start, span.stop) for span in spans[1]] == [(2.5, 3.5), (3.5, 5.5)]
    assert [(span.start, span.stop) for span in spans[0]] == [(0, 1), (16, 18)]


def test_each_chunk_knows_its_last_reduction() -> None:
    for schedule in grid():
        for program in lower(schedule):
            last = {
                it.action.chunk: it for it in program if isinstance(it, Compute) and it.action.rule.reduces
            }
            marked = [it for it in program if isinstance(it, Compute) and it.last]
            assert sorted(marked, key=lambda it: it.action.chunk) == [last[chunk] for chunk in sorted(last)]
            assert len(marked) == schedule.virtual_stages


def test_actions_read_as_they_are_written() -> None:
    assert str(Action.parse("2F0")) == "2F0"
    assert Action.parse(" 13B27 ").microbatch == 27
    with pytest.raises(ValueError, match="must read like 2F0"):
        Action.parse("F2")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            ("zigzag", 2, 2, 1),
            "must be one of gpipe, 1f1b, interleaved, zb-h1, zb-v, v-half, but is 'zigzag'",
        ),
        (("1f1b", 2, 0, 1), "`microbatches` must be at least 1, but is 0"),
        (("zb-v", 2, 2, 1), "`virtual_stages` must be 2 with schedule zb-v"),
        (("1f1b", 2, 2, 2), "`virtual_stages` must be 1 with schedule 1f1b, but is 2"),
        (("interleaved", 1, 2, 2), "virtual_stages is 2 and pp is 1"),
        (("interleaved", 2, 2, 1), "virtual_stages is 1 and pp is 2"),
    ],
)
def test_what_a_schedule_cannot_do_is_refused(values: tuple[str, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_schedule(*values)


SMALL = [
    make_schedule("gpipe", 3, 2),
    make_schedule("1f1b", 3, 4),
    make_schedule("interleaved", 2, 3, 2),
    make_schedule("zb-v", 2, 3, 2),
]


@pytest.mark.parametrize("schedule", SMALL, ids=lambda schedule: schedule.name)
def test_dropped_and_doubled_actions_are_found(schedule: Schedule) -> None:
    for rank, order in enumerate(schedule.orders):
        for place, action in enumerate(order):
            for row in (order[:place] + order[place + 1 :], (*order[:place], action, *order[place:])):
                with pytest.raises(ScheduleError, match=f"rank {rank}: "):
                    check_orders(_with_row(schedule, rank, row))


@pytest.mark.parametrize("schedule", SMALL, ids=lambda schedule: schedule.name)
def test_a_backward_before_its_forward_is_found(schedule: Schedule) -> None:
    for rank, order in enumerate(schedule.orders):
        for forward in (action for action in order if action.kind == "F"):
            backward = Action.parse(str(forward).replace("F", "B"))
            swap = {forward: backward, backward: forward}
            with pytest.raises(ScheduleError, match="before its forward"):
                check_orders(_with_row(schedule, rank, tuple(swap.get(action, action) for action in order)))


def test_orders_that_wait_for_each_other_show_the_grid_and_the_cells() -> None:
    late = actions("0F1 0B1 0F0 0B0")
    schedule = replace(make_schedule("1f1b", 2, 2), orders=(actions("0F0 0B0 0F1 0B1"), late))
    with pytest.raises(ScheduleError) as caught:
        check(schedule)
    assert str(caught.value).splitlines()[1:] == [
        "rank 0:   0F0 >0B0<   0F1   0B1",
        "rank 1: >0F1<   0B1   0F0   0B0",
    ]


@pytest.mark.parametrize("schedule", SMALL, ids=lambda schedule: schedule.name)
def test_dropped_and_doubled_instructions_are_found(schedule: Schedule) -> None:
    programs = lower(schedule)
    for rank, program in enumerate(programs):
        for place, instruction in enumerate(program):
            for row in (
                program[:place] + program[place + 1 :],
                (*program[:place], instruction, *program[place:]),
            ):
                with pytest.raises(ScheduleError, match="rank"):
                    check_programs(schedule, _with_program(programs, rank, row))


@pytest.mark.parametrize("schedule", SMALL, ids=lambda schedule: schedule.name)
def test_swapped_instructions_are_found(schedule: Schedule) -> None:
    """Every swap that breaks the rank's own order, or turns two transfers with one peer round."""
    programs = lower(schedule)
    swaps = 0
    for rank, program in enumerate(programs):
        for place in range(len(program)):
            for other in range(place + 1, len(program)):
                one, two = program[place], program[other]
                if not _breaks(one, two):
                    continue
                row = list(program)
                row[place], row[other] = two, one
                swaps += 1
                with pytest.raises(ScheduleError):
                    check_programs(schedule, _with_program(programs, rank, tuple(row)))
    assert swaps > 20


def _breaks(one: Compute | Send | Receive, two: Compute | Send | Receive) -> bool:
    if isinstance(one, Compute) and isinstance(two, Compute):
        return True
    if isinstance(one, Send) and isinstance(two, Send):
        return one.to_rank == two.to_rank
    if isinstance(one, Receive) and isinstance(two, Receive):
        return one.from_rank == two.from_rank
    makes_and_sends = isinstance(one, Compute) and isinstance(two, Send)
    gets_and_uses = isinstance(one, Receive) and isinstance(two, Compute)
    return (makes_and_sends or gets_and_uses) and one.action == two.action


def test_a_message_to_the_wrong_rank_is_found() -> None:
    schedule = make_schedule("1f1b", 3, 2)
    programs = lower(schedule)
    for rank, program in enumerate(programs):
        for place, instruction in enumerate(program):
            if isinstance(instruction, Send):
                wrong = replace(instruction, to_rank=(instruction.to_rank + 1) % 3)
                row = (*program[:place], wrong, *program[place + 1 :])
                with pytest.raises(ScheduleError):
                    check_programs(schedule, _with_program(programs, rank, row))


def test_two_blocking_sends_towards_each_other_are_found() -> None:
    """The naive 1F1B: both sides send before they receive; buffers hide it, large messages do not."""
    schedule = make_schedule("1f1b", 2, 2)
    first, last = lower(schedule)
    receive = Receive(0, Action.parse("0F1"))
    rest = [instruction for instruction in last if instruction != receive]
    place = rest.index(Send(0, Action.parse("0B0"))) + 1
    naive = (*rest[:place], receive, *rest[place:])
    with pytest.raises(ScheduleError, match="wait for ever: rank 0 waits at 0F1→1; rank 1 waits at 0B0→0"):
        check_programs(schedule, (first, naive))


def _with_row(schedule: Schedule, rank: int, row: tuple[Action, ...]) -> Schedule:
    return replace(schedule, orders=(*schedule.orders[:rank], row, *schedule.orders[rank + 1 :]))


def _with_program(programs: tuple[Program, ...], rank: int, row: Program) -> tuple[Program, ...]:
    return (*programs[:rank], row, *programs[rank + 1 :])


def test_the_drawing_is_the_simulation() -> None:
    assert draw(make_schedule("1f1b", 2, 2)).splitlines() == [
        "rank 0 |F0 F1 .  .  B0    .  B1    |",
        "rank 1 |.  F0 B0    F1 B1    .  .  |",
    ]
    schedule = make_schedule("interleaved", 2, 4, 2)
    spans = [span for rank_spans in simulate(schedule) for span in rank_spans]
    assert (
        svg(schedule).count("<rect") == len(spans) + 1 + schedule.pp
    )  # the page and a row of idle time for each


def test_the_command_draws_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # B166
    picture = tmp_path / "s.svg"
    assert (
        command.main(["--schedule", "1f1b", "--pp", "4", "--microbatches", "8", "--svg", str(picture)]) == 0
    )
    out = capsys.readouterr().out
    assert "bubble 27.3% (3/11)" in out
    assert "in flight per rank: 4 3 2 1" in out
    assert f"wrote {picture}" in out
    assert picture.read_text(encoding="utf-8").startswith("<svg")


def test_the_command_refuses_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (
        ["--schedule", "zigzag"],
        ["--pp", "0"],
        ["--pp", "x"],
        ["--virtual-stages", "2"],
        ["--nonsense"],
    ):
        try:
            code = command.main(wrong)
        except SystemExit as ended:
            code = ended.code
        assert code == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_command_starts_without_torch() -> None:
    code = "import sys, triaxis.launch.schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
