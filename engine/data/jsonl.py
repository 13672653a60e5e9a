"""JSON lines: one document a line, `text`, or `messages` of which the assistant's answers are trained.

What a line may be:
- blank: passed over, not counted. A byte order mark at the file's head and CRLF ends are taken off.
- empty: no text, or whitespace only, or no messages. Counted, and left out.
- bad: not UTF-8, not a JSON object, neither key, a null or a value of another type, no answer to train on.
  An error that names file, line and reason; with on_bad_sample="skip" counted, listed and left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import numpy as np
from jinja2.exceptions import TemplateError

from triaxis.engine.data.fingerprint import fingerprint_arrays
from triaxis.engine.data.stream import (
    ArrayTokens,
    StreamSource,
    pack_documents,
    rows_that_train,
    told_cuts,
    told_drops,
)
from triaxis.engine.data.tokenizer import Message, Segment, Tokenizer, open_tokenizer

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BAD_LINES_NAMED = 10


class OnBadSample(StrEnum):
    ERROR = "error"
    SKIP = "skip"


class BadLine(ValueError):
    """Why a line holds no document."""


@dataclass(slots=True)
class Tally:
    """What became of a file's lines. `bad` lists "file:line: reason"."""

    read: int = 0
    kept: int = 0
    empty: int = 0
    bad: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"read {self.read}, kept {self.kept}, empty {self.empty}, bad {len(self.bad)}"

    def listing(self) -> str:
        """The first bad lines, and how many more."""
        more = len(self.bad) - BAD_LINES_NAMED
        return "; ".join(self.bad[:BAD_LINES_NAMED]) + (f"; and {more} more" if more > 0 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """line: where it is. ids: its tokens, end token included. trained: which are targets; None for all."""

    line: int
    ids: list[int]
    trained: list[bool] | None


def read_documents(path: Path, tokenizer: Tokenizer, tally: Tally, on_bad_sample: str) -> Iterator[Document]:
    """The file's documents in order; `tally` is filled as they are read."""
    on_bad = _on_bad(on_bad_sample)
    if not path.is_file():
        raise ValueError(f"data must be a file, but {path} does not exist")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if not line.strip():
                continue
            tally.read += 1
            try:
                encoded = _encode(parse_line(line), tokenizer)
            except BadLine as error:
                if on_bad is OnBadSample.ERROR:
                    raise ValueError(
                        f"{path}:{number}: {error}; mend the line, or set on_bad_sample to skip"
                    ) from error
                tally.bad.append(f"{path}:{number}: {error}")
                continue
            if encoded is None:
                tally.empty += 1
                continue
            tally.kept += 1
            yield Document(line=number, ids=encoded[0], trained=encoded[1])
    if not tally.kept:
        listing = f": {tally.listing()}" if tally.bad else ""
        raise ValueError(f"{path} must hold at least one document, but has none ({tally}){listing}")


def _on_bad(value: str) -> OnBadSample:
    if value not in tuple(OnBadSample):
        raise ValueError(f"`on_bad_sample` must be error or skip, but is {value!r}")
    return OnBadSample(value)


def parse_line(line: bytes) -> str | list[Message]:
    """The text or the messages of a line; raises BadLine."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadLine(f"is not UTF-8 (byte {error.start} of the line)") from error
    except json.JSONDecodeError as error:
        raise BadLine(f"is not JSON ({error.msg} at column {error.colno})") from error
    except RecursionError as error:
        raise BadLine("is not JSON that can be read (nested too deep)") from error
    if not isinstance(record, dict):
        raise BadLine(f"must be a JSON object, but is {_kind(record)}")
    if "messages" in record:
        return _messages(record["messages"])
    if "text" in record:
        return _text(record["text"], "`text`")
    raise BadLine(f"must have the key `text` or `messages`, but has {', '.join(map(repr, record)) or 'none'}")


def _messages(value: object) -> list[Message]:
    if not isinstance(value, list):
        raise BadLine(f"`messages` must be a list, but is {_kind(value)}")
    messages = []
    for number, entry in enumerate(value):
        if not isinstance(entry, dict) or not {"role", "content"} <= entry.keys():
            raise BadLine(f"message {number} must be an object with `role` and `content`")
        role = _text(entry["role"], f"`role` of message {number}")
        messages.append(Message(role=role, content=_text(entry["content"], f"`content` of message {number}")))
    if messages and not any(message.role == "assistant" for message in messages):
        raise BadLine("`messages` must have an assistant's answer to train on, but has none")
    return messages


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise BadLine(f"{name} must be a string, but is {_kind(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadLine(f"{name} holds half a surrogate pair (character {error.start})") from error
    return value


def _kind(value: object) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"


def _encode(content: str | list[Message], tokenizer: Tokenizer) -> tuple[list[int], list[bool] | None] | None:
    """(ids, trained) with the end token, or None for an empty document."""
    end = [] if tokenizer.end is None else [tokenizer.end]
    if isinstance(content, str):
        if not content.strip():
            return None
        whole = tokenizer.encode(content, special=True)
        return whole + (end if whole[-1:] != end else []), None
    if not any(message.content.strip() for message in content):
        return None
    ids: list[int] = []
    trained: list[bool] = []
    for segment in _render(content, tokenizer):
        piece = tokenizer.encode(segment.text, special=False) if segment.text else []
        ids += piece
        trained += [segment.trained] * len(piece)
    if ids[-1:] != end:  # a template may have written it
        ids += end
        trained += [content[-1].role == "assistant"] * len(end)
    return ids, trained


def _render(messages: list[Message], tokenizer: Tokenizer) -> list[Segment]:
    try:
        return tokenizer.render(messages)
    except (TemplateError, ValueError) as error:
        raise BadLine(f"the tokenizer's chat template refuses it: {error}") from error


def open_jsonl(
    path: Path, *, sequence_length: int, tokenizer_path: str | Path | None, on_bad_sample: str, pack: bool
) -> StreamSource:
    """The whole file, tokenized into memory; a corpus that does not fit there wants `launch.preprocess`."""
    tokenizer = open_tokenizer(tokenizer_path)
    tally = Tally()
    ids: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
    targets: list[np.ndarray[tuple[int], np.dtype[np.bool_]]] = []
    lines: list[int] = []
    for document in read_documents(path, tokenizer, tally, on_bad_sample):
        lines.append(document.line)
        ids.append(np.array(document.ids, dtype=np.int32))
        targets.append(np.array(document.trained or [True] * len(document.ids), dtype=np.bool_))
    lengths = np.array([len(piece) for piece in ids], dtype=np.int64)
    stops = np.cumsum(lengths)
    tokens = np.concatenate(ids)
    starts, trained = stops - lengths, np.concatenate(targets)
    cut = pack_documents(starts, len(tokens), sequence_length, pack=pack)
    rows = rows_that_train(cut, starts, len(tokens), trained)
    if not len(rows.starts):
        raise ValueError(f"{path}: no document has a token to train on ({tally}); give longer texts")
    return StreamSource(
        tokens=ArrayTokens(tokens),
        document_starts=starts,
        rows=rows,
        sequence_length=sequence_length,
        vocab_size=tokenizer.vocab_size,
        name_document=_line_namer(path, lines),
        report=f"{path}: {tally}"
        + (f" ({tally.listing()})" if tally.bad else "")
        + told_cuts(lengths, sequence_length)
        + told_drops(cut, rows),
        fingerprint=fingerprint_arrays(tokens, trained, starts),
        trained=trained,
    )


def _line_namer(path: Path, lines: list[int]) -> Callable[[int], str]:
    return lambda document: f"{path}:{lines[document]}"
