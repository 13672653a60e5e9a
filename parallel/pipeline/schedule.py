"""Pipeline schedules as data: which rank computes what, in which order.

A schedule says only the order of computations of each rank, and which model stage each of its chunks is; `lower`
derives the sends and receives. What is checked, drawn and simulated is the very thing that runs.

    1f1b, pp 2, 3 microbatches      rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
                                    rank 1: 0F0 0B0 0F1 0B1 0F2 0B2
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Final


class ScheduleName(StrEnum):
    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZB_H1 = "zb-h1"
    ZB_V = "zb-v"
    V_HALF = "v-half"


class Kind(StrEnum):
    """What an action computes: a microbatch's forward, its backward, or one of the two halves of that."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"


@dataclass(frozen=True, slots=True, kw_only=True)
class KindRule:
    """What a kind of action needs and makes.

    after: the kind that must come before it in its chunk, for the same microbatch
    toward: where the tensor that it makes is used: 1 the next model stage, -1 the one before, 0 nowhere
    holds: by how much it changes the number of microbatches whose activations are held
    reduces: whether gradients of weights are complete after it; units: how long it takes, if nobody says otherwise
    """

    name: str
    after: Kind | None
    toward: int
    holds: int
    reduces: bool
    units: int


KINDS: Final[Mapping[Kind, KindRule]] = {
    Kind.FORWARD: KindRule(name="forward", after=None, toward=1, holds=1, reduces=False, units=1),
    Kind.BACKWARD: KindRule(name="backward", after=Kind.FORWARD, toward=-1, holds=-1, reduces=True, units=2),
    Kind.INPUT: KindRule(
        name="gradients of inputs", after=Kind.FORWARD, toward=-1, holds=0, reduces=False, units=1
    ),
    Kind.WEIGHT: KindRule(
        name="gradients of weights", after=Kind.INPUT, toward=0, holds=-1, reduces=True, units=1
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRule:
    """What a schedule asks of a run.

    chunks: of a rank, unless the run says otherwise; several: whether it may say more
    splits: whether backward passes are done in two; turns: whether stages go there and back (`vee`)
    """

    chunks: int = 1
    several: bool = False
    splits: bool = False
    turns: bool = False


SCHEDULES: Final[Mapping[ScheduleName, ScheduleRule]] = {
    ScheduleName.GPIPE: ScheduleRule(),
    ScheduleName.ONE_F_ONE_B: ScheduleRule(),
    ScheduleName.INTERLEAVED: ScheduleRule(chunks=2, several=True),
    ScheduleName.ZB_H1: ScheduleRule(splits=True),
    ScheduleName.ZB_V: ScheduleRule(chunks=2, splits=True, turns=True),
    ScheduleName.V_HALF: ScheduleRule(chunks=2, splits=True, turns=True),
}


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

    @property
    def rule(self) -> KindRule:
        return KINDS[self.kind]

    def like(self, kind: Kind) -> Action:
        """The action of another kind on the same microbatch in the same chunk."""
        return Action(kind=kind, chunk=self.chunk, microbatch=self.microbatch)

    @classmethod
    def parse(cls, text: str) -> Action:
        letters = "".join(Kind)
        found = re.fullmatch(rf"(\d+)([{letters}])(\d+)", text.strip())
        if found is None:
            kinds = f"{', '.join(letters[:-1])} or {letters[-1]}"
            raise ValueError(f"an action must read like 2F0 (chunk, {kinds}, microbatch), but is {text!r}")
        return cls(kind=Kind(found[2]), chunk=int(found[1]), microbatch=int(found[3]))


@dataclass(frozen=True)
class Placement:
    """Which model stage each chunk is: stages[rank][chunk]."""

    stages: tuple[tuple[int, ...], ...]

    @cached_property
    def places(self) -> Mapping[int, tuple[int, int]]:
        """Each stage's (rank, chunk)."""
        return {
            stage: (rank, chunk) for rank, held in enumerate(self.stages) for chunk, stage in enumerate(held)
        }

    @property
    def last(self) -> int:
        """The stage that makes the loss."""
        return len(self.places) - 1


def looped(pp: int, virtual_stages: int) -> Placement:
    """Round after round: chunk c of rank r is stage c * pp + r."""
    return Placement(tuple(tuple(c * pp + r for c in range(virtual_stages)) for r in range(pp)))


def vee(pp: int) -> Placement:
    """There and back: rank r has stage r and stage 2 * pp - 1 - r, so that rank 0 has the first and the last."""
    return Placement(tuple((rank, 2 * pp - 1 - rank) for rank in range(pp)))


def placement_of(name: str, pp: int, virtual_stages: int) -> Placement:
    """Where the named schedule has the model's stages."""
    return vee(pp) if SCHEDULES[ScheduleName(name)].turns else looped(pp, virtual_stages)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The computations of each rank in order: `orders[rank]`. Forward-only schedules have no backward."""

    name: str
    placement: Placement
    microbatches: int
    orders: tuple[tuple[Action, ...], ...]
    forward_only: bool = False

    @property
    def pp(self) -> int:
        return len(self.placement.stages)

    @property
    def virtual_stages(self) -> int:
        """How many chunks a rank has."""
        return len(self.placement.stages[0])

    def consumer(self, rank: int, action: Action) -> tuple[int, Action] | None:
        """(rank, action) that uses the tensor that `action` of `rank` makes; None at the ends."""
        return self._neighbour(rank, action, action.rule.toward)

    def producer(self, rank: int, action: Action) -> tuple[int, Action] | None:
        """(rank, action) whose tensor `action` of `rank` uses, from another stage; None at the ends."""
        return self._neighbour(rank, action, -action.rule.toward)

    def _neighbour(self, rank: int, action: Action, step: int) -> tuple[int, Action] | None:
        place = self.placement.places.get(self.placement.stages[rank][action.chunk] + step)
        if step == 0 or place is None:
            return None
        kind = action.kind
        if (
            kind is not Kind.FORWARD
        ):  # the other stage may do in one what this one does in two, or the reverse
            split = Action(kind=Kind.INPUT, chunk=place[1], microbatch=action.microbatch)
            kind = Kind.INPUT if split in self._split[place[0]] else Kind.BACKWARD
        return place[0], Action(kind=kind, chunk=place[1], microbatch=action.microbatch)

    @cached_property
    def _split(self) -> tuple[frozenset[Action], ...]:
        """For each rank the backward passes that are done in two."""
        return tuple(frozenset(a for a in order if a.kind is Kind.INPUT) for order in self.orders)


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
