"""Random layouts, and random faults in the programs of their ranks."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tests.agreement import MODEL, RULES
from triaxis.engine.plan import Recompute, StepPlan
from triaxis.models.fields import fields_of, with_fields
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.programs.program import Cluster, Communicate, Event, Program, Segment, Step, Wait

LENGTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A layout and what it trains."""

    plan: StepPlan
    topology: Topology

    def __str__(self) -> str:
        plan, topology, model = self.plan, self.topology, self.plan.model
        parts = [f"tp{topology.tp} pp{topology.pp} dp{topology.dp} zero{plan.zero} {plan.schedule}"]
        parts += [f"m{plan.microbatches}x{plan.microbatch_size} {plan.dtype} buckets{plan.bucket_elements}"]
        parts += [topology.order] * (topology.order != "tp-pp-dp") + ["sp"] * plan.sequence_parallel
        parts += (
            ["recompute"] * plan.recompute.repeats_layers
            + ["tied"] * model.tied
            + ["documents"] * (plan.documents_a_row > 1)
        )
        fields = fields_of(model)
        parts += ["biases"] * fields.attention_bias + ["qk_norm"] * fields.qk_norm
        return " ".join([*parts, f"layers{model.layers} kv{fields.kv_heads} vocab{model.vocab_size}"])


