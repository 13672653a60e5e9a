"""Shard files: safetensors written and read as streams, behind torch.distributed.checkpoint's storage classes.

A file holds chunks, each under its tensor's name and place: "master/lm_head.weight[0:128,0:64]". Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from triaxis.engine.checkpoint.assignment import DTYPE_NAMES, DTYPES, item_bytes, item_data
from triaxis.engine.checkpoint.manifest import (
    ChunkRecord,
    FileRecord,
    Manifest,
    RunState,
    TensorRecord,
    damaged,
    read_manifest,
    write_manifest,
)
from triaxis.engine.plain_files import read_plain

HEADER_ALIGNMENT_BYTES = 64
READ_BYTES = 1 << 24


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def _chunk_key(item: WriteItem) -> str:
    chunk = item_data(item).chunk
    bounds = (f"{low}:{low + size}" for low, size in zip(chunk.offsets, chunk.sizes, strict=True))
    return f"{item.index.fqn}[{','.join(bounds)}]"


def _header(plan: SavePlan) -> bytes:
    """The head of a safetensors file: its length in 8 bytes, then by chunk dtype, shape and place behind the head."""
    entries: dict[str, Any] = {}
    first = 0
    for item in plan.items:
        data, size = item_data(item), item_bytes(item)
        entries[_chunk_key(item)] = {
            "dtype": DTYPE_NAMES[data.properties.dtype],
            "shape": list(data.chunk.sizes),
            "data_offsets": [first, first + size],
        }
        first += size
    text = json.dumps(entries).encode()
    length = -(-(len(text) + 8) // HEADER_ALIGNMENT_BYTES) * HEADER_ALIGNMENT_BYTES - 8
    return length.to_bytes(8, "little") + text.ljust(length)


def results_of(plan: SavePlan) -> list[WriteResult]:
    """Where the plan's chunks will be, which only the plan decides."""
    results = []
    first = len(_header(plan))
    for item in plan.items:
        chunk, size = item_data(item).chunk, item_bytes(item)
        record = ChunkRecord(
            offsets=tuple(chunk.offsets), sizes=tuple(chunk.sizes), file=plan.storage_data, first_byte=first
        )
        results.append(WriteResult(index=item.index, size_in_bytes=size, storage_data=record))
        first += size
    return results


class _SummedFile:
    """A file being written, and the CRC-32 of what it holds."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.crc32, self.size_bytes = file, 0, 0

    def write(self, block: Any) -> None:  # noqa: ANN401  (a buffer)
        self._file.write(block)
        self.crc32 = zlib.crc32(block, self.crc32)
        self.size_bytes += len(block)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors of the operating system name the file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


class ShardWriter(StorageWriter):
    """Writes a rank's share into one file of a folder. files: what was written, by name."""

    def __init__(self) -> None:
        self._folder = Path()
        self.files: dict[str, FileRecord] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """checkpoint_id: the folder."""
        self._folder, self.files = Path(checkpoint_id or "."), {}

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Nothing: the folder is there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """storage_data: the name of each plan's file."""
        return [replace(plan, storage_data=shard_name(number)) for number, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Streams the chunks into the file and syncs it; no file for an empty plan. Raises OSError with its name."""
        if plan.items:
            path = self._folder / plan.storage_data
            with _named(path), path.open("xb") as file:
                summed = _SummedFile(file)
                summed.write(_header(plan))
                for item in plan.items:
                    value = planner.resolve_data(item)
                    assert isinstance(value, Tensor)
                    summed.write(memoryview(_bytes_of(value.cpu().contiguous())))
                file.flush()
                os.fsync(file.fileno())
            self.files[path.name] = FileRecord(size_bytes=summed.size_bytes, crc32=summed.crc32)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results_of(plan))
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the manifest. metadata.planner_data: (state, optimizer steps); storage_data: every file's record."""
        state, optimizer_steps = metadata.planner_data
        assert isinstance(state, RunState)
        records = {result.index: result.storage_data for share in results for result in share}
        tensors = {
            name: TensorRecord(
                dtype=DTYPE_NAMES[tensor.properties.dtype],
                shape=tuple(tensor.size),
                chunks=tuple(records[MetadataIndex(name, chunk.offsets)] for chunk in tensor.chunks),
            )
            for name, tensor in _tensors(metadata)
        }
        manifest = Manifest(
            state=state, optimizer_steps=optimizer_steps, files=metadata.storage_data, tensors=tensors
        )
        with _named(self._folder):
            write_manifest(self._folder, manifest)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(checkpoint_id).is_dir()


def _tensors(metadata: Metadata) -> Iterator[tuple[str, TensorStorageMetadata]]:
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        yield name, tensor


def _bytes_of(tensor: Tensor) -> Any:  # noqa: ANN401  (a numpy array)
    return tensor.detach().view(-1).view(torch.uint8).numpy()


class ShardReader(StorageReader):
    """Reads chunks of one checkpoint's files, `READ_BYTES` at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records: dict[MetadataIndex, ChunkRecord] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """checkpoint_id: the checkpoint's folder."""
        self.path = Path(checkpoint_id or self.path)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ANN401
        """planner_data: the manifest. Raises CheckpointError."""
        manifest = read_manifest(self.path)
        tensors: dict[str, Any] = {}
        for name, tensor in manifest.tensors.items():
            chunks = [
                ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
                for chunk in tensor.chunks
            ]
            properties = TensorProperties(dtype=DTYPES[tensor.dtype])
            tensors[name] = TensorStorageMetadata(
                properties=properties, size=torch.Size(tensor.shape), chunks=chunks
            )
        return Metadata(state_dict_metadata=tensors, planner_data=manifest)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:  # noqa: ANN401
        self._records = {
            MetadataIndex(name, chunk.offsets): chunk
            for name, tensor in metadata.planner_data.tensors.items()
            for chunk in tensor.chunks
        }

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """In the order of the files."""

        def place(item: ReadItem) -> tuple[str, int]:
            record = self._records[item.storage_index]
            return record.file, record.first_byte

        return replace(plan, items=sorted(plan.items, key=place))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @torch.no_grad()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills what the planner resolves. Raises CheckpointError that names the file."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._records[item.storage_index].file, []).append(item)
        for name, items in by_file.items():
            try:
                with read_plain(self.path / name) as file:
                    for item in items:
                        tensor = planner.resolve_tensor(item)
                        self._read(file, name, item, tensor)
                        planner.commit_tensor(item, tensor)
            except OSError as error:
                raise damaged(self.path, name, f"cannot be read ({error.strerror})") from error
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, file: BinaryIO, name: str, item: ReadItem, tensor: Tensor) -> None:
        """Whole rows of the stored chunk, of which the wanted columns are kept."""
        record = self._records[item.storage_index]
        inner = record.sizes[1:]
        row_bytes = prod(inner) * tensor.element_size()
        rows_at_once = max(1, READ_BYTES // row_bytes)
        for row in range(0, item.lengths[0], rows_at_once):
            rows = min(rows_at_once, item.lengths[0] - row)
            block = torch.empty((rows, *inner), dtype=tensor.dtype)
            wanted = memoryview(_bytes_of(block))
            first = record.first_byte + (item.storage_offsets[0] + row) * row_bytes
            if os.preadv(file.fileno(), [wanted], first) != len(wanted):
                raise damaged(self.path, name, f"ends before byte {first + len(wanted)}")
            for dim in range(1, block.dim()):
                block = block.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
            tensor[row : row + rows].copy_(block)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(checkpoint_id).is_dir()
