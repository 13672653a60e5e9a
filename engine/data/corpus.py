"""Text files as a stream: tokenized once into files of numbers, then read from them.

A small corpus is tokenized by each rank and held in memory. A large one is tokenized by one process of a machine into
a cache, while the others wait for its lock, and read from there row by row: a rank's memory does not grow with it.

A cache entry: tokens.bin and trained.bin (one number a token), starts.bin (of documents, in tokens), places.bin
(file and line of each document), entry.json. Its name is a hash of all that decides its content.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from triaxis.engine.data.fingerprint import DIGEST_BYTES, fingerprint_code, fingerprint_tokenizer
from triaxis.engine.data.jsonl import Document, Tally, read_documents
from triaxis.engine.data.stream import (
    ArrayTokens,
    FileTokens,
    Ints,
    StreamSource,
    TokenReader,
    pack_documents,
    rows_that_train,
    told_cuts,
    told_drops,
)
from triaxis.engine.data.tokenizer import Tokenizer, open_tokenizer

CACHED_FROM_BYTES = 8 * 2**20
ENTRY = "entry.json"
KEPT = ("told", "notes", "fingerprint", "vocab_size", "all_trained", "tokens", "dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What decides a stream beside the files. part: of documents that are held out, and whether those are wanted."""

    tokenizer_path: str | None
    on_bad_sample: str
    train_inserted: bool = False
    eval_fraction: float | None = None
    held_out: bool = False


def open_corpus(
    files: Sequence[Path], reading: Reading, *, sequence_length: int, pack: bool, cache: Path
) -> StreamSource:
    """The files one behind the other. Raises ValueError where they hold nothing to train on."""
    if sum(file.stat().st_size for file in files) < CACHED_FROM_BYTES:
        with tempfile.TemporaryDirectory(prefix="triaxis-") as folder:
            _tokenize(files, reading, Path(folder))
            return _open(files, Path(folder), sequence_length, pack, in_memory=True)
    entry = cache / _key(files, reading)
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / f"{entry.name}.lock"):
        if not (entry / ENTRY).exists():
            draft = Path(tempfile.mkdtemp(prefix=f".{entry.name}.", dir=cache))
            try:
                with _shown(files) as still:
                    _tokenize(files, reading, draft, still)
                draft.replace(entry)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
    return _open(files, entry, sequence_length, pack, in_memory=False)


def _key(files: Sequence[Path], reading: Reading) -> str:
    """Files by place, size and time: an entry serves one machine, and reading them all costs what it should save."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for file in files:
        facts = file.stat()
        digest.update(f"{file.resolve()} {facts.st_size} {facts.st_mtime_ns} {facts.st_ino}\n".encode())
    digest.update(repr(asdict(reading)).encode())
    digest.update(fingerprint_tokenizer(reading.tokenizer_path).encode())
    digest.update(fingerprint_code([Path(__file__).parent]).encode())
    return digest.hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process, and one thread, at a time."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def _shown(files: Sequence[Path]) -> Iterator[Callable[[], None]]:
    """A bar on a terminal; yields what is called for each document."""
    from rich.console import Console  # noqa: PLC0415 - only where there is something to wait for
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("tokenizing"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda: progress.advance(task)


def _tokenize(
    files: Sequence[Path], reading: Reading, folder: Path, still: Callable[[], None] = lambda: None
) -> None:
    tokenizer = open_tokenizer(reading.tokenizer_path, train_inserted=reading.train_inserted)
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32)
    tally, digest = Tally(), blake2b(digest_size=DIGEST_BYTES)
    written, all_trained = 0, True
    with (
        (folder / "tokens.bin").open("wb") as tokens,
        (folder / "trained.bin").open("wb") as trained,
        (folder / "starts.bin").open("wb") as starts,
        (folder / "places.bin").open("wb") as places,
    ):
        for number, document in _documents(files, reading, tokenizer, tally, still):
            ids = np.array(document.ids, dtype=dtype).tobytes()
            mask = bytes(document.trained) if document.trained is not None else b"\1" * len(document.ids)
            all_trained &= b"\0" not in mask
            for part in (len(document.ids).to_bytes(8, "little"), ids, mask):
                digest.update(part)
            tokens.write(ids)
            trained.write(mask)
            starts.write(np.int64(written).tobytes())
            places.write(np.array([number, document.line], dtype=np.int64).tobytes())
            written += len(document.ids)
    told = str(tally) + (f" ({tally.listing()})" if tally.bad else "")
    notes = [*tokenizer.notes, *tally.told()]
    values = (told, notes, digest.hexdigest(), tokenizer.vocab_size, all_trained, written, dtype.str)
    (folder / ENTRY).write_text(json.dumps(dict(zip(KEPT, values, strict=True))), encoding="utf-8")


def _documents(
    files: Sequence[Path], reading: Reading, tokenizer: Tokenizer, tally: Tally, still: Callable[[], None]
) -> Iterator[tuple[int, Document]]:
    """(number of the file, document) of the part that is wanted."""
    some = False
    for number, file in enumerate(files):
        for document in read_documents(file, tokenizer, tally, reading.on_bad_sample, still=still):
            fraction = reading.eval_fraction
            if fraction is not None and _is_held_out(document.ids, fraction) != reading.held_out:
                continue
            some = True
            yield number, document
    if not some:
        part = "held-out" if reading.held_out else "training"
        raise ValueError(
            f"`eval_fraction` must leave documents for both parts, but of {tally.kept} none is in the {part} part; "
            "give a file of its own with --eval_data"
        )


def _is_held_out(ids: Sequence[int], fraction: float) -> bool:
    """By content: equal documents are on one side, and a document's side does not depend on others."""
    digest = blake2b(np.array(ids, dtype=np.int64).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def _open(
    files: Sequence[Path], folder: Path, sequence_length: int, pack: bool, *, in_memory: bool
) -> StreamSource:
    entry: dict[str, Any] = json.loads((folder / ENTRY).read_text(encoding="utf-8"))

    def numbers(name: str, dtype: str) -> TokenReader:
        path = folder / name
        return ArrayTokens(np.fromfile(path, dtype)) if in_memory else FileTokens(path, np.dtype(dtype))

    def table(name: str) -> Ints:
        path = folder / name
        return np.fromfile(path, np.int64) if in_memory else np.memmap(path, np.int64, mode="r")

    tokens = numbers("tokens.bin", entry["dtype"])
    trained = None if entry["all_trained"] else numbers("trained.bin", "u1")
    starts, places = table("starts.bin"), table("places.bin")
    cut = pack_documents(starts, entry["tokens"], sequence_length, pack=pack)
    rows = rows_that_train(cut, starts, entry["tokens"], trained)
    name = f"{files[0]}" if len(files) == 1 else f"{len(files)} files from {files[0]} to {files[-1]}"
    if not len(rows.starts):
        raise ValueError(f"{name}: no document has a token to train on ({entry['told']}); give longer texts")
    return StreamSource(
        tokens=tokens,
        document_starts=starts,
        rows=rows,
        sequence_length=sequence_length,
        vocab_size=entry["vocab_size"],
        name_document=lambda document: f"{files[int(places[2 * document])]}:{int(places[2 * document + 1])}",
        report=f"{name}: {entry['told']}"
        + told_cuts(starts, entry["tokens"], sequence_length)
        + told_drops(cut, rows),
        notes=tuple(entry["notes"]),
        fingerprint=entry["fingerprint"],
        trained=trained,
    )
