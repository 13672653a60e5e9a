"""What a manifest must be, whole, before any part of it is used: a manifest may come from anywhere. No torch.

Everything that it names stands inside its folder, and every element of every tensor is in exactly one chunk.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Any

from triaxis.parallel.places.rectangles import covers_once

ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
"""The types of elements, as safetensors names them."""
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors", re.ASCII)
HEAD_BYTES = 8
MOST = 1 << 62
MOST_DIMS = 8
MOST_CHARACTERS = 512
SHOWN_CHARACTERS = 60

STATE_KEYS = ("step", "tokens", "config", "sampler", "eval_loss", "extra")
BODY_KEYS = ("format", "version", "state", "optimizer_steps", "files", "tensors")


class Misfit(ValueError):
    """A part of a manifest that cannot be; the message names it."""


def check_body(body: object) -> None:
    """Raises Misfit unless a manifest's body has every key, of its type and within its bounds, and nothing else."""
    fields = _mapping(body, "the manifest", BODY_KEYS)
    _check_state(fields["state"])
    _whole(fields["optimizer_steps"], "optimizer_steps")
    sizes = _check_files(fields["files"])
    places: dict[str, list[tuple[int, int]]] = {}
    for name, tensor in _mapping(fields["tensors"], "tensors").items():
        _check_tensor(name, tensor, sizes, places)
    for file, runs in places.items():
        end = HEAD_BYTES
        for first, count in sorted(runs):
            if first < end:
                raise Misfit(f"`tensors` must not share bytes, but two chunks have byte {first:,} of {file}")
            end = first + count


def _check_state(value: object) -> None:
    state = _mapping(value, "state", STATE_KEYS)
    for name in ("step", "tokens"):
        _whole(state[name], f"state.{name}")
    for name in ("config", "sampler", "extra"):
        _mapping(state[name], f"state.{name}")
    loss = state["eval_loss"]
    if not (loss is None or isinstance(loss, float) or type(loss) is int):
        raise _misfit("state.eval_loss", "a number or null", loss)


def _check_files(value: object) -> dict[str, int]:
    """The files' sizes by name."""
    sizes = {}
    for name, record in _mapping(value, "files").items():
        if not FILE_NAME.fullmatch(name):
            raise _misfit("files", "names of safetensors files in the checkpoint's own folder", name)
        fields = _mapping(record, f"files.{name}", ("size_bytes", "crc32"))
        sizes[name] = _whole(fields["size_bytes"], f"files.{name}.size_bytes")
        _whole(fields["crc32"], f"files.{name}.crc32", most=2**32 - 1)
    return sizes


def _check_tensor(
    name: str, value: object, sizes: Mapping[str, int], places: dict[str, list[tuple[int, int]]]
) -> None:
    """Adds the tensor's runs of bytes to `places`, by file."""
    if not name.isprintable() or not 0 < len(name) <= MOST_CHARACTERS:
        raise _misfit("tensors", f"names of 1 to {MOST_CHARACTERS} printable characters", name)
    where = f"tensors.{name}"
    tensor = _mapping(value, where, ("dtype", "shape", "chunks"))
    dtype = tensor["dtype"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise _misfit(f"{where}.dtype", f"one of {', '.join(ITEM_BYTES)}", dtype)
    shape = _sizes(tensor["shape"], f"{where}.shape", least=1)
    if not shape or prod(shape) > MOST:
        raise _misfit(f"{where}.shape", f"of at least one dimension and at most {MOST:,} elements", shape)
    boxes = []
    for chunk in _list(tensor["chunks"], f"{where}.chunks"):
        if not isinstance(chunk, list) or len(chunk) != 4:
            raise _misfit(f"{where}.chunks", "lists of offsets, sizes, file and first byte", chunk)
        offsets = _sizes(chunk[0], f"{where}.chunks.offsets", dims=len(shape))
        lengths = _sizes(chunk[1], f"{where}.chunks.sizes", dims=len(shape), least=1)
        file = chunk[2]
        if not isinstance(file, str) or file not in sizes:
            raise _misfit(f"{where}.chunks.file", "one of the manifest's `files`", file)
        count = prod(lengths) * ITEM_BYTES[dtype]
        first = _whole(chunk[3], f"{where}.chunks.first_byte", least=HEAD_BYTES)
        if first + count > sizes[file]:
            raise Misfit(
                f"`{where}.chunks` must end within {file} of {sizes[file]:,} bytes, but one ends at {first + count:,}"
            )
        places.setdefault(file, []).append((first, count))
        boxes.append((offsets, lengths))
    if not covers_once(shape, boxes):
        raise Misfit(f"`{where}.chunks` must cover every element of shape {list(shape)} once, but do not")


def _mapping(value: object, where: str, keys: tuple[str, ...] | None = None) -> dict[str, Any]:
    """A JSON object, with these keys and no others where they are given."""
    if not isinstance(value, dict):
        raise _misfit(where, "an object", value)
    if keys is not None and value.keys() != set(keys):
        missing = [key for key in keys if key not in value]
        if missing:
            raise Misfit(f"`{where}` must have {', '.join(missing)}, but has not")
        raise _misfit(where, f"without further keys than {', '.join(keys)}", sorted(value.keys() - set(keys)))
    return value


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise _misfit(where, "a list", value)
    return value


def _whole(value: object, where: str, *, least: int = 0, most: int = MOST) -> int:
    if type(value) is not int or not least <= value <= most:  # a bool is no number here
        raise _misfit(where, f"a whole number from {least} to {most:,}", value)
    return value


def _sizes(value: object, where: str, *, dims: int | None = None, least: int = 0) -> tuple[int, ...]:
    sizes = tuple(_whole(size, where, least=least) for size in _list(value, where))
    if len(sizes) > MOST_DIMS or (dims is not None and len(sizes) != dims):
        raise _misfit(where, f"of {MOST_DIMS if dims is None else dims} dimensions", sizes)
    return sizes


def _misfit(where: str, must: str, value: object) -> Misfit:
    shown = repr(value)
    shown = shown if len(shown) <= SHOWN_CHARACTERS else shown[:SHOWN_CHARACTERS] + "…"
    return Misfit(f"`{where}` must be {must}, but is {shown}")
