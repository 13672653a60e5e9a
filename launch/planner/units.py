"""A unit of the model with its prices: segments that were recorded for two sizes, priced at a third one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from triaxis.launch.hardware.hardware import Hardware
from triaxis.launch.simulator.timeline import Prices
from triaxis.parallel.programs.program import Communicate, Compute, Event, Segment, Wait

if TYPE_CHECKING:
    from triaxis.engine.trace.parts import Parameter, Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A stretch of a backward pass.

    seconds: with its waits for tensor-parallel messages; computing: without them
    height, growth: bytes held at most, and at the end, beyond those held at its beginning
    completes: places in the unit's parameters, whose gradients are whole at its end
    """

    seconds: float
    computing: float
    height: float
    growth: float
    completes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A part with its prices, for one microbatch. Parameters: its own, then those of the root."""

    forward: Stretch
    backward: tuple[Stretch, ...]
    parameters: tuple[Parameter, ...]
    root: tuple[Parameter, ...]

    @cached_property
    def seconds(self) -> float:
        """Of backward."""
        return sum(piece.seconds for piece in self.backward)

    @cached_property
    def computing(self) -> float:
        """Of backward, without waits."""
        return sum(piece.computing for piece in self.backward)

    @cached_property
    def growth(self) -> float:
        """Bytes held more after backward than before: what forward kept goes, so this is negative."""
        return sum(piece.growth for piece in self.backward)

    @cached_property
    def height(self) -> float:
        """Bytes held at most during backward beyond those at its beginning."""
        before = accumulate((piece.growth for piece in self.backward), initial=0.0)
        return max(level + piece.height for level, piece in zip(before, self.backward, strict=False))


def drawn(low: Stretch, high: Stretch, share: float) -> Stretch:
    """On the line from one to the other."""
    return Stretch(
        seconds=low.seconds + share * (high.seconds - low.seconds),
        computing=low.computing + share * (high.computing - low.computing),
        height=low.height + share * (high.height - low.height),
        growth=low.growth + share * (high.growth - low.growth),
        completes=low.completes,
    )


class Pricer:
    """Prices segments recorded for two sizes at a third one. share: of the way from the first to the second."""

    def __init__(self, hardware: Hardware, tp: int, share: float) -> None:
        self._prices, self._ranks, self._share = Prices(hardware), tuple(range(tp)), share

    def unit(self, low: Part, high: Part) -> Unit:
        pairs = zip(low.backward, high.backward, strict=True)
        lane = _Lane(self._prices, self._ranks)  # messages may end in a later piece
        backward = tuple(
            replace(self.stretch(one.segment, other.segment, lane), completes=one.completes)
            for one, other in pairs
        )
        return Unit(
            forward=self.stretch(low.forward, high.forward),
            backward=backward,
            parameters=low.parameters,
            root=low.root,
        )

    def stretch(self, low: Segment, high: Segment, lane: _Lane | None = None) -> Stretch:
        events = low.events
        deltas: Sequence[float] = low.memory.deltas
        if self._share:
            if len(low.events) != len(high.events) or len(deltas) != len(high.memory.deltas):
                raise ValueError(
                    f"a part does {len(low.events)} things with one microbatch and {len(high.events)} with a larger"
                )
            events = tuple(
                self._between(one, other) for one, other in zip(low.events, high.events, strict=True)
            )
            deltas = [
                one + self._share * (other - one)
                for one, other in zip(low.memory.deltas, high.memory.deltas, strict=True)
            ]
        lane = lane or _Lane(self._prices, self._ranks)
        seconds, computing = lane.run(events)
        level = height = 0.0
        for delta in deltas:
            level += delta
            height = max(height, level)
        return Stretch(seconds=seconds, computing=computing, height=height, growth=level)

    def _between(self, low: Event, high: Event) -> Event:
        share = self._share
        if isinstance(low, Compute) and isinstance(high, Compute):
            return Compute(
                low.operation,
                low.dtype,
                round(low.flops + share * (high.flops - low.flops)),
                round(low.read_bytes + share * (high.read_bytes - low.read_bytes)),
                round(low.written_bytes + share * (high.written_bytes - low.written_bytes)),
            )
        if isinstance(low, Communicate) and isinstance(high, Communicate):
            return replace(low, nbytes=round(low.nbytes + share * (high.nbytes - low.nbytes)))
        return low


class _Lane:
    """One rank's computing beside its lane of tensor-parallel messages, where all ranks do the same at once."""

    def __init__(self, prices: Prices, ranks: tuple[int, ...]) -> None:
        self._prices, self._ranks = prices, ranks
        self._now = self._free = 0.0
        self._ends: dict[tuple[str, str], list[float]] = {}

    def run(self, events: Iterable[Event]) -> tuple[float, float]:
        """Seconds of these events, with waits and without."""
        began, computing = self._now, 0.0
        for event in events:
            if isinstance(event, Compute):
                price = self._prices.operation(event)
                computing += price
                self._now += price
            elif isinstance(event, Wait):
                ends = self._ends.get((event.group, event.operation), [])
                if len(ends) > event.age:
                    self._now = max(self._now, ends[-1 - event.age])
            else:
                self._free = max(self._now, self._free) + self._prices.message(event, self._ranks, 0)
                self._ends.setdefault((event.group, event.operation), []).append(self._free)
        return self._now - began, computing
