"""What a chunk of this engine's model holds on one rank, and how parallel/replicas/zero.py cuts it into buckets.

Backward passes through units: the head (0) with the last norm, the layers from the last (1) to the first, and the
embedding with the learned positions. Each has up to STEPS steps, after each of which one parameter's gradient is
whole; a moment is unit · STEPS + step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final, NamedTuple

from triaxis.launch.planner.layout import cut_evenly
from triaxis.launch.planner.shapes import Shape

BUCKET_ELEMENTS: Final = 1 << 25
UNDER_WAY: Final = 2  # reductions that ZeRO 2 and 3 do not wait for
STEPS: Final = 6
ROOT: Final = -1  # the unit of what is in no layer, head or embedding, or in two of them
DOWN, UP, MLP_NORM, OUTPUT, FUSED, ATTENTION_NORM = range(STEPS)  # of a layer
HEAD, LAST_NORM = 0, 1  # of the head
POSITIONS, TABLE = 0, 1  # of the embedding


class Parameter(NamedTuple):  # made by the thousand, several times as fast as a frozen dataclass
    """elements of this rank's part; unit: gathered with it; first, last: the moments of its gradient's first and
    last contribution (a shared weight has two); replicated: every tensor rank has it."""

    elements: float
    unit: int
    first: int
    last: int
    replicated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Consecutive parameters. first, last: moments when its gradient's buffer is taken, and is whole; replicated:
    elements that every tensor rank has"""

    number: int
    elements: float
    unit: int
    first: int
    last: int
    replicated: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """Some layers, with the embedding (first) or the head (last), in buckets that may cross units or not."""

    layers: int
    first: bool
    last: bool
    buckets: tuple[Bucket, ...]

    @cached_property
    def elements(self) -> float:
        """Of all parameters."""
        return sum(bucket.elements for bucket in self.buckets)

    @cached_property
    def sizes(self) -> tuple[tuple[float, int], ...]:
        """Elements of buckets, and how many there are of that size."""
        return tuple(Counter(bucket.elements for bucket in self.buckets).items())

    @cached_property
    def replicated(self) -> tuple[tuple[float, float], ...]:
        """Elements that every tensor rank has, and all, of those buckets where there are some."""
        return tuple((bucket.replicated, bucket.elements) for bucket in self.buckets if bucket.replicated)

    @cached_property
    def units(self) -> tuple[int, ...]:
        """As backward passes through them."""
        start, stop = (0 if self.last else 1), self.layers + (2 if self.first else 1)
        return tuple(range(start, stop))

    @cached_property
    def of_unit(self) -> dict[int, tuple[Bucket, ...]]:
        """The buckets that are gathered for a unit."""
        return _grouped((ROOT, *self.units), ((bucket.unit, bucket) for bucket in self.buckets))

    def gathered(self, unit: int, moment: int) -> float:
        """Elements of the parameters that are here under ZeRO 3: the unit's, the next one's, the root's."""
        return self._near[unit] + (self._near[ROOT] if moment <= self._rooted else 0.0)

    @cached_property
    def _near(self) -> dict[int, float]:
        sizes = {unit: sum(bucket.elements for bucket in held) for unit, held in self.of_unit.items()}
        return {unit: sizes[unit] + sizes.get(unit + 1, 0.0) for unit in self.units} | {ROOT: sizes[ROOT]}

    @cached_property
    def _rooted(self) -> int:
        """The moment up to which the root's parameters stay; -1 if it has none."""
        return max((bucket.last for bucket in self.of_unit[ROOT]), default=-1)

    @cached_property
    def completions(self) -> tuple[Bucket, ...]:
        """In the order in which their gradients are whole."""
        return tuple(sorted(self.buckets, key=lambda bucket: bucket.last))

    @cached_property
    def completing(self) -> dict[int, tuple[Bucket, ...]]:
        """By moment, those whose gradients are whole then."""
        return _grouped((), ((bucket.last, bucket) for bucket in self.buckets))


def _grouped(keys: Iterable[int], buckets: Iterable[tuple[int, Bucket]]) -> dict[int, tuple[Bucket, ...]]:
    groups: dict[int, list[Bucket]] = {key: [] for key in keys}
    for key, bucket in buckets:
        groups.setdefault(key, []).append(bucket)
    return {key: tuple(group) for key, group in groups.items()}


