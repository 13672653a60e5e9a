"""The time of one step: the engine's parts as they are recorded (profiles.py), a rank's lane of data-parallel messages
(lane.py) and its pipeline (walk.py), walked with few microbatches that stand for many.

The simulation traces and replays every rank; this is its shape, and a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Sequence

from triaxis.launch.hardware.collectives import collective_seconds, send_seconds
from triaxis.launch.planner.chunks import TIES, Chunk, Group, rank_chunks, unit_of
from triaxis.launch.planner.lane import IDLE, Passes, finished, foreign, later
from triaxis.launch.planner.layout import Layout
from triaxis.launch.planner.price import StepTime
from triaxis.launch.planner.profiles import Profile, UpdatePrices, apart, profile, uniform, update_prices
from triaxis.launch.planner.replicas import Replicas
from triaxis.launch.planner.walk import RANKS, Walked, compiled, walk, walked_microbatches
from triaxis.launch.simulator.timeline import Prices
from triaxis.parallel.programs.operation import Operation
from triaxis.parallel.programs.program import Compute
from triaxis.parallel.replicas.cut import Sharding


def step_time(layout: Layout) -> StepTime:
    """The step's time, and what lengthens it on the pipeline rank that computes longest."""
    return _Step(layout).time()


class _Step:
    """One layout's step, while it is worked out."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        plan = apart(layout.plan, layout.pp)
        self.sharding = Sharding.of(plan.zero, layout.dp)
        self.first = profile(plan, layout.tp, layout.hardware)
        further = plan.microbatches > 1 and not self.sharding.gradients
        self.profile = profile(plan, layout.tp, layout.hardware, further=True) if further else self.first
        self.update = update_prices(plan, layout.hardware)
        self.prices = Prices(layout.hardware)
        self.replicas = Replicas(
            prices=self.prices,
            ranks=tuple(layout.group("dp")),
            sharding=self.sharding,
            weight_bytes=plan.dtype.element_bytes,
            gradient_bytes=plan.summed.element_bytes,
        )
        held = rank_chunks(layout.plan, layout.tp, layout.pp, layout.dp)
        alike = {
            chunk: Passes(chunk, self.profile, self.replicas)
            for chunk in dict.fromkeys(chunk for chunks in held for chunk in chunks)
        }
        self.stages = (
            layout.pp if plan.virtual_stages > 1 or not uniform(plan.model) else min(layout.pp, RANKS)
        )
        self.held = [*held[: self.stages - 1], held[-1]]
        self.passes = [[alike[chunk] for chunk in chunks] for chunks in self.held]
        settled = {chunk: passes.settled() for chunk, passes in alike.items()}
        self.seconds = tuple(
            tuple(seconds for chunk in chunks for seconds in settled[chunk][0]) for chunks in self.held
        )
        self.plain = [sum(sum(alike[chunk].seconds) for chunk in chunks) for chunks in self.held]
        self.longest = max(range(self.stages), key=lambda place: self.plain[place])
        self.left_out = sum(
            action[0]
            for chunks in held[self.stages - 1 : -1]
            for chunk in chunks
            for action in settled[chunk][0]
        )
        self.lanes = [settled[chunks[0]][1] for chunks in self.held]  # after the last backward

    def time(self) -> StepTime:
        layout, plan = self.layout, self.layout.plan
        count, stages, chunks = plan.microbatches, self.stages, plan.virtual_stages
        walked = walked_microbatches(plan.schedule, stages, chunks, count)
        course = compiled(plan.schedule, stages, walked, chunks)
        hops = self._hops()
        own, middle = self.plain[self.longest], count - walked
        found = walk(course, (*hops[: stages - 1], hops[-1]), self.seconds, stages if chunks > 1 else 1)
        if layout.dp > 1 and not self.sharding.gradients:
            self._close(found)
        wait = sum(slot[1 + (place + 1) % 2] for place, slot in enumerate(self.seconds[self.longest])) - own
        through = self.left_out + 2 * sum(hops[stages - 1 : layout.pp - 1])
        beside = {held: self._summed(held) for held in dict.fromkeys(self.held)}
        rests = [finished(lane) + beside[held] for lane, held in zip(self.lanes, self.held, strict=True)]
        slow = max(range(stages), key=lambda place: found.ends[place] + rests[place])
        summed = found.ends[slow] + rests[slow] + middle * found.each + through - self._saved()
        data = count * wait + rests[slow]
        idle = max(0.0, summed - count * own - data)
        crossing = min(idle, count * max(0.0, found.each - own - wait)) if middle else 0.0
        update, publish = max((self._update(held) for held in dict.fromkeys(self.held)), key=sum)
        compute, again = self._computing(self.held[self.longest])
        return StepTime(
            compute=count * compute,
            recompute=count * again,
            tensor=count * (own - compute - again),
            context=0.0,
            expert=0.0,
            pipeline=crossing,
            bubble=idle - crossing,
            data=data + publish,
            optimizer=update + self._start(),
            tokens=layout.step_tokens,
            gpus=layout.gpus,
            stage=self.longest if self.longest < stages - 1 else layout.pp - 1,
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

    def _saved(self) -> float:
        """Seconds that the first microbatch takes less than the others: its gradients are written and not added."""
        if self.profile is self.first:
            return 0.0
        chunks = self.held[self.longest]
        return sum(
            count * (unit_of(self.profile, name).seconds - unit_of(self.first, name).seconds)
            for chunk in chunks
            for name, count in chunk.counts
        )

    def _computing(self, chunks: tuple[Chunk, ...]) -> tuple[float, float]:
        """Seconds of a microbatch's operations on a rank, without those computed again, and of these."""
        prices = self.profile
        again = 0.0
        if self.layout.recomputes:
            again = sum(
                count * unit_of(prices, name).forward.computing
                for chunk in chunks
                for name, count in chunk.counts
                if name in prices.layers
            )
        return _all_computing(prices, chunks) - again, again

    def _summed(self, chunks: tuple[Chunk, ...]) -> float:
        """Seconds to sum a rank's gradients further, of replicated parts and tied tables."""
        layout = self.layout
        shards = layout.dp if self.sharding.states else 1
        totals: dict[Group, float] = {}
        for chunk in chunks:
            for group, some, size in chunk.partial:
                totals[group] = totals.get(group, 0.0) + min(some, size / shards)
        ends = layout.group("pp")[0], layout.group("pp")[-1]
        seconds = 0.0
        for group, elements in totals.items():
            nbytes = self.replicas.gradient_bytes * elements
            seconds += collective_seconds(
                "all_reduce", nbytes, ends if group == TIES else group, layout.hardware
            )
            if group == TIES:  # gathered in one tensor and put back; of the others the update's record tells
                copied = round(nbytes)
                seconds += self.prices.operation(Compute("cat", "", 0, copied, copied))
                seconds += self.prices.operation(Compute("_foreach_copy_", "", 0, 2 * copied, copied))
        return seconds

    def _update(self, chunks: Sequence[Chunk]) -> tuple[float, float]:
        """Seconds of the norm and the update of what a rank owns, and until everybody has it: gathers run behind the
        copies."""
        elements = sum(chunk.elements for chunk in chunks)
        buckets = sum(len(chunk.buckets) for chunk in chunks)
        owned = elements / (self.layout.dp if self.sharding.states else 1)
        update = UpdatePrices.of(self.update.before, buckets, owned)
        copied = UpdatePrices.of(self.update.copies, buckets, owned)
        if not self.sharding.states or self.sharding.parameters:
            return update + copied, 0.0
        gathers = [
            (self.replicas.message(Operation.ALL_GATHER, size), count)
            for chunk in chunks
            for size, count in chunk.sizes
        ]
        gathered = sum(seconds * count for seconds, count in gathers)
        one = gathers[-1][0]
        return update + copied, max(gathered + copied / buckets, copied + one) - copied

    def _start(self) -> float:
        """Seconds before the first microbatch, where tokens are counted, and of agreeing on the scale and the norm."""
        layout = self.layout
        ranks = range(layout.gpus)
        agreed = [collective_seconds("all_reduce", nbytes, ranks, layout.hardware) for nbytes in (8, 16)]
        return self.update.beginning(layout.microbatches) + sum(agreed)

    def _hops(self) -> tuple[float, ...]:
        """Seconds of a hidden state's way from each pipeline rank to the next, the last one's to the first."""
        layout, ranks = self.layout, self.layout.group("pp")
        known: dict[bool, float] = {}
        hops = []
        for place in range(layout.pp):
            source, target = ranks[place], ranks[(place + 1) % layout.pp]
            near = source // layout.hardware.gpus_per_node == target // layout.hardware.gpus_per_node
            if near not in known:
                known[near] = send_seconds(self.profile.hidden_bytes, source, target, layout.hardware)
            hops.append(known[near])
        return tuple(hops)


def _all_computing(prices: Profile, chunks: Sequence[Chunk]) -> float:
    return sum(
        prices.start.computing
        + sum(
            count * (unit_of(prices, name).forward.computing + unit_of(prices, name).computing)
            for name, count in chunk.counts
        )
        for chunk in chunks
    )
