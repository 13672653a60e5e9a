"""A checkpoint's manifest: the run's state, and where every chunk of every tensor is. No torch."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from triaxis.engine.checkpoint.folder import MANIFEST, previous_checkpoint, sync_folder

FORMAT = "triaxis-checkpoint"
VERSION = 1
BLOCK_BYTES = 1 << 20


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
    eval_loss: of the stored evaluation batch at saving, in nats; extra: what else the trainer keeps
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


def read_manifest(path: Path) -> Manifest:
    """A checkpoint's manifest. Raises CheckpointError if it is missing, damaged or of another format."""
    try:
        text = (path / MANIFEST).read_bytes()
    except OSError as error:
        raise damaged(path, MANIFEST, f"cannot be read ({error.strerror})") from error
    try:
        document = json.loads(text)
        body, written = document["manifest"], document["crc32"]
    except (ValueError, TypeError, KeyError) as error:
        raise damaged(path, MANIFEST, "is not a manifest: truncated or overwritten") from error
    if zlib.crc32(_encode(body)) != written:
        raise damaged(path, MANIFEST, "does not match its own checksum")
    if (body["format"], body["version"]) != (FORMAT, VERSION):
        raise CheckpointError(
            f"{path / MANIFEST} must have `format` {FORMAT} and `version` {VERSION}, but has {body['format']} and "
            f"{body['version']}; read it with the release that wrote it"
        )
    return Manifest(
        state=RunState(**body["state"]),
        optimizer_steps=body["optimizer_steps"],
        files={name: FileRecord(**record) for name, record in body["files"].items()},
        tensors={name: _tensor_record(record) for name, record in body["tensors"].items()},
    )


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
        try:
            with (path / name).open("rb") as file:
                size_bytes = os.fstat(file.fileno()).st_size
                if size_bytes != record.size_bytes:
                    raise damaged(
                        path, name, f"has {size_bytes} bytes, but was written with {record.size_bytes}"
                    )
                crc32 = 0
                while block := file.read(BLOCK_BYTES):
                    crc32 = zlib.crc32(block, crc32)
        except OSError as error:
            raise damaged(path, name, f"cannot be read ({error.strerror})") from error
        if crc32 != record.crc32:
            raise damaged(path, name, "does not match its checksum")
