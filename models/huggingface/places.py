"""Where each of our tensors lies among the tensors of a Hugging Face checkpoint. Standard library only.

Our names are those of Llama in `transformers`, so most families need few rows or none. What differs is told by rows of
a table, each with its way back: another name, a transposed matrix, several weights below one another in one tensor,
experts stacked in a dimension of their own, rotary rows in pairs. What no row names keeps its name.

Example (GPT-2, hidden 4): our `…q_proj.weight` and `…k_proj.weight`, both (4, 4), lie in `…c_attn.weight`, (4, 12): its
columns 0 to 4 and 4 to 8, transposed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of a family's table; `{layer}` and `{expert}` stand for numbers in both names.

    transposed: theirs is [in, out]
    stacked: theirs has experts as its first dimension
    interleaved: (height, turned): in each run of `height` rows the last `turned` ones, which rotary positions turn, lie
        in pairs there, and here the pairs' first ones above their second ones
    Rows with the same `theirs` lie below one another (before it is transposed), in the table's order.
    """

    ours: str
    theirs: str
    transposed: bool = False
    stacked: bool = False
    interleaved: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one of our tensors lies: rows from `first_row` on of their tensor `name` (of its expert), or columns.

    interleaved: as in `Row`
    """

    name: str
    first_row: int = 0
    transposed: bool = False
    expert: int | None = None
    interleaved: tuple[int, int] | None = None

    def order(self, offsets: Shape, sizes: Shape) -> list[int] | None:
        """Which of the rows that `index` finds there each row of ours is; None where they are in the same order.

        Example: height 5, of which 4 are turned: 0 1 3 2 4.
        """
        if self.interleaved is None:
            return None
        height, turned = self.interleaved
        if offsets[0] % height or sizes[0] % height:
            raise ValueError(
                f"rows of {self.name} must be read in runs of {height}, a head each, "
                f"but are {sizes[0]} from {offsets[0]} on"
            )
        plain = height - turned
        run = [*range(plain), *range(plain, height, 2), *range(plain + 1, height, 2)]
        return [first + row for first in range(0, sizes[0], height) for row in run]

    def index(self, offsets: Shape, sizes: Shape) -> tuple[slice | int, ...]:
        """Their elements that are a rectangle of ours; transpose what is read with it where `transposed`."""
        starts = (offsets[0] + self.first_row, *offsets[1:])
        parts: list[slice | int] = [
            slice(start, start + size) for start, size in zip(starts, sizes, strict=True)
        ]
        if self.transposed:
            parts.reverse()
        return tuple(parts) if self.expert is None else (self.expert, *parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """A whole model's tensors. of: by our names; shapes: of theirs; parts: our names in each of theirs."""

    of: Mapping[str, Place]
    shapes: Mapping[str, Shape]
    parts: Mapping[str, Sequence[str]]


def place_tensors(rows: Sequence[Row], ours: Mapping[str, Shape]) -> Places:
    """Places of all our tensors (name → whole shape) under a family's table."""
    patterns = [(_pattern(row.ours), row) for row in rows]
    found: dict[str, list[tuple[int, str, Row | None, int | None]]] = {}
    for name in ours:
        order, row, numbers = _row_of(name, patterns)
        expert = int(numbers["expert"]) if row is not None and row.stacked else None
        theirs = name if row is None else row.theirs.format_map(numbers)
        found.setdefault(theirs, []).append((order, name, row, expert))
    of: dict[str, Place] = {}
    shapes: dict[str, Shape] = {}
    for theirs, members in found.items():
        members.sort(key=lambda member: (member[3] or 0, member[0]))
        heights: dict[int | None, int] = {}
        for _, name, row, expert in members:
            first = heights.get(expert, 0)
            of[name] = Place(
                name=theirs,
                first_row=first,
                transposed=row is not None and row.transposed,
                expert=expert,
                interleaved=None if row is None else row.interleaved,
            )
            heights[expert] = first + ours[name][0]
        shapes[theirs] = _whole_shape(members[0][2], ours[members[0][1]], heights)
    parts = {theirs: [name for _, name, _, _ in members] for theirs, members in found.items()}
    return Places(of=of, shapes=shapes, parts=parts)


def _pattern(ours: str) -> re.Pattern[str]:
    """Whole names only: `experts.{expert}` must not match inside `shared_experts`."""
    return re.compile(re.sub(r"\\{(layer|expert)\\}", r"(?P<\1>\\d+)", re.escape(ours)))


def _row_of(
    name: str, patterns: Sequence[tuple[re.Pattern[str], Row]]
) -> tuple[int, Row | None, dict[str, str]]:
    for order, (pattern, row) in enumerate(patterns):
        match = pattern.fullmatch(name)
        if match is not None:
            return order, row, match.groupdict()
    return -1, None, {}


def _whole_shape(row: Row | None, first: Shape, heights: Mapping[int | None, int]) -> Shape:
    height = max(heights.values())
    whole = (height, *first[1:])
    if row is not None and row.transposed:
        whole = whole[::-1]
    return whole if row is None or not row.stacked else (len(heights), *whole)
