"""Several sources as one: the rows of each, one behind the other or in proportion."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from triaxis.engine.data.fingerprint import DIGEST_BYTES
from triaxis.engine.data.source import Source
from triaxis.engine.data.stream import Ints, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSet:
    """A set that is open. weight: a whole number; weighed: whether `--data` gives it."""

    name: str
    weight: int
    weighed: bool
    source: Source


def refuse_equal(sets: Sequence[OpenSet]) -> None:
    """Raises ValueError where two sets have one content: sets are known by it."""
    known: dict[str, str] = {}
    for one in sets:
        if one.source.fingerprint in known:
            raise ValueError(
                f"`data` must name each set once, but {one.name} holds what {known[one.source.fingerprint]} does; "
                "add their weights up"
            )
        known[one.source.fingerprint] = one.name


class JoinedSource:
    """A `Source` of all rows of several sets. Weights are in its fingerprint: ranks must mix alike.

    mixed: any beginning holds rows of every set in proportion; else they lie one behind the other
    """

    def __init__(self, sets: Sequence[OpenSet], *, mixed: bool = False) -> None:
        self._sources = sources = [one.source for one in sets]
        sizes = [len(source) for source in sources]
        self._starts = np.cumsum([0, *sizes])
        halves = [(np.arange(size) + 0.5) / size for size in sizes]
        self._order = np.argsort(np.concatenate(halves), kind="stable") if mixed else None
        sizes_known = [source.vocab_size for source in sources]
        self.vocab_size = 0 if 0 in sizes_known else max(sizes_known)
        parts = [f"{one.source.fingerprint} {one.weight}" for one in sets]
        self.fingerprint = blake2b("\n".join(parts).encode(), digest_size=DIGEST_BYTES).hexdigest()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _place(self, index: int) -> tuple[Source, int]:
        row = index if self._order is None else int(self._order[index])
        number = bisect_right(self._starts, row) - 1
        return self._sources[number], row - int(self._starts[number])

    def sample(self, epoch: int, index: int) -> Sample:
        source, row = self._place(index)
        return source.sample(epoch, row)

    def tokens_of(self, indices: Ints) -> int:
        """Real tokens in these rows: without padding."""
        rows = indices if self._order is None else self._order[indices]
        number = np.searchsorted(self._starts, rows, side="right") - 1
        return sum(
            source.tokens_of(rows[number == which] - self._starts[which])
            for which, source in enumerate(self._sources)
        )

    def describe(self, index: int, position: int) -> str:
        source, row = self._place(index)
        return source.describe(row, position)

    def summary(self) -> str:
        return "\n".join(source.summary() for source in self._sources)
