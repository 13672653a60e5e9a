"""Where each rank stands: sizes per axis, an order, and the groups that follow. Pure arithmetic.

Worked example, dp=4 tp=2 pp=2 in the order `tp-pp-dp` (innermost first), 16 ranks:
    replica 0: stage 0 = ranks 0 1 (a tensor-parallel pair), stage 1 = ranks 2 3; replica 1: ranks 4..7; …
    groups("tp") = (0, 1), (2, 3), …    groups("pp") = (0, 2), (1, 3), …    groups("dp") = (0, 4, 8, 12), …
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod


class Axis(StrEnum):
    TP = "tp"
    CP = "cp"
    PP = "pp"
    DP = "dp"
    EP = "ep"


FACTORS = (Axis.TP, Axis.CP, Axis.PP, Axis.DP)
"""The axes whose sizes multiply to the world size; ep is carved out of tp × cp × dp instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Sizes per axis and their order, innermost first; an axis of size one may go unnamed."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    order: str = "tp-pp-dp"

    def __post_init__(self) -> None:
        for axis in Axis:
            if self.size(axis) < 1:
                raise ValueError(f"`{axis}` must be at least 1, but is {self.size(axis)}; set `{axis}` to 1")
        _check_order(self.order, [axis for axis in FACTORS if self.size(axis) > 1])
        ranks = self.tp * self.cp * self.dp
        if ranks % self.ep:
            raise ValueError(
                f"`ep` must divide tp {self.tp} × cp {self.cp} × dp {self.dp} = {ranks}, but is {self.ep}; "
                f"nearest that work: ep {_listed(_nearest_divisors(ranks, self.ep))}"
            )

    @property
    def world_size(self) -> int:
        return prod(self.size(axis) for axis in FACTORS)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes named by the order, innermost first."""
        return tuple(Axis(name) for name in self.order.split("-"))

    def size(self, axis: str) -> int:
        """The size of one axis."""
        return int(getattr(self, Axis(axis)))

    def coordinates(self, rank: int) -> dict[str, int]:
        """The rank's place on every axis: 6 in the worked example is {tp: 0, cp: 0, pp: 1, dp: 1, ep: 0}."""
        self._check_rank(rank)
        places = dict.fromkeys((str(axis) for axis in Axis), 0)
        rest = rank
        for axis in self.axes:
            rest, places[axis] = divmod(rest, self.size(axis))
        place, stride = 0, 1
        for axis in self.axes:
            if axis != Axis.PP:
                place, stride = place + places[axis] * stride, stride * self.size(axis)
        places[Axis.EP] = place % self.ep
        return places

    def place(self, rank: int) -> str:
        """How people find the rank: 6 in the worked example is `dp 1, pp 1, tp 0`; cp is told where it is in use."""
        places = self.coordinates(rank)
        axes = (Axis.DP, Axis.PP, *((Axis.CP,) if self.cp > 1 else ()), Axis.TP)
        return ", ".join(f"{axis} {places[axis]}" for axis in axes)

    def rank(self, **coordinates: int) -> int:
        """The rank at a place: tp=0, pp=1, dp=1 is 6 in the worked example. Axes left out are at 0."""
        for name, place in coordinates.items():
            if name not in FACTORS:
                raise ValueError(f"a coordinate must be one of {_listed(FACTORS)}, but is `{name}`")
            if not 0 <= place < self.size(name):
                raise ValueError(f"`{name}` must be from 0 to {self.size(name) - 1}, but is {place}")
        rank, stride = 0, 1
        for axis in self.axes:
            rank += coordinates.get(axis, 0) * stride
            stride *= self.size(axis)
        return rank

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """All groups along the axes together: a partition of the ranks, each group and the whole ascending."""
        if Axis.EP in axes:
            assert len(axes) == 1, "ep is cut out of tp × cp × dp and combines with no other axis"
            wide = self.groups(Axis.TP, Axis.CP, Axis.DP)
            cuts = (group[i : i + self.ep] for group in wide for i in range(0, len(group), self.ep))
            return tuple(sorted(cuts))
        inside = {Axis(axis) for axis in axes}
        offsets, bases, stride = [0], [0], 1
        for axis in self.axes:
            steps = range(0, stride * self.size(axis), stride)
            if axis in inside:
                offsets = [step + offset for step in steps for offset in offsets]
            else:
                bases = [step + base for step in steps for base in bases]
            stride *= self.size(axis)
        offsets.sort()
        return tuple(tuple(base + offset for offset in offsets) for base in sorted(bases))

    def expert_replicas(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold the same experts: those at one place in every ep cut of tp × cp × dp.

        Example: tp=2 dp=4 ep=4 cuts 0 … 7 into 0 1 2 3 and 4 5 6 7: (0, 4), (1, 5), (2, 6) and (3, 7).
        """
        wide = self.groups(Axis.TP, Axis.CP, Axis.DP)
        return tuple(sorted(group[place :: self.ep] for group in wide for place in range(self.ep)))

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The group along the axes that holds the rank."""
        self._check_rank(rank)
        return next(group for group in self.groups(*axes) if rank in group)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"`rank` must be from 0 to {self.world_size - 1}, but is {rank}")