def draw_case(draw: random.Random, *, ranks: int = 8, microbatches: int = 5) -> Case:
    """A legal layout of 2 to `ranks` ranks and a tiny model, each choice by itself."""
    shapes = [
        (tp, pp, dp)
        for tp in (1, 2, 4)
        for pp in (1, 2, 3, 4)
        for dp in (1, 2, 3, 4)
        if 2 <= tp * pp * dp <= ranks
    ]
    tp, pp, dp = draw.choice(shapes)
    schedule = draw.choice(["gpipe", "1f1b", "zb-h1", *["interleaved", "zb-v", "v-half"] * (pp > 1)])
    virtual_stages = 2 if schedule in ("interleaved", "zb-v", "v-half") else 1
    model = with_fields(
        MODEL,
        name="drawn",
        vocab_size=draw.choice([61, 64, 67]),
        kv_heads=draw.choice([1, 2, 8]),
        layers=pp * virtual_stages + draw.choice([0, 1]),
        tied=draw.random() < 0.5,
        attention_bias=draw.random() < 0.3,
        qk_norm=draw.random() < 0.3,
    )
    plan = StepPlan(
        model=model,
        microbatch_size=draw.choice([1, 2]),
        microbatches=draw.randint(1, microbatches),
        sequence_length=LENGTH,
        schedule=schedule,
        virtual_stages=virtual_stages,
        sequence_parallel=draw.random() < 0.5,
        recompute=Recompute.FULL if draw.random() < 0.3 else Recompute.NONE,
        zero=draw.choice([0, 1, 2, 3]),
        bucket_elements=draw.choice([1, 3000, 1 << 20]),
        dtype=draw.choice(["fp32", "bf16", "fp64"]),
        max_grad_norm=draw.choice([0.0, 1.0]),
        rule=RULES[draw.choice(list(RULES))][0],
    )
    order = draw.choice(["tp-pp-dp", "tp-dp-pp", "pp-tp-dp", "dp-pp-tp"])
    topology = Topology(tp=tp, pp=pp, dp=dp, order=order)
    documents = draw.choice([1, 1, 1, 2, 3])
    return Case(plan=replace(plan, document_tokens=LENGTH // documents), topology=topology)


def resolve(cluster: Cluster) -> Cluster:
    """The cluster with a program for each rank, in which sums have the rank's own sizes; empty ones are left out."""
    programs = tuple(_own_program(cluster, rank) for rank in range(cluster.size))
    return replace(cluster, programs=programs, program_of=tuple(range(cluster.size)), sizes={})


def _own_program(cluster: Cluster, rank: int) -> Program:
    program, sizes = cluster.program(rank), cluster.sizes.get(rank, ())
    *before, last = program.steps
    events: list[Event] = []
    left_out = False
    for event in last.segment.events:
        if isinstance(event, Communicate) and event.varying >= 0:
            elements = sizes[event.varying]
            left_out = elements == 0
            nbytes = elements * getattr(torch, event.dtype).itemsize
            if not left_out:
                events.append(replace(event, varying=-1, elements=elements, nbytes=nbytes))
        elif left_out and isinstance(event, Wait):
            left_out = False
        else:
            events.append(event)
    return replace(program, steps=(*before, Step(last.label, Segment(tuple(events), last.segment.memory))))


# A program in which waits name their communication, so that any of them can be moved.


@dataclass(frozen=True, slots=True)
class Item:
    """In a step, by its number: a communication is issued (event), or waited for (None)."""

    step: int
    handle: int
    event: Communicate | None = None


def unroll(program: Program) -> list[Item]:
    items: list[Item] = []
    handles: dict[tuple[str, str], list[int]] = defaultdict(list)
    for number, step in enumerate(program.steps):
        for event in step.segment.messages:
            known = handles[event.group, event.operation]
            if isinstance(event, Communicate):
                known.append(len(items))
                items.append(Item(number, len(items), event))
            else:
                items.append(Item(number, known[-1 - event.age]))
    return items


def roll(program: Program, items: list[Item]) -> Program:
    """The program with these messages and no computations, in its own steps."""
    events: list[list[Event]] = [[] for _ in program.steps]
    handles: dict[tuple[str, str], list[int]] = defaultdict(list)
    issued: dict[int, Communicate] = {}
    for item in items:
        event = item.event or issued[item.handle]
        known = handles[event.group, event.operation]
        if item.event is not None:
            known.append(item.handle)
            issued[item.handle] = event
            events[item.step].append(event)
        else:
            events[item.step].append(Wait(event.group, event.operation, known[::-1].index(item.handle)))
    steps = [
        Step(step.label, Segment(tuple(held), step.segment.memory))
        for step, held in zip(program.steps, events, strict=True)
    ]
    return replace(program, steps=tuple(steps))


def channels(program: Program) -> dict[tuple[str, int], list[tuple[object, ...]]]:
    """What others can see of a program: per group what it asks for, per partner what it sends and receives.

    The rule for equivalent mutants. A rank whose channels are what they were is as correct as it was: each
    partner sees the same sequence, and no data passes that would tell. Any change in a channel is a fault.
    """
    seen: dict[tuple[str, int], list[tuple[object, ...]]] = defaultdict(list)
    for _, event in program.messages():
        if isinstance(event, Communicate):
            alone = event.operation.is_message
            seen[event.group, event.peer if alone else -1].append(event.asked())
    return seen


# The faults. Each changes one rank's items, or returns None where it does not apply.

Fault = Callable[[random.Random, list[Item], Cluster, int], list[Item] | None]


def _issues(items: list[Item]) -> list[int]:
    return [place for place, item in enumerate(items) if item.event is not None]


def _changed(items: list[Item], place: int, **changes: object) -> list[Item]:
    item = items[place]
    assert item.event is not None
    event = replace(item.event, **changes)  # type: ignore[arg-type]
    return [*items[:place], replace(item, event=event), *items[place + 1 :]]


def drop(draw: random.Random, items: list[Item], cluster: Cluster, rank: int) -> list[Item] | None:
    dropped = items[draw.choice(_issues(items))].handle
    return [item for item in items if item.handle != dropped]


def duplicate(draw: random.Random, items: list[Item], cluster: Cluster, rank: int) -> list[Item] | None:
    place = draw.choice(_issues(items))
    again = replace(items[place], handle=len(items))
    return [*items[: place + 1], again, replace(again, event=None), *items[place + 1 :]]


def swap(draw: random.Random, items: list[Item], cluster: Cluster, rank: int) -> list[Item] | None:
    """Two communications exchange their places, near ones rather than far ones."""
    issues = _issues(items)
    if len(issues) < 2:
        return None
    first = draw.randrange(len(issues) - 1)
    second = min(first + draw.choice([1, 1, 2, 3, 10]), len(issues) - 1)
    one, other = issues[first], issues[second]
    moved = list(items)
    moved[one] = replace(items[one], event=items[other].event)
    moved[other] = replace(items[other], event=items[one].event)
    return moved


def resize(draw: random.Random, items: list[Item], cluster: Cluster, rank: int) -> list[Item] | None:
    places = [place for place in _issues(items) if items[place].event.elements]  # type: ignore[union-attr]
    place = draw.choice(places)
    event = items[place].event
    assert event is not None
    elements = draw.choice([event.elements + 1, event.elements - 1, 2 * event.elements])
    return _changed(items, place, elements=elements)


def wrong_dtype(draw: random.Random, items: list[Item], cluster: Cluster, rank: int) -> list[Item] | None:
    places = [place for place in _issues(items) if items[place].event.dtype]  # type: ignore[union-attr]
    return _changed(items, draw.choice(places), dtype="float16")


def wrong_group(draw: random.Random, items: list[Item], cluster: Cluster, rank: int) -> list[Item] | None:
    place = draw.choice(_issues(items))
    event = items[place].event
    assert event is not None
    others = [
        name
        for name, partition in cluster.groups.items()
        if name != event.group and any(rank in part and len(part) > 1 for part in partition)
    ]
    return _changed(items, place, group=draw.choice(others)) if others else None


def wrong_peer(draw: random.Random, items: list[Item], cluster: Cluster, rank: int) -> list[Item] | None:
    places = [place for place in _issues(items) if items[place].event.peer >= 0]  # type: ignore[union-attr]
    if not places:
        return None
    place = draw.choice(places)
    event = items[place].event
    assert event is not None
    members = cluster.members(event.group, rank)
    return _changed(
        items, place, peer=draw.choice([peer for peer in range(len(members)) if peer != event.peer])
    )


def not_waited(draw: random.Random, items: list[Item], cluster: Cluster, rank: int) -> list[Item] | None:
    place = draw.choice([place for place, item in enumerate(items) if item.event is None])
    return [*items[:place], *items[place + 1 :]]


def waited_twice(draw: random.Random, items: list[Item], cluster: Cluster, rank: int) -> list[Item] | None:
    place = draw.choice([place for place, item in enumerate(items) if item.event is None])
    return [*items[: place + 1], items[place], *items[place + 1 :]]


def microbatches_exchanged(
    draw: random.Random, items: list[Item], cluster: Cluster, rank: int
) -> list[Item] | None:
    """The rank takes two microbatches one for the other."""
    places = [place for place in _issues(items) if items[place].event.peer >= 0]  # type: ignore[union-attr]
    labels = sorted({items[place].event.label for place in places})  # type: ignore[union-attr]
    numbers = sorted({label.split()[0][1:] for label in labels})
    if len(numbers) < 2:
        return None
    one, other = draw.sample(numbers, 2)
    exchanged = {one: other, other: one}
    moved = list(items)
    for place in places:
        event = items[place].event
        assert event is not None
        kind, number = event.label[0], event.label.split()[0][1:]
        label = event.label.replace(kind + number, kind + exchanged.get(number, number), 1)
        moved[place] = replace(items[place], event=replace(event, label=label))
    return moved


FAULTS: dict[str, Fault] = {
    "drop": drop,
    "duplicate": duplicate,
    "swap": swap,
    "resize": resize,
    "wrong dtype": wrong_dtype,
    "wrong group": wrong_group,
    "wrong peer": wrong_peer,
    "not waited for": not_waited,
    "waited for twice": waited_twice,
    "microbatches exchanged": microbatches_exchanged,
}
OF_HANDLES = ("not waited for", "waited for twice")
"""Faults that no other rank sees, and that are faults all the same."""


def with_program(cluster: Cluster, rank: int, program: Program) -> Cluster:
    """The resolved cluster with another program for one rank."""
    programs = list(cluster.programs)
    programs[rank] = program
    return replace(cluster, programs=tuple(programs))


def mutate(draw: random.Random, cluster: Cluster, fault: str) -> tuple[Cluster, int] | None:
    """The resolved cluster with a fault in one rank's program, and that rank; None if nobody could see it."""
    rank = draw.randrange(cluster.size)
    program = cluster.programs[rank]
    items = FAULTS[fault](draw, unroll(program), cluster, rank)
    if items is None:
        return None
    mutant = roll(program, items)
    if fault not in OF_HANDLES and channels(mutant) == channels(program):
        return None
    return with_program(cluster, rank, mutant), rank
