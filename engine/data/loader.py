"""Which rows a step trains on, and which of them are this rank's.

The order is a `Course`: not a function of ranks, nor of how often a run was restarted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from triaxis.engine.data.course import Course
from triaxis.engine.data.source import Source
from triaxis.engine.data.stream import Sample
from triaxis.models.batch import IGNORED, Batch
from triaxis.parallel.kernels.attention import documents_of


class Loader:
    """Microbatches of one data-parallel rank.

    Sample j of a global batch goes to data rank j // (global_batch / data_size), and there fills
    microbatches in order. Example: global batch 8, microbatches of 2, 2 ranks: rank 1 has (4 5) (6 7).
    course: the order of samples; left out, the source's epochs one behind the other
    """

    def __init__(
        self,
        source: Source,
        *,
        seed: int,
        global_batch: int,
        microbatch_size: int,
        data_rank: int,
        data_size: int,
        vocab_size: int,
        course: Course | None = None,
    ) -> None:
        if len(source) == 0:
            raise ValueError("the source must hold at least one row, but is empty")
        if global_batch < 1 or global_batch % (microbatch_size * data_size):
            raise ValueError(
                "`global_batch` must be a multiple of microbatch_size x dp "
                f"({microbatch_size} x {data_size}), but is {global_batch}; change one of the three"
            )
        if seed < 0:
            raise ValueError(f"`seed` must be at least 0, but is {seed}")
        self.source = source
        self.seed = seed
        self.global_batch = global_batch
        self.microbatch_size = microbatch_size
        self.data_rank = data_rank
        self.data_size = data_size
        self.vocab_size = vocab_size
        self.course = course or Course([len(source)], seed=seed)

    def step_batches(self, step: int, *, first_sample: int | None = None) -> list[Batch]:
        """This rank's microbatches of optimizer step `step` (from 0).

        first_sample: the samples consumed before this step, where that is not step * global_batch
            (a run that was resumed with another global batch)
        """
        share = self.global_batch // self.data_size
        first = step * self.global_batch if first_sample is None else first_sample
        first += self.data_rank * share
        places = list(zip(*(part.tolist() for part in self.course.places(first, first + share)), strict=True))
        size = self.microbatch_size
        return [self._batch(places[start : start + size]) for start in range(0, share, size)]

    def tokens_of(self, first_sample: int) -> int:
        """Real tokens, without padding, of the global batch that begins with this sample."""
        _, rows = self.course.places(first_sample, first_sample + self.global_batch)
        return self.source.tokens_of(rows)

    def eval_samples(self, batches: int | None = None) -> int:
        """The samples of an evaluation over all ranks: `batches` global batches, or all there are."""
        return len(self.source) if batches is None else min(len(self.source), batches * self.global_batch)

    def eval_batches(self, batches: int | None = None) -> list[Batch]:
        """This rank's microbatches of an evaluation: every sample once, in the source's order.

        Every rank has equally many; rows that no sample is left for are padding without a label.
        Example: 10 samples, microbatches of 2: rank 0 of 2 has (0 1) (4 5) (8 9), rank 1 (2 3) (6 7) (- -).
        """
        samples, size = self.eval_samples(batches), self.microbatch_size
        found = []
        for first in range(self.data_rank * size, samples + self.data_rank * size, size * self.data_size):
            found.append(self._batch([(0, index) for index in range(first, min(first + size, samples))]))
        return found

    def _batch(self, places: Sequence[tuple[int, int]]) -> Batch:
        """A microbatch of the rows at (epoch, index); padding rows behind them fill it up."""
        rows = [self.source.sample(epoch, index) for epoch, index in places]
        for (_, index), row in zip(places, rows, strict=True):
            self._check(index, row)
        length = len(rows[0].tokens_L) if rows else len(self.source.sample(0, 0).tokens_L)
        return make_batch(rows, self.microbatch_size, length)

    def _check(self, index: int, row: Sample) -> None:
        """Refuse a token, or a target, outside the vocabulary."""
        for ids, ahead in ((row.tokens_L, 0), (np.where(row.labels_L == IGNORED, 0, row.labels_L), 1)):
            if ids.min() >= 0 and ids.max() < self.vocab_size:
                continue
            position = int(np.flatnonzero((ids < 0) | (ids >= self.vocab_size))[0])
            raise ValueError(
                f"token ids must be below vocab_size {self.vocab_size} and not negative, but sample {index} "
                f"({self.source.describe(index, position + ahead)}) has {int(ids[position])} at position "
                f"{position + ahead}; use the tokenizer that belongs to the model, or raise vocab_size"
            )


def make_batch(rows: Sequence[Sample], size: int, length: int) -> Batch:
    """A microbatch of `size` rows of `length` tokens; padding rows behind those given fill it up."""
    rows = [*rows, *[_padding(length)] * (size - len(rows))]
    documents = None
    if any(row.documents_L is not None for row in rows):
        single_L = np.zeros(length, dtype=np.int64)
        parts = [single_L if row.documents_L is None else row.documents_L for row in rows]
        documents = documents_of(torch.from_numpy(np.stack(parts)))
    return Batch(
        tokens_BL=torch.from_numpy(np.stack([row.tokens_L for row in rows])),
        labels_BL=torch.from_numpy(np.stack([row.labels_L for row in rows])),
        positions_BL=torch.from_numpy(np.stack([row.positions_L for row in rows])),
        documents=documents,
    )


def _padding(length: int) -> Sample:
    return Sample(
        tokens_L=np.zeros(length, dtype=np.int64),
        labels_L=np.full(length, IGNORED, dtype=np.int64),
        positions_L=np.arange(length, dtype=np.int64),
        documents_L=None,
    )
