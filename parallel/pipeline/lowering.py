"""A rank's program: the computations of its schedule, and the sends and receives between. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from triaxis.parallel.pipeline.schedule import Action, Schedule
from triaxis.parallel.pipeline.walk import Span, simulate


@dataclass(frozen=True, slots=True)
class Compute:
    """last: it is the last of the step that adds to the gradients of its chunk's weights: they may be reduced then."""

    action: Action
    last: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return str(self.action)


@dataclass(frozen=True, slots=True)
class Send:
    """Sends what `action` of this rank made to `to_rank`. label: what it is there (`F3 for stage 2`)."""

    to_rank: int
    action: Action
    label: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.action}→{self.to_rank}"


@dataclass(frozen=True, slots=True)
class Receive:
    """Receives from `from_rank` what `action` of this rank will use. label: as the sender says."""

    from_rank: int
    action: Action
    label: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.from_rank}→{self.action}"


@dataclass(frozen=True, slots=True)
class Hand:
    """Hands what `action` made to `taker`, which is of the same rank: no message."""

    action: Action
    taker: Action

    def __str__(self) -> str:
        return f"{self.action}→{self.taker}"


Instruction = Compute | Send | Receive | Hand
Program = tuple[Instruction, ...]


def lower(schedule: Schedule) -> tuple[Program, ...]:
    """Each rank's program, its transfers in one order that holds for all ranks.

    Every transfer stands where the simulated sender finishes, in both programs. As the transfers of all ranks
    are parts of one sequence, the earliest one not yet done can always proceed: no rank waits for ever,
    even if a send blocks until its receive is posted. A receive may stand before the computation under way.
    """
    events: list[tuple[float, int, Span]] = []
    for span in (span for spans in simulate(schedule) for span in spans):
        events.append((span.start, 1, span))  # a computation
        events.append((span.stop, 0, span))  # its transfer: before computations that start then
    programs: list[list[Instruction]] = [[] for _ in schedule.orders]
    closing = [_last_reductions(order) for order in schedule.orders]
    for _, is_compute, span in sorted(events, key=lambda event: event[:2]):
        if is_compute:
            programs[span.rank].append(Compute(span.action, last=span.action in closing[span.rank]))
            continue
        consumer = schedule.consumer(span.rank, span.action)
        if consumer is None:
            continue
        to_rank, action = consumer
        if to_rank == span.rank:
            programs[span.rank].append(Hand(span.action, action))
            continue
        label = (
            f"{action.kind}{action.microbatch} for stage {schedule.placement.stages[to_rank][action.chunk]}"
        )
        programs[span.rank].append(Send(to_rank, span.action, label))
        _insert_early(programs[to_rank], Receive(span.rank, action, label))
    return tuple(tuple(program) for program in programs)


def links(programs: Iterable[Program]) -> tuple[tuple[int, int], ...]:
    """Who sends to whom in them, in one order for all: (0, 1), (1, 0), … in a pipeline of two that trains."""
    return tuple(
        sorted(
            {
                (rank, instruction.to_rank)
                for rank, program in enumerate(programs)
                for instruction in program
                if isinstance(instruction, Send)
            }
        )
    )


def _last_reductions(order: Sequence[Action]) -> frozenset[Action]:
    """Of each chunk the last action that adds to the gradients of its weights."""
    last = {action.chunk: action for action in order if action.rule.reduces}
    return frozenset(last.values())


def _insert_early(program: list[Instruction], receive: Receive) -> None:
    """Before the computation under way, to arrive meanwhile; no earlier, or buffers would pile up."""
    under_way = bool(program) and isinstance(program[-1], Compute)
    program.insert(len(program) - under_way, receive)
