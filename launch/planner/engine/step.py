"""The step of this engine in closed form: its operators (operators.py), its lane of data-parallel messages
(data_lane.py) and its pipeline (pipeline.py), walked with few microbatches that stand for many.

The simulation traces the engine and replays every rank; this is its shape, and a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Sequence

from triaxis.launch.hardware.collectives import send_seconds
from triaxis.launch.planner.engine.buckets import Chunk, rank_chunks
from triaxis.launch.planner.engine.data_lane import (
    IDLE,
    Passes,
    finished,
    foreign,
    later,
    parts_of,
    prices_of,
)
from triaxis.launch.planner.engine.operators import Operators
from triaxis.launch.planner.engine.pipeline import RANKS, Walked, compiled, walk, walked_microbatches
from triaxis.launch.planner.layout import QUANTIZED, TRIAXIS, Layout, Recompute
from triaxis.launch.planner.step import StepTime


def is_own(layout: Layout) -> bool:
    """Whether the layout is one that this engine runs: dense, all on the device, whole layers recomputed or none,
    without context parallelism, no 8-bit products."""
    shape = layout.shape
    return (
        layout.software is TRIAXIS
        and not shape.experts
        and shape.latent is None
        and layout.cp == 1
        and layout.flash_attention
        and layout.recompute in (Recompute.NONE, Recompute.FULL)
        and not layout.offloaded
        and not layout.states_on_host
        and layout.dtype not in QUANTIZED
    )


def own_step_time(layout: Layout) -> StepTime:
    """The step's time, and what lengthens it on the pipeline rank that computes longest."""
    return _OwnStep(layout).time()


