"""Pipeline schedules as data: which rank computes what, in which order, and the messages between.

Model stage `c*pp + r` is chunk c of rank r. A schedule says only the order of computations of each rank;
`lower` derives the sends and receives. What is checked, drawn and simulated is the very thing that runs.

    1f1b, pp 2, 3 microbatches      rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
                                    rank 1: 0F0 0B0 0F1 0B1 0F2 0B2
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class ScheduleName(StrEnum):
    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"


class Kind(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"


class ScheduleError(ValueError):
    """A schedule that is incomplete, out of order or stuck; the message shows the grid of all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One computation of a rank. Written "2F0": chunk 2 of the rank, forward, microbatch 0."""

    kind: Kind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        found = re.fullmatch(r"(\d+)([FB])(\d+)", text.strip())
        if found is None:
            raise ValueError(f"an action must read like 2F0 (chunk, F or B, microbatch), but is {text!r}")
        return cls(kind=Kind(found[2]), chunk=int(found[1]), microbatch=int(found[3]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The computations of each rank in order: `orders[rank]`. Forward-only schedules have no backward."""

    name: str
    pp: int
    microbatches: int
    virtual_stages: int
    orders: tuple[tuple[Action, ...], ...]
    forward_only: bool = False

    def consumer(self, rank: int, action: Action) -> tuple[int, Action] | None:
        """(rank, action) that uses the tensor that `action` of `rank` makes; None at the ends."""
        step = 1 if action.kind is Kind.FORWARD else -1
        return self._neighbour(rank, action, step)

    def producer(self, rank: int, action: Action) -> tuple[int, Action] | None:
        """(rank, action) whose tensor `action` of `rank` uses, from another stage; None at the ends."""
        step = -1 if action.kind is Kind.FORWARD else 1
        return self._neighbour(rank, action, step)

    def _neighbour(self, rank: int, action: Action, step: int) -> tuple[int, Action] | None:
        stage = action.chunk * self.pp + rank + step
        if not 0 <= stage < self.pp * self.virtual_stages:
            return None
        return stage % self.pp, Action(kind=action.kind, chunk=stage // self.pp, microbatch=action.microbatch)


@dataclass(frozen=True, slots=True)
class Compute:
    action: Action

    def __str__(self) -> str:
        return str(self.action)


@dataclass(frozen=True, slots=True)
class Send:
    """Sends what `action` of this rank made to `to_rank`."""

    to_rank: int
    action: Action

    def __str__(self) -> str:
        return f"{self.action}→{self.to_rank}"


@dataclass(frozen=True, slots=True)
class Receive:
    """Receives from `from_rank` what `action` of this rank will use."""

    from_rank: int
    action: Action

    def __str__(self) -> str:
        return f"{self.from_rank}→{self.action}"


Instruction = Compute | Send | Receive
Program = tuple[Instruction, ...]


def make_schedule(name: str, pp: int, microbatches: int, virtual_stages: int = 1) -> Schedule:
    """The named schedule; ValueError for what it cannot do."""
    _refuse_impossible(name, pp, microbatches, virtual_stages)
    chosen = ScheduleName(name)
    # Interleaving is orderly in whole groups of pp microbatches. A shorter last group is filled up, and what
    # was added is left out afterwards: no microbatch needs another, so the orders still cannot get stuck.
    ordered = microbatches if virtual_stages == 1 else -(-microbatches // pp) * pp
    forwards = _chunk_order(Kind.FORWARD, pp, ordered, virtual_stages)
    backwards = _chunk_order(Kind.BACKWARD, pp, ordered, virtual_stages)
    orders = []
    for rank in range(pp):
        warmup = {
            ScheduleName.GPIPE: microbatches,
            ScheduleName.ONE_F_ONE_B: pp - rank - 1,
            ScheduleName.INTERLEAVED: (virtual_stages - 1) * pp + 2 * (pp - rank - 1),
        }[chosen]
        order = _alternate(forwards, backwards, min(warmup, len(forwards)))
        orders.append(tuple(action for action in order if action.microbatch < microbatches))
    return Schedule(
        name=chosen, pp=pp, microbatches=microbatches, virtual_stages=virtual_stages, orders=tuple(orders)
    )


def make_forward_schedule(pp: int, microbatches: int, virtual_stages: int = 1) -> Schedule:
    """Forward passes only, for evaluation."""
    order = tuple(_chunk_order(Kind.FORWARD, pp, microbatches, virtual_stages))
    return Schedule(
        name="forward",
        pp=pp,
        microbatches=microbatches,
        virtual_stages=virtual_stages,
        orders=(order,) * pp,
        forward_only=True,
    )


def _refuse_impossible(name: str, pp: int, microbatches: int, virtual_stages: int) -> None:
    names = [str(known) for known in ScheduleName]
    if name not in names:
        raise ValueError(f"`schedule` must be one of {', '.join(names)}, but is {name!r}")
    for field, value in (("pp", pp), ("microbatches", microbatches), ("virtual_stages", virtual_stages)):
        if value < 1:
            raise ValueError(f"`{field}` must be at least 1, but is {value}")
    if name != ScheduleName.INTERLEAVED and virtual_stages > 1:
        raise ValueError(
            f"`virtual_stages` must be 1 with schedule {name}, but is {virtual_stages}; "
            f"virtual stages need schedule interleaved and pp of at least 2"
        )
    if name == ScheduleName.INTERLEAVED and (virtual_stages < 2 or pp < 2):
        raise ValueError(
            f"schedule interleaved must have virtual_stages and pp of at least 2, but virtual_stages is "
            f"{virtual_stages} and pp is {pp}; raise them, or use schedule 1f1b"
        )


def _chunk_order(kind: Kind, pp: int, microbatches: int, virtual_stages: int) -> list[Action]:
    """Groups of pp microbatches go through all chunks, group by group; the last group may be shorter."""
    chunks = list(range(virtual_stages))
    if kind is Kind.BACKWARD:
        chunks.reverse()
    return [
        Action(kind=kind, chunk=chunk, microbatch=microbatch)
        for start in range(0, microbatches, pp)
        for chunk in chunks
        for microbatch in range(start, min(start + pp, microbatches))
    ]


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> tuple[Action, ...]:
    """`warmup` forwards, then one forward, one backward in turn, then the backwards left."""
    order = list(forwards[:warmup])
    steady = forwards[warmup:]
    for forward, backward in zip(steady, backwards, strict=False):
        order += [forward, backward]
    return (*order, *backwards[len(steady) :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """When a rank computes an action, in the unit of the durations given."""

    rank: int
    action: Action
    start: int
    stop: int


def simulate(schedule: Schedule, *, forward: int = 1, backward: int = 2) -> tuple[tuple[Span, ...], ...]:
    """Per rank, when it computes what, if messages take no time and every chunk the same time.

    Raises ScheduleError, with the grid and the cell of each rank that waits, when the orders get stuck.
    """
    finished: dict[tuple[int, Action], int] = {}
    spans: list[list[Span]] = [[] for _ in schedule.orders]
    progressed = True
    while progressed:
        progressed = False
        for rank, order in enumerate(schedule.orders):
            while len(spans[rank]) < len(order):
                action = order[len(spans[rank])]
                needs = _needs(schedule, rank, action)
                if any(need not in finished for need in needs):
                    break
                free = spans[rank][-1].stop if spans[rank] else 0
                start = max([free, *(finished[need] for need in needs)])
                stop = start + (forward if action.kind is Kind.FORWARD else backward)
                spans[rank].append(Span(rank=rank, action=action, start=start, stop=stop))
                finished[rank, action] = stop
                progressed = True
    stuck = {
        rank: len(spans[rank]) for rank, order in enumerate(schedule.orders) if len(spans[rank]) < len(order)
    }
    if stuck:
        cells = [schedule.orders[rank][cell] for rank, cell in stuck.items()]
        waits = "; ".join(f"rank {rank} waits at {action}" for rank, action in zip(stuck, cells, strict=True))
        raise ScheduleError(
            f"the schedule cannot be carried out: {waits}\n{order_grid(schedule.orders, stuck)}"
        )
    return tuple(tuple(rank_spans) for rank_spans in spans)


def _needs(schedule: Schedule, rank: int, action: Action) -> list[tuple[int, Action]]:
    producer = schedule.producer(rank, action)
    needs = [] if producer is None else [producer]
    if action.kind is Kind.BACKWARD:
        needs.append((rank, Action(kind=Kind.FORWARD, chunk=action.chunk, microbatch=action.microbatch)))
    return needs


def lower(schedule: Schedule) -> tuple[Program, ...]:
    """Each rank's program, its transfers in one order that holds for all ranks.

    Every transfer stands where the simulated sender finishes, in both programs. As the transfers of all ranks
    are parts of one sequence, the earliest one not yet done can always proceed: no rank waits for ever,
    even if a send blocks until its receive is posted. A receive may stand before the computation under way.
    """
    events: list[tuple[int, int, Span]] = []
    for span in (span for spans in simulate(schedule) for span in spans):
        events.append((span.start, 1, span))  # a computation
        events.append((span.stop, 0, span))  # its transfer: before computations that start then
    programs: list[list[Instruction]] = [[] for _ in schedule.orders]
    for _, is_compute, span in sorted(events, key=lambda event: event[:2]):
        if is_compute:
            programs[span.rank].append(Compute(span.action))
            continue
        consumer = schedule.consumer(span.rank, span.action)
        if consumer is not None:
            to_rank, action = consumer
            programs[span.rank].append(Send(to_rank, span.action))
            _insert_early(programs[to_rank], Receive(span.rank, action))
    return tuple(tuple(program) for program in programs)


def _insert_early(program: list[Instruction], receive: Receive) -> None:
    """Before the computation under way, to arrive meanwhile; no earlier, or buffers would pile up."""
    under_way = bool(program) and isinstance(program[-1], Compute)
    program.insert(len(program) - under_way, receive)


def order_grid(rows: Sequence[Sequence[object]], marks: dict[int, int]) -> str:
    """A row for each rank; the cell `marks[rank]` stands in >…<."""
    texts = [
        [f">{cell}<" if marks.get(rank) == place else str(cell) for place, cell in enumerate(row)]
        + ([">end<"] if marks.get(rank) == len(row) else [])
        for rank, row in enumerate(rows)
    ]
    width = max((len(text) for row in texts for text in row), default=0)
    return "\n".join(
        f"rank {rank}: " + " ".join(text.rjust(width) for text in row) for rank, row in enumerate(texts)
    )