@lru_cache(maxsize=4096)
def rank_chunks(
    shape: Shape, tensor: int, pp: int, virtual_stages: int, whole_units: bool
) -> tuple[tuple[Chunk, ...], ...]:
    """The chunks of each pipeline rank, as engine.step cuts the layers."""
    parts = pp * virtual_stages
    head = shape.embedding_parameters() / shape.dense_parameters(routed=False)
    counts = cut_evenly(shape.layers, parts, 0.0, head)
    return tuple(
        tuple(
            chunk_of(
                shape,
                tensor,
                counts[part],
                first=part == 0,
                last=part == parts - 1,
                whole_units=whole_units,
            )
            for part in range(rank, parts, pp)
        )
        for rank in range(pp)
    )


@lru_cache(maxsize=4096)
def chunk_of(shape: Shape, tensor: int, layers: int, *, first: bool, last: bool, whole_units: bool) -> Chunk:
    """A chunk on one of `tensor` ranks. whole_units: buckets do not cross units (ZeRO 3)."""
    embedding = layers + 1
    hidden, bias = shape.hidden, 1 if shape.biased else 0
    norm = (hidden,) if shape.rms else (hidden, hidden)
    table = -(-shape.vocab // tensor) * hidden
    query, keys = shape.attention_features(tensor)
    fused = query + 2 * keys
    inner = (shape.mlp_matrices - 1) * shape.ffn / tensor
    apart = shape.tied and not (first and last)  # a tied table on two stages
    shared = shape.tied and first and last

    def made(elements: float, unit: int, step: int, *, within: int | None = None) -> Parameter:
        """within: the unit whose backward gives its gradient, if another."""
        moment = (unit if within is None else within) * STEPS + step
        replicated = step in (ATTENTION_NORM, MLP_NORM) if 0 < unit < embedding else unit == ROOT
        return Parameter(elements=elements, unit=unit, first=moment, last=moment, replicated=replicated)

    root: list[Parameter] = []
    if shared:
        root.append(Parameter(elements=table, unit=ROOT, first=HEAD, last=embedding * STEPS + TABLE))
    if first and shape.bound_rows:
        root.append(made(shape.bound_rows * hidden, ROOT, POSITIONS, within=embedding))
    if last:
        root += [made(size, ROOT, LAST_NORM, within=0) for size in norm]
    tables = [made(table, embedding, TABLE)] if first and not shared else []
    heads = [made(table, 0, HEAD)] if last and not shared else []
    layer = [
        *((size, step) for step in (ATTENTION_NORM, MLP_NORM) for size in norm),
        (fused * hidden, FUSED),
        (fused * bias, FUSED),
        (query * hidden, OUTPUT),
        (hidden * bias, OUTPUT),
        (inner * hidden, UP),
        (inner * bias, UP),
        (shape.ffn / tensor * hidden, DOWN),
        (hidden * bias, DOWN),
    ]
    blocks = [made(size, unit, step) for unit in range(layers, 0, -1) for size, step in layer if size]
    groups = _fill([*root, *tables, *blocks, *heads], whole_units, tables + heads if apart else [])
    buckets = tuple(
        Bucket(
            number=number,
            elements=sum(member.elements for member in group),
            unit=group[0].unit,
            first=min(member.first for member in group),
            last=max(member.last for member in group),
            replicated=sum(member.elements for member in group if member.replicated),
        )
        for number, group in enumerate(groups)
    )
    return Chunk(layers=layers, first=first, last=last, buckets=buckets)


def _fill(
    parameters: Sequence[Parameter], whole_units: bool, alone: Sequence[Parameter]
) -> list[list[Parameter]]:
    """Consecutive parameters until a bucket holds BUCKET_ELEMENTS; some stand alone."""
    groups: list[list[Parameter]] = []
    size: float = BUCKET_ELEMENTS
    for parameter in parameters:
        another = whole_units and groups and groups[-1][-1].unit != parameter.unit
        if size >= BUCKET_ELEMENTS or another or parameter in alone:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size = BUCKET_ELEMENTS if parameter in alone else size + parameter.elements
    return groups
