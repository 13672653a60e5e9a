"""Segments cut into pieces: where something begins, or where a gradient is whole. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from triaxis.parallel.programs.program import Communicate, Event, MemoryCurve, Segment

Whole = tuple[Segment, int]
"""A piece of a backward pass, and the bucket whose gradient is whole at its end (-1: none)."""


def cut(segment: Segment, starts: Sequence[int]) -> list[Segment]:
    """The segment in pieces that begin at the events `starts`; the first one is what comes before them."""
    bounds = [0, *starts, len(segment.events)]
    return [
        _slice(segment, start, stop, first=start == 0, last=number == len(starts))
        for number, (start, stop) in enumerate(pairwise(bounds))
    ]


def _slice(segment: Segment, start: int, stop: int, *, first: bool, last: bool, skip: int = 0) -> Segment:
    """Events [start, stop) without the first `skip`; a change of memory on a border is the earlier piece's."""
    memory = segment.memory
    chosen = [
        place
        for place, event in enumerate(memory.places)
        if (event > start or first) and (event <= stop or last)
    ]
    return Segment(
        segment.events[start + skip : stop],
        MemoryCurve(
            tuple(max(0, memory.places[place] - start - skip) for place in chosen),
            tuple(memory.kinds[place] for place in chosen),
            tuple(memory.deltas[place] for place in chosen),
        ),
    )


def _is_reduction(event: Event) -> bool:
    return isinstance(event, Communicate) and event.gradient >= 0


def pieces_of(backward: Segment) -> list[Whole]:
    """The pieces of a backward pass, each with the bucket that is whole at its end (-1: none)."""
    marks = [place for place, event in enumerate(backward.events) if _is_reduction(event)]
    found: list[Whole] = []
    start = 0
    for mark in marks:
        event = backward.events[mark]
        assert isinstance(event, Communicate)
        piece = _slice(backward, start, mark, first=start == 0, last=False, skip=1 if start else 0)
        found.append((piece, event.gradient))
        start = mark
    rest = _slice(backward, start, len(backward.events), first=start == 0, last=True, skip=1 if start else 0)
    return [*found, (rest, -1)]
