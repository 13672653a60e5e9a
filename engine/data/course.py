"""Which row each sample of a run is. No torch.

Sets take turns by their weights, and each goes through its own rows, one epoch behind the other, in an order that is a
function of (seed, epoch, its number of rows) and of nothing else. So a set's next sample depends on how many samples
it has given, and not on the other sets, their weights, ranks, or how often the run was restarted. Data without
weights is one set.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from triaxis.engine.data.sets import turns
from triaxis.engine.data.stream import Ints


def epoch_order(rows: int, *, seed: int, epoch: int) -> Ints:
    """A permutation of `rows`; sorts raw Philox numbers, whose stream NumPy promises not to change."""
    keys = np.random.Philox(np.random.SeedSequence((seed, epoch))).random_raw(rows)
    return np.argsort(keys, kind="stable").astype(np.int64)


class _Orders:
    """A set's orders by epoch; the latest and those beside it are kept."""

    def __init__(self, rows: int, seed: int) -> None:
        self.rows, self._seed = rows, seed
        self._known: dict[int, Ints] = {}

    def of(self, epoch: int) -> Ints:
        known = self._known  # another thread may put others in its place
        if epoch not in known:
            near = {other: order for other, order in known.items() if abs(other - epoch) == 1}
            known = {**near, epoch: epoch_order(self.rows, seed=self._seed, epoch=epoch)}
            self._known = known
        return known[epoch]


class Course:
    """The order of a run's samples over the rows of its sets, which lie one behind the other.

    rows: of each set. weights: whole numbers, as `named_sets` has them
    since: the run's sample from which these weights hold; begun: samples that each set had given by then
    Example: sets of 10 and 5 rows, weights 2 and 1: samples 0 and 2 are of the first set, its rows first in its order;
    sample 1 is of the second, a row from 10 to 14.
    """

    def __init__(
        self,
        rows: Sequence[int],
        *,
        seed: int,
        weights: Sequence[int] = (1,),
        since: int = 0,
        begun: Sequence[int] | None = None,
    ) -> None:
        self.weights, self.since = tuple(weights), since
        self.begun = (0,) * len(rows) if begun is None else tuple(begun)
        self._orders = [_Orders(count, seed) for count in rows]
        self._first_rows = np.cumsum([0, *rows[:-1]])
        self._turns = turns(weights)
        self._had = np.empty_like(self._turns)  # by the same set, earlier in the round
        for number in range(len(rows)):
            own = self._turns == number
            self._had[own] = np.arange(own.sum())

    def taken(self, sample: int) -> tuple[int, ...]:
        """The samples that each set has given when the run has taken so many, at least `since`."""
        rounds, rest = divmod(sample - self.since, len(self._turns))
        had = np.bincount(self._turns[:rest], minlength=len(self.weights)).tolist()
        return tuple(
            begun + rounds * weight + own
            for begun, weight, own in zip(self.begun, self.weights, had, strict=True)
        )

    def places(self, first: int, stop: int) -> tuple[Ints, Ints]:
        """(epoch of its set, row) of the run's samples [first, stop)."""
        rounds, turn = np.divmod(np.arange(first, stop) - self.since, len(self._turns))
        number = self._turns[turn]
        own = np.array(self.begun)[number] + rounds * np.array(self.weights)[number] + self._had[turn]
        epochs, rows = np.divmod(own, np.array([orders.rows for orders in self._orders])[number])
        for which, epoch in sorted(set(zip(number.tolist(), epochs.tolist(), strict=True))):
            mine = (number == which) & (epochs == epoch)
            rows[mine] = self._first_rows[which] + self._orders[which].of(epoch)[rows[mine]]
        return epochs, rows
