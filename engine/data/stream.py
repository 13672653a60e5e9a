"""A corpus as one stream of tokens, cut into rows.

Every source ends up here: documents lie one behind the other in a stream, and a row is a piece of the stream
of at most `sequence_length` tokens. The ways of packing differ only in where rows start and stop.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from triaxis.models.batch import IGNORED
from triaxis.parallel.places.legal_values import counted

Ints = NDArray[np.int64]
BLOCK = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One row of a microbatch, int64 arrays of length L; meaning as in `models.batch.Batch`."""

    tokens_L: Ints
    labels_L: Ints
    positions_L: Ints
    documents_L: Ints | None


class TokenReader(Protocol):
    """Where the stream's tokens are: memory or a file."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> Ints:
        """A copy of the stream's tokens [start, stop)."""
        ...


@dataclass(frozen=True, slots=True)
class ArrayTokens:
    """A stream held in memory, in any integer type."""

    tokens: NDArray[np.integer]

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, stop: int) -> Ints:
        return self.tokens[start:stop].astype(np.int64)


class FileTokens:
    """A stream in a file of numbers. Read, not mapped: pages of a map would count as this process's memory."""

    def __init__(self, path: Path, dtype: np.dtype[np.integer]) -> None:
        self._file = path.open("rb")
        self._dtype = dtype
        self._count = os.fstat(self._file.fileno()).st_size // dtype.itemsize

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, stop: int) -> Ints:
        size = self._dtype.itemsize
        content = os.pread(self._file.fileno(), (stop - start) * size, start * size)
        return np.frombuffer(content, self._dtype).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Row i is the stream's tokens [starts[i], stops[i])."""

    starts: Ints
    stops: Ints


def cut_windows(tokens: int, sequence_length: int) -> Rows:
    """Windows of `sequence_length` behind each other; the last one may be shorter, and nothing is dropped.

    Example: 10 tokens, length 4: [0, 4) [4, 8) [8, 10).
    """
    starts = np.arange(0, tokens, sequence_length, dtype=np.int64)
    return Rows(starts=starts, stops=np.minimum(starts + sequence_length, tokens))


def pack_documents(document_starts: Ints, tokens: int, sequence_length: int, *, pack: bool) -> Rows:
    """Whole documents, first come, into the open row; one that does not fit opens the next.

    A document longer than a row is cut into rows of its own; its last piece leaves its row open.
    With pack=False each document (or piece of a long one) has a row of its own.
    Example: documents of 3, 2, 9, 1 tokens, length 4: [0, 3) [3, 5) [5, 9) [9, 13) [13, 15).
    """
    starts, stops = array("q"), array("q")
    for start, stop in _bounds(document_starts, tokens):
        if pack and starts and stop - starts[-1] <= sequence_length:
            stops[-1] = stop
            continue
        for piece in range(start, stop, sequence_length):
            starts.append(piece)
            stops.append(min(piece + sequence_length, stop))
    return Rows(starts=np.array(starts, dtype=np.int64), stops=np.array(stops, dtype=np.int64))


