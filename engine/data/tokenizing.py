"""Text files into files of numbers, by as many processes as there are cores. No torch.

What it writes into a folder: tokens.bin and trained.bin (one number a token), starts.bin (of documents, in tokens),
places.bin (file and line of each document), entry.json (`Entry`). Processes change nothing in it: records are encoded
in pieces, and the pieces are written in the order of the files.

A rank has threads, a device and perhaps a main program that must not run twice, none of which survives a fork. So it
starts one fresh process (`tokenize_apart`), which tells how far it is, and that process has the others.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from triaxis.engine.data.files import Record, records
from triaxis.engine.data.fingerprint import DIGEST_BYTES
from triaxis.engine.data.jsonl import Tally, documents_of, empty_file
from triaxis.engine.data.tokenizer import Tokenizer, open_tokenizer

ENTRY = "entry.json"
PIECE_BYTES, PIECE_RECORDS = 2**18, 1000
BYTES_A_PROCESS = 2**22
"""Below it, starting a process takes longer than its part of the work."""
MOST_PROCESSES = 16
START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from triaxis.engine.data.tokenizing import serve; sys.exit(serve(json.loads(sys.argv[2])))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What decides a stream beside the files.

    part: of documents that are held out, and whether those are wanted; date: that chat templates write, where they do
    """

    tokenizer_path: str | None
    on_bad_sample: str
    train_inserted: bool = False
    date: str | None = None
    eval_fraction: float | None = None
    held_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What is known of the files of numbers. told: counts of what was read; dtype: of tokens.bin."""

    told: str
    notes: tuple[str, ...]
    fingerprint: str
    vocab_size: int
    all_trained: bool
    tokens: int
    dtype: str

    @classmethod
    def at(cls, folder: Path) -> Entry:
        fields = json.loads((folder / ENTRY).read_text(encoding="utf-8"))
        return cls(**{**fields, "notes": tuple(fields["notes"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Some records of a file. done: bytes of all files that are read by its end."""

    file: int
    path: Path
    records: list[tuple[int, Record]]
    done: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Numbers:
    """A piece's documents. ids, trained: one number a token; lengths, lines: one a document; tally: of all records."""

    ids: np.ndarray
    trained: np.ndarray
    lengths: np.ndarray
    lines: np.ndarray
    tally: Tally


Tell = Callable[[int, int], None]
"""Called with (documents, bytes) that were read, all together."""


def tokenize(files: Sequence[Path], reading: Reading, folder: Path, *, processes: int, tell: Tell) -> None:
    """Writes the files of numbers. Raises ValueError where a file holds nothing, or a line may not be skipped."""
    tokenizer = open_tokenizer(
        reading.tokenizer_path, train_inserted=reading.train_inserted, date=reading.date
    )
    tally, digest = Tally(), blake2b(digest_size=DIGEST_BYTES)
    kept = [0] * len(files)
    written, all_trained = 0, True
    names = ("tokens.bin", "trained.bin", "starts.bin", "places.bin")
    tokens, trained, starts, places = (open(folder / name, "wb") for name in names)  # noqa: SIM115 - closed below
    with tokens, trained, starts, places:
        for piece, found in _encoded(_pieces(files), reading, processes):
            tally.take(found.tally)
            kept[piece.file] += found.tally.kept
            ends = np.cumsum(found.lengths)
            for length, stop in zip(found.lengths.tolist(), ends.tolist(), strict=True):
                part = slice(stop - length, stop)
                for content in (length.to_bytes(8, "little"), found.ids[part].data, found.trained[part].data):
                    digest.update(content)
            tokens.write(found.ids.data)
            trained.write(found.trained.data)
            starts.write((written + ends - found.lengths).data)
            places.write(np.stack([np.full_like(found.lines, piece.file), found.lines], axis=1).data)
            all_trained &= bool(found.trained.all())
            written += len(found.ids)
            tell(tally.read, piece.done)
    for file, count in zip(files, kept, strict=True):
        if not count:
            raise empty_file(file, tally)
    if not written:
        raise _no_part(reading, tally)
    entry = Entry(
        told=str(tally) + (f" ({tally.listing()})" if tally.bad else ""),
        notes=(*tokenizer.notes, *tally.told()),
        fingerprint=digest.hexdigest(),
        vocab_size=tokenizer.vocab_size,
        all_trained=all_trained,
        tokens=written,
        dtype=_dtype(tokenizer).str,
    )
    (folder / ENTRY).write_text(json.dumps(asdict(entry)), encoding="utf-8")


def _no_part(reading: Reading, tally: Tally) -> ValueError:
    part = "held-out" if reading.held_out else "training"
    return ValueError(
        f"`eval_fraction` must leave documents for both parts, but of {tally.kept} none is in the {part} part; "
        "give a file of its own with --eval_data"
    )


def _dtype(tokenizer: Tokenizer) -> np.dtype[Any]:
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32)


