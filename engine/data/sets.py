"""What `--data` names: one set, or several with the weights by which they are mixed. No torch.

A weight is a set's part of the samples. It is exact: written out as a whole number for each set, the sets take turns
so that after any number of samples each has had its part to within one sample.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from triaxis.engine.data.files import SEPARATOR

WEIGHED = re.compile(r"(?P<place>.+):(?P<weight>\d{1,9}(\.\d{1,9})?)", re.ASCII | re.DOTALL)
STDLIB = "stdlib"
MOST_TURNS = 100_000
"""Of whole weights together: the turns of one round are made when a run starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSet:
    """place: as `open_source` takes it. weight: a whole number, or None where `--data` gives no weights."""

    place: str
    weight: int | None = None


def named_sets(data: str, field: str = "data") -> tuple[NamedSet, ...]:
    """The sets of `data`; without weights there is one, the union of what is named.

    Raises ValueError, which names the setting, `field`.
    Example: "a.jsonl:0.7,b.jsonl:0.3" is a.jsonl with 7 and b.jsonl with 3; "a.jsonl,b.jsonl" is one set.
    """
    words = _words(data)
    if not any(weight for _, weight in words):
        return (NamedSet(place=data),)
    places = [place for place, _ in words]
    bare = [place for place, weight in words if weight is None]
    if bare:
        raise ValueError(
            f"`{field}` must give a weight for every set or for none, but {' and '.join(bare)} "
            f"{'has' if len(bare) == 1 else 'have'} none; write {bare[0]}:0.5, or leave all weights out for the union"
        )
    twice = sorted({place for place in places if places.count(place) > 1})
    if twice:
        raise ValueError(
            f"`{field}` must name each set once, but names {' and '.join(twice)} again; add its weights up"
        )
    if STDLIB in places and len(places) > 1:
        raise ValueError(f"`{field}` must be {STDLIB} alone, without other sets; name files")
    weights = _whole([Fraction(weight or 0) for _, weight in words], places, field)
    return tuple(NamedSet(place=place, weight=weight) for place, weight in zip(places, weights, strict=True))


def with_places(data: str, change: Callable[[str], str]) -> str:
    """The same words, each place changed, each weight as it was."""
    words = ((change(place), weight) for place, weight in _words(data))
    return SEPARATOR.join(place if weight is None else f"{place}:{weight}" for place, weight in words)


def _words(data: str) -> list[tuple[str, str | None]]:
    """(place, weight as written) of each."""
    if os.path.exists(data):
        return [(data, None)]
    words = data.split(SEPARATOR)
    found = [None if os.path.exists(word) else WEIGHED.fullmatch(word) for word in words]
    return [
        (match["place"], match["weight"]) if match else (word, None)
        for word, match in zip(words, found, strict=True)
    ]


def _whole(weights: Sequence[Fraction], places: Sequence[str], field: str) -> list[int]:
    """The least whole numbers in the same proportion."""
    empty = [place for place, weight in zip(places, weights, strict=True) if not weight]
    if empty:
        raise ValueError(
            f"`{field}` must have weights above 0, but that of {' and '.join(empty)} is 0; leave the set out: a "
            "run that is resumed keeps its place"
        )
    unit = math.lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * unit) for weight in weights]
    divisor = math.gcd(*whole)
    found = [weight // divisor for weight in whole]
    if sum(found) > MOST_TURNS:
        raise ValueError(
            f"`{field}` must have weights that are at most {MOST_TURNS:,} together as whole numbers, but they are "
            f"{sum(found):,} ({' : '.join(map(str, found))}); round them"
        )
    return found


def turns(weights: Sequence[int]) -> np.ndarray:
    """Which set gives each sample of a round of sum(weights): each set as often as its weight.

    After any number of samples a set has had its part to within one (R. Tijdeman, The chairman assignment problem,
    1980, with k sets: to within 1 - 1/(2k - 2)).
    Example: weights 3 and 1 give 0 0 1 0.
    """
    total, spread = sum(weights), 2 * max(1, len(weights) - 1)
    given = [0] * len(weights)
    found = np.empty(total, dtype=np.int64)
    for turn in range(total):
        # What is due to a set after this turn, in units of 1 / (spread * total).
        due = [
            spread * (weight * (turn + 1) - total * had) for weight, had in zip(weights, given, strict=True)
        ]
        number = min(
            (number for number, owed in enumerate(due) if owed >= total),
            key=lambda number: ((spread - 1) * total - due[number]) / weights[number],
        )
        given[number] += 1
        found[turn] = number
    return found
