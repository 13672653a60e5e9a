"""Text files as a stream: tokenized once into files of numbers, then read from them.

A small corpus is tokenized by each rank and held in memory. A large one is tokenized once per machine into a cache,
while the other ranks wait for its lock, and read from there row by row: a rank's memory does not grow with it. The
name of a cache entry is a hash of all that decides its content.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path

import numpy as np

from triaxis.engine.data.fingerprint import DIGEST_BYTES, fingerprint_code, fingerprint_tokenizer
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
from triaxis.engine.data.tokenizing import ENTRY, Entry, Reading, Tell, tokenize, tokenize_apart
from triaxis.engine.plain_files import locked

CACHED_FROM_BYTES = 8 * 2**20


def open_corpus(
    files: Sequence[Path], reading: Reading, *, sequence_length: int, pack: bool, cache: Path
) -> StreamSource:
    """The files one behind the other. Raises ValueError where they hold nothing to train on."""
    if sum(file.stat().st_size for file in files) < CACHED_FROM_BYTES:
        with tempfile.TemporaryDirectory(prefix="triaxis-") as folder:
            tokenize(files, reading, Path(folder), processes=1, tell=lambda documents, done: None)
            return _open(files, Path(folder), sequence_length, pack, in_memory=True)
    entry = cache / _key(files, reading)
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / f"{entry.name}.lock"):
        if not (entry / ENTRY).exists():
            draft = Path(tempfile.mkdtemp(prefix=f".{entry.name}.", dir=cache))
            try:
                with _shown(files) as tell:
                    tokenize_apart(files, reading, draft, tell)
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
def _shown(files: Sequence[Path]) -> Iterator[Tell]:
    """A bar on a terminal; yields what is told how far it is."""
    from rich.console import Console  # noqa: PLC0415 - only where there is something to wait for
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("tokenizing"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    documents = TextColumn("{task.fields[documents]:,} documents")
    with Progress(*columns, documents, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=sum(file.stat().st_size for file in files), documents=0)
        yield lambda count, done: progress.update(task, completed=done, documents=count)


def _open(
    files: Sequence[Path], folder: Path, sequence_length: int, pack: bool, *, in_memory: bool
) -> StreamSource:
    entry = Entry.at(folder)

    def numbers(name: str, dtype: str) -> TokenReader:
        path = folder / name
        return ArrayTokens(np.fromfile(path, dtype)) if in_memory else FileTokens(path, np.dtype(dtype))

    def table(name: str) -> Ints:
        path = folder / name
        return np.fromfile(path, np.int64) if in_memory else np.memmap(path, np.int64, mode="r")

    tokens = numbers("tokens.bin", entry.dtype)
    trained = None if entry.all_trained else numbers("trained.bin", "u1")
    starts, places = table("starts.bin"), table("places.bin")
    cut = pack_documents(starts, entry.tokens, sequence_length, pack=pack)
    rows = rows_that_train(cut, starts, entry.tokens, trained)
    name = f"{files[0]}" if len(files) == 1 else f"{len(files)} files from {files[0]} to {files[-1]}"
    if not len(rows.starts):
        raise ValueError(f"{name}: no document has a token to train on ({entry.told}); give longer texts")
    return StreamSource(
        tokens=tokens,
        document_starts=starts,
        rows=rows,
        sequence_length=sequence_length,
        vocab_size=entry.vocab_size,
        name_document=lambda document: f"{files[int(places[2 * document])]}:{int(places[2 * document + 1])}",
        report=f"{name}: {entry.told}"
        + told_cuts(starts, entry.tokens, sequence_length)
        + told_drops(cut, rows),
        notes=entry.notes if in_memory else (*entry.notes, f"tokenized once, into {folder}"),
        fingerprint=entry.fingerprint,
        trained=trained,
    )
