"""Documents of text files: one a line or record, `text`, or `messages` of which the assistant's answers are trained.

What a line may be:
- blank: passed over, not counted. A byte order mark at the file's head and CRLF ends are taken off.
- empty: no text, or whitespace only, or no messages. Counted, and left out.
- bad: not UTF-8, not a JSON object, neither key, a null or a value of another type, no answer to train on.
  An error that names file, line and reason; with on_bad_sample="skip" counted, listed and left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from triaxis.engine.data.chat import BadLine, Conversation, kind_of, parse_conversation, text_of
from triaxis.engine.data.files import Record, records
from triaxis.engine.data.tokenizer import Encoded, Tokenizer
from triaxis.parallel.places.legal_values import counted, first_of

BAD_LINES_NAMED = 10


class OnBadSample(StrEnum):
    ERROR = "error"
    SKIP = "skip"


@dataclass(slots=True)
class Tally:
    """What became of a file's lines. bad: "file:line: reason" of each. unread: keys beside `text`, left alone.

    unended: answers that the template does not end
    """

    read: int = 0
    kept: int = 0
    empty: int = 0
    bad: list[str] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)
    unended: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    conversations: int = 0

    def add(self, encoded: Encoded) -> None:
        self.kept += 1
        self.unended += encoded.unended
        self.tokens += len(encoded.ids)
        self.trained_tokens += len(encoded.ids) if encoded.trained is None else sum(encoded.trained)
        self.conversations += encoded.trained is not None

    def take(self, other: Tally) -> None:
        """Adds what became of other lines, which came later."""
        for name in ("read", "kept", "empty", "unended", "tokens", "trained_tokens", "conversations"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.bad += other.bad
        self.unread |= other.unread

    def __str__(self) -> str:
        return f"read {self.read}, kept {self.kept}, empty {self.empty}, bad {len(self.bad)}"

    def told(self) -> list[str]:
        """What people must know beside the counts, a line each."""
        told = []
        if self.conversations:
            told.append(
                f"{counted(self.conversations, 'conversation')}: {self.trained_tokens:,} of {self.tokens:,} tokens are "
                "trained, those of answers and what ends them"
            )
        if self.unended:
            told.append(
                f"the chat template does not end {counted(self.unended, 'answer')}: the model does not learn to stop "
                "there; use a template that writes an end token behind each answer"
            )
        if self.unread:
            told.append(f"keys left unread beside `text`: {', '.join(sorted(self.unread)[:BAD_LINES_NAMED])}")
        return told

    def listing(self) -> str:
        """The first bad lines, and how many more."""
        return first_of(self.bad, BAD_LINES_NAMED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """line: where it is. ids: its tokens, end token included. trained: which are targets; None for all."""

    line: int
    ids: list[int]
    trained: list[bool] | None


def read_documents(path: Path, tokenizer: Tokenizer, tally: Tally, on_bad_sample: str) -> Iterator[Document]:
    """The file's documents in order; `tally` is filled as they are read. Raises ValueError where there is none."""
    if not path.is_file():
        raise ValueError(f"`data` must be a file, but {path} does not exist")
    kept = tally.kept
    yield from documents_of(path, records(path), tokenizer, tally, on_bad_sample)
    if tally.kept == kept:
        raise empty_file(path, tally)


def empty_file(path: Path, tally: Tally) -> ValueError:
    listing = f": {tally.listing()}" if tally.bad else ""
    return ValueError(f"{path} must hold at least one document, but has none ({tally}){listing}")


def documents_of(
    path: Path,
    found: Iterable[tuple[int, Record]],
    tokenizer: Tokenizer,
    tally: Tally,
    on_bad_sample: str,
) -> Iterator[Document]:
    """The documents of some of a file's records, (line, record) each."""
    on_bad = _on_bad(on_bad_sample)
    for number, record in found:
        tally.read += 1
        try:
            encoded = _encode(parse_record(record, tokenizer, tally), tokenizer)
        except BadLine as error:
            if on_bad is OnBadSample.ERROR:
                raise ValueError(
                    f"{path}:{number}: {error}; mend it, or set on_bad_sample to skip"
                ) from error
            tally.bad.append(f"{path}:{number}: {error}")
            continue
        if encoded is None:
            tally.empty += 1
            continue
        tally.add(encoded)
        yield Document(line=number, ids=encoded.ids, trained=encoded.trained)


def _on_bad(value: str) -> OnBadSample:
    if value not in tuple(OnBadSample):
        raise ValueError(f"`on_bad_sample` must be error or skip, but is {value!r}")
    return OnBadSample(value)


def parse_record(found: Record, tokenizer: Tokenizer, tally: Tally) -> str | Conversation:
    """The text or the conversation of a record; raises BadLine."""
    if isinstance(found, BadLine):
        raise found
    record = _parse_line(found) if isinstance(found, bytes) else found
    if not isinstance(record, dict):
        raise BadLine(f"must be a JSON object, but is {kind_of(record)}")
    if "messages" in record:
        return parse_conversation(record, tokenizer.keys)
    if "text" in record:
        tally.unread.update(key for key in record if key != "text")
        return text_of(record["text"], "`text`")
    raise BadLine(f"must have the key `text` or `messages`, but has {', '.join(map(repr, record)) or 'none'}")


def _parse_line(line: bytes) -> object:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadLine(f"is not UTF-8 (byte {error.start} of the line)") from error
    except json.JSONDecodeError as error:
        raise BadLine(f"is not JSON ({error.msg} at column {error.colno})") from error
    except RecursionError as error:
        raise BadLine("is not JSON that can be read (nested too deep)") from error
    except ValueError as error:  # a number of thousands of digits
        raise BadLine("is not JSON that can be read (a number is too long)") from error


def _encode(content: str | Conversation, tokenizer: Tokenizer) -> Encoded | None:
    """None for an empty document."""
    if isinstance(content, str):
        return tokenizer.encode_text(content) if content.strip() else None
    if not any(_says_something(message.fields) for message in content.messages):
        return None
    return tokenizer.encode_chat(content)


def _says_something(fields: dict[str, Any]) -> bool:
    content = fields.get("content")
    return (
        bool(content.strip())
        if isinstance(content, str)
        else len(fields) > 1 + ("content" in fields and not content)
    )
