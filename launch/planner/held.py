"""The bytes that a rank holds at its peak: the backward passes that may be the peak, followed piece by piece.

What a unit keeps and takes meanwhile is recorded (profiles.py); how many microbatches are in flight, and which buffers
of gradients and gathered parameters are there, follows from the engine's own schedule, cut and limits. The peak may
also lie after them, where a tied table's gradient is copied to be summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import Final

from triaxis.launch.hardware.device import FRAGMENTED, context_bytes
from triaxis.launch.planner.chunks import HEAD, PIECES, TIES, Chunk, rank_chunks, unit_of
from triaxis.launch.planner.layout import Layout
from triaxis.launch.planner.pool import NOTHING, Pooled, heaviest_passes, pooled
from triaxis.launch.planner.price import Memory
from triaxis.launch.planner.profiles import Profile, apart, profile, state_bytes
from triaxis.launch.planner.staging import process_bytes
from triaxis.parallel.replicas.cut import Sharding

SHOWN: Final = 8
"""Layers of a kind that show all that happens under ZeRO 3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A rank's bytes at its peak besides model states."""

    activations: float = 0.0
    logits: float = 0.0
    buffers: float = 0.0
    temporaries: float = 0.0

    @property
    def total(self) -> float:
        return self.activations + self.logits + self.buffers + self.temporaries


def memory(layout: Layout) -> Memory:
    """The memory of the fullest pipeline rank. Of ranks that hold the same chunks the first has most in flight."""
    first: dict[tuple[Chunk, ...], int] = {}
    for stage, chunks in enumerate(rank_chunks(layout.plan, layout.tp, layout.pp, layout.dp)):
        first.setdefault(chunks, stage)
    return max((stage_memory(layout, stage) for stage in first.values()), key=lambda it: it.total)


def stage_memory(layout: Layout, stage: int) -> Memory:
    """The memory of a rank of pipeline stage `stage`."""
    plan, topology = layout.plan, layout.topology
    chunks = rank_chunks(plan, layout.tp, layout.pp, layout.dp)[stage]
    sharding = Sharding.of(plan.zero, layout.dp)
    elements = sum(chunk.elements for chunk in chunks)
    each = state_bytes(plan)
    prices = profile(apart(plan, layout.pp), layout.tp, layout.hardware)
    states = (
        each.parameters * elements / (layout.dp if sharding.parameters else 1),
        each.gradients * elements / (layout.dp if sharding.gradients else 1),
        each.optimizer * elements / (layout.dp if sharding.states else 1),
    )
    held = _held(layout, prices, stage, chunks, sharding)
    tables = prices.table_bytes * len(chunks)
    allocated = sum(states) + held.total + tables
    on_cpu = layout.hardware.context_bytes is not None
    return Memory(
        parameters=states[0],
        gradients=states[1],
        optimizer=states[2],
        activations=held.activations + tables,
        logits=held.logits,
        buffers=held.buffers,
        temporaries=held.temporaries,
        fragments=0.0 if on_cpu else FRAGMENTED * allocated,
        context=process_bytes(layout, stage, chunks, states=sum(states), allocated=allocated)
        if on_cpu
        else context_bytes((topology.tp, topology.pp, topology.dp)),
        stage=stage,
    )


def _held(layout: Layout, prices: Profile, stage: int, whole: tuple[Chunk, ...], sharding: Sharding) -> Held:
    plan = layout.plan
    chunks = whole
    if sharding.parameters:
        chunks = rank_chunks(plan, layout.tp, layout.pp, layout.dp, shown=SHOWN)[stage]
    kept = [kept_bytes(prices, chunk) for chunk in whole]
    course = _Passes(
        prices=prices,
        sharding=sharding,
        replicas=layout.dp,
        weight_bytes=plan.dtype.element_bytes,
        gradient_bytes=plan.summed.element_bytes,
    )
    best = Held(temporaries=_summed_ties(layout, whole, sharding))
    layers = tuple(chunk.layers for chunk in whole)
    for heavy in heaviest_passes(plan.schedule, layout.pp, stage, plan.microbatches, layers):
        pool = pooled(chunks, heavy.runs) if sharding.gradients else NOTHING
        messages = (heavy.sent + 1) * prices.hidden_bytes if layout.pp > 1 else 0.0  # one is awaited
        total = sum(map(mul, heavy.flying, kept))
        held = course.height(chunks[heavy.chunk], whole[heavy.chunk], total, messages, pool)
        best = max(best, held, key=lambda one: one.total)
    return best


def kept_bytes(prices: Profile, chunk: Chunk) -> float:
    """What a chunk keeps of a microbatch between forward and backward: its input, and what its units keep. What it
    sends on is no longer its own."""
    kept = prices.start.growth + sum(
        count * unit_of(prices, name).forward.growth for name, count in chunk.counts
    )
    return kept + ((not chunk.first) - (not chunk.last)) * prices.hidden_bytes


def _summed_ties(layout: Layout, chunks: Sequence[Chunk], sharding: Sharding) -> float:
    """Where two stages have the table: its gradient, copied to be summed."""
    table = sum(some for chunk in chunks for group, some, _ in chunk.partial if group == TIES)
    return layout.plan.summed.element_bytes * table / (layout.dp if sharding.states else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passes:
    """A layout's backward passes."""

    prices: Profile
    sharding: Sharding
    replicas: int
    weight_bytes: int
    gradient_bytes: int

    def height(
        self, chunk: Chunk, whole: Chunk, total: float, messages: float, pool: Sequence[Pooled]
    ) -> Held:
        """The most that is held in a backward pass.

        chunk: what is shown of the whole one; total: bytes kept for this pass and others; messages: of the pipeline's;
        pool: the course of the gradients' buffers
        """
        prices, best, most, at = self.prices, Held(), 0.0, 0
        level = total + (0.0 if chunk.last else prices.hidden_bytes)
        skipped = len(whole.units) - len(chunk.units)  # they go when half of those shown have gone
        for place, name in enumerate(chunk.units):
            unit = unit_of(prices, name)
            if skipped and 2 * place > len(chunk.units):
                level -= skipped * unit.forward.growth
                skipped = 0
            until = (place + 1) * PIECES
            quiet = at + 1 == len(pool) or pool[at + 1][0] >= until  # no buffer comes or goes meanwhile
            if quiet and not self.sharding.parameters:
                rest = messages + self.gradient_bytes * (pool[at][1] + pool[at][2] / self.replicas)
                if level + unit.height + rest <= most:
                    level += unit.growth
                    continue
            kept = level
            for index, piece in enumerate(unit.backward):
                moment = place * PIECES + index
                while at + 1 < len(pool) and pool[at + 1][0] <= moment:
                    at += 1
                _, made, reduced = pool[at]
                buffers = messages + self.gradient_bytes * (made + reduced / self.replicas)
                if self.sharding.parameters:
                    buffers += self.weight_bytes * chunk.gathered(place, moment)
                top = level + piece.height
                if top + buffers > most:
                    most = top + buffers
                    above = max(0.0, top - kept)
                    logits = above if name == HEAD and index == 0 else 0.0
                    best = Held(
                        activations=top - above,
                        logits=logits,
                        buffers=buffers,
                        temporaries=above - logits,
                    )
                level += piece.growth
        return best
