"""Which communicators NCCL is asked for, and how: pure, so that 512 ranks are counted without one GPU.

The world's own communicator comes with the ranks' meeting. Each further partition of the ranks is one split of it, in
which every rank takes part, in the one order in which a mesh makes its groups; equal partitions share one. `new_group`
instead would split the world once for every part of a partition: 257 splits at tp 8 × pp 8 × dp 8, not 3.

Messages between pipeline stages have a communicator for each direction. Those of one communicator run one behind the
other on one stream, which the order of a lowered schedule allows; but what goes up need not wait for what goes down.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from triaxis.parallel.places.topology import members_with

Partition = tuple[tuple[int, ...], ...]


UNDER_WAY: Final = 2
"""Large collectives that ranks of one machine's CPUs have under way in a group; one more ends the first."""


class Direction(StrEnum):
    """Where a message goes: to a later member of the group or to an earlier one."""

    UP = "up"
    DOWN = "down"


def direction(sender: int, receiver: int) -> Direction:
    """Of a message between two members of a group, by their places, so that both sides find the same queue."""
    return Direction.UP if sender < receiver else Direction.DOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a communicator is made with.

    urgent: its kernels come before others, so that what the next layer waits for is not queued behind products
    most_blocks: thread blocks of each kernel, each of which holds a multiprocessor while it waits; None: NCCL chooses
    """

    urgent: bool = False
    most_blocks: int | None = None


OPTIONS: Final[Mapping[str, Options]] = {
    "tp": Options(urgent=True),
    # A receive is posted early and spins until its message comes: with few blocks the products beside it keep the rest.
    "pp": Options(urgent=True, most_blocks=4),
}
"""By the group's name; of names that share a communicator the first one's."""


def is_made(partition: Partition, way: Direction) -> bool:
    """Whether a partition takes a communicator of its own: ranks that are all alone need none, all ranks have one."""
    return any(len(part) > 1 for part in partition) and (len(partition) > 1 or way is Direction.DOWN)


def held_by(rank: int, wanted: Iterable[tuple[Partition, Direction]]) -> int:
    """How many communicators a rank holds beside the world's, of those that are wanted."""
    return sum(
        is_made(partition, way) and len(members_with(rank, partition)) > 1
        for partition, way in dict.fromkeys(wanted)
    )
