"""Proves a schedule complete, ordered and free of deadlock; or says where it is not."""

from __future__ import annotations

from collections.abc import Sequence

from triaxis.parallel.pipeline.lowering import Compute, Hand, Program, Receive, Send, lower
from triaxis.parallel.pipeline.schedule import Action, Kind, Schedule, ScheduleError, order_grid


def check(schedule: Schedule) -> None:
    """Raises ScheduleError, with the grid and the cell, unless schedule and lowered programs are right."""
    check_orders(schedule)
    check_programs(schedule, lower(schedule))


def check_orders(schedule: Schedule) -> None:
    """Complete: every forward once, and every backward, whole or in two. Ordered: each after what it needs."""
    if len(schedule.orders) != schedule.pp:
        raise ScheduleError(
            f"`orders` must have one row for each of {schedule.pp} ranks, but has {len(schedule.orders)}"
        )
    kinds = {Kind.FORWARD} if schedule.forward_only else set(Kind)
    chunks, microbatches = range(schedule.virtual_stages), range(schedule.microbatches)
    for rank, order in enumerate(schedule.orders):
        done: set[Action] = set()
        for place, action in enumerate(order):
            if action in done:
                _fail(schedule.orders, rank, place, f"{action} is computed twice")
            if (
                action.kind not in kinds
                or action.chunk not in chunks
                or action.microbatch not in microbatches
            ):
                _fail(schedule.orders, rank, place, f"{action} does not belong to the schedule")
            if action.rule.after is not None and action.like(action.rule.after) not in done:
                need = action.like(action.rule.after)
                _fail(schedule.orders, rank, place, f"{action} comes before its {need.rule.name} {need}")
            if action.kind in _WHOLE_OR_HALF and action.like(_WHOLE_OR_HALF[action.kind]) in done:
                other = action.like(_WHOLE_OR_HALF[action.kind])
                _fail(schedule.orders, rank, place, f"{action} repeats what {other} has done")
            done.add(action)
        missing = sorted(
            str(action)
            for chunk in chunks
            for microbatch in microbatches
            for action in _missing(chunk, microbatch, done, forward_only=schedule.forward_only)
        )
        if missing:
            _fail(schedule.orders, rank, len(order), f"never computes {', '.join(missing)}")


_WHOLE_OR_HALF = {Kind.BACKWARD: Kind.INPUT, Kind.INPUT: Kind.BACKWARD}


def _missing(chunk: int, microbatch: int, done: set[Action], *, forward_only: bool) -> list[Action]:
    forward = Action(kind=Kind.FORWARD, chunk=chunk, microbatch=microbatch)
    halves = forward.like(Kind.INPUT) in done
    backward = forward.like(Kind.WEIGHT if halves else Kind.BACKWARD)
    return [action for action in ([forward] if forward_only else [forward, backward]) if action not in done]


def check_programs(schedule: Schedule, programs: Sequence[Program]) -> None:
    """Runs the programs under the strictest meaning: a transfer happens when both sides stand at it.

    What passes so passes with any buffering, and when sends and receives share one queue.
    """
    for rank, (order, program) in enumerate(zip(schedule.orders, programs, strict=True)):
        computed = [(at, it.action) for at, it in enumerate(program) if isinstance(it, Compute)]
        for place, (at, action) in enumerate(computed):
            if place >= len(order) or order[place] != action:
                _fail(programs, rank, at, f"{action} is not what the schedule computes here")
        if len(computed) < len(order):
            _fail(programs, rank, len(program), f"never computes {order[len(computed)]}")
    run = _Run(schedule, programs)
    while sum(run.advance(rank) for rank in range(schedule.pp)):  # every rank, not up to the first
        pass
    run.check_end()


class _Run:
    """Where each rank stands in its program, and which tensors it has made and received."""

    def __init__(self, schedule: Schedule, programs: Sequence[Program]) -> None:
        self.schedule = schedule
        self.programs = programs
        self.places = [0] * len(programs)
        self.made: list[set[Action]] = [set() for _ in programs]
        self.received: list[set[Action]] = [set() for _ in programs]

    def advance(self, rank: int) -> bool:
        """Goes on as far as this rank can; whether it moved."""
        start = self.places[rank]
        while self.places[rank] < len(self.programs[rank]):
            instruction = self.programs[rank][self.places[rank]]
            if isinstance(instruction, Compute):
                self._compute(rank, instruction.action)
            elif isinstance(instruction, Hand):
                self._hand(rank, instruction)
            elif not (isinstance(instruction, Send) and self._transfer(rank, instruction)):
                break
            self.places[rank] += 1
        return self.places[rank] > start

    def _compute(self, rank: int, action: Action) -> None:
        if self.schedule.producer(rank, action) is not None:
            if action not in self.received[rank]:
                self._fail(rank, f"{action} is computed before its input is received")
            self.received[rank].remove(action)
        if self.schedule.consumer(rank, action) is not None:
            self.made[rank].add(action)

    def _hand(self, rank: int, hand: Hand) -> None:
        if hand.action not in self.made[rank]:
            self._fail(rank, f"{hand.action} is handed on, but not made, or handed on before")
        if self.schedule.consumer(rank, hand.action) != (rank, hand.taker):
            self._fail(rank, f"{hand.taker} does not use {hand.action}")
        self.made[rank].remove(hand.action)
        self.received[rank].add(hand.taker)

    def _transfer(self, rank: int, send: Send) -> bool:
        """Done if the receiver stands at the receive; the receiver moves on too."""
        if send.action not in self.made[rank]:
            self._fail(rank, f"{send.action} is sent, but not made, or sent before")
        to_rank = send.to_rank
        if self.schedule.consumer(rank, send.action) is None:
            self._fail(rank, f"nobody uses {send.action}")
        if not 0 <= to_rank < len(self.programs) or self.places[to_rank] == len(self.programs[to_rank]):
            return False
        receive = self.programs[to_rank][self.places[to_rank]]
        if not isinstance(receive, Receive) or receive.from_rank != rank:
            return False
        if self.schedule.consumer(rank, send.action) != (to_rank, receive.action):
            self._fail(to_rank, f"receives {receive.action}, but rank {rank} sends {send.action}")
        self.made[rank].remove(send.action)
        self.received[to_rank].add(receive.action)
        self.places[to_rank] += 1
        return True

    def check_end(self) -> None:
        waiting = {
            rank: place
            for rank, (place, program) in enumerate(zip(self.places, self.programs, strict=True))
            if place < len(program)
        }
        if waiting:
            where = "; ".join(
                f"rank {rank} waits at {self.programs[rank][place]}" for rank, place in waiting.items()
            )
            raise ScheduleError(f"the programs wait for ever: {where}\n{order_grid(self.programs, waiting)}")
        for rank, (made, received) in enumerate(zip(self.made, self.received, strict=True)):
            if made:
                self._fail(rank, f"never sends {', '.join(sorted(map(str, made)))}")
            if received:
                self._fail(rank, f"never uses {', '.join(sorted(map(str, received)))}")

    def _fail(self, rank: int, reason: str) -> None:
        _fail(self.programs, rank, self.places[rank], reason)


def _fail(rows: Sequence[Sequence[object]], rank: int, place: int, reason: str) -> None:
    raise ScheduleError(f"rank {rank}: {reason}\n{order_grid(rows, {rank: place})}")
