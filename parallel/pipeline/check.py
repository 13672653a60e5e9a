"""Proves a schedule complete, ordered and free of deadlock; or says where it is not."""

from __future__ import annotations

from collections.abc import Sequence

from triaxis.parallel.pipeline.schedule import (
    Action,
    Compute,
    Kind,
    Program,
    Receive,
    Schedule,
    ScheduleError,
    Send,
    lower,
    order_grid,
)


def check(schedule: Schedule) -> None:
    """Raises ScheduleError, with the grid and the cell, unless schedule and lowered programs are right."""
    check_orders(schedule)
    check_programs(schedule, lower(schedule))


def check_orders(schedule: Schedule) -> None:
    """Complete: every forward and backward once on each rank. Ordered: a backward after its forward."""
    kinds = [Kind.FORWARD] if schedule.forward_only else [Kind.FORWARD, Kind.BACKWARD]
    expected = {
        Action(kind=kind, chunk=chunk, microbatch=microbatch)
        for kind in kinds
        for chunk in range(schedule.virtual_stages)
        for microbatch in range(schedule.microbatches)
    }
    if len(schedule.orders) != schedule.pp:
        raise ScheduleError(
            f"`orders` must have one row for each of {schedule.pp} ranks, but has {len(schedule.orders)}"
        )
    for rank, order in enumerate(schedule.orders):
        done: set[Action] = set()
        for place, action in enumerate(order):
            forward = Action(kind=Kind.FORWARD, chunk=action.chunk, microbatch=action.microbatch)
            if action in done:
                _fail(schedule.orders, rank, place, f"{action} is computed twice")
            if action not in expected:
                _fail(schedule.orders, rank, place, f"{action} does not belong to the schedule")
            if action.kind is Kind.BACKWARD and forward not in done:
                _fail(schedule.orders, rank, place, f"{action} comes before its forward {forward}")
            done.add(action)
        missing = sorted(str(action) for action in expected - done)
        if missing:
            _fail(schedule.orders, rank, len(order), f"never computes {', '.join(missing)}")


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
