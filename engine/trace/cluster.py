"""Every rank's program, from as few traced ranks as tell all of them.

Ranks of one pipeline stage run one program, but for two things. A tensor rank whose parameters are cut differently
from the first's is traced by itself. And ZeRO cuts buckets between data-parallel ranks anywhere, so how many elements
of a gradient are still to be summed over tp or tied stages differs; these sizes are worked out for each rank from its
segments, by the arithmetic that the optimizer uses. `every_rank` traces each rank by itself: a test compares the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeGuard

import torch

from triaxis.engine.plan import StepPlan
from triaxis.engine.step import LOSS_AND_NORM, summed_dtype
from triaxis.engine.trace.meter import Known
from triaxis.engine.trace.rank import TracedBucket, TracedRank, survey_rank, trace_rank
from triaxis.parallel.places.layout import ParameterLayout
from triaxis.parallel.places.topology import Topology, members_with
from triaxis.parallel.programs.operation import Operation
from triaxis.parallel.programs.program import (
    Cluster,
    Communicate,
    Event,
    Program,
    Segment,
    Step,
    Wait,
)
from triaxis.parallel.replicas.cut import cut_segments
from triaxis.parallel.replicas.data_parallel import PARTIAL_GRADIENTS

Partition = tuple[tuple[int, ...], ...]


def trace_cluster(
    plan: StepPlan,
    topology: Topology,
    *,
    every_rank: bool = False,
    repeat: bool = True,
    target: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> Cluster:
    """All ranks' programs of one optimizer step.

    target: "cuda" for the path that a GPU takes through layers; progress: called with (ranks traced, ranks to trace)
    """
    world_size = topology.world_size
    places = [topology.place(rank) for rank in range(world_size)]
    known = Known()
    deputy = list(range(world_size)) if every_rank else _deputies(plan, topology)
    chosen = sorted(set(deputy))
    traced: dict[int, TracedRank] = {}
    for done, rank in enumerate(chosen):
        if progress is not None:
            progress(done, len(chosen))
        traced[rank] = trace_rank(plan, topology, rank, repeat=repeat, known=known, target=target)
    if progress is not None:
        progress(len(chosen), len(chosen))
    groups = traced[chosen[0]].partitions
    if every_rank:
        programs = tuple(traced[rank].program for rank in chosen)
        return Cluster(world_size, groups, programs, tuple(range(world_size)), {}, places)
    sizes: dict[int, tuple[int, ...]] = {}
    varied: dict[int, Program] = {}
    for rank in chosen:
        sums = _sums_of_alike(traced[rank], groups, [r for r in range(world_size) if deputy[r] == rank])
        summed = {name for of_rank in sums.values() for name in of_rank}
        names = sorted(name for name in summed if len(members_with(rank, groups[name])) > 1)
        _check(traced[rank].program, sums[rank], names, places[rank])
        varied[rank] = _vary(traced[rank].program, names, summed_dtype(plan))
        if names:
            sizes |= {other: tuple(held.get(name, 0) for name in names) for other, held in sums.items()}
    numbers = {rank: number for number, rank in enumerate(chosen)}
    return Cluster(
        world_size,
        groups,
        tuple(varied[rank] for rank in chosen),
        tuple(numbers[rank] for rank in deputy),
        sizes,
        places,
    )


def _deputies(plan: StepPlan, topology: Topology) -> list[int]:
    """For each rank: the one whose program tells its own."""
    deputies = {
        (tensor_rank, stage): topology.rank(pp=stage, tp=first)
        for stage in range(topology.pp)
        for tensor_rank, first in enumerate(_alike_tensor_ranks(plan, topology, stage))
    }
    places = [topology.coordinates(rank) for rank in range(topology.world_size)]
    return [deputies[place["tp"], place["pp"]] for place in places]


def _alike_tensor_ranks(plan: StepPlan, topology: Topology, stage: int) -> list[int]:
    """For each tensor rank of a stage: the first whose parameters are cut into pieces of the same shapes.

    Pieces never grow with the rank, so where the first and the last have the same, all have.
    """

    def pieces(tensor_rank: int) -> object:
        return survey_rank(plan, topology, topology.rank(pp=stage, tp=tensor_rank))

    if topology.tp == 1 or pieces(0) == pieces(topology.tp - 1):
        return [0] * topology.tp
    seen: dict[object, int] = {}
    return [seen.setdefault(pieces(tensor_rank), tensor_rank) for tensor_rank in range(topology.tp)]


def _sums_of_alike(
    traced: TracedRank, groups: Mapping[str, Partition], ranks: Sequence[int]
) -> dict[int, dict[str, int]]:
    """For each rank like the traced one: the elements of its shards that are still to be summed, by group.

    They differ by the ranks' places among the replicas of each bucket, and by nothing else.
    """
    partial = []
    for bucket in traced.buckets:
        pieces = [(first, layout) for first, layout in bucket.pieces if layout.partial]
        if pieces:
            partial.append((bucket, pieces))
    axes = sorted({bucket.group for bucket, _ in partial if bucket.shards > 1})
    place_in = {axis: {rank: i for part in groups[axis] for i, rank in enumerate(part)} for axis in axes}
    known: dict[tuple[int, ...], dict[str, int]] = {}
    sums = {}
    for rank in ranks:
        places = {axis: place_in[axis][rank] for axis in axes}
        key = tuple(places.values())
        if key not in known:
            known[key] = _sums_at(partial, places)
        sums[rank] = known[key]
    return sums


def _sums_at(
    partial: Sequence[tuple[TracedBucket, Sequence[tuple[int, ParameterLayout]]]], places: Mapping[str, int]
) -> dict[str, int]:
    """By group: the elements still to be summed of the shards at these places among the buckets' replicas."""
    sums: Counter[str] = Counter()
    for bucket, pieces in partial:
        size = bucket.elements // bucket.shards
        first = places[bucket.group] * size if bucket.shards > 1 else 0
        for segment in cut_segments(pieces, first, first + size):
            for name in segment.layout.partial:
                sums[name] += segment.stop - segment.start
    return sums


