"""Fingerprints: short names of contents, by which ranks and restarts see whether they read the same. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np

WHOLE_BYTES = 256 * 2**20
"""A file up to this size is read whole; of a larger one its size and samples: reading all would take minutes."""
SAMPLES = 4096
SAMPLE_BYTES = 64 * 2**10
DIGEST_BYTES = 12
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "vocab*",
    "merges.txt",
    "*.model",
)


def fingerprint_arrays(*arrays: np.ndarray) -> str:
    """Of the values, whatever their integer type's width is on disk."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def fingerprint_files(files: Sequence[Path]) -> str:
    """Of kinds and contents, wherever they lie; of more than `WHOLE_BYTES`, of the size and evenly spaced blocks."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for file in files:
        digest.update(f"{file.suffix} {file.stat().st_size}\n".encode())
        for block in _blocks(file):
            digest.update(block)
    return digest.hexdigest()


def _blocks(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= WHOLE_BYTES:
            while block := stream.read(2**20):
                yield block
            return
        for sample in range(SAMPLES):
            stream.seek(sample * (size - SAMPLE_BYTES) // (SAMPLES - 1))
            yield stream.read(SAMPLE_BYTES)


def fingerprint_tokenizer(path: str | None) -> str:
    """Of a tokenizer.json, or of the files of a folder that make the tokenizer; "bytes" without one."""
    if path is None:
        return "bytes"
    folder = Path(path)
    if folder.is_file():
        return fingerprint_files([folder])
    return fingerprint_files(
        sorted({file for pattern in TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file()})
    )


def fingerprint_code(rooms: Sequence[Path]) -> str:
    """Of the Python files below these folders."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for room in rooms:
        for file in sorted(room.rglob("*.py")):
            digest.update(file.relative_to(room).as_posix().encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()
