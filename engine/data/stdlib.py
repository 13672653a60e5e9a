"""The text of the running Python's standard library: a corpus that every machine already has.

Byte-level: 256 byte values, and one id that ends each document. A document is a file. It differs from one
build of Python to the next, so losses are comparable only within one; ranks and restarts compare its content, and name
the builds where it is another.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import sysconfig
from pathlib import Path

import numpy as np

from triaxis.engine.data.fingerprint import fingerprint_arrays
from triaxis.engine.data.stream import ArrayTokens, StreamSource, cut_windows, rows_that_train, told_drops
from triaxis.engine.data.tokenizer import BYTE_END, BYTE_VOCABULARY
from triaxis.parallel.places.legal_values import counted

LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"})
EVAL_ONE_IN = 40


def held_out(relative_path: str) -> bool:
    """Whether a file belongs to the eval split: one in 40, by a hash of its path."""
    digest = hashlib.sha256(relative_path.encode()).digest()
    return int.from_bytes(digest[:8], "big") % EVAL_ONE_IN == 0


def list_files(folder: Path) -> list[Path]:
    """The Python files of the library proper, sorted.

    Only modules that this version of Python documents as its own: what an installation adds (its configuration with
    the folders of whoever built it, `sitecustomize`, packages) would make the data depend on the account.
    Raises ValueError where a folder cannot be read, which is no reason to train on less.
    """
    files: list[Path] = []
    for place, folders, names in os.walk(folder, onerror=_refuse_unreadable):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        if Path(place) == folder:
            folders[:] = [name for name in folders if name in sys.stdlib_module_names]
            names = [name for name in names if name.removesuffix(".py") in sys.stdlib_module_names]
        files += [Path(place, name) for name in names if name.endswith(".py")]
    return sorted(files)


def _refuse_unreadable(error: OSError) -> None:
    raise ValueError(
        f"the standard library must be readable by this account, but {error.filename} is not ({error.strerror}): "
        "another account would train on more; give rights, or name your text with --data"
    )


def this_python() -> str:
    """The build that runs this, as `3.11.7 (main Dec  4 2023 18:10:11)`: distributions patch their own."""
    return f"{platform.python_version()} ({' '.join(platform.python_build())})"


def open_stdlib(*, split: str, sequence_length: int, folder: Path | None = None) -> StreamSource:
    """The split's files in the order of their paths, cut into windows."""
    folder = folder or Path(sysconfig.get_path("stdlib"))
    names: list[str] = []
    texts: list[bytes] = []
    read = empty = bad = 0
    for path in list_files(folder):
        relative = path.relative_to(folder)
        if held_out(relative.as_posix()) != (split == "eval"):
            continue
        read += 1
        text = path.read_bytes()
        if not text.strip():
            empty += 1
            continue
        try:
            text.decode("utf-8")
        except UnicodeDecodeError:
            bad += 1
            continue
        names.append(relative.as_posix())
        texts.append(text)
    if not texts:
        raise ValueError(f"`{folder}` must hold Python files for the {split} split, but none was found")
    lengths = np.array([len(text) + 1 for text in texts], dtype=np.int64)
    stops = np.cumsum(lengths)
    tokens = np.full(int(stops[-1]), BYTE_END, dtype=np.uint16)
    for text, stop in zip(texts, stops.tolist(), strict=True):
        tokens[stop - 1 - len(text) : stop - 1] = np.frombuffer(text, dtype=np.uint8)
    starts = stops - lengths
    cut = cut_windows(len(tokens), sequence_length)
    rows = rows_that_train(cut, starts, len(tokens), None)
    return StreamSource(
        tokens=ArrayTokens(tokens),
        document_starts=starts,
        rows=rows,
        sequence_length=sequence_length,
        vocab_size=BYTE_VOCABULARY,
        name_document=names.__getitem__,
        report=f"stdlib ({split}) of Python {platform.python_version()}: "
        f"read {counted(read, 'file')}, kept {len(texts)}, empty {empty}, bad {bad}{told_drops(cut, rows)}",
        fingerprint=fingerprint_arrays(tokens, starts),
    )
