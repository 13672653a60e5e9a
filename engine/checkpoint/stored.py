"""A checkpoint without a model: its tensors read, compared and written anew, a chunk at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf, prod
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from triaxis.engine.checkpoint.assignment import (
    DTYPES,
    StateLoadPlanner,
    StatePlanner,
    item_bytes,
    item_data,
    metadata_of,
    write_item,
)
from triaxis.engine.checkpoint.folder import (
    FOLDER,
    begin_folder,
    checkpoints_at,
    discard_folder,
    leftovers_at,
    place_folder,
)
from triaxis.engine.checkpoint.manifest import check_files
from triaxis.engine.checkpoint.states import HeldTensor
from triaxis.engine.checkpoint.storage import ShardReader, ShardWriter, results_of
from triaxis.parallel.places.rectangles import CHUNK_ELEMENTS, cut_rectangles


class StoredTensors:
    """The tensors of one complete checkpoint. Raises CheckpointError where a file is damaged."""

    def __init__(self, path: Path) -> None:
        self._reader = ShardReader(path)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, True)
        self.manifest = self._metadata.planner_data

    def read(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """A part of a tensor, on the host."""
        record = self.manifest.tensors[name]
        values = torch.empty(sizes, dtype=DTYPES[record.dtype])
        held = HeldTensor(dtype=values.dtype, shape=record.shape, chunks={offsets: values})
        planner = StateLoadPlanner()
        planner.set_up_planner({name: held}, self._metadata)
        self._reader.read_data(self._reader.prepare_local_plan(planner.create_local_plan()), planner)
        return values

    def chunks(
        self, name: str, limit: int = CHUNK_ELEMENTS
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(offsets, sizes) that cover a tensor once, rows of at most `limit` elements together."""
        shape = self.manifest.tensors[name].shape
        for part in cut_rectangles(shape, 0, prod(shape), limit):
            yield part.offsets, part.sizes


def largest_difference(one: StoredTensors, other: StoredTensors, name: str) -> float:
    """The largest absolute difference of a tensor that both hold in one shape; infinite where one alone is NaN."""
    largest = 0.0
    for offsets, sizes in one.chunks(name):
        a, b = (stored.read(name, offsets, sizes).double() for stored in (one, other))
        gaps = (a - b).abs().masked_fill_((a == b) | (a.isnan() & b.isnan()), 0.0)
        largest = max(largest, float(gaps.nan_to_num(nan=inf, posinf=inf).max()))
    return largest


class _CopyPlanner(StatePlanner):
    """Plans a save of what another checkpoint holds."""

    def __init__(self, stored: StoredTensors) -> None:
        super().__init__()
        self._stored = stored

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        chunk = item_data(write_item).chunk
        return self._stored.read(write_item.index.fqn, tuple(chunk.offsets), tuple(chunk.sizes))


def reshard(path: Path, directory: Path, files: int) -> Path:
    """Writes a complete checkpoint again under `directory/checkpoints`, in at most `files` files of nearly equal size.

    Example: 3 files of 10 chunks of one size hold 4, 3 and 3.
    """
    if files < 1:
        raise ValueError(f"`files` must be at least 1, but is {files}")
    if checkpoints_at(directory) or leftovers_at(directory):
        raise ValueError(
            f"`out` must be a directory without checkpoints, but {directory} has some; name a new one"
        )
    stored = StoredTensors(path)
    manifest = stored.manifest
    check_files(path, manifest.files)
    limit = min(CHUNK_ELEMENTS, -(-sum(prod(tensor.shape) for tensor in manifest.tensors.values()) // files))
    items = [
        write_item(name, DTYPES[tensor.dtype], tensor.shape, offsets, sizes)
        for name, tensor in manifest.tensors.items()
        for offsets, sizes in stored.chunks(name, limit)
    ]
    writer, planner = ShardWriter(), _CopyPlanner(stored)
    plans = writer.prepare_global_plan(_equal_shares(items, files))
    temporary = begin_folder(directory / FOLDER, manifest.state.step)
    writer.reset(temporary)
    try:
        for plan in plans:
            writer.write_data(plan, planner)
        metadata = replace(
            metadata_of(items),
            planner_data=(manifest.state, manifest.optimizer_steps),
            storage_data=writer.files,
        )
        writer.finish(metadata, [results_of(plan) for plan in plans])
    except OSError:
        discard_folder(temporary)
        raise
    return place_folder(temporary, manifest.state.step)[0]


def _equal_shares(items: list[WriteItem], shares: int) -> list[SavePlan]:
    """The items in order, cut where each share has its part of the bytes."""
    total_bytes = sum(item_bytes(item) for item in items)
    plans = [SavePlan([]) for _ in range(shares)]
    before = 0
    for item in items:
        plans[before * shares // total_bytes].items.append(item)
        before += item_bytes(item)
    return plans
