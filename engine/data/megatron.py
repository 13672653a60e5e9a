"""Megatron's indexed datasets: `prefix.bin` holds token ids, `prefix.idx` their cut into sequences.

Layout of an index: magic (9 bytes), version (8), type code (1), sequences (8), document borders (8); then
lengths (4 each), byte offsets (8 each) and document borders (8 each). Reading and writing is Megatron-Core's;
the check comes first, so that a broken file is one clear message and not an assertion.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from triaxis.engine.data.fingerprint import fingerprint_files
from triaxis.engine.data.stream import Ints, StreamSource, cut_windows, rows_that_train, told_drops
from triaxis.engine.data.tokenizer import open_tokenizer

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, type[np.integer]] = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """A checked index. document_starts: in tokens of the stream, without empty documents."""

    prefix: Path
    dtype: type[np.integer]
    tokens: int
    documents: int
    document_starts: Ints


def strip_suffix(path: Path) -> Path:
    """The prefix of `prefix`, `prefix.bin` or `prefix.idx`."""
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def _file(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)


def _refuse(
    path: Path, what: str, expected: object, found: object, advice: str = "write it anew"
) -> ValueError:
    return ValueError(f"{path}: {what} must be {expected}, but is {found}; {advice}")


def check_index(path: Path) -> Index:
    """Check `prefix.idx` by itself and against `prefix.bin`; a ValueError names file, expected, found."""
    prefix = strip_suffix(path)
    index_path, data_path = _file(prefix, ".idx"), _file(prefix, ".bin")
    for file in (index_path, data_path):
        if not file.is_file():
            raise ValueError(
                "data must be `stdlib`, a .jsonl file or the prefix of a .bin and an .idx, "
                f"but {file} does not exist"
            )
    raw = index_path.read_bytes()
    dtype, sequences, borders = _check_header(index_path, data_path, raw)
    size = HEADER.size + 12 * sequences + 8 * borders
    if len(raw) != size:
        what = f"the size of an index of {sequences} sequences and {borders} document borders"
        raise _refuse(index_path, what, f"{size} bytes", f"{len(raw)} bytes")
    lengths = np.frombuffer(raw, np.int32, sequences, HEADER.size).astype(np.int64)
    offsets = np.frombuffer(raw, np.int64, sequences, HEADER.size + 4 * sequences)
    documents = np.frombuffer(raw, np.int64, borders, HEADER.size + 12 * sequences)
    itemsize = np.dtype(dtype).itemsize
    stops = np.concatenate(([0], np.cumsum(lengths)))
    if (lengths < 0).any() or (offsets != stops[:-1] * itemsize).any():
        wrong = int(np.flatnonzero((lengths < 0) | (offsets != stops[:-1] * itemsize))[0])
        expected = f"at byte {int(stops[wrong]) * itemsize} with a length from 0"
        found = f"at byte {int(offsets[wrong])} with length {int(lengths[wrong])}"
        raise _refuse(index_path, f"sequence {wrong}", expected, found)
    ends = documents[[0, -1]].tolist() if borders else []
    # Compared with their neighbours, not by differences: those of 64-bit numbers wrap.
    if ends != [0, sequences] or (documents[1:] < documents[:-1]).any():
        found = f"{ends} at the ends" if ends != [0, sequences] else "descending"
        raise _refuse(index_path, "document borders", f"ascending from 0 to {sequences}", found)
    tokens, data_bytes = int(stops[-1]), data_path.stat().st_size
    if data_bytes != tokens * itemsize:
        what = f"the size of {tokens} tokens of {itemsize} bytes"
        raise _refuse(data_path, what, f"{tokens * itemsize} bytes", f"{data_bytes} bytes")
    if not tokens:
        raise _refuse(data_path, "the number of tokens", "at least 1", 0)
    starts = np.unique(stops[documents[:-1]])
    return Index(
        prefix=prefix,
        dtype=dtype,
        tokens=tokens,
        documents=borders - 1,
        document_starts=starts[starts < tokens],
    )


def _check_header(index_path: Path, data_path: Path, raw: bytes) -> tuple[type[np.integer], int, int]:
    """(token type, sequences, document borders) of an index's first bytes."""
    found = raw[: len(MAGIC)]
    if len(found) == len(MAGIC) and found != MAGIC:
        with data_path.open("rb") as data:
            swapped = data.read(len(MAGIC)) == MAGIC
        advice = f"it and {data_path} are swapped" if swapped else "it is of another format: write it anew"
        raise _refuse(index_path, "magic", MAGIC, found, advice)
    if len(raw) < HEADER.size:
        raise _refuse(
            index_path, "the size of an index", f"at least {HEADER.size} bytes", f"{len(raw)} bytes"
        )
    _, version, code, sequences, borders = HEADER.unpack_from(raw)
    if version != VERSION:
        raise _refuse(index_path, "version", VERSION, version)
    if code not in DTYPES:
        known = ", ".join(f"{key} ({value.__name__})" for key, value in DTYPES.items())
        raise _refuse(index_path, "the code of the token type", f"one of {known}", code)
    return DTYPES[code], sequences, borders


class IndexedTokens:
    """The stream of an indexed dataset. Reads are copies: the file's map ends with the dataset."""

    def __init__(self, index: Index) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDataset  # noqa: PLC0415 - slow to import

        self._dataset: Any = IndexedDataset(str(index.prefix))  # untyped library
        self._tokens = index.tokens
        self._dtype = index.dtype

    def __len__(self) -> int:
        return self._tokens

    def read(self, start: int, stop: int) -> Ints:
        offset = start * np.dtype(self._dtype).itemsize
        tokens: Ints = self._dataset.bin_reader.read(self._dtype, stop - start, offset).astype(np.int64)
        return tokens


def open_megatron(
    path: Path, *, sequence_length: int, tokenizer_path: str | Path | None = None
) -> StreamSource:
    """Windows over the stream, with documents kept apart."""
    index = check_index(path)
    kept = len(index.document_starts)
    cut = cut_windows(index.tokens, sequence_length)
    rows = rows_that_train(cut, index.document_starts, index.tokens, None)
    if not len(rows.starts):
        raise ValueError(
            f"{index.prefix}.bin must hold a document of at least 2 tokens, since the first is never a target, but "
            f"none of its {index.documents} has; write it anew"
        )
    counts = f"read {index.documents}, kept {kept}, empty {index.documents - kept}, bad 0"
    return StreamSource(
        tokens=IndexedTokens(index),
        document_starts=index.document_starts,
        rows=rows,
        sequence_length=sequence_length,
        vocab_size=0 if tokenizer_path is None else open_tokenizer(tokenizer_path).vocab_size,
        name_document=lambda document: f"{index.prefix}.bin, non-empty document {document}",
        report=f"{index.prefix}: {counts}{told_drops(cut, rows)}",
        fingerprint=fingerprint_files([_file(index.prefix, suffix) for suffix in (".idx", ".bin")]),
    )
