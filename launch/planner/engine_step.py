"""The step of this engine in closed form: operators (operators.py), the pipeline's bubble, ZeRO's messages.

The simulation traces the engine and replays every rank; this is its shape, and a test holds the two together.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from triaxis.launch.planner.collectives import collective_seconds, send_seconds
from triaxis.launch.planner.layout import TRIAXIS, Layout, Recompute
from triaxis.launch.planner.operators import BUCKET_ELEMENTS, ELEMENT_BYTES, Operators, Part
from triaxis.launch.planner.step import StepTime

START_SMALL: Final = 12  # launches that begin a step


def is_own(layout: Layout) -> bool:
    """Whether the layout is one that this engine runs: dense, without context parallelism, no 8-bit products."""
    plain = (
        not layout.shape.experts and layout.shape.latent is None and layout.cp == 1 and layout.flash_attention
    )
    return layout.software is TRIAXIS and plain and layout.dtype in ELEMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """Seconds of one microbatch on one pipeline rank, and parameters of its units."""

    forward: float
    backward: float
    again: float
    messages: float
    units: tuple[tuple[Part, float], ...]

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.again + self.messages


def own_step_time(layout: Layout) -> StepTime:
    """The step's time on the slowest pipeline rank."""
    operators = Operators(layout)
    stages = _stages(layout, operators)
    longest = max(range(len(stages)), key=lambda rank: stages[rank].total)
    slow, count, chunks = stages[longest], layout.microbatches, layout.virtual_stages
    others = sum(stage.total for rank, stage in enumerate(stages) if rank != longest) / chunks
    hop = _hop(layout, operators)
    exposed, stalls = _data(layout, operators, stages, longest)
    updated = max(sum(parameters for _, parameters in stage.units) for stage in stages)
    if layout.zero:
        updated /= layout.shards
    return StepTime(
        compute=count * (slow.forward + slow.backward),
        recompute=count * slow.again,
        tensor=count * slow.messages,
        context=0.0,
        expert=0.0,
        pipeline=count * _crossing(layout, stages, longest, hop),
        bubble=others + (layout.pp - 1) * (2 * hop + stalls / chunks),
        data=exposed + count * stalls,
        optimizer=operators.update(updated) + operators.seconds((), START_SMALL),
        tokens=layout.global_batch * layout.sequence,
        gpus=layout.gpus,
    )


def _stages(layout: Layout, operators: Operators) -> list[_Stage]:
    shape, full = layout.shape, layout.recompute == Recompute.FULL
    block, embedding, head = operators.block(), operators.embedding(), operators.head()
    counts = layout.stage_layers()
    table = shape.embedding_parameters() / layout.tp
    layer = shape.dense_parameters(routed=False) / layout.tp
    stages = []
    for rank, layers in enumerate(counts):
        units = [(block, layer)] * layers
        if rank == 0:
            units.insert(0, (embedding, table + shape.bound_rows * shape.hidden))
        if rank == layout.pp - 1:
            units.append((head, 0.0 if shape.tied and layout.pp == 1 else table))
        stages.append(
            _Stage(
                forward=sum(part.forward for part, _ in units),
                backward=sum(part.backward for part, _ in units),
                again=layers * block.forward if full else 0.0,
                messages=sum(part.forward_messages + part.backward_messages for part, _ in units)
                + (layers * block.forward_messages if full else 0.0),
                units=tuple(units),
            )
        )
    return stages


def _crossing(layout: Layout, stages: list[_Stage], longest: int, hop: float) -> float:
    """Seconds that 1F1B's slowest rank waits in each microbatch: a message each way, less what its neighbours spare."""
    if layout.pp == 1 or layout.virtual_stages > 1 or layout.schedule == "gpipe":
        return 0.0
    beside = [stages[rank].total for rank in (longest - 1, longest + 1) if 0 <= rank < layout.pp]
    return max(0.0, 2 * hop - (stages[longest].total - max(beside)))


def _hop(layout: Layout, operators: Operators) -> float:
    """Seconds of a hidden state's way to the next stage."""
    if layout.pp == 1:
        return 0.0
    ranks = layout.group("pp")
    boundary = layout.hardware.gpus_per_node
    crossing = next((rank for rank in ranks if rank >= boundary), ranks[1])
    return send_seconds(
        operators.element * operators.outer * layout.shape.hidden, 0, crossing, layout.hardware
    )


def _data(layout: Layout, operators: Operators, stages: list[_Stage], longest: int) -> tuple[float, float]:
    """Exposed seconds of data-parallel messages: of the whole step, and for each microbatch of the slowest rank."""
    if layout.shards == 1 or not layout.trains_weights:
        return 0.0, 0.0
    hardware, ranks = layout.hardware, layout.group("dp")

    def over(operation: str, parameters: float, each: float) -> float:
        return collective_seconds(operation, parameters * each, ranks, hardware) if parameters else 0.0

    if layout.zero == 3:
        return _gathered(layout, operators, stages[longest])
    wide, element = operators.wide, operators.element
    ends_last = stages[0]  # backward passes end on the first rank
    total = sum(parameters for _, parameters in ends_last.units)
    buckets = max(1, round(total / BUCKET_ELEMENTS))
    operation = "all_reduce" if layout.zero == 0 else "reduce_scatter"
    one = over(operation, total / buckets, wide)
    computing = ends_last.backward + ends_last.again
    last = max(one, buckets * one - computing * (buckets - 1) / buckets)
    if layout.shape.tied and layout.pp > 1:
        table = layout.shape.embedding_parameters() / layout.tp / (layout.shards if layout.zero else 1)
        ends = layout.group("pp")
        last += collective_seconds("all_reduce", wide * table, (ends[0], ends[-1]), hardware)
    if layout.zero == 0:
        return last, 0.0
    publish = buckets * over("all_gather", total / buckets, element)
    if layout.zero == 1:
        return last + publish, 0.0
    mine = sum(parameters for _, parameters in stages[longest].units)
    added = operators.seconds([(0.0, 3 * wide * mine / layout.shards)], small=buckets)
    hidden = stages[longest].total
    return one + publish, added + max(0.0, buckets * one - hidden)


def _gathered(layout: Layout, operators: Operators, stage: _Stage) -> tuple[float, float]:
    """ZeRO 3: a unit's parameters come while the one before computes, both ways; sums take the same lane."""
    hardware, ranks = layout.hardware, layout.group("dp")
    full = layout.recompute == Recompute.FULL
    units = []
    for part, parameters in stage.units:
        if parameters:
            gather = collective_seconds("all_gather", parameters * operators.element, ranks, hardware)
            scatter = collective_seconds("reduce_scatter", parameters * operators.wide, ranks, hardware)
            forward = part.forward + part.forward_messages
            units.append((gather, scatter, forward, part.backward + part.backward_messages + full * forward))
    stalls = units[0][0] + units[0][1] + units[-1][0]  # the first unit of a pass has nothing to hide behind
    for (gather, _, forward, _), (following, summed, _, backward) in pairwise(units):
        stalls += max(0.0, following - forward) + max(0.0, gather + summed - backward)
    return units[0][1], stalls
