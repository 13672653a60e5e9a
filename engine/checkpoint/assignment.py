"""Who writes which chunk, and who reads which: planners for torch.distributed.checkpoint over `HeldTensor`s."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from triaxis.engine.checkpoint.states import HeldTensor
from triaxis.parallel.worlds.agreement import Json

DTYPES = {  # as safetensors names them
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
STAGING_ALIGNMENT_BYTES = 64


def write_item(
    name: str, dtype: torch.dtype, shape: Iterable[int], offsets: Iterable[int], sizes: Iterable[int]
) -> WriteItem:
    """A chunk of the tensor `name` to be written."""
    chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
    data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=dtype), size=torch.Size(shape))
    return WriteItem(index=MetadataIndex(name, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)


def item_data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None, "every item of ours is a chunk of a tensor"
    return item.tensor_data


def item_bytes(item: WriteItem) -> int:
    data = item_data(item)
    return prod(data.chunk.sizes) * data.properties.dtype.itemsize


def plan_to_json(plan: SavePlan) -> Json:
    """A plan for a message: by tensor its dtype, shape and chunks."""
    tensors: dict[str, Any] = {}
    for item in plan.items:
        data = item_data(item)
        tensor = tensors.setdefault(item.index.fqn, [DTYPE_NAMES[data.properties.dtype], list(data.size), []])
        tensor[2].append([list(data.chunk.offsets), list(data.chunk.sizes)])
    return tensors


def plan_from_json(tensors: Any) -> SavePlan:  # noqa: ANN401  (JSON of plan_to_json)
    return SavePlan(
        [
            write_item(name, DTYPES[dtype], shape, offsets, sizes)
            for name, (dtype, shape, chunks) in tensors.items()
            for offsets, sizes in chunks
        ]
    )


def share_out(plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """Each chunk to one of the ranks that hold it: the one with the fewest bytes so far, replicated chunks last.

    Example: ranks that hold {a}, {a, b} and {b}, all of one size, write a, nothing and b.
    """
    holders: dict[MetadataIndex, list[int]] = {}
    items: dict[MetadataIndex, WriteItem] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders.setdefault(item.index, []).append(rank)
            known = items.setdefault(item.index, item)
            assert known == item, f"replicas of {item.index} are cut differently"
    shared_bytes = [0] * len(plans)
    writer: dict[MetadataIndex, int] = {}
    for index in sorted(items, key=lambda index: (len(holders[index]) > 1, -item_bytes(items[index]))):
        rank = min(holders[index], key=lambda holder: (shared_bytes[holder], holder))
        writer[index] = rank
        shared_bytes[rank] += item_bytes(items[index])
    shares = [
        replace(plan, items=[item for item in plan.items if writer[item.index] == rank])
        for rank, plan in enumerate(plans)
    ]
    return shares, metadata_of(items.values())


def metadata_of(items: Iterable[WriteItem]) -> Metadata:
    """The tensors that the items make up; each must be covered once."""
    tensors: dict[str, TensorStorageMetadata] = {}
    for item in items:
        data = item_data(item)
        fresh = TensorStorageMetadata(properties=data.properties, size=data.size, chunks=[])
        tensors.setdefault(item.index.fqn, fresh).chunks.append(data.chunk)
    for name, tensor in tensors.items():
        covered = sum(prod(chunk.sizes) for chunk in tensor.chunks)
        assert covered == prod(tensor.size), f"{name}: chunks cover {covered} elements of {tensor.size}"
    return Metadata(state_dict_metadata=dict(tensors))


class StatePlanner(SavePlanner):
    """Plans a save of held tensors, and hands out their values: live, or as they were when staged."""

    def __init__(self) -> None:
        self._held: dict[str, HeldTensor] = {}
        self._is_staged = False
        self._live_values: list[Tensor] = []
        self._copies: dict[MetadataIndex, Tensor] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """state_dict: `HeldTensor` by name."""
        self._held = state_dict

    def create_local_plan(self) -> SavePlan:
        return SavePlan(
            [
                write_item(name, tensor.dtype, tensor.shape, offsets, view.shape)
                for name, tensor in self._held.items()
                for offsets, view in tensor.chunks.items()
            ]
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return share_out(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._copies[write_item.index] if self._is_staged else self._live(write_item)

    def _live(self, item: WriteItem) -> Tensor:
        return self._held[item.index.fqn].chunks[tuple(item_data(item).chunk.offsets)]

    @torch.no_grad()
    def stage(self, plan: SavePlan) -> None:
        """Copies the plan's values to the host, into a buffer (pinned beside a GPU) that is kept for the next time.

        plan: the same in every call
        """
        if not self._copies:
            self._live_values = [self._live(item) for item in plan.items]
            places = _places_for(self._live_values)
            self._copies = {item.index: place for item, place in zip(plan.items, places, strict=True)}
        if self._live_values:
            torch._foreach_copy_(list(self._copies.values()), self._live_values, non_blocking=True)
            if self._live_values[0].is_cuda:
                torch.cuda.synchronize(self._live_values[0].device)
        self._is_staged = True

    def unstage(self) -> None:
        """Values are live again."""
        self._is_staged = False


def _places_for(values: list[Tensor]) -> list[Tensor]:
    """Tensors like the values, side by side in one buffer on the host."""
    sizes = [-(-value.nbytes // STAGING_ALIGNMENT_BYTES) * STAGING_ALIGNMENT_BYTES for value in values]
    pinned = any(value.is_cuda for value in values)
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
    parts = buffer.split(sizes)
    return [
        part[: value.nbytes].view(value.dtype).view(value.shape)
        for part, value in zip(parts, values, strict=True)
    ]


class StateLoadPlanner(LoadPlanner):
    """Plans which parts of a checkpoint's chunks fill the held tensors."""

    def __init__(self) -> None:
        self._held: dict[str, HeldTensor] = {}
        self._metadata: Metadata | None = None

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """state_dict: `HeldTensor` by name, all of them in the metadata with the same shape and dtype."""
        self._held, self._metadata = state_dict, metadata

    def create_local_plan(self) -> LoadPlan:
        assert self._metadata is not None, "set_up_planner comes first"
        items: list[ReadItem] = []
        for name, tensor in self._held.items():
            stored = self._metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            chunks = [
                ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=view.shape)
                for offsets, view in tensor.chunks.items()
            ]
            items += create_read_items_for_chunk_list(name, stored, chunks)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("every item of ours is a chunk of a tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        offsets = read_item.dest_index.offset
        assert offsets is not None
        view = self._held[read_item.dest_index.fqn].chunks[tuple(offsets)]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, start, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing: what `resolve_tensor` gave was filled in place."""


def mismatches(wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> list[str]:
    """How the tensors of two metadata differ, in words; empty if one can be loaded as the other."""
    faults = [f"{name} is missing" for name in sorted(wanted.keys() - stored.keys())]
    faults += [f"{name} is not in the model" for name in sorted(stored.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & stored.keys()):
        ours, theirs = (
            f"{DTYPE_NAMES[tensor.properties.dtype]} {tuple(tensor.size)}"
            for tensor in (wanted[name], stored[name])
        )
        if ours != theirs:
            faults.append(f"{name} must be {ours}, but is {theirs}")
    return faults