class _OwnStep:
    """One layout's step, while it is worked out."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.operators = layout, Operators(layout)
        self.parts, self.prices = parts_of(layout), prices_of(layout)
        self.reduces = layout.shards > 1 and layout.trains_weights
        self.zero = layout.zero if self.reduces else 0
        self.shards = layout.shards if self.zero else 1
        held = rank_chunks(layout.shape, layout.tp, layout.pp, layout.virtual_stages, self.zero == 3)
        distinct = dict.fromkeys(chunk for chunks in held for chunk in chunks)
        alike = {chunk: Passes(chunk, self.parts, self.prices, self.zero) for chunk in distinct}
        self.stages = stages = layout.pp if layout.virtual_stages > 1 else min(layout.pp, RANKS)  # walked
        self.held = [*held[: stages - 1], held[-1]]
        self.passes = [[alike[chunk] for chunk in chunks] for chunks in self.held]
        settled = {chunk: passes.settled() for chunk, passes in alike.items()}
        self.seconds = tuple(
            tuple(seconds for chunk in chunks for seconds in settled[chunk][0]) for chunks in self.held
        )
        self.plain = [sum(sum(alike[chunk].seconds) for chunk in chunks) for chunks in self.held]
        self.longest = max(range(stages), key=lambda place: self.plain[place])
        self.left_out = sum(
            action[0] for chunks in held[stages - 1 : -1] for chunk in chunks for action in settled[chunk][0]
        )
        self.lanes = [settled[chunks[0]][1] for chunks in self.held]  # after the last backward

    def time(self) -> StepTime:
        layout, operators, parts = self.layout, self.operators, self.parts
        count, stages, chunks = round(layout.microbatches), self.stages, layout.virtual_stages
        period = stages if chunks > 1 else 1
        walked = walked_microbatches(layout.schedule, stages, chunks, count)
        course = compiled(layout.schedule, stages, walked, chunks)
        hops = self._hops()
        own, middle = self.plain[self.longest], count - walked
        found = walk(course, (*hops[: stages - 1], hops[-1]), self.seconds, period)
        if self.reduces and self.zero < 2:
            self._close(found)
        wait = sum(slot[1 + (place + 1) % 2] for place, slot in enumerate(self.seconds[self.longest])) - own
        through = self.left_out + 2 * sum(hops[stages - 1 : layout.pp - 1])
        beside = {held: self._summed(held) for held in dict.fromkeys(self.held)}
        rests = [finished(lane) + beside[held] for lane, held in zip(self.lanes, self.held, strict=True)]
        slow = max(range(stages), key=lambda place: found.ends[place] + rests[place])
        summed = found.ends[slow] + rests[slow] + middle * found.each + through
        data = count * wait + rests[slow]
        idle = max(0.0, summed - count * own - data)
        crossing = min(idle, count * max(0.0, found.each - own - wait)) if middle else 0.0
        update, publish = max((self._update(held) for held in dict.fromkeys(self.held)), key=sum)
        layers = sum(chunk.layers for chunk in self.held[self.longest])
        again = layers * parts.block.again if layout.recompute == Recompute.FULL else 0.0
        compute = self._computing(self.held[self.longest])
        return StepTime(
            compute=count * compute,
            recompute=count * again,
            tensor=count * (own - compute - again),
            context=0.0,
            expert=0.0,
            pipeline=crossing,
            bubble=idle - crossing,
            data=data + publish,
            optimizer=update + operators.start(count, layout.gpus),
            tokens=layout.global_batch * layout.sequence,
            gpus=layout.gpus,
        )

    def _close(self, found: Walked) -> None:
        """ZeRO 0 and 1: gradients are reduced in the last microbatch's backward passes, the last chunk's first."""
        for place, passes in enumerate(self.passes):
            lane, told = IDLE, 0.0
            for chunk in reversed(range(len(passes))):
                end = found.closing[place][chunk]
                lane = later(lane, end - passes[chunk].seconds[1] - told)
                lane, told = passes[chunk].run(1, foreign(lane))[1], end
            self.lanes[place] = lane

    def _computing(self, chunks: tuple[Chunk, ...]) -> float:
        """Seconds of a microbatch's products and other operators on a rank, nothing computed again."""
        parts = self.parts
        units = [(parts.block, sum(chunk.layers for chunk in chunks))]
        units += [(parts.embedding, 1)] if chunks[0].first else []
        units += [(parts.head, 1)] if chunks[-1].last else []
        return parts.context * len(chunks) + sum(times * (p.forward + p.backward) for p, times in units)

    def _summed(self, chunks: tuple[Chunk, ...]) -> float:
        """Seconds to sum a rank's gradients further, of replicated parts and tied tables, and for their norm."""
        layout, operators = self.layout, self.operators
        now = operators.norm(sum(chunk.elements for chunk in chunks) / layout.shards)
        if layout.sequence_parallel and layout.tp > 1:
            parts = [part for chunk in chunks for part in chunk.replicated]
            now += operators.summed(
                sum(min(some, size / self.shards) for some, size in parts), layout.group("tp")
            )
        if layout.shape.tied and layout.pp > 1 and (chunks[0].first or chunks[-1].last):
            table = layout.shape.embedding_parameters() / layout.tp / self.shards
            ends = layout.group("pp")
            now += operators.summed(table, (ends[0], ends[-1]))
        return now

    def _update(self, chunks: Sequence[Chunk]) -> tuple[float, float]:
        """Seconds of the update of what a rank owns, and until everybody has it: gathers run behind the copies."""
        elements = sum(chunk.elements for chunk in chunks)
        buckets = sum(len(chunk.buckets) for chunk in chunks)
        update, copied = self.operators.update(elements / self.shards, buckets)
        if self.zero not in (1, 2):
            return update + copied, 0.0
        gathers = [
            (self.prices.message("all_gather", size), count)
            for chunk in chunks
            for size, count in chunk.sizes
        ]
        gathered = sum(seconds * count for seconds, count in gathers)
        one = gathers[-1][0]
        return update + copied, max(gathered + copied / buckets, copied + one) - copied

    def _hops(self) -> tuple[float, ...]:
        """Seconds of a hidden state's way from each pipeline rank to the next, the last one's to the first."""
        layout, ranks = self.layout, self.layout.group("pp")
        nbytes = self.operators.element * self.operators.outer * layout.shape.hidden
        known: dict[bool, float] = {}
        hops = []
        for place in range(layout.pp):
            source, target = ranks[place], ranks[(place + 1) % layout.pp]
            near = source // layout.hardware.gpus_per_node == target // layout.hardware.gpus_per_node
            if near not in known:
                known[near] = send_seconds(nbytes, source, target, layout.hardware)
            hops.append(known[near])
        return tuple(hops)
