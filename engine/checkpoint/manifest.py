"""What a checkpoint is on disk: shard files, and a manifest that is written last. No torch.

    checkpoints/step-00000020/shard-00000.safetensors   chunks of tensors, whoever wrote them
                              shard-00001.safetensors
                              manifest.json             the run's state, every file's size and checksum, every chunk
                              best                      if it had the best evaluation loss so far
    checkpoints/.tmp-step-00000030-5f1c…                a save under way, or what is left of one that died

A checkpoint is complete if it has its name and its manifest: both come with one rename.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

FORMAT = "triaxis-checkpoint"
VERSION = 1
FOLDER = "checkpoints"
MANIFEST = "manifest.json"
BEST = "best"
TEMPORARY = ".tmp-"
REPLACED = ".old"
NAME = re.compile(r"step-(\d+)(\.old)?")
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


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def complete_checkpoints(directory: Path) -> list[Path]:
    """The complete checkpoints of the run in `directory`, the newest last; leftovers of dead saves are not."""
    found = []
    for path in (directory / FOLDER).glob("step-*"):
        match = NAME.fullmatch(path.name)
        if match and (path / MANIFEST).is_file():
            found.append((int(match[1]), match[2] is None, path))
    return [path for _, _, path in sorted(found)]


def previous_checkpoint(path: Path) -> Path | None:
    """The complete checkpoint before this one in the same folder."""
    complete = complete_checkpoints(path.parent.parent)
    before = complete[: complete.index(path)] if path in complete else complete
    return before[-1] if before else None
