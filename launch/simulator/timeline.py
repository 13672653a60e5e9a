"""The timeline of a cluster's step: every class of ranks on its compute lane and one lane for each group.

An operation takes as long as its arithmetic or its memory traffic, whichever is longer, and its launch. A
communication starts when all that take part have issued it and their lanes are free. Lanes overlap; a wait holds the
compute lane until its communication has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from triaxis.launch.hardware.collectives import collective_seconds, send_seconds
from triaxis.launch.hardware.hardware import Hardware
from triaxis.parallel.programs.lockstep import Call, Item, Lockstep, by_channel
from triaxis.parallel.programs.operation import Operation
from triaxis.parallel.programs.program import (
    PIPELINE,
    SETUP,
    Cluster,
    Communicate,
    Compute,
    Program,
    Segment,
    Wait,
)
from triaxis.parallel.programs.rank_classes import rank_classes

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """What makes ranks unequal: factors by rank. slower: of its computations; links: of its groups' messages."""

    slower: Mapping[int, float] = field(default_factory=dict)
    links: Mapping[int, float] = field(default_factory=dict)


@dataclass(slots=True)
class Row:
    """One class of ranks. compute: (start, end, label) of each step; lanes: (start, end) of communications, by group.

    rank: the class's first; busy, exposed, idle: seconds the compute lane works, waits for messages under way (by
    group), and waits for other ranks
    """

    rank: int
    ranks: int
    compute: list[tuple[float, float, str]] = field(default_factory=list)
    lanes: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    busy: float = 0.0
    exposed: dict[str, float] = field(default_factory=dict)
    idle: float = 0.0
    end: float = 0.0


@dataclass(frozen=True, slots=True)
class Timeline:
    """rows: one for each class of ranks; critical: what the step's length is made of, seconds; flops: of all ranks"""

    seconds: float
    rows: tuple[Row, ...]
    critical: tuple[tuple[str, float], ...]
    flops: float


class Prices:
    """Seconds of operations and communications on some hardware; those of a segment are worked out once."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self._operations: dict[int, float] = {}
        self._segments: dict[int, tuple[Communicate | Wait | float, ...]] = {}
        self._messages: dict[tuple[object, ...], float] = {}

    def operation(self, event: Compute) -> float:
        hardware = self.hardware
        seconds = hardware.memory_seconds(event.read_bytes + event.written_bytes)
        if event.flops:
            dtype = DTYPES.get(event.dtype, "fp32")
            if dtype not in hardware.peak_flops:
                dtype = "fp32" if "fp32" in hardware.peak_flops else next(iter(hardware.peak_flops))
            seconds = max(seconds, hardware.matmul_seconds(event.flops, dtype))
        return seconds + hardware.launch_overhead_s

    def segment(self, segment: Segment) -> tuple[Communicate | Wait | float, ...]:
        """A segment's messages, and between them the seconds of its operations."""
        found = self._segments.get(id(segment))
        if found is not None:
            return found
        items: list[Communicate | Wait | float] = []
        seconds = 0.0
        for event in segment.events:
            if isinstance(event, Compute):
                price = self._operations.get(id(event))
                if price is None:
                    price = self._operations[id(event)] = self.operation(event)
                seconds += price
            else:
                if seconds:
                    items.append(seconds)
                    seconds = 0.0
                items.append(event)
        if seconds:
            items.append(seconds)
        self._segments[id(segment)] = made = tuple(items)
        return made

    def message(self, event: Communicate, ranks: Sequence[int], place: int) -> float:
        """A communication of the rank at `place` of `ranks`."""
        if event.operation is Operation.NEW_GROUP or (
            event.nbytes == 0 and event.operation is not Operation.BARRIER
        ):
            return 0.0
        alone = event.operation.is_message
        key = (
            event.operation,
            event.nbytes,
            ranks[place] if alone else ranks[0],
            ranks[event.peer] if alone else ranks,
        )
        found = self._messages.get(key)
        if found is None:
            if alone:
                found = send_seconds(event.nbytes, ranks[place], ranks[event.peer], self.hardware)
            else:
                found = collective_seconds(event.operation, event.nbytes, ranks, self.hardware)
            self._messages[key] = found
        return found


