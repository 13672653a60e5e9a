"""Proves that the programs of all ranks of a cluster fit together, or shows where they do not. Pure.

The obligations:
    agreement    the members of a group ask for the same operations in the same order
    channels     what is sent between two ranks is received, first in first out, and fits
    progress     nobody waits for ever, though a send ends only when its receive is posted
    one queue    the same, with all communication of a rank in a single queue (streams of one device may block another)
    handles      every communication is waited for, once
    gradients    every bucket is reduced as often as its rule says, over its group; further sums are as declared
    memory       at the end each rank holds what it held at the beginning

Programs are deterministic and receive from named ranks only, so all runs end alike (Kahn 1974): one run under the
strictest meaning decides for every interleaving. Ranks that nobody can tell apart run in step, as one class: the
classes are the coarsest equitable partition, so the run of the classes is a run of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from triaxis.parallel.programs.lockstep import MOST_SHOWN, Fault, Lockstep, in_one
from triaxis.parallel.programs.operation import Operation
from triaxis.parallel.programs.program import Cluster, Communicate, Program
from triaxis.parallel.programs.rank_classes import rank_classes


@dataclass(frozen=True, slots=True)
class Proof:
    """What was shown, and what was not."""

    faults: tuple[Fault, ...]
    warnings: tuple[Fault, ...]
    ranks: int
    classes: int
    communications: int

    @property
    def holds(self) -> bool:
        return not self.faults


def prove(cluster: Cluster) -> Proof:
    """Checks every obligation over all ranks of the cluster."""
    faults = [*_check_programs(cluster), *_check_sizes(cluster)]
    classes = rank_classes(cluster)
    warnings: list[Fault] = []
    stuck = Lockstep(cluster, classes, in_one).finish()
    if stuck:
        stuck_apart = Lockstep(cluster, classes).finish()
        if stuck_apart:
            faults += stuck_apart
        else:
            warnings += [Fault("one queue", fault.message, fault.ranks) for fault in stuck]
    counted = {number: sum(1 for _ in program.messages()) for number, program in enumerate(cluster.programs)}
    return Proof(
        tuple(faults),
        tuple(warnings),
        cluster.size,
        len(classes.members),
        sum(counted[number] for number in cluster.program_of),
    )


# What one program can be asked by itself.


def _check_programs(cluster: Cluster) -> Iterator[Fault]:
    first_with: dict[int, int] = {}
    for rank, number in enumerate(cluster.program_of):
        first_with.setdefault(number, rank)
    for number, rank in first_with.items():
        program = cluster.programs[number]
        where = f"rank {rank} ({cluster.places[rank]})"
        for obligation, message in _program_faults(program):
            yield Fault(obligation, f"{where}: {message}", (rank,))


def _program_faults(program: Program) -> Iterator[tuple[str, str]]:
    issued: dict[tuple[str, Operation], list[tuple[str, Communicate, list[str]]]] = {}
    reductions: dict[int, list[Communicate]] = {}
    for label, event in program.messages():
        key = event.group, event.operation
        if isinstance(event, Communicate):
            issued.setdefault(key, []).append((label, event, []))
            if event.gradient >= 0:
                reductions.setdefault(event.gradient, []).append(event)
            continue
        known = issued.get(key, [])
        if event.age < 0 or event.age >= len(known):
            yield (
                "handles",
                f"in step {label} a {event.operation} in '{event.group}' is waited for before it is issued",
            )
        else:
            known[len(known) - 1 - event.age][2].append(label)
    for handles in issued.values():
        for label, event, waits in handles:
            if len(waits) != 1:
                times = "never" if not waits else f"{len(waits)} times"
                yield "handles", f"{event}, issued in step {label}, is waited for {times}; each handle once"
    rules = {rule.bucket: rule for rule in program.gradients}
    for bucket, rule in rules.items():
        done = reductions.get(bucket, [])
        if len(done) != rule.reductions:
            yield (
                "gradients",
                f"the gradient of bucket {bucket} is reduced {len(done)} times, not {rule.reductions}",
            )
        for event in done:
            if event.group != rule.group or event.elements != rule.elements:
                yield (
                    "gradients",
                    f"the gradient of bucket {bucket} must be reduced whole ({rule.elements:,} elements) over "
                    f"'{rule.group}', but step has {event}",
                )
    if rules:
        for bucket in reductions.keys() - rules.keys():
            yield "gradients", f"a gradient of bucket {bucket} is reduced, which no rule asks for"
    growth = sum(step.segment.growth for step in program.steps)
    if growth:
        yield "memory", f"the step ends with {growth:+,} bytes against its beginning"


def _check_sizes(cluster: Cluster) -> Iterator[Fault]:
    """Communications whose size each rank has for itself: the members of every group agree."""
    names: dict[int, dict[int, str]] = {}
    for number, program in enumerate(cluster.programs):
        names[number] = {
            event.varying: event.group
            for event in (program.steps[-1].segment.messages if program.steps else ())
            if isinstance(event, Communicate) and event.varying >= 0
        }
    for group in sorted({name for of_program in names.values() for name in of_program.values()}):
        for members in cluster.groups[group]:
            asked: dict[int, int] = {}
            for rank in members:
                places = names[cluster.program_of[rank]]
                for place, name in places.items():
                    if name == group:
                        asked[rank] = cluster.sizes[rank][place]
            if len(members) > 1 and (len(set(asked.values())) > 1 or (asked and len(asked) < len(members))):
                sizes = ", ".join(f"rank {rank}: {asked.get(rank, 'none')}" for rank in members[:MOST_SHOWN])
                yield Fault("agreement", f"gradients summed over '{group}' differ in size: {sizes}", members)