def members_with(rank: int, partition: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The part of a partition that holds the rank."""
    return tuple(next(part for part in partition if rank in part))


def resolve_topology(
    *,
    world_size: int,
    tp: int,
    pp: int,
    cp: int = 1,
    ep: int = 1,
    dp: int | None = None,
    order: str = "tp-pp-dp",
) -> Topology:
    """The topology of a world; `dp` None is what the world size leaves. 16 ranks, tp=2, pp=2: dp=4."""
    for name, value in (("world_size", world_size), ("tp", tp), ("pp", pp), ("cp", cp)):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, but is {value}; set `{name}` to 1 or more")
    model = tp * pp * cp
    formula = f"tp {tp} × pp {pp} × cp {cp}"
    if dp is None:
        if world_size % model:
            raise ValueError(
                f"`world_size` must be a multiple of {formula} = {model}, but is {world_size}; "
                f"nearest that work: {_remedies(world_size, tp, pp, cp)}"
            )
        dp = world_size // model
    elif dp * model != world_size:
        remedy = f"world_size {dp * model}"
        remedy += f", or dp {world_size // model}" if world_size % model == 0 else ""
        raise ValueError(
            f"`world_size` must be dp {dp} × {formula} = {dp * model}, but is {world_size}; "
            f"nearest that work: {remedy}, or leave `dp` out"
        )
    return Topology(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, order=order)


def describe(topology: Topology) -> str:
    """A line per rank, outermost axis first: `rank 0: dp0 pp0 tp0`."""
    width = len(str(topology.world_size - 1))
    lines = []
    for rank in range(topology.world_size):
        places = topology.coordinates(rank)
        names = [*reversed(topology.axes), *([Axis.EP] if topology.ep > 1 else [])]
        lines.append(f"rank {rank:>{width}}: " + " ".join(f"{axis}{places[axis]}" for axis in names))
    return "\n".join(lines)


def _check_order(order: str, needed: Sequence[Axis]) -> None:
    names = order.split("-")
    rule = f"`order` must name axes of {_listed(FACTORS)}, each once, innermost first, joined by '-'"
    for name in names:
        if name not in FACTORS:
            hint = "; ep is carved out of tp × cp × dp and has no place in it" if name == Axis.EP else ""
            raise ValueError(f"{rule}, but is '{order}', where '{name}' is not one{hint}")
        if names.count(name) > 1:
            raise ValueError(f"{rule}, but is '{order}', where '{name}' comes twice")
    missing = [axis for axis in needed if axis not in names]
    if missing:
        insert = [*names[:1], *missing, *names[1:]] if Axis.CP in missing else [*names, *missing]
        raise ValueError(
            f"`order` must name every axis larger than one, but is '{order}', without {_listed(missing)}; "
            f"for example '{'-'.join(insert)}'"
        )


def _remedies(world_size: int, tp: int, pp: int, cp: int) -> str:
    """The world sizes and the sizes of single axes, nearest to those asked for, that fit together."""
    model = tp * pp * cp
    below = world_size // model * model
    texts = [f"world_size {_listed([size for size in (below, below + model) if size])}"]
    for name, value in (("tp", tp), ("pp", pp), ("cp", cp)):
        others = model // value
        if value > 1 and world_size % others == 0:
            texts.append(f"{name} {_listed(_nearest_divisors(world_size // others, value))}")
    return ", or ".join(texts)


def _nearest_divisors(number: int, wanted: int) -> list[int]:
    """The divisors of `number` next below and next above `wanted`: 16 and 3 gives 2 and 4."""
    divisors = [value for value in range(1, number + 1) if number % value == 0]
    below = [value for value in divisors if value <= wanted][-1:]
    return below + [value for value in divisors if value > wanted][:1]


def _listed(values: Sequence[object]) -> str:
    texts = [str(value) for value in values]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"