def _is_sum(event: Event) -> TypeGuard[Communicate]:
    return isinstance(event, Communicate) and event.label == PARTIAL_GRADIENTS


def _check(program: Program, expected: dict[str, int], names: list[str], place: str) -> None:
    """What the traced rank summed is what its layouts declare."""
    found = {event.group: event.elements for _, event in program.messages() if _is_sum(event)}
    declared = {name: expected[name] for name in names if expected.get(name)}
    if found != declared:
        raise ValueError(
            f"{place}: gradients summed over further axes are {found}, but declared are {declared}"
        )


def _vary(program: Program, names: list[str], summed: torch.dtype) -> Program:
    """The program with one sum for every group in `names`, whose size each rank has for itself."""
    if not names:
        return program
    *before, last = program.steps
    events: list[Event] = []
    sums: dict[str, Communicate] = {}
    place = -1
    waited = False
    for event in last.segment.events:
        if _is_sum(event):
            sums[event.group] = event
            place = len(events) if place < 0 else place
            waited = True
        elif waited and isinstance(event, Wait):
            waited = False
        else:
            events.append(event)
    if place < 0:  # this replica had nothing to sum: the sums come before the norm is agreed on
        place = next(
            i for i, e in enumerate(events) if isinstance(e, Communicate) and e.label == LOSS_AND_NORM
        )
    dtype = str(summed).removeprefix("torch.")
    made: list[Event] = []
    for number, name in enumerate(names):
        known = sums.get(name) or Communicate(
            Operation.ALL_REDUCE, name, dtype, 0, 0, label=PARTIAL_GRADIENTS
        )
        made.append(replace(known, varying=number, nbytes=known.elements * summed.itemsize))
        made.append(Wait(name, Operation.ALL_REDUCE, 0))
    segment = Segment((*events[:place], *made, *events[place:]), last.segment.memory)
    return replace(program, steps=(*before, Step(last.label, segment)))