def _bounds(document_starts: Ints, tokens: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of each document, a block of them in memory at a time."""
    for first in range(0, len(document_starts), BLOCK):
        block = document_starts[first : first + BLOCK + 1].tolist()
        if len(block) <= BLOCK:
            block.append(tokens)
        yield from pairwise(block)


def rows_that_train(rows: Rows, document_starts: Ints, tokens: int, trained: TokenReader | None) -> Rows:
    """The rows that hold at least one trained target: a token that is trained and does not begin its document.

    Example: documents of 3 and 1 tokens in rows [0, 3) [3, 4): the second row has no target, and is dropped.
    """
    # Row [start, stop) has the targets (start, stop], less those that begin a document or lie behind the end.
    beginnings = np.append(document_starts, tokens)
    first, last = (np.searchsorted(beginnings, edge, side="right") for edge in (rows.starts, rows.stops))
    kept = rows.stops - rows.starts > last - first
    if trained is not None:
        for block in range(0, len(kept), BLOCK):
            part = slice(block, block + BLOCK)
            kept[part] &= _hold_trained(rows.starts[part], rows.stops[part], beginnings, trained)
    return Rows(starts=rows.starts[kept], stops=rows.stops[kept])


def _hold_trained(starts: Ints, stops: Ints, beginnings: Ints, trained: TokenReader) -> NDArray[np.bool_]:
    low, high = int(starts[0]), int(stops[-1]) + 1
    targets = np.append(trained.read(low, min(high, len(trained))) != 0, high > len(trained))[: high - low]
    first, last = np.searchsorted(beginnings, (low, high))
    targets[beginnings[first:last] - low] = False
    before = np.concatenate(([0], np.cumsum(targets)))
    found: NDArray[np.bool_] = before[stops + 1 - low] > before[starts + 1 - low]
    return found


def told_drops(cut: Rows, kept: Rows) -> str:
    """ "; 3 rows without a trained token dropped (17 tokens)", or "" where all were kept."""
    dropped = len(cut.starts) - len(kept.starts)
    if not dropped:
        return ""
    lost = int((cut.stops - cut.starts).sum() - (kept.stops - kept.starts).sum())
    return f"; {counted(dropped, 'row')} without a trained token dropped ({counted(lost, 'token')})"


def told_cuts(document_starts: Ints, tokens: int, sequence_length: int) -> str:
    """ "; 2 documents longer than a row were cut", or "" where none was."""
    cut = sum(stop - start > sequence_length for start, stop in _bounds(document_starts, tokens))
    return (
        f"; {counted(cut, 'document')} longer than a row {'was' if cut == 1 else 'were'} cut" if cut else ""
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSource:
    """A `Source` over a stream of documents; immutable, so ranks that are threads may share one.

    document_starts: ascending, the first is 0, none is empty
    trained: whether each token of the stream is a target that is trained; None for all
    name_document: the file (and line) of a document, for messages
    vocab_size: ids are below it; 0 where the files do not say
    report: the first line of `summary()`
    notes: what else people must know, a line each
    fingerprint: of the tokens, of what is trained and of the documents' starts
    """

    tokens: TokenReader
    document_starts: Ints
    rows: Rows
    sequence_length: int
    vocab_size: int
    name_document: Callable[[int], str]
    report: str
    fingerprint: str
    notes: tuple[str, ...] = ()
    trained: TokenReader | None = None

    def __len__(self) -> int:
        return len(self.rows.starts)

    def sample(self, epoch: int, index: int) -> Sample:
        """Row `index`: the same in every epoch.

        A target across a document's border is IGNORED; behind a short row's end come token 0 and IGNORED,
        which causal attention keeps from everything before.
        """
        del epoch  # the order changes from epoch to epoch, the rows do not
        start, stop = int(self.rows.starts[index]), int(self.rows.stops[index])
        first, last = np.searchsorted(self.document_starts, (start, stop), side="right")
        borders = self.document_starts[first:last] - start  # of the documents starting in (start, stop]
        size, length = stop - start, self.sequence_length

        tokens = self.tokens.read(start, min(stop + 1, len(self.tokens)))
        targets = tokens[1:].copy()
        if self.trained is not None:
            targets[self.trained.read(start + 1, start + len(tokens)) == 0] = IGNORED
        targets[borders - 1] = IGNORED
        tokens_L = np.zeros(length, dtype=np.int64)
        tokens_L[:size] = tokens[:size]
        labels_L = np.full(length, IGNORED, dtype=np.int64)
        labels_L[: len(targets)] = targets

        inner = borders[borders < size]
        positions_L = np.arange(length, dtype=np.int64)
        if not len(inner):
            return Sample(tokens_L=tokens_L, labels_L=labels_L, positions_L=positions_L, documents_L=None)
        documents_L = np.zeros(length, dtype=np.int64)
        documents_L[inner] = 1
        np.cumsum(documents_L, out=documents_L)
        positions_L -= np.concatenate(([0], inner))[documents_L]
        return Sample(tokens_L=tokens_L, labels_L=labels_L, positions_L=positions_L, documents_L=documents_L)

    def tokens_of(self, indices: Ints) -> int:
        """Real tokens in these rows: without padding."""
        return int((self.rows.stops[indices] - self.rows.starts[indices]).sum())

    def describe(self, index: int, position: int) -> str:
        """Where the token at `position` of row `index` comes from."""
        place = int(self.rows.starts[index]) + position
        return self.name_document(int(np.searchsorted(self.document_starts, place, side="right")) - 1)

    def summary(self) -> str:
        tokens, rows = counted(len(self.tokens), "token"), counted(len(self), "row")
        counts = f"{self.report}; {tokens} in {rows} of {self.sequence_length}"
        return "\n".join([counts, *(f"  {note}" for note in self.notes)])
