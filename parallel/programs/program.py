"""What a rank does in one step, as data: computations, communications, waits, and the bytes it holds. Pure.

A `Program` is a rank's steps in order; steps that repeat (the same chunk on another microbatch) share one `Segment`.
A `Cluster` gives every rank of a topology its program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from triaxis.parallel.places.topology import members_with
from triaxis.parallel.programs.operation import Operation

SETUP, PIPELINE, UPDATE = "setup", "pipeline", "update"
"""Labels of steps that are no action of the schedule: before the first, between actions, and after the last."""


class MemoryKind(StrEnum):
    """What bytes are held for."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer states"
    ACTIVATIONS = "activations"
    GATHERED = "gathered parameters"
    BUCKETS = "unreduced gradients"
    MESSAGES = "pipeline messages"
    TEMPORARIES = "temporaries"
    OTHER = "other"


KINDS = tuple(MemoryKind)


@dataclass(frozen=True, slots=True)
class Compute:
    """One operation on the device. flops: multiplications and additions of matrix products and attention, else 0."""

    operation: str
    dtype: str
    flops: int
    read_bytes: int
    written_bytes: int


_WHOM = {Operation.SEND: " to place ", Operation.RECEIVE: " from place "}


@dataclass(frozen=True, slots=True)
class Communicate:
    """A communication is issued.

    elements: of the whole tensor (gathered, or before it is scattered), or of the message
    peer: the other side's place in the group, or the root's; -1 for neither
    label: what it is for, on which they must agree too (`gradient of bucket 2`; of a pipeline message `F3 for stage 2`;
        of a new group its partition)
    gradient: the bucket whose gradient is reduced here; -1 for none
    gives, takes: elements for and from each member, in an uneven all_to_all
    varying: index into the rank's own `sizes`, which hold the elements instead; -1 where all ranks have the same
    """

    operation: Operation
    group: str
    dtype: str
    elements: int
    nbytes: int
    peer: int = -1
    site: str = ""
    label: str = ""
    gradient: int = -1
    varying: int = -1
    gives: tuple[int, ...] = ()
    takes: tuple[int, ...] = ()

    def asked(self) -> tuple[object, ...]:
        """What the members of a collective must agree on; what they give each other in uneven parts is apart."""
        elements = -1 if self.gives else self.elements
        return (self.operation, self.dtype, elements, self.peer, self.label)

    def __str__(self) -> str:
        what = f"{self.operation} of {self.elements:,} {self.dtype}" if self.elements else self.operation
        whom = _WHOM.get(self.operation, " of member ")
        peer = f"{whom}{self.peer}" if self.peer >= 0 else ""
        label = f" ({self.label})" if self.label else ""
        return f"{what}{label}{peer} in group '{self.group}' at {self.site}"


@dataclass(frozen=True, slots=True)
class Wait:
    """A communication is waited for: of those of its kind issued in its group, the one `age` before the last."""

    group: str
    operation: Operation
    age: int


Event = Compute | Communicate | Wait


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """How the bytes held change over a segment.

    places[i]: the event (counted in the segment) before which change i happens; kinds[i]: an index into KINDS
    """

    places: tuple[int, ...] = ()
    kinds: tuple[int, ...] = ()
    deltas: tuple[int, ...] = ()

    def net(self) -> dict[MemoryKind, int]:
        """The change from the segment's beginning to its end."""
        change: dict[MemoryKind, int] = {}
        for kind, delta in zip(self.kinds, self.deltas, strict=True):
            change[KINDS[kind]] = change.get(KINDS[kind], 0) + delta
        return change


@dataclass(frozen=True, eq=False)
class Segment:
    """Consecutive events of a rank, and the bytes held meanwhile."""

    events: tuple[Event, ...]
    memory: MemoryCurve = MemoryCurve()

    @cached_property
    def messages(self) -> tuple[Communicate | Wait, ...]:
        """The events that concern other ranks."""
        return tuple(event for event in self.events if not isinstance(event, Compute))

    @cached_property
    def issues(self) -> Mapping[tuple[str, Operation], int]:
        """How many communications it issues, by group and operation."""
        return Counter(
            (event.group, event.operation) for event in self.messages if isinstance(event, Communicate)
        )

    @cached_property
    def growth(self) -> int:
        """Bytes held more at the end than at the beginning."""
        return sum(self.memory.deltas)


@dataclass(frozen=True, slots=True)
class Step:
    """A segment where it happens: `0F3` (an action of the schedule), or a phase such as `update`."""

    label: str
    segment: Segment

    @property
    def acts(self) -> bool:
        """Whether it is an action of the schedule."""
        return self.label not in (SETUP, PIPELINE, UPDATE)


@dataclass(frozen=True, slots=True)
class GradientRule:
    """A bucket's gradient is reduced over `group` this often in a step, by one operation of so many elements."""

    bucket: int
    group: str
    elements: int
    reductions: int


@dataclass(frozen=True, eq=False)
class Program:
    """Everything a rank does in one optimizer step.

    gradients: what must be reduced; held: bytes before the first step, by kind
    """

    steps: tuple[Step, ...]
    gradients: tuple[GradientRule, ...] = ()
    held: Mapping[MemoryKind, int] | None = None

    def messages(self) -> Iterator[tuple[str, Communicate | Wait]]:
        """Each event that concerns other ranks, with the label of its step."""
        for step in self.steps:
            for event in step.segment.messages:
                yield step.label, event

    @cached_property
    def talk(self) -> tuple[tuple[object, ...], ...]:
        """What other ranks can see of this program: equal for ranks that cannot be told apart."""
        return tuple(step.segment.messages for step in self.steps if step.segment.messages)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Every rank's program.

    groups: each group's name and the partition of the ranks that it is
    program_of[rank]: an index into `programs`
    sizes[rank]: elements of the rank's varying communications
    places[rank]: how to name the rank ("dp 0, pp 1, tp 1")
    """

    size: int
    groups: Mapping[str, tuple[tuple[int, ...], ...]]
    programs: tuple[Program, ...]
    program_of: tuple[int, ...]
    sizes: Mapping[int, tuple[int, ...]]
    places: Sequence[str]

    def members(self, group: str, rank: int) -> tuple[int, ...]:
        """The ranks of the group of this name that holds `rank`."""
        return members_with(rank, self.groups[group])

    def program(self, rank: int) -> Program:
        return self.programs[self.program_of[rank]]
