"""One rank's program: the training step itself, run dry in the trace world, with what repeats recorded once.

The pipeline's executor runs every action. The first few microbatches and the last go through the model; those
between do what one before them did, so its recorded segments stand in for theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from triaxis.engine.plan import StepPlan
from triaxis.engine.step import TrainingStep, build_stages
from triaxis.engine.trace.meter import Known, Meter
from triaxis.models.batch import Batch
from triaxis.parallel.kernels.attention import Documents
from triaxis.parallel.layers.declare import named_layouts
from triaxis.parallel.pipeline.executor import PipelineChunk
from triaxis.parallel.pipeline.schedule import Action, Kind
from triaxis.parallel.places.layout import ParameterLayout
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.programs.operation import Operation
from triaxis.parallel.programs.program import (
    PIPELINE,
    SETUP,
    UPDATE,
    Communicate,
    GradientRule,
    MemoryKind,
    Program,
    Segment,
    Step,
    Wait,
)
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.recording import Recorder, RecordingWorld
from triaxis.parallel.worlds.trace import TraceWorld


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedBucket:
    """A bucket of `elements`, cut into equal shards over a group. pieces: (first element, layout) of each"""

    group: str
    elements: int
    shards: int
    pieces: tuple[tuple[int, ParameterLayout], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRank:
    """One rank's program and what its data-parallel replicas differ in.

    partitions: every group's partition of the ranks
    host_reads: what made the host wait for the device, each with the label of the step of the program that it was in
    building_bytes: the most that was held while the rank's part was made
    """

    program: Program
    partitions: dict[str, tuple[tuple[int, ...], ...]]
    buckets: tuple[TracedBucket, ...]
    host_reads: tuple[tuple[str, str], ...]
    building_bytes: int


class Tape:
    """The segments of a rank, cut out of what the recorder and the meter note."""

    def __init__(self, recorder: Recorder, meter: Meter) -> None:
        self.recorder, self.meter = recorder, meter
        self.steps: list[Step] = []
        self.host_reads: list[tuple[str, str]] = []
        self._first = self._first_change = 0
        self._issued: dict[tuple[str, Operation], int] = {}
        self._issued_before: dict[int, dict[tuple[str, Operation], int]] = {}

    def cut(self, label: str, kept_for: MemoryKind) -> Segment:
        """What was noted since the last cut."""
        events = tuple(self.recorder.events[self._first :])
        memory = self.meter.curve(self._first, self._first_change, kept_for)
        segment = Segment(events, memory)
        self._issued_before[id(segment)] = self._issued
        self._issued = dict(self.recorder.issued)
        self._first, self._first_change = len(self.recorder.events), len(self.meter.changes)
        self.host_reads += [(label, what) for what in self.recorder.host_reads]
        self.recorder.host_reads.clear()
        if events or memory.places:
            self.steps.append(Step(label, segment))
        return segment

    def skip(self) -> None:
        """Forgets what was noted since the last cut."""
        del self.recorder.events[self._first :], self.meter.changes[self._first_change :]

    def repeat(self, label: str, segment: Segment) -> None:
        """The segment happens again."""
        self.cut(PIPELINE, MemoryKind.MESSAGES)
        self.steps.append(Step(label, segment))
        for key, count in segment.issues.items():
            self.recorder.repeat(key, self._issued_before[id(segment)].get(key, 0), count)
        self._issued = dict(self.recorder.issued)
        self.meter.live_bytes += segment.growth


class _Again(Function):
    """Stands for a chunk's forward and backward on one more microbatch."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, chunk: TracedChunk, microbatch: int) -> Tensor:
        ctx.shape, ctx.dtype, ctx.chunk, ctx.microbatch = hidden.shape, hidden.dtype, chunk, microbatch
        return chunk.imagined(chunk.output_shape, chunk.output_dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        ctx.chunk.take_gradient(grads[0], ctx.microbatch)
        if ctx.shape == torch.Size(()):
            return None, None, None
        return ctx.chunk.imagined(ctx.shape, ctx.dtype), None, None


KEPT_FOR = {
    Kind.FORWARD: MemoryKind.ACTIVATIONS,
    Kind.BACKWARD: MemoryKind.BUCKETS,
    Kind.INPUT: MemoryKind.ACTIVATIONS,  # gradients of outputs, for the gradients of weights
    Kind.WEIGHT: MemoryKind.BUCKETS,
}
"""What tensors are held for that an action made and left."""


class TracedChunk:
    """A model stage that is run for some microbatches, and repeated for the others.

    models: for each microbatch the one that it does the same as; itself, if it is run
    """

    def __init__(self, inner: PipelineChunk, index: int, models: Sequence[int], tape: Tape) -> None:
        self._inner, self._index, self._models, self._tape = inner, index, models, tape
        self._segments: dict[Action, Segment] = {}
        self._inputs: dict[int, Tensor] = {}
        self._arrived: dict[int, int] = {}
        self._keeps: dict[int, bool] = {}
        self._kept: dict[int, Tensor] = {}
        self._anchor = torch.zeros((), requires_grad=True)
        self.output_shape, self.output_dtype = torch.Size(()), torch.float32

    def _runs(self, microbatch: int) -> bool:
        return self._models[microbatch] == microbatch

    def imagined(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor that the repeated segment has counted already."""
        tensor = self._tape.meter.unmetered(lambda: torch.empty(shape, dtype=dtype))
        self._tape.meter.kind_of[self._tape.meter.adopt(tensor)] = MemoryKind.MESSAGES
        return tensor

    def _again(self, action: Action) -> bool:
        """Whether the action does as one before it did, whose segment then stands for it."""
        for number in list(self._arrived):  # whoever passed the gradient on has let go of it by now
            self._keeps[number] = self._arrived.pop(number) in self._tape.meter.alive
        model = self._models[action.microbatch]
        if model == action.microbatch:
            self._tape.cut(PIPELINE, MemoryKind.MESSAGES)
            return False
        self._tape.repeat(str(action), self._segments[replace(action, microbatch=model)])
        return True

    def _done(self, action: Action) -> None:
        self._segments[action] = self._tape.cut(str(action), KEPT_FOR[action.kind])

    def forward(self, hidden: Tensor | None, microbatch: int) -> Tensor:
        action = Action(kind=Kind.FORWARD, chunk=self._index, microbatch=microbatch)
        if self._again(action):
            again: Tensor = _Again.apply(self._anchor if hidden is None else hidden, self, microbatch)  # type: ignore[no-untyped-call]
            return again
        output = self._inner.forward(hidden, microbatch)
        if output.requires_grad:
            output.register_hook(lambda gradient: self.note_gradient(gradient, microbatch))
        self._keep_as_message(output)
        self._done(action)
        self.output_shape, self.output_dtype = output.shape, output.dtype
        if hidden is not None:
            self._inputs[microbatch] = hidden
        return output

    def before_backward(self, action: Action, *, last: bool) -> None:
        if not self._again(action):
            self._inner.before_backward(action, last=last)

    def after_backward(self, action: Action) -> None:
        if not self._runs(action.microbatch):
            self._tape.skip()  # the repeated segment tells it
            return
        self._inner.after_backward(action)
        if action.kind is Kind.BACKWARD:
            self._arrived.pop(action.microbatch, None)
        hidden = self._inputs.pop(action.microbatch, None)
        if hidden is not None and hidden.grad is not None:
            self._keep_as_message(hidden.grad)
        self._done(action)

    def add_weight_gradients(self, action: Action, *, last: bool) -> None:
        microbatch = action.microbatch
        if not self._again(action):
            self._inner.add_weight_gradients(action, last=last)
            self._done(action)
        elif microbatch in self._kept:
            self._tape.meter.disown(self._kept.pop(microbatch))

    def note_gradient(self, gradient: Tensor, microbatch: int) -> None:
        """The gradient of a chunk's output arrives, as a message or made here."""
        self._arrived[microbatch] = self._tape.meter.number_of(gradient)

    def take_gradient(self, gradient: Tensor, microbatch: int) -> None:
        """The same for a microbatch that is not run: kept for the gradients of weights, where its model keeps it."""
        if self._keeps.get(self._models[microbatch], False):
            self._kept[microbatch] = gradient

    def _keep_as_message(self, tensor: Tensor) -> None:
        self._tape.meter.keep(tensor, MemoryKind.MESSAGES)


def model_microbatches(step: TrainingStep) -> list[int]:
    """For each microbatch the one that it does the same as; itself, if there is none before it.

    Where a backward pass waits for reductions of those before it, what it does settles after a few, and
    with several chunks goes by its place among the pp microbatches that pass through all chunks together.
    """
    data_parallel, microbatches = step.data_parallel, step.plan.microbatches
    reaching = data_parallel.reductions_under_way
    period = step.mesh.pp.size if reaching and len(step.stages) > 1 else 1
    first = (1 + -(-reaching // len(data_parallel.buckets))) * period
    last = (microbatches - 1) // period * period
    return [
        microbatch if microbatch < first + period or microbatch >= last else first + microbatch % period
        for microbatch in range(microbatches)
    ]


def classify(step: TrainingStep, meter: Meter) -> None:
    """Says what the storages of a rank's model states are held for."""
    for bucket in step.data_parallel.buckets:
        for kind, tensor in bucket.states():
            meter.keep(tensor, kind)


def gradient_rules(step: TrainingStep) -> tuple[GradientRule, ...]:
    """How often each bucket's gradient must be reduced over its replicas in one step."""
    return tuple(
        GradientRule(bucket.number, bucket.group.name, bucket.padded_elements, reductions)
        for bucket in step.data_parallel.buckets
        if (reductions := bucket.reductions(step.plan.microbatches))
    )


def imagined_batches(plan: StepPlan) -> Sequence[Batch]:
    """Batches of the right shape, with `plan.documents_a_row` documents in a row, of one length to within a token."""
    shape = plan.microbatch_size, plan.sequence_length

    def ids() -> Tensor:
        return torch.empty(shape, dtype=torch.int64)

    documents = _imagined_documents(plan) if plan.documents_a_row > 1 else None
    return [
        Batch(tokens_BL=ids(), labels_BL=ids(), positions_BL=ids(), documents=documents)
        for _ in range(plan.microbatches)
    ]


def _imagined_documents(plan: StepPlan) -> Documents:
    """Those of all rows, the longer ones first, so that more rows are longer operations and not more of them.

    Example: two rows of 5 tokens with two documents each: borders 0 3 6 8 10.
    """
    short, longer = divmod(plan.sequence_length, plan.documents_a_row)
    lengths = [short + 1] * longer + [short] * (plan.documents_a_row - longer)
    borders = tuple(
        accumulate((length for length in lengths for _ in range(plan.microbatch_size)), initial=0)
    )
    return Documents(borders=borders, starts=torch.empty(len(borders), dtype=torch.int32))


def _no_values(layout: ParameterLayout, run: Tensor, first: int) -> None:
    """Stands for a run's first values: dry, there are none, but replicas send them to each other all the same."""


class Recorded(NamedTuple):
    """What a rank did, the step that did it, the meter that saw it; the rest as in `TracedRank`."""

    program: Program
    step: TrainingStep
    meter: Meter
    host_reads: tuple[tuple[str, str], ...]
    building_bytes: int


def record_step(
    plan: StepPlan,
    topology: Topology,
    inner: World,
    *,
    dry: bool,
    repeat: bool,
    batches: Sequence[Batch],
    known: Known | None = None,
    watch: Callable[[TrainingStep, Recorder], None] | None = None,
    updates: bool = True,
) -> Recorded:
    """The program of the world's rank in a step of a run under way (its second): events, bytes, rules.

    watch: is given the step before it runs, to hook what it wants to see, and the recorder of its events
    updates: False: the step ends where its gradients are summed
    """
    recorder = Recorder()
    world = RecordingWorld(inner, recorder)
    meter = Meter(recorder, dry=dry, known=known)
    with meter:
        tape = Tape(recorder, meter)
        mesh = build_mesh(world, topology)
        step = TrainingStep(plan, mesh, _no_values if dry else None)
        building_bytes = max(accumulate(delta for _, _, delta in meter.changes), default=0)
        setup = Segment(tuple(e for e in recorder.events if isinstance(e, Communicate | Wait)))
        classify(step, meter)
        for number in meter.alive:
            meter.kind_of.setdefault(number, MemoryKind.OTHER)
        if dry and updates:
            step.optimizer.step(0.0, torch.ones(()))  # the moments exist from the first update on
        elif updates:
            step.train(batches, 1e-3)
            step.losses = ()
            meter.keep(step.scale, MemoryKind.OTHER)
        for number in meter.alive:
            meter.kind_of.setdefault(number, MemoryKind.OPTIMIZER)
        held = meter.held()
        recorder.forget()
        meter.changes.clear()
        models = model_microbatches(step) if repeat else range(plan.microbatches)
        step.pipeline.chunks = tuple(
            TracedChunk(chunk, index, models, tape) for index, chunk in enumerate(step.pipeline.chunks)
        )
        if watch is not None:
            watch(step, recorder)
        if updates:
            step.train(batches, 1e-3)
        else:
            step.accumulate(batches)
        step.pipeline.chunks, step.losses = (), ()  # a step's losses are kept for whoever asks after it
        tape.cut(UPDATE, MemoryKind.TEMPORARIES)
    program = Program((Step(SETUP, setup), *tape.steps), gradient_rules(step), held)
    return Recorded(program, step, meter, tuple(tape.host_reads), building_bytes)


def rank_layouts(plan: StepPlan, topology: Topology, rank: int) -> tuple[tuple[ParameterLayout, ...], ...]:
    """What each chunk of a rank holds, piece by piece, from the model's own constructors; no memory is taken."""
    world = TraceWorld(rank, topology.world_size, "meta")
    stages = build_stages(plan, build_mesh(world, topology))
    return tuple(tuple(layout for _, layout, _ in named_layouts(stage)) for stage in stages)


def survey_rank(plan: StepPlan, topology: Topology, rank: int) -> object:
    """What decides how a rank's program differs from its tensor-parallel peers': the shapes of its pieces."""
    return tuple(
        (layout.name, layout.local_shape, layout.partial, layout.replicas)
        for chunk in rank_layouts(plan, topology, rank)
        for layout in chunk
    )


def trace_rank(
    plan: StepPlan,
    topology: Topology,
    rank: int,
    *,
    repeat: bool = True,
    known: Known | None = None,
    target: str = "cpu",
) -> TracedRank:
    """What `rank` does in one step, without any other rank, data or memory. fully_shard cannot be traced.

    known: calls understood while other ranks were traced, on the same target: "cuda" takes the path of GPUs
    """
    world = TraceWorld(rank, topology.world_size, target=target)
    plan = replace(plan, seed=None)
    recorded = record_step(
        plan,
        topology,
        world,
        dry=True,
        repeat=repeat,
        batches=imagined_batches(plan),
        known=known,
    )
    return TracedRank(
        program=recorded.program,
        partitions=world.partitions,
        buckets=tuple(
            TracedBucket(group=b.group.name, elements=b.padded_elements, shards=b.shards, pieces=b.pieces)
            for b in recorded.step.data_parallel.buckets
        ),
        host_reads=recorded.host_reads,
        building_bytes=recorded.building_bytes,
    )
