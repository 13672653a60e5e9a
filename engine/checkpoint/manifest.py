"""A checkpoint's manifest: the run's state, and where every chunk of every tensor is. No torch."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from triaxis.engine.checkpoint.folder import MANIFEST, previous_checkpoint, step_of, sync_folder
from triaxis.engine.checkpoint.schema import Misfit, check_body
from triaxis.engine.plain_files import kind_of, read_plain

FORMAT = "triaxis-checkpoint"
VERSION = 1
BLOCK_BYTES = 1 << 20
MOST_BYTES = 1 << 30


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file. previous: the complete one before it."""

    def __init__(self, message: str, previous: Path | None = None) -> None:
        super().__init__(message)
        self.previous = previous


class SaveError(RuntimeError):
    """A save that failed, on all ranks alike. step: of the checkpoint; earlier checkpoints are intact."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where a run is, besides its tensors: the same on every rank, and JSON.

    step: optimizer steps done; tokens: seen so far
    config: the run's flags; sampler: where the data order is
    eval_loss: of the stored row at saving, in nats, for comparison after a load; extra: what else the trainer keeps
    """

    step: int
    tokens: int
    config: dict[str, object]
    sampler: dict[str, object]
    eval_loss: float | None
    extra: dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRecord:
    """A rectangle of a tensor, row-major in a file. offsets, sizes: in the whole tensor; first_byte: in the file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    first_byte: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """A tensor by chunks that cover it once. dtype: as safetensors writes it ("F32")."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[ChunkRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A shard file's length and the CRC-32 of all its bytes."""

    size_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint's table of contents. optimizer_steps: how many updates the moments have seen."""

    state: RunState
    optimizer_steps: int
    files: dict[str, FileRecord]
    tensors: dict[str, TensorRecord]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())


def damaged(path: Path, file: str, what: str) -> CheckpointError:
    """The error of a checkpoint whose `file` is not as it was written, and the way out."""
    previous = previous_checkpoint(path)
    way_out = f"resume from {previous}" if previous else "no complete checkpoint is before it"
    return CheckpointError(f"{path / file} {what}; {way_out}", previous)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes it with a checksum of itself, and syncs both. A chunk is [offsets, sizes, file, first byte]."""
    tensors = {
        name: {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "chunks": [[chunk.offsets, chunk.sizes, chunk.file, chunk.first_byte] for chunk in tensor.chunks],
        }
        for name, tensor in manifest.tensors.items()
    }
    body = _encode(
        {
            "format": FORMAT,
            "version": VERSION,
            "state": asdict(manifest.state),
            "optimizer_steps": manifest.optimizer_steps,
            "files": {name: asdict(record) for name, record in manifest.files.items()},
            "tensors": tensors,
        }
    )
    with (folder / MANIFEST).open("xb") as file:
        file.write(b'{"crc32": %d, "manifest": %s}' % (zlib.crc32(body), body))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def read_manifest(path: Path, *, files: bool = True) -> Manifest:
    """A checkpoint's manifest, valid as a whole: what it says can be, and its files are there, regular, of their sizes.

    The only way to a manifest that was written; raises CheckpointError. (`check_files` compares the files' contents.)
    files: False leaves it to the caller to look at each of them
    """
    try:
        with read_plain(path / MANIFEST) as file:
            if os.fstat(file.fileno()).st_size > MOST_BYTES:
                raise damaged(path, MANIFEST, f"must have at most {MOST_BYTES:,} bytes, but has more")
            text = file.read()
    except OSError as error:
        raise damaged(path, MANIFEST, f"cannot be read ({error.strerror})") from error
    try:
        document = json.loads(text)
        body, written = document["manifest"], document["crc32"]
        known = body["format"], body["version"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise damaged(path, MANIFEST, "is not a manifest: truncated or overwritten") from error
    if zlib.crc32(_encode(body)) != written:
        raise damaged(path, MANIFEST, "does not match its own checksum")
    if known != (FORMAT, VERSION):
        raise CheckpointError(
            f"{path / MANIFEST} must have `format` {FORMAT} and `version` {VERSION}, but has {known[0]!r:.40} and "
            f"{known[1]!r:.40}; read it with the release that wrote it"
        )
    try:
        check_body(body)
    except Misfit as error:
        raise damaged(path, MANIFEST, f"is not valid: {error}") from error
    named = step_of(path)
    if named is not None and named != body["state"]["step"]:
        raise damaged(
            path, MANIFEST, f"is of step {body['state']['step']}, not of the step in its folder's name"
        )
    manifest = Manifest(
        state=RunState(**body["state"]),
        optimizer_steps=body["optimizer_steps"],
        files={name: FileRecord(**record) for name, record in body["files"].items()},
        tensors={name: _tensor_record(record) for name, record in body["tensors"].items()},
    )
    for name, record in manifest.files.items() if files else ():
        _check_size(path, name, record)
    return manifest


def _check_size(path: Path, name: str, record: FileRecord) -> None:
    """Without opening the file."""
    try:
        kind, size_bytes = kind_of(path / name), (path / name).lstat().st_size
    except OSError as error:
        raise damaged(path, name, f"cannot be read ({error.strerror})") from error
    if kind is not None:
        raise damaged(path, name, f"must be a file, but is {kind}")
    if size_bytes != record.size_bytes:
        raise damaged(path, name, f"has {size_bytes} bytes, but was written with {record.size_bytes}")


def _tensor_record(record: dict[str, Any]) -> TensorRecord:
    chunks = tuple(
        ChunkRecord(offsets=tuple(offsets), sizes=tuple(sizes), file=file, first_byte=first_byte)
        for offsets, sizes, file, first_byte in record["chunks"]
    )
    return TensorRecord(dtype=record["dtype"], shape=tuple(record["shape"]), chunks=chunks)


def _encode(body: object) -> bytes:
    """JSON of which a body that was read makes the same bytes again."""
    return json.dumps(body, sort_keys=True).encode()


def check_files(path: Path, files: Mapping[str, FileRecord]) -> None:
    """Reads the files through. Raises CheckpointError that names the first missing, short or changed one."""
    for name, record in files.items():
        _check_size(path, name, record)
        try:
            with read_plain(path / name) as file:
                crc32 = 0
                while block := file.read(BLOCK_BYTES):
                    crc32 = zlib.crc32(block, crc32)
        except OSError as error:
            raise damaged(path, name, f"cannot be read ({error.strerror})") from error
        if crc32 != record.crc32:
            raise damaged(path, name, "does not match its checksum")
