"""What the parts of the engine do, each recorded by a dry run of a model of two layers a kind: no part is told twice.

A step of any size is made of few parts: the embedding, a layer of each kind, the head with its loss, and the update.
Here the engine's own step runs on one rank of such a small model, every parameter in a bucket of its own, so that each
reduction marks the moment at which one gradient is whole. What is recorded between two marks is a `Segment`, as in
every other trace, and is priced as such; whoever plans puts the parts together (launch/planner/).

    forward     [ embedding ][ layer ][ layer ][ head ]         a part begins where its unit is called
    backward    [ head ][ layer ][ layer ][ embedding ]         a piece ends where a gradient is whole

The layer told is the second one: what comes before it and after it is a layer too, as almost everywhere in a model.
An extra prediction depth, where a model has some, is a part from the embedding to the loss: behind the head in forward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from triaxis.engine.plan import StepPlan
from triaxis.engine.step import TrainingStep
from triaxis.engine.trace.meter import Known
from triaxis.engine.trace.rank import imagined_batches, record_step
from triaxis.engine.trace.slices import Whole, cut, pieces_of
from triaxis.models.builder import Stage
from triaxis.models.config import ModelConfig
from triaxis.models.kinds import Kind
from triaxis.parallel.layers.declare import layouts_of
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.programs.operation import Operation
from triaxis.parallel.programs.program import (
    PIPELINE,
    UPDATE,
    Communicate,
    Compute,
    Event,
    MemoryKind,
    Program,
    Segment,
)
from triaxis.parallel.replicas.zero import ZeroDataParallel
from triaxis.parallel.worlds.mesh import Mesh
from triaxis.parallel.worlds.recording import Recorder
from triaxis.parallel.worlds.trace import TraceWorld

LAYERS = 2
"""Of each kind: the first is what comes before the second, which is the one told."""
REPLICAS = 2
"""Ranks of dp in the small run: as few as make reductions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter as a rank holds it.

    partial: the ranks of each group over which its gradient is summed besides dp
    shared: by two units, the head being the first in backward; tied: to one on another stage
    """

    elements: int
    partial: tuple[tuple[int, ...], ...]
    shared: bool
    tied: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A stretch of a unit's backward pass, at the end of which some gradients are whole.

    completes: places of the parameters in the unit's `parameters`, or in its `root` ones, counted on from those
    """

    segment: Segment
    completes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one unit does for one microbatch: parameters that are gathered and reduced together, and their use.

    root: parameters that belong to no unit, or to two, and whose gradient is whole in this one's backward pass
    """

    forward: Segment
    backward: tuple[Piece, ...]
    parameters: tuple[Parameter, ...]
    root: tuple[Parameter, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a model on a rank.

    start: what every chunk's forward pass begins with; layers: by kind; depths: extra prediction depths
    table_bytes: that every chunk holds besides model states, such as rotary tables
    """

    start: Segment
    embedding: Part
    layers: dict[Kind, Part]
    head: Part
    depths: tuple[Part, ...]
    table_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Bytes of model states for each element of a bucket, before any are sharded."""

    parameters: float
    gradients: float
    optimizer: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Updates:
    """What comes after a step's backward passes: operations of all buckets together.

    microbatches: of the step; begin: operations before the first of them
    buckets, elements: of the rank's shards; before: up to the norm and the update; copies: masters to parameters
    """

    states: States
    microbatches: int
    begin: tuple[Compute, ...]

    buckets: int
    elements: int
    before: tuple[Compute, ...]
    copies: tuple[Compute, ...]


def small_model(model: ModelConfig) -> ModelConfig:
    """The model with two layers of each of its kinds and nothing else; ends, sizes and norms as they are."""
    kinds = tuple(kind for kind in model.kinds() for _ in range(LAYERS))
    further = model.depth_kinds() or kinds[-1:]
    return replace(model, layers=len(kinds), leading=kinds, repeating=further)


def trace_parts(plan: StepPlan, tp: int, known: Known, *, further: bool = False) -> Parts:
    """The parts of the plan's step on the first of `tp` tensor ranks, for one microbatch of its size.

    further: of a microbatch whose gradients are added to those of one before it
    """
    microbatches = 2 if further else 1
    small = replace(
        plan, model=small_model(plan.model), microbatches=microbatches, zero=0, bucket_elements=1, seed=None
    )
    marks: list[int] = []
    program, step = _run(small, tp, known, marks, updates=False)
    last = microbatches - 1
    forward, offset = _step(program, f"0F{last}")
    starts = [mark - offset for mark in marks if offset <= mark <= offset + len(forward.events)]
    backward, _ = _step(program, f"0B{last}")
    parts = _assembled(plan, program, step, cut(forward, starts), pieces_of(backward))
    _release(step)
    return parts


def _release(step: TrainingStep) -> None:
    """Gives back the address space of the step's tensors at once: the garbage collector counts objects, not bytes, and
    a process whose mappings exceed the machine's memory cannot fork."""
    weights = [parameter for stage in step.stages for parameter in stage.parameters()]
    held = [value for bucket in step.data_parallel.buckets for value in vars(bucket).values()]
    for tensor in (*weights, *(weight.grad for weight in weights), *held):
        if isinstance(tensor, torch.Tensor):
            tensor.untyped_storage().resize_(0)


