"""Which files `--data` means, and the records in them. Lines are read as they come: no file is held whole."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
from collections.abc import Callable, Iterator
from glob import glob, has_magic
from pathlib import Path
from typing import IO, Any, cast

from triaxis.engine.data.chat import BadLine

KINDS = (".jsonl", ".json", ".txt", ".parquet")
OPENERS: dict[str, Callable[[IO[bytes]], object]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": lambda raw: _zstandard(raw),
}
SEPARATOR = ","
CACHE = Path("~/.cache/triaxis/data")
"""What is made of data once per machine: tokens, and folders of what the hub has."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Record = bytes | dict[str, Any] | BadLine
"""A line, an object, or why there is none."""


def kind_of_file(path: Path) -> str | None:
    """`.jsonl` and so on, below a compression; None for no text."""
    suffix = Path(path.stem).suffix if path.suffix in OPENERS else path.suffix
    return suffix if suffix in KINDS else None


def text_files(data: str, field: str = "data") -> list[Path] | None:
    """The files of a name, folder, pattern, or several with commas between; None where it means Megatron's files.

    Raises ValueError where nothing is there, which names the setting, `field`.
    """
    parts = [data] if os.path.exists(data) else data.split(SEPARATOR)
    if len(parts) == 1 and not (os.path.isdir(data) or has_magic(data) or kind_of_file(Path(data))):
        return None
    found: list[Path] = []
    for part in parts:
        place = Path(part)
        if os.path.isdir(part):
            inside = sorted(path for path in place.rglob("*") if path.is_file() and kind_of_file(path))
        elif has_magic(part) and not os.path.exists(part):
            inside = [path for path in map(Path, sorted(glob(part, recursive=True))) if kind_of_file(path)]
        else:
            inside = [place] if os.path.isfile(part) and kind_of_file(place) else []
        if not inside:
            there = "is none" if os.path.exists(part) else "does not exist"
            raise ValueError(
                f"`{field}` must be a file of {', '.join(KINDS)} (or compressed), a folder or a pattern of them, but "
                f"{part} {'holds none' if os.path.isdir(part) else there}"
            )
        found += inside
    return list(dict.fromkeys(found))


def records(path: Path, raw: IO[bytes] | None = None) -> Iterator[tuple[int, Record]]:
    """(line, or number from 1; record) of every record that is not blank.

    raw: the file, open, for a caller who wants to know how far it is read; a table's stays at its beginning
    """
    kind = kind_of_file(path)
    if kind == ".parquet":
        yield from _rows(path)
        return
    with raw or path.open("rb") as file, _decompressed(path, file) as lines:
        if kind == ".txt":
            yield 1, _text(lines.read().removeprefix(BYTE_ORDER_MARK))
        elif kind == ".json":
            yield from _objects(lines.read().removeprefix(BYTE_ORDER_MARK))
        else:
            for number, line in enumerate(lines, start=1):
                content = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
                if content.strip():
                    yield number, content


def _decompressed(path: Path, raw: IO[bytes]) -> IO[bytes]:
    return cast(IO[bytes], OPENERS[path.suffix](raw)) if path.suffix in OPENERS else raw


def _zstandard(raw: IO[bytes]) -> object:
    import pyarrow  # noqa: PLC0415 - slow to import

    return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"))


def _text(content: bytes) -> Record:
    try:
        return {"text": content.decode("utf-8")}
    except UnicodeDecodeError as error:
        return BadLine(f"is not UTF-8 (byte {error.start})")


def _objects(content: bytes) -> Iterator[tuple[int, Record]]:
    """A list of objects, one object over several lines, or an object a line."""
    lines = [(n, line) for n, line in enumerate(content.splitlines(), start=1) if line.strip()]
    try:
        whole = json.loads(content)
    except (ValueError, RecursionError) as error:
        if len(lines) > 1 and not _is_json(lines[0][1]):
            yield lines[0][0], BadLine(f"is not JSON ({error})")
            return
        whole = None  # a line each, each with what is wrong with it
    if whole is None or (len(lines) == 1 and not isinstance(whole, list)):
        yield from lines
    else:
        yield from enumerate(whole if isinstance(whole, list) else [whole], start=1)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _rows(path: Path) -> Iterator[tuple[int, Record]]:
    """A table's rows; what a row has no value for is left out, as in JSON."""
    from datasets import load_dataset  # noqa: PLC0415 - slow to import

    table = load_dataset("parquet", data_files=str(path), split="train", streaming=True)
    for number, row in enumerate(table, start=1):
        yield number, _without_nulls(row)


def _without_nulls(value: Any) -> Any:  # JSON
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
