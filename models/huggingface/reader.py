"""Reads a folder of safetensors by slices: each rank reads the rectangles that it holds, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from triaxis.models.huggingface.family import BLOCK
from triaxis.models.huggingface.places import Place, Places, Shape
from triaxis.parallel.places.legal_values import first_of

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SHOWN = 20
COMPARED_ROWS = 4096
SCALES = "_scale_inv"
"""What DeepSeek-V3 appends to the name of an 8-bit weight to name its blocks' scales."""


class ImportRefused(ValueError):
    """A checkpoint that cannot be read as this model; the message lists everything that is wrong."""


class SafetensorsFolder:
    """The tensors of a Hugging Face checkpoint, in one file or in several with an index. Files are mapped, not read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file_of = _files(folder)
        self._open: dict[str, Any] = {}

    def _file(self, name: str) -> Any:  # noqa: ANN401  (safetensors is untyped)
        file = self.file_of[name]
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.folder / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ImportRefused(
                    f"`{self.folder / file}` must be a safetensors file, but cannot be read: {error}; "
                    "fetch it again, or remove it and its line in the index"
                ) from error
        return self._open[file]

    def shapes(self) -> dict[str, Shape]:
        """Every tensor's shape, out of the files' headers."""
        found = {}
        for name in self.file_of:
            file = self._file(name)
            try:
                found[name] = tuple(file.get_slice(name).get_shape())
            except SafetensorError as error:
                raise ImportRefused(
                    f"`{self.folder / self.file_of[name]}` must hold {name}, as the index says, but does not: {error}"
                ) from error
        return found

    def read(self, name: str, index: tuple[slice | int, ...]) -> Tensor:
        """A part of a tensor."""
        whole = self._file(name).get_slice(name)
        part: Tensor = whole[index] if index else self._file(name).get_tensor(name)
        if name + SCALES not in self.file_of:
            return part
        return _widened(part, self._file(name + SCALES).get_tensor(name + SCALES), index)


def _widened(part: Tensor, scales: Tensor, index: tuple[slice | int, ...]) -> Tensor:
    """8-bit values times the scale of their block, of which each stands for 128 × 128 elements of the whole tensor."""
    spans = index or tuple(slice(0, size) for size in part.shape)
    rows, columns = (
        torch.arange(span.start, span.stop) // BLOCK for span in spans if isinstance(span, slice)
    )
    return part.float() * scales[rows[:, None], columns]


def _files(folder: Path) -> dict[str, str]:
    """The file that holds each tensor."""
    if (folder / INDEX).is_file():
        try:
            table = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise ImportRefused(
                f"`{folder / INDEX}` must be JSON with a `weight_map`, but is not: {error}"
            ) from error
        outside = [file for file in table.values() if Path(file).name != file]
        absent = sorted({file for file in table.values() if not (folder / file).is_file()} - set(outside))
        if outside or absent:
            raise ImportRefused(
                f"`{folder / INDEX}` must name files beside it, but {', '.join(sorted({*outside, *absent}))} is none; "
                "fetch the whole checkpoint"
            )
        return dict(table)
    if (folder / SINGLE).is_file():
        with safe_open(folder / SINGLE, framework="pt") as file:
            return dict.fromkeys(file.keys(), SINGLE)
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    hint = f"; {pickled[0]} is pickled and can run code: save it anew with save_pretrained" if pickled else ""
    raise ImportRefused(f"`{folder}` must hold {SINGLE} or {INDEX}, but has neither{hint}")


class HubWeights:
    """A model's weights by our names, read from a Hugging Face checkpoint. Making it checks that nothing is missing.

    ignored: their names that carry nothing (masks, rotary tables), as whole patterns
    tied: (head, embedding) of theirs where the head is the embedding; a head that is there must be equal
    copies: of theirs, which of theirs each repeats; those that are there must be equal
    """

    def __init__(
        self,
        folder: Path,
        places: Places,
        *,
        ignored: Sequence[str] = (),
        tied: tuple[str, str] | None = None,
        copies: Mapping[str, str] | None = None,
    ) -> None:
        self._files, self._places = SafetensorsFolder(folder), places
        there = self._files.shapes()
        for name in [name for name in there if name.removesuffix(SCALES) in there and name.endswith(SCALES)]:
            del there[name]
        if tied is not None and tied[0] in there:
            self._check_equal(
                there,
                *tied,
                "since config.json says `tie_word_embeddings`, but differs {}; "
                "set `tie_word_embeddings` to false in config.json, or export the checkpoint again",
            )
            del there[tied[0]]
        for copy, whole in (copies or {}).items():
            if copy in there:
                self._check_equal(there, copy, whole, "which all prediction depths share, but differs {}")
                del there[copy]
        faults = compare_shapes(places.shapes, there, ignored)
        if faults:
            shown = first_of(faults, SHOWN, separator="\n", lead="… and")
            raise ImportRefused(f"{folder} is not a checkpoint of this model:\n{shown}")

    def _check_equal(self, shapes: Mapping[str, Shape], copy: str, whole: str, why: str) -> None:
        """A run of rows at a time: an embedding may be as large as a rank's part of the model."""
        if whole not in shapes:
            return
        if shapes[copy] != shapes[whole]:
            raise ImportRefused(f"{copy} must equal {whole}, {why.format('in its shape')}")
        rows, *rest = shapes[whole]
        difference = torch.zeros(())
        for first in range(0, rows, COMPARED_ROWS):
            index = (slice(first, min(first + COMPARED_ROWS, rows)), *(slice(0, size) for size in rest))
            one, other = (self._files.read(name, index).float() for name in (copy, whole))
            difference = torch.maximum(difference, (one - other).abs().max())
        if difference != 0:  # so it is where something is not a number
            raise ImportRefused(f"{copy} must equal {whole}, {why.format(f'by up to {difference:.3g}')}")

    def read(self, name: str, offsets: Shape, sizes: Shape) -> Tensor:
        """A rectangle of one of our tensors, in the dtype of the file."""
        place = self._places.of[name]
        return read_place(self._files, place, offsets, sizes)


def read_place(files: SafetensorsFolder, place: Place, offsets: Shape, sizes: Shape) -> Tensor:
    """The rectangle of ours that lies at `place`."""
    # Rows in another order within a head are read by whole heads, and those before and after let go.
    height = 1 if place.interleaved is None else place.interleaved[0]
    before, behind = offsets[0] % height, -(offsets[0] + sizes[0]) % height
    offsets, sizes = (offsets[0] - before, *offsets[1:]), (before + sizes[0] + behind, *sizes[1:])
    part = files.read(place.name, place.index(offsets, sizes))
    part = part.t() if place.transposed else part
    order = place.order(offsets, sizes)
    return part if order is None else part[order][before : sizes[0] - behind]


def compare_shapes(
    expected: Mapping[str, Shape], there: Mapping[str, Shape], ignored: Sequence[str] = ()
) -> list[str]:
    """What is missing, not expected, or of another shape, a line each."""
    from fnmatch import fnmatchcase

    faults = [
        f"  {name} must have shape {list(shape)}, but has {list(there[name])}"
        for name, shape in expected.items()
        if name in there and there[name] != shape
    ]
    extra = [name for name in there if name not in expected]
    extra = [name for name in extra if not any(fnmatchcase(name, pattern) for pattern in ignored)]
    for name in expected:
        if name not in there:
            near = get_close_matches(name, extra, 1)
            faults.append(f"  {name} is missing" + (f" (there is {near[0]})" if near else ""))
    return faults + [f"  {name} is not a tensor of this model" for name in extra]
