"""Which ranks of a cluster cannot be told apart: they run in step, so one of each class stands for all. Pure.

This is colour refinement, the one-dimensional Weisfeiler-Leman algorithm (1-WL). Ranks are coloured by what their
programs say; then, again and again, by their colour and the colours of those they share groups with, until no colour
splits any more. What is left is the coarsest equitable partition: a rank of a class has partners of the same classes as
any other of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from triaxis.parallel.programs.program import Cluster, Communicate, Program


@dataclass(frozen=True, slots=True)
class Classes:
    """class_of[rank]; members[class], the first of which stands for all."""

    class_of: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]


def rank_classes(cluster: Cluster, apart: Sequence[object] | None = None) -> Classes:
    """The coarsest partition in which two ranks of a class run the same program with partners of the same classes.

    apart: for each rank, what else tells it from others (such as its speed)
    """
    uses = [_uses(program) for program in cluster.programs]
    colours = _first_colours(cluster, uses, apart)
    count = len(set(colours))
    while True:
        colours = _refined(cluster, uses, colours)
        # a refinement only ever splits: as many colours as before means the same classes as before
        if len(set(colours)) == count:
            return _classes(colours)
        count = len(set(colours))


class _Numbers(dict[object, int]):
    """A number for each distinct key, from 0 on: small, where keys are whole programs."""

    def __missing__(self, key: object) -> int:
        number = self[key] = len(self)
        return number


def _first_colours(
    cluster: Cluster, uses: Sequence[Mapping[str, bool]], apart: Sequence[object] | None
) -> list[int]:
    """By what a rank's program says to others, and its own places in the groups where places matter."""
    numbers = _Numbers()
    talks = [numbers[program.talk] for program in cluster.programs]
    place_in: dict[str, list[int]] = {}
    for name, partition in cluster.groups.items():
        places = place_in[name] = [0] * cluster.size
        for members in partition:
            for place, rank in enumerate(members):
                places[rank] = place
    colours = []
    for rank, number in enumerate(cluster.program_of):
        own_places = tuple(place_in[name][rank] for name, placed in uses[number].items() if placed)
        colours.append(numbers[talks[number], own_places, None if apart is None else apart[rank]])
    return colours


def _refined(cluster: Cluster, uses: Sequence[Mapping[str, bool]], colours: Sequence[int]) -> list[int]:
    """By a rank's colour and what it sees in each group that it talks in.

    That is the colour at each place where it names places (messages, roots, uneven parts); elsewhere the members cannot
    be told from one another, and it is the set of their colours.
    """
    numbers = _Numbers()
    views: list[list[int]] = [[] for _ in colours]
    for name, partition in cluster.groups.items():
        for members in partition:
            by_place = tuple(colours[rank] for rank in members)
            seen = {
                True: numbers["places", by_place],
                False: numbers["colours", tuple(sorted(set(by_place)))],
            }
            for rank in members:
                placed = uses[cluster.program_of[rank]].get(name)
                views[rank].append(-1 if placed is None else seen[placed])
    return [numbers[colour, tuple(view)] for colour, view in zip(colours, views, strict=True)]


def _classes(colours: Sequence[int]) -> Classes:
    """Classes in the order of their first ranks."""
    alike: dict[int, list[int]] = {}
    for rank, colour in enumerate(colours):
        alike.setdefault(colour, []).append(rank)
    numbers = {colour: number for number, colour in enumerate(alike)}
    return Classes(
        tuple(numbers[colour] for colour in colours), tuple(tuple(ranks) for ranks in alike.values())
    )


def _uses(program: Program) -> Mapping[str, bool]:
    """The groups a program talks in, and whether places in them matter."""
    used: dict[str, bool] = {}
    for segment in {id(step.segment): step.segment for step in program.steps}.values():
        for event in segment.messages:
            if isinstance(event, Communicate):
                placed = event.peer >= 0 or bool(event.gives)
                used[event.group] = used.get(event.group, False) or placed
    return dict(sorted(used.items()))