def trace_update(plan: StepPlan, known: Known, *, bucket_elements: int, microbatches: int) -> Updates:
    """What stands around the microbatches where optimizer states alone are sharded. The model should be small: whose
    elements are updated makes no difference."""
    small = replace(
        plan,
        model=small_model(plan.model),
        microbatches=microbatches,
        zero=1,
        bucket_elements=bucket_elements,
        seed=None,
    )
    program, step = _run(small, 1, known, [], updates=True)
    segment, _ = _step(program, UPDATE)
    gathers = [place for place, event in enumerate(segment.events) if _gathers(event)]
    first = gathers[0] if gathers else len(segment.events)
    while first and isinstance(event := segment.events[first - 1], Compute) and event.operation == "copy_":
        first -= 1  # the copy that is gathered first
    buckets = step.data_parallel.buckets
    elements = sum(bucket.master.numel() for bucket in buckets)
    held = step.state_bytes()
    return Updates(
        states=States(
            parameters=held["parameters"] / (REPLICAS * elements),
            gradients=held["gradients"] / (REPLICAS * elements),
            optimizer=(held["masters"] + held["moments"]) / elements,
        ),
        microbatches=microbatches,
        begin=tuple(event for event in _step(program, PIPELINE)[0].events if isinstance(event, Compute)),
        buckets=len(buckets),
        elements=elements,
        before=tuple(event for event in segment.events[:first] if isinstance(event, Compute)),
        copies=tuple(event for event in segment.events[first:] if isinstance(event, Compute)),
    )


def _gathers(event: Event) -> bool:
    return isinstance(event, Communicate) and event.operation is Operation.ALL_GATHER and event.group == "dp"


def _run(
    plan: StepPlan, tp: int, known: Known, marks: list[int], *, updates: bool
) -> tuple[Program, TrainingStep]:
    """The step of the first rank; marks: fills with the events before which a layer, or the head, is called."""
    topology = Topology(tp=tp, dp=REPLICAS)
    world = TraceWorld(0, topology.world_size)

    def watch(step: TrainingStep, recorder: Recorder) -> None:
        def note(_module: nn.Module, _inputs: object, _output: object = None) -> None:
            marks.append(len(recorder.events))

        blocks = [block for stage in _built(step) for block in stage.blocks]
        for block in blocks:
            block.register_forward_pre_hook(note)
        blocks[-1].register_forward_hook(note)
        for stage in _built(step):
            if stage.embedding is not None:
                stage.embedding.register_forward_pre_hook(note)  # where each extra depth begins, too

    program, step, *_ = record_step(
        plan,
        topology,
        world,
        dry=True,
        repeat=False,
        batches=imagined_batches(plan),
        known=known,
        watch=watch,
        updates=updates,
    )
    return program, step


