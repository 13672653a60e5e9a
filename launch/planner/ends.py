"""The last stage's end where a model has extra prediction depths: head and depths as one unit. No torch.

A depth is recorded from the embedding to its loss, but with a vocabulary of a few words: what its tables take is told
by the embedding's and the head's own records, once more for each depth. In backward, with two depths:

    [ head ][ depth 2 ][ embedding ]  [ head ][ depth 1 ][ embedding ]  [ head ]

Gradients of the head are whole after the last of its pieces; those of the embedding in its own unit, or, where the last
stage has a table of its own, after the last of its pieces here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from triaxis.launch.planner.units import Pricer, Stretch, Unit

if TYPE_CHECKING:
    from triaxis.engine.trace.parts import Parameter, Part, Parts, Piece


def joined_unit(head: Unit, depths: Sequence[Unit], embedding: Unit) -> Unit:
    """The prices of head and depths. Its parameters are the head's: of whole gradients the parts tell."""
    further = [
        piece for depth in reversed(depths) for unit in (head, depth, embedding) for piece in unit.backward
    ]
    return replace(
        head,
        forward=_in_turn([head.forward, *(one for depth in depths for one in (depth.forward, head.forward))]),
        backward=(*further, *head.backward),
    )


def depth_units(pricer: Pricer, low: Parts, high: Parts) -> tuple[Unit, ...]:
    """Extra prediction depths without the head and the embedding of few words that they were recorded with."""
    if not low.depths:
        return ()
    head, embedding = pricer.unit(low.head, high.head), pricer.unit(low.embedding, high.embedding)
    return tuple(
        _without_ends(pricer.unit(one, other), head, embedding)
        for one, other in zip(low.depths, high.depths, strict=True)
    )


def _without_ends(depth: Unit, head: Unit, embedding: Unit) -> Unit:
    """A depth less the time of a head and an embedding. Backward begins with the head and ends with the embedding."""
    pieces = list(depth.backward)
    pieces[0] = _less(pieces[0], head.seconds, head.computing)
    pieces[-1] = _less(pieces[-1], embedding.seconds, embedding.computing)
    forward = _less(
        depth.forward,
        head.forward.seconds + embedding.forward.seconds,
        head.forward.computing + embedding.forward.computing,
    )
    return replace(depth, forward=forward, backward=tuple(pieces))


def _less(stretch: Stretch, seconds: float, computing: float) -> Stretch:
    return replace(
        stretch,
        seconds=max(stretch.seconds - seconds, 0.0),
        computing=max(stretch.computing - computing, 0.0),
    )


def _in_turn(stretches: Sequence[Stretch]) -> Stretch:
    level = height = 0.0
    for one in stretches:
        height = max(height, level + one.height)
        level += one.growth
    return Stretch(
        seconds=sum(one.seconds for one in stretches),
        computing=sum(one.computing for one in stretches),
        height=height,
        growth=level,
    )


@dataclass(slots=True)
class _Ends:
    """What is put together so far. own, root: parameters; each piece completes places in one of them."""

    own: list[Parameter]
    root: list[Parameter]
    pieces: list[tuple[Piece, tuple[tuple[bool, int], ...]]]

    def add(self, part: Part, *, completes: bool) -> None:
        count, own, root = len(part.parameters), len(self.own), len(self.root)
        for piece in part.backward:
            places = piece.completes if completes else ()
            told = tuple((n >= count, n - count + root if n >= count else n + own) for n in places)
            self.pieces.append((piece, told))
        if completes:
            self.own += part.parameters
            self.root += part.root


def joined_part(parts: Parts, *, table: bool) -> Part:
    """The parameters of head and depths, and when their gradients are whole, in the pieces of `joined_unit`.

    table: the stage has a table of its own for the embedding, tied to the first stage's
    """
    ends = _Ends([], [], [])
    tied = replace(
        parts.embedding,
        parameters=tuple(replace(one, tied=True) for one in parts.embedding.parameters),
        root=(),
    )
    for number, depth in reversed(list(enumerate(parts.depths))):
        ends.add(parts.head, completes=False)
        ends.add(depth, completes=True)
        ends.add(tied, completes=table and number == 0)
    ends.add(parts.head, completes=True)
    own = len(ends.own)
    return replace(
        parts.head,
        parameters=tuple(ends.own),
        root=tuple(ends.root),
        backward=tuple(
            replace(piece, completes=tuple(place + own * rooted for rooted, place in told))
            for piece, told in ends.pieces
        ),
    )
