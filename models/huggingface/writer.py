"""Writes a model as a folder of safetensors with an index, a file at a time: no more than one file is in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from triaxis.models.huggingface.places import Places, Shape
from triaxis.models.huggingface.reader import INDEX, SINGLE

FILE_BYTES = 5 * 10**9

Read = Callable[[str, Shape, Shape], Tensor]
"""A rectangle (offsets, sizes) of one of our tensors."""


def their_tensors(
    names: Sequence[str],
    places: Places,
    shapes: dict[str, Shape],
    read: Read,
    dtype_of: Callable[[str], torch.dtype],
) -> Iterator[tuple[str, Tensor]]:
    """Those of their tensors that `names` are, put together from ours; `shapes` are ours."""
    for name in names:
        dtype = dtype_of(name)
        tensor = torch.empty(places.shapes[name], dtype=dtype)
        for part in places.parts[name]:
            place, shape = places.of[part], shapes[part]
            values = read(part, (0,) * len(shape), shape)
            order = place.order((0,) * len(shape), shape)
            if order is not None:
                values = torch.empty_like(values).index_copy_(0, torch.tensor(order), values)
            tensor[place.index((0,) * len(shape), shape)] = (values.t() if place.transposed else values).to(
                dtype
            )
        yield name, tensor


def write_tensors(
    folder: Path,
    places: Places,
    shapes: dict[str, Shape],
    read: Read,
    dtype: torch.dtype,
    fp32: Sequence[str] = (),
    file_bytes: int = FILE_BYTES,
    share: tuple[int, int] = (0, 1),
) -> int:
    """Writes all tensors, `file_bytes` a file at most (a larger tensor has its own); returns the bytes of all.

    fp32: patterns of their names that stay fp32 whatever `dtype` is
    share: (rank, ranks): each writes every so manieth file, the first one the index too
    """

    def dtype_of(name: str) -> torch.dtype:
        return torch.float32 if any(fnmatchcase(name, pattern) for pattern in fp32) else dtype

    cuts = _cut(
        [(name, prod(shape) * dtype_of(name).itemsize) for name, shape in places.shapes.items()], file_bytes
    )
    names = [SINGLE] if len(cuts) == 1 else [_numbered(at, len(cuts)) for at in range(len(cuts))]
    rank, ranks = share
    for file, members in list(zip(names, cuts, strict=True))[rank::ranks]:
        held = dict(their_tensors(members, places, shapes, read, dtype_of))
        save_file(held, folder / file, metadata={"format": "pt"})
    total = sum(prod(shape) * dtype_of(name).itemsize for name, shape in places.shapes.items())
    if len(cuts) > 1 and rank == 0:
        weight_map = {name: file for file, members in zip(names, cuts, strict=True) for name in members}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return total


def _cut(sizes: list[tuple[str, int]], file_bytes: int) -> list[list[str]]:
    """Names in order, a list for each file."""
    files: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes:
        if files[-1] and filled + size > file_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    return files


def _numbered(at: int, count: int) -> str:
    return f"model-{at + 1:05}-of-{count:05}.safetensors"