def _step(program: Program, label: str) -> tuple[Segment, int]:
    """The segment of a step, and how many events come before it (setting up is not counted)."""
    before = 0
    for step in program.steps[1:]:
        if step.label == label:
            return step.segment, before
        before += len(step.segment.events)
    raise ValueError(f"the program has no step {label}")


def _built(step: TrainingStep) -> list[Stage]:
    """The stages that the engine's own builder made: of others nothing can be priced part by part."""
    return [stage for stage in step.stages if isinstance(stage, Stage)]


def _owners(step: TrainingStep) -> dict[int, list[int]]:
    """The units that have each parameter, by its id: 0 is the embedding, then come layers, head and extra depths."""
    (stage,) = _built(step)
    owners: dict[int, list[int]] = {}
    for number, module in enumerate([stage.embedding, *stage.blocks, stage.head, *stage.depths]):
        assert module is not None
        for parameter in module.parameters():
            owners.setdefault(id(parameter), []).append(number)
    return owners


def _assembled(
    plan: StepPlan, program: Program, step: TrainingStep, forward: list[Segment], backward: list[Whole]
) -> Parts:
    """forward: what comes before the embedding, then each unit in the order of `_owners`; backward: see `pieces_of`."""
    data_parallel = step.data_parallel
    assert isinstance(data_parallel, ZeroDataParallel)
    owners = _owners(step)
    parameters = [bucket.members[0] for bucket in data_parallel.buckets]
    used = [owners.get(id(parameter), []) for parameter in parameters]
    depths = plan.model.depths
    last = len(forward) - 2 - depths  # the head's number
    whole_in: dict[int, int] = {}  # by bucket, the unit in whose backward pass its gradient is whole
    under_way = last
    for _, bucket in backward:  # what no unit has alone is whole in the head, or after all layers
        if bucket >= 0:
            alone = len(used[bucket]) == 1
            under_way = used[bucket][0] if alone else last if under_way >= last else 0
            whole_in[bucket] = under_way

    def part(unit: int) -> Part:
        buckets = [number for number in range(len(parameters)) if whole_in[number] == unit]
        own = [number for number in buckets if len(used[number]) == 1]
        root = [number for number in buckets if len(used[number]) != 1]
        all_of = [*own, *root]
        places = {number: place for place, number in enumerate(all_of)}
        made = [_parameter(parameters[one], step.mesh, shared=len(used[one]) > 1) for one in all_of]
        return Part(
            forward=forward[unit + 1],
            backward=tuple(
                Piece(segment=segment, completes=(places[bucket],) if bucket >= 0 else ())
                for segment, bucket in backward
                if (whole_in[bucket] if bucket >= 0 else 0) == unit  # the rest comes after the embedding
            ),
            parameters=tuple(made[: len(own)]),
            root=tuple(made[len(own) :]),
        )

    return Parts(
        start=forward[0],
        embedding=part(0),
        layers={kind: part(LAYERS * (number + 1)) for number, kind in enumerate(plan.model.kinds())},
        head=part(last),
        depths=tuple(part(last + 1 + depth) for depth in range(depths)),
        table_bytes=(program.held or {}).get(MemoryKind.OTHER, 0),
    )


def _parameter(parameter: nn.Parameter, mesh: Mesh, *, shared: bool) -> Parameter:
    names = {name for layout in layouts_of(parameter) for name in layout.partial}
    return Parameter(
        elements=parameter.numel(),
        partial=tuple(sorted(mesh.groups[name].ranks for name in names if mesh.groups[name].size > 1)),
        shared=shared,
    )
