"""Conversations: what a line of messages may hold, and which characters of its rendered text are trained.

A conversation is rendered once, whole, and its text is tokenized once, whole: ids are those that the tokenizer makes
of the text, so nothing is learned that inference does not ask for. What is trained is said in characters: the answers
and what ends each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Span = tuple[int, int]
"""Characters [start, stop) of a text."""

ANSWERING = "assistant"
TRAIN_KEYS = ("weight", "train")
BARE_KEYS = frozenset({"role", "content"})


class BadLine(ValueError):
    """Why a line holds no document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """fields: as the template gets them, `role` and `content` among them. trained: whether it is an answer to learn."""

    role: str
    fields: dict[str, Any]
    trained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """others: what the line has for the template beside messages, by key (`tools`, …)."""

    messages: tuple[Message, ...]
    others: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A conversation as text.

    spans: what is trained, ascending. unended: answers to learn that nothing ends, so that a model cannot learn to stop
    verbatim: where people wrote what looks like a control token; it stays the text that they wrote
    """

    text: str
    spans: tuple[Span, ...]
    unended: int = 0
    verbatim: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKeys:
    """What a template reads: of a message, and of the line."""

    message: frozenset[str] = BARE_KEYS
    record: frozenset[str] = frozenset()


def parse_conversation(record: dict[str, Any], known: KnownKeys) -> Conversation:
    """The conversation of a line's JSON object. Raises BadLine, which names what it cannot use."""
    value = record["messages"]
    if not isinstance(value, list):
        raise BadLine(f"`messages` must be a list, but is {kind_of(value)}")
    messages = tuple(_message(number, entry, known) for number, entry in enumerate(value))
    if messages and not any(message.role == ANSWERING for message in messages):
        raise BadLine("`messages` must have an assistant's answer to train on, but has none")
    others = {key: content for key, content in record.items() if key != "messages"}
    extra = others.pop("chat_template_kwargs", None) or {}
    if not isinstance(extra, dict):
        raise BadLine(f"`chat_template_kwargs` must be an object, but is {kind_of(extra)}")
    for key in {**others, **extra}:
        if key not in known.record:
            raise BadLine(
                f"has the key {key!r}, which the chat template does not read; take it out, or use a template that does"
            )
    return Conversation(messages=messages, others={**others, **extra})


def _message(number: int, entry: object, known: KnownKeys) -> Message:
    if not isinstance(entry, dict) or "role" not in entry:
        raise BadLine(f"message {number} must be an object with `role` and `content`")
    role = text_of(entry["role"], f"`role` of message {number}")
    content = entry.get("content")
    silent = content is None and (entry.get("tool_calls") or "reasoning_content" in entry)
    if "content" not in entry and not silent:
        raise BadLine(f"message {number} must be an object with `role` and `content`")
    if not silent and not isinstance(content, list):  # a list of parts is the template's business
        text_of(content, f"`content` of message {number}")
    fields = {key: value for key, value in entry.items() if key not in TRAIN_KEYS}
    for key, value in fields.items():
        if key not in known.message:
            raise BadLine(
                f"message {number} has the key {key!r}, which the chat template does not read; take it out, or use a "
                "template that does"
            )
        check_text(value, f"`{key}` of message {number}")
    return Message(role=role, fields=fields, trained=_is_trained(number, role, entry))


def _is_trained(number: int, role: str, entry: dict[str, Any]) -> bool:
    """An assistant's message, unless `weight` 0 or `train` false says that it is not to be learned."""
    marks = []
    for key in TRAIN_KEYS:
        if key in entry:
            if entry[key] not in (0, 1):
                raise BadLine(
                    f"`{key}` of message {number} must be 0 or 1 (false or true), but is {entry[key]!r}"
                )
            marks.append(bool(entry[key]))
    if role != ANSWERING:
        if any(marks):
            raise BadLine(f"message {number} is to be trained, but is the {role}'s: only answers are")
        return False
    return all(marks)


def text_of(value: object, name: str) -> str:
    """The value, which must be a string that UTF-8 can write. Raises BadLine."""
    if not isinstance(value, str):
        raise BadLine(f"{name} must be a string, but is {kind_of(value)}")
    check_text(value, name)
    return value


def check_text(value: object, name: str) -> None:
    """Raises BadLine if any string in the value cannot be written."""
    for text in strings_in(value):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadLine(f"{name} holds half a surrogate pair (character {error.start})") from error


def strings_in(value: object) -> list[str]:
    """Every string in a JSON value, keys included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [text for item in value for text in strings_in(item)]
    if isinstance(value, dict):
        return [text for item in value.items() for text in strings_in(list(item))]
    return []


def kind_of(value: object) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"


def render_roles(conversation: Conversation) -> Rendered:
    r"""The template where a tokenizer has none: "<|role|>\n" before each content, "\n" behind it.

    Of an assistant's message the content and the newline behind it are trained, the role is not.
    """
    text, spans = "", []
    for message in conversation.messages:
        text += f"<|{message.role}|>\n"
        start = len(text)
        text += f"{message.fields['content']}\n"
        if message.trained:
            spans.append((start, len(text)))
    return Rendered(text=text, spans=tuple(spans))


def trained_tokens(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Whether a token has a character in a span. offsets: of each token, ascending; spans: ascending.

    A tokenizer that trims what it reports gives a token of whitespace no width: it reaches back to the one before.
    Example: offsets (0, 2) (2, 5) (5, 6), a span (3, 6): False, True, True.
    """
    found = []
    following, end = 0, 0
    for start, stop in offsets:
        if start == stop:
            start = min(end, start)
        while following < len(spans) and spans[following][1] <= start:
            following += 1
        found.append(following < len(spans) and spans[following][0] < stop and start < stop)
        end = max(end, stop)
    return found


def marked_verbatim(conversation: Conversation, controls: Sequence[str], mark: str) -> Conversation | None:
    """With `mark` behind the first character of whatever looks like a control token; None if nothing does."""
    found = False

    def change(value: Any) -> Any:  # JSON
        nonlocal found
        if isinstance(value, str):
            for control in controls:
                if control in value:
                    found = True
                    value = value.replace(control, control[0] + mark + control[1:])
            return value
        if isinstance(value, list):
            return [change(item) for item in value]
        if isinstance(value, dict):
            return {key: change(item) for key, item in value.items()}
        return value

    messages = tuple(
        replace(message, fields={k: v if k == "role" else change(v) for k, v in message.fields.items()})
        for message in conversation.messages
    )
    others = change(conversation.others)
    return Conversation(messages=messages, others=others) if found else None