def _pieces(files: Sequence[Path]) -> Iterator[_Piece]:
    """All records in order; a piece is of one file."""
    before = 0
    for number, path in enumerate(files):
        size, held, some = path.stat().st_size, 0, list[tuple[int, Record]]()
        with path.open("rb") as raw:
            for line, record in records(path, raw):
                some.append((line, record))
                held += len(record) if isinstance(record, bytes) else 0
                if held >= PIECE_BYTES or len(some) >= PIECE_RECORDS:
                    yield _Piece(file=number, path=path, records=some, done=before + min(raw.tell(), size))
                    some, held = [], 0
        before += size
        yield _Piece(file=number, path=path, records=some, done=before)


def _encoded(pieces: Iterable[_Piece], reading: Reading, processes: int) -> Iterator[tuple[_Piece, _Numbers]]:
    """Each piece with its numbers, in order. One process is this one."""
    if processes == 1:
        yield from ((piece, _encode(piece, reading)) for piece in pieces)
        return
    context = multiprocessing.get_context("spawn")
    coming: deque[tuple[_Piece, Future[_Numbers]]] = deque()
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_end_with_parent)
    try:
        for piece in pieces:
            coming.append((piece, pool.submit(_encode, piece, reading)))
            if len(coming) > 2 * processes:  # no more in memory than keeps all busy
                first, numbers = coming.popleft()
                yield first, numbers.result()
        for first, numbers in coming:
            yield first, numbers.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """A process of the pool would otherwise wait for work for ever when its parent was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent has it too, and says what there is to say
    parent = multiprocessing.parent_process()
    assert parent is not None, "a process of a pool has a parent"

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@functools.cache
def _tokenizer(reading: Reading) -> Tokenizer:
    return open_tokenizer(reading.tokenizer_path, train_inserted=reading.train_inserted, date=reading.date)


def _encode(piece: _Piece, reading: Reading) -> _Numbers:
    tokenizer, tally = _tokenizer(reading), Tally()
    dtype = _dtype(tokenizer)
    ids: list[np.ndarray] = [np.empty(0, dtype)]
    trained: list[np.ndarray] = [np.empty(0, np.uint8)]
    lines: list[int] = []
    for document in documents_of(piece.path, piece.records, tokenizer, tally, reading.on_bad_sample):
        fraction = reading.eval_fraction
        if fraction is not None and _is_held_out(document.ids, fraction) != reading.held_out:
            continue
        ids.append(np.array(document.ids, dtype))
        marks = document.trained
        trained.append(
            np.ones(len(document.ids), np.uint8) if marks is None else np.array(marks, dtype=np.uint8)
        )
        lines.append(document.line)
    return _Numbers(
        ids=np.concatenate(ids),
        trained=np.concatenate(trained),
        lengths=np.array([len(part) for part in ids[1:]], dtype=np.int64),
        lines=np.array(lines, dtype=np.int64),
        tally=tally,
    )


def _is_held_out(ids: Sequence[int], fraction: float) -> bool:
    """By content: equal documents are on one side, and a document's side does not depend on others."""
    digest = blake2b(np.array(ids, dtype=np.int64).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def tokenize_apart(files: Sequence[Path], reading: Reading, folder: Path, tell: Tell) -> None:
    """The same by a process of its own, which ends when this one does. Raises what `tokenize` raises, as ValueError."""
    job = {"files": list(map(str, files)), "reading": asdict(reading), "folder": str(folder)}
    command = [sys.executable, "-c", START, json.dumps(sys.path), json.dumps(job)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None, "asked for"
        fault = None
        try:
            for line in process.stdout:
                said = json.loads(line)
                fault = said.get("fault")
                if fault is None:
                    tell(said["documents"], said["bytes"])
        except BaseException:
            process.kill()
            raise
    if fault is not None:
        raise ValueError(fault)
    if process.returncode:
        raise ValueError(
            f"the process that tokenizes {files[0]} ended with code {process.returncode}; what it wrote stands above "
            "(a negative code is a signal: -9 where memory ran out)"
        )


def serve(job: dict[str, Any]) -> int:
    """The process of `tokenize_apart`. What it says goes to its caller, what libraries print to standard error."""
    said = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(**facts: object) -> None:
        print(json.dumps(facts), file=said, flush=True)

    files, folder = [Path(name) for name in job["files"]], Path(job["folder"])
    size = sum(file.stat().st_size for file in files)
    processes = max(1, min(_cores(), MOST_PROCESSES, size // BYTES_A_PROCESS))
    try:
        tokenize(
            files,
            Reading(**job["reading"]),
            folder,
            processes=processes,
            tell=lambda documents, done: say(documents=documents, bytes=done),
        )
    except BrokenPipeError:
        return 1  # whoever asked has ended
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        say(fault=str(error) or repr(error))
    return 0


def _cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
