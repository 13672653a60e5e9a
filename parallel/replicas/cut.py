"""How local parameters are cut into buckets, and buckets over the ranks that hold the same: pure arithmetic.

The step carries it out, and whoever plans the step calls the same functions. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from triaxis.parallel.places.layout import ParameterLayout

ALIGNMENT_ELEMENTS: Final = 16


class Member(
    NamedTuple
):  # a planner makes them by the thousand; a frozen dataclass takes several times as long
    """One local parameter, as the cut into buckets sees it.

    elements: held here, padding included; replicas: the mesh group whose members hold the same
    unit: the number of the unit that it is used with, 0 the root; alone: it shares no bucket (a tied weight, which
    not all stages hold)
    """

    name: str
    elements: int
    dtype: str
    replicas: str
    unit: int = 0
    alone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """What each replica keeps only a part of: optimizer states, gradients between microbatches, parameters."""

    states: bool
    gradients: bool
    parameters: bool

    @classmethod
    def of(cls, zero: int, replicas: int) -> Sharding:
        """In ZeRO's stage `zero`, over so many replicas. One alone keeps everything: there is nobody to share with."""
        stage = zero if replicas > 1 else 0
        return cls(states=stage >= 1, gradients=stage >= 2, parameters=stage == 3)


def fill_buckets(
    members: Sequence[Member], bucket_elements: int, shardings: Mapping[str, Sharding]
) -> list[list[int]]:
    """The members of each bucket by their places in `members`, in order of the buckets' first ones.

    A bucket has one dtype and one group of replicas, and is full with `bucket_elements` or more. Where parameters are
    sharded it also keeps to one unit, since it is gathered and freed with it. shardings: by the name of the replicas.
    Example: 4, 4, 4 and 4 elements in buckets of 6: [0, 1] and [2, 3]; if 1 has other replicas: [0, 2], [1] and [3].
    """
    buckets: list[list[int]] = []
    filling: dict[tuple[str, str, int], tuple[list[int], int]] = {}
    for place, member in enumerate(members):
        unit = member.unit if shardings[member.replicas].parameters else 0
        kind = member.dtype, member.replicas, unit
        bucket, elements = filling.get(kind, ([], bucket_elements))
        if member.alone or elements >= bucket_elements:
            bucket, elements = [], 0
            buckets.append(bucket)
        bucket.append(place)
        # after one that stands alone the next begins anew
        filling[kind] = bucket, bucket_elements if member.alone else elements + member.elements
    return buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of a shard's elements [start, stop) that belong to one piece of a parameter.

    first: the run's first element in the piece
    """

    start: int
    stop: int
    first: int
    layout: ParameterLayout


def cut_segments(pieces: Sequence[tuple[int, ParameterLayout]], start: int, stop: int) -> tuple[Segment, ...]:
    """The segments of the shard [start, stop) of a bucket whose pieces begin at the given elements.

    Example: pieces of 6 and 4 elements, shard [5, 10): segments [0, 1) of the first, [1, 5) of the second.
    """
    segments = []
    for offset, layout in pieces:
        low, high = max(offset, start), min(offset + layout.elements, stop)
        if low < high:
            segments.append(Segment(start=low - start, stop=high - start, first=low - offset, layout=layout))
    return tuple(segments)


def padded_elements(elements: int, replicas: int) -> int:
    """Of a bucket, so that all shards are equal and aligned: 100 elements over 4 replicas are padded to 128."""
    unit = replicas * ALIGNMENT_ELEMENTS
    return -(-elements // unit) * unit


def shard_range(padded: int, replicas: int, rank: int) -> tuple[int, int]:
    """The elements [start, stop) of a padded bucket that the replica `rank` keeps: 128 over 4, rank 1: [32, 64)."""
    size = padded // replicas
    return rank * size, (rank + 1) * size