class _Timed(Lockstep):
    """The run with prices; keeps what is needed to draw it and to say what its length is made of."""

    def __init__(self, cluster: Cluster, prices: Prices, disturbance: Disturbance) -> None:
        told = [
            (disturbance.slower.get(rank, 1.0), disturbance.links.get(rank, 1.0))
            for rank in range(cluster.size)
        ]
        classes = rank_classes(cluster, told if disturbance.slower or disturbance.links else None)
        super().__init__(cluster, classes, by_channel)
        self.prices, self.disturbance = prices, disturbance
        self.rows = [Row(ranks[0], len(ranks)) for ranks in self.classes.members]
        self.waits: list[list[tuple[float, Call]]] = [[] for _ in self.rows]
        self._members: dict[tuple[int, str], tuple[tuple[int, ...], int, float]] = {}

    def items(self, index: int) -> Iterable[Item]:
        row, state = self.rows[index], self.states
        factor = self.disturbance.slower.get(row.rank, 1.0)
        for step in self.cluster.program(row.rank).steps:
            if step.label == SETUP:
                continue
            start = state[index].clock
            for item in self.prices.segment(step.segment):
                if isinstance(item, float):
                    row.busy += item * factor
                    yield step.label, item * factor
                else:
                    yield step.label, item
            end = state[index].clock
            if end > start and step.label != PIPELINE:
                row.compute.append((start, end, step.label))

    def seconds(self, call: Call) -> float:
        key = call.owner, call.event.group
        found = self._members.get(key)
        if found is None:
            rank = self.rows[call.owner].rank
            ranks = self.cluster.members(call.event.group, rank)
            slowest = max(self.disturbance.links.get(member, 1.0) for member in ranks)
            found = self._members[key] = ranks, ranks.index(rank), slowest
        ranks, place, factor = found
        return self.prices.message(call.event, ranks, place) * factor

    def waited(self, index: int, call: Call) -> None:
        row, clock = self.rows[index], self.states[index].clock
        lane = row.lanes.setdefault(call.event.group, [])
        if call.end > call.start:
            lane.append((call.start, call.end))
        if call.end > clock:
            under_way = min(call.end - clock, call.end - call.start)
            row.exposed[call.event.group] = row.exposed.get(call.event.group, 0.0) + under_way
            row.idle += call.end - clock - under_way
            self.waits[index].append((clock, call))


def simulate(cluster: Cluster, prices: Prices, disturbance: Disturbance | None = None) -> Timeline:
    """Runs the cluster's step; the cluster must have been proved."""
    run = _Timed(cluster, prices, disturbance or Disturbance())
    faults = run.finish()
    if faults:
        raise ValueError(f"the programs do not fit together, so they have no timeline: {faults[0]}")
    for row, state in zip(run.rows, run.states, strict=True):
        row.end = state.clock
        for lane in row.lanes.values():
            lane.sort()
    seconds = max(row.end for row in run.rows)
    flops = sum(_flops(cluster.program(row.rank)) * row.ranks for row in run.rows)
    return Timeline(seconds, tuple(run.rows), _critical(run, seconds), flops)


def _flops(program: Program) -> float:
    counted: dict[int, int] = {}
    total = 0
    for step in program.steps:
        key = id(step.segment)
        if key not in counted:
            counted[key] = sum(event.flops for event in step.segment.events if isinstance(event, Compute))
        total += counted[key]
    return total


def _critical(run: _Timed, seconds: float) -> tuple[tuple[str, float], ...]:
    """Backward from the rank that ends last: its computing, the message it waited for, who sent that last, …"""
    parts: dict[str, float] = {}

    def add(what: str, amount: float) -> None:
        if amount > 0:
            parts[what] = parts.get(what, 0.0) + amount

    index = max(range(len(run.rows)), key=lambda i: run.rows[i].end)
    time = seconds
    while time > 0:
        place = run.cluster.places[run.rows[index].rank]
        stage = next((part for part in place.split(", ") if part.startswith("pp")), place)
        waits = run.waits[index]
        while waits and waits[-1][1].end > time:
            waits.pop()
        if not waits:
            add(f"compute, {stage}", time)
            break
        _, call = waits.pop()
        add(f"compute, {stage}", time - call.end)
        while True:  # the lane's messages one behind the other, back to one that began when it was issued
            add(f"{call.event.group} {call.event.operation}", call.end - call.start)
            last = call.last or call
            if last.before is None or last.before.end < last.start or last.before.end == 0:
                break
            call = last.before
        index, time = last.owner, last.start
    return tuple(sorted(parts.items(), key=lambda part: -part[1]))
