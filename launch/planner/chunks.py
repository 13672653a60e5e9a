"""What a chunk of the model holds on one rank: its units, its parameters in buckets, and when gradients are whole.

Backward passes through the units in turn, each in the pieces that profiles.py prices. A moment is the place of a unit
times PIECES, and the piece in it. Which parameters there are is recorded; how they are cut into buckets, layers into
stages, is asked of the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby, islice
from typing import TYPE_CHECKING, Final

from triaxis.engine.plan import StepPlan, stage_layers
from triaxis.launch.planner.ends import joined_part
from triaxis.launch.planner.profiles import Profile, apart, shapes_of
from triaxis.launch.planner.units import Unit
from triaxis.parallel.replicas.cut import Member, Sharding, fill_buckets, padded_elements

if TYPE_CHECKING:
    from triaxis.engine.trace.parts import Parameter, Part, Parts

PIECES: Final = 256
Group = tuple[int, ...]
"""The ranks of the first rank's group, over which gradients are summed besides dp."""
HEAD, EMBEDDING, ROOT = "head", "embedding", -1
TIES: Final[Group] = ()
"""Stands for the first and the last stage, over which a tied table's gradient is summed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters that are reduced together, padded as the engine pads them.

    place: of the unit that they are gathered with, in backward order; ROOT for the root's
    first, whole: moments when its gradient's buffer is taken, and after which its gradient is whole
    partial: elements whose gradients are summed further, by group
    """

    number: int
    elements: int
    place: int
    first: int
    whole: int
    partial: tuple[tuple[Group, int], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """Some layers, with the embedding or the head if they are the first or the last. units: in backward order."""

    units: tuple[Hashable, ...]
    buckets: tuple[Bucket, ...]

    @cached_property
    def first(self) -> bool:
        """Whether it has the embedding."""
        return self.units[-1] == EMBEDDING

    @cached_property
    def last(self) -> bool:
        """Whether it has the head."""
        return self.units[0] == HEAD

    @cached_property
    def counts(self) -> tuple[tuple[Hashable, int], ...]:
        """Units of each kind."""
        return tuple(Counter(self.units).items())

    @cached_property
    def layers(self) -> int:
        return len(self.units) - self.first - self.last

    @cached_property
    def elements(self) -> int:
        """Of all buckets."""
        return sum(bucket.elements for bucket in self.buckets)

    @cached_property
    def partial(self) -> tuple[tuple[Group, int, int], ...]:
        """Group, elements that are summed over it, and all elements, of the buckets that have some."""
        return tuple(
            (group, some, bucket.elements) for bucket in self.buckets for group, some in bucket.partial
        )

    @cached_property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Elements of buckets, and how many there are of that size."""
        return tuple(Counter(bucket.elements for bucket in self.buckets).items())

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """For each place: how many units of the same kind follow in a row, in backward order."""
        found = [0] * len(self.units)
        for place in range(len(self.units) - 2, -1, -1):
            if self.units[place] == self.units[place + 1]:
                found[place] = found[place + 1] + 1
        return tuple(found)

    @cached_property
    def of_unit(self) -> dict[int, tuple[Bucket, ...]]:
        """The buckets that are gathered for the unit at a place."""
        places = (ROOT, *range(len(self.units)))
        return _grouped(places, ((bucket.place, bucket) for bucket in self.buckets))

    @cached_property
    def completions(self) -> tuple[Bucket, ...]:
        """In the order in which their gradients are whole."""
        return tuple(sorted(self.buckets, key=lambda bucket: bucket.whole))

    @cached_property
    def completing(self) -> dict[int, tuple[Bucket, ...]]:
        """By moment, those whose gradients are whole then."""
        return _grouped((), ((bucket.whole, bucket) for bucket in self.buckets))

    def gathered(self, place: int, moment: int) -> float:
        """Elements of the parameters that are here under ZeRO 3: the unit's, the next one's, the root's."""
        return self._near[place] + (self._near[ROOT] if moment <= self._rooted else 0.0)

    @cached_property
    def _near(self) -> dict[int, float]:
        sizes = {place: sum(bucket.elements for bucket in held) for place, held in self.of_unit.items()}
        return {
            place: sizes[place] + (sizes.get(place + 1, 0) if place != ROOT else 0)
            for place in (ROOT, *range(len(self.units)))
        }

    @cached_property
    def _rooted(self) -> int:
        """The moment up to which the root's parameters stay; -1 if it has none."""
        return max((bucket.whole for bucket in self.of_unit[ROOT]), default=-1)


def unit_of(profile: Profile, name: Hashable) -> Unit:
    """The prices of a chunk's unit."""
    if name == HEAD:
        return profile.end
    return profile.embedding if name == EMBEDDING else profile.layers[name]  # type: ignore[index]


def _grouped(keys: Iterable[int], buckets: Iterable[tuple[int, Bucket]]) -> dict[int, tuple[Bucket, ...]]:
    groups: dict[int, list[Bucket]] = {key: [] for key in keys}
    for key, bucket in buckets:
        groups.setdefault(key, []).append(bucket)
    return {key: tuple(group) for key, group in groups.items()}


def rank_chunks(
    plan: StepPlan, tp: int, pp: int, replicas: int, shown: int | None = None
) -> tuple[tuple[Chunk, ...], ...]:
    """The chunks of each pipeline rank, as the engine cuts layers and buckets.

    shown: at most so many layers of a kind in a row, where a few of them show all that happens
    """
    shape = replace(
        plan, microbatch_size=1, microbatches=1, zero=3 if plan.zero == 3 and replicas > 1 else 0, seed=None
    )
    return _rank_chunks(shape, tp, pp, replicas, shown)


@lru_cache(maxsize=4096)
def _rank_chunks(
    plan: StepPlan, tp: int, pp: int, replicas: int, shown: int | None
) -> tuple[tuple[Chunk, ...], ...]:
    parts = shapes_of(apart(plan, pp), tp)
    cuts = stage_layers(plan.model, pp * plan.virtual_stages)
    last = len(cuts) - 1
    made: dict[tuple[object, ...], Chunk] = {}

    def chunk(number: int) -> Chunk:
        runs = groupby(plan.model.kind(layer) for layer in cuts[number])
        kinds = tuple(kind for _, run in runs for kind in islice(run, shown))
        key = kinds, number == 0, number == last
        if key not in made:
            made[key] = _chunk(plan, parts, kinds, replicas, first=number == 0, last=number == last)
        return made[key]

    return tuple(tuple(chunk(number) for number in range(rank, last + 1, pp)) for rank in range(pp))


@dataclass(slots=True, kw_only=True)
class _Held:
    """A parameter in a chunk. first, whole: as of a bucket."""

    parameter: Parameter
    place: int
    first: int
    whole: int


def _chunk(
    plan: StepPlan, parts: Parts, kinds: Sequence[Hashable], replicas: int, *, first: bool, last: bool
) -> Chunk:
    ends = _ends(plan, parts, first=first, last=last)
    units = ((HEAD,) if last else ()) + tuple(reversed(kinds)) + ((EMBEDDING,) if first else ())
    root: list[_Held] = []
    own: list[list[_Held]] = []
    for place, name in enumerate(units):
        held, rooted = _of_unit(ends[name] if name in ends else parts.layers[name], place)  # type: ignore[index]
        own.append(held)
        root = [*rooted, *root]  # the embedding's come before the head's, as modules do
    ordered = [*root, *(held for unit in reversed(own) for held in unit)]
    members = [
        Member(
            name=str(number),
            elements=held.parameter.elements,
            dtype=plan.dtype,
            replicas="dp",
            unit=0 if held.place == ROOT else len(units) - held.place,
            alone=held.parameter.tied,
        )
        for number, held in enumerate(ordered)
    ]
    cut = fill_buckets(members, plan.bucket_elements, {"dp": Sharding.of(plan.zero, replicas)})
    return Chunk(
        units=units,
        buckets=tuple(
            _bucket(number, [ordered[place] for place in places], replicas)
            for number, places in enumerate(cut)
        ),
    )


def _ends(plan: StepPlan, parts: Parts, *, first: bool, last: bool) -> dict[Hashable, Part]:
    """Head and embedding as a chunk has them: extra prediction depths, tables that are tied to another stage's."""
    depths, tied = plan.model.depths > 0, plan.model.tied and not (first and last)
    if tied:
        head = tuple(replace(one, tied=True) for one in parts.head.parameters)
        parts = replace(parts, head=replace(parts.head, parameters=head))
    table = tuple(
        replace(one, tied=tied or (depths and not last), shared=one.shared or (depths and last))
        for one in parts.embedding.parameters
    )
    return {
        HEAD: joined_part(parts, table=not (first or plan.model.tied)) if depths else parts.head,
        EMBEDDING: replace(parts.embedding, parameters=table),
    }


def _of_unit(part: Part, place: int) -> tuple[list[_Held], list[_Held]]:
    """The unit's own parameters and the root's that it uses."""
    whole = {
        number: place * PIECES + index
        for index, piece in enumerate(part.backward)
        for number in piece.completes
    }

    def held(number: int, parameter: Parameter, where: int) -> _Held:
        if parameter.tied and where != ROOT:
            parameter = replace(parameter, partial=(*parameter.partial, TIES))
        # the head uses a shared table first, and is always the first unit
        begins = 0 if parameter.shared else whole[number]
        return _Held(parameter=parameter, place=where, first=begins, whole=whole[number])

    count = len(part.parameters)
    own = [held(number, one, place) for number, one in enumerate(part.parameters)]
    return own, [held(count + number, one, ROOT) for number, one in enumerate(part.root)]


def _bucket(number: int, members: Sequence[_Held], replicas: int) -> Bucket:
    partial = Counter[Group]()
    for member in members:
        for group in member.parameter.partial:
            partial[group] += member.parameter.elements
    return Bucket(
        number=number,
        elements=padded_elements(sum(member.parameter.elements for member in members), replicas),
        place=members[0].place,
        first=min(member.first for member in members),
        whole=max(member.whole for member in members),
        partial=tuple(sorted(partial.items())),
    )
