"""Text and conversations to token ids: bytes, a tokenizer.json, or a Hugging Face tokenizer's folder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from triaxis.engine.data.chat import (
    Conversation,
    KnownKeys,
    Rendered,
    Span,
    render_roles,
    trained_tokens,
)
from triaxis.engine.data.day import dated
from triaxis.engine.data.template import Ends, find_ends, known_keys, render_chat
from triaxis.engine.data.verbatim import Verbatim, any_of, control_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FileTokens
    from transformers import PreTrainedTokenizerBase

BYTE_END = 256
BYTE_VOCABULARY = 257
BARE = KnownKeys()
END_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eot|>", "[EOS]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A document's tokens. trained: which are targets; None for all. unended: answers that nothing ends."""

    ids: list[int]
    trained: list[bool] | None = None
    unended: int = 0


class Tokenizer(Protocol):
    """vocab_size: ids are below it. end: the id that ends a text, or None where there is none.

    keys: what a line of messages may hold. notes: what people must know of it, a line each.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def end(self) -> int | None: ...

    @property
    def keys(self) -> KnownKeys: ...

    @property
    def notes(self) -> tuple[str, ...]: ...

    def encode_text(self, text: str) -> Encoded:
        """A text with what the tokenizer puts around one, and one end; nothing in it becomes a control token."""
        ...

    def encode_chat(self, conversation: Conversation) -> Encoded: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """UTF-8 bytes, and one id more that ends a document."""

    vocab_size: int = BYTE_VOCABULARY
    end: int | None = BYTE_END
    keys: KnownKeys = BARE
    notes: tuple[str, ...] = ()

    def encode_text(self, text: str) -> Encoded:
        return Encoded(ids=[*text.encode(), BYTE_END])

    def encode_chat(self, conversation: Conversation) -> Encoded:
        rendered = render_roles(conversation)
        offsets = [
            (place, place + 1) for place, character in enumerate(rendered.text) for _ in character.encode()
        ]
        trained = trained_tokens(offsets, rendered.spans)
        return _ended(conversation, [*rendered.text.encode()], trained, BYTE_END)

    def decode(self, ids: Sequence[int]) -> str:
        text = bytes(token for token in ids if token < BYTE_END).decode(errors="replace")
        return text + "<end>" * (BYTE_END in ids)


def _ended(conversation: Conversation, ids: list[int], trained: list[bool], end: int | None) -> Encoded:
    """With the document's end, which is the last answer's."""
    if end is not None and ids[-1:] != [end]:
        ids, trained = [*ids, end], [*trained, conversation.messages[-1].trained]
    return Encoded(ids=ids, trained=trained)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTokenizer:
    """A tokenizer.json, with a chat template where its folder has one.

    controls, pattern: ids and texts of its special tokens. around: what it puts before and behind a text.
    template: None for "<|role|>" lines. verbatim: makes, once, what tokenizes texts that hold such texts
    """

    tokens: FileTokens
    vocab_size: int
    end: int | None
    controls: frozenset[int]
    pattern: re.Pattern[str]
    around: tuple[list[int], list[int]]
    verbatim: Callable[[], Verbatim]
    template: Template | None = None
    notes: tuple[str, ...] = ()

    @property
    def keys(self) -> KnownKeys:
        return BARE if self.template is None else self.template.keys

    def encode_text(self, text: str) -> Encoded:
        before, behind = self.around
        ids = [*before, *self._encode_plain(text)[0], *behind]
        end = [] if self.end is None or ids[-1:] == [self.end] else [self.end]
        return Encoded(ids=ids + end)

    def encode_chat(self, conversation: Conversation) -> Encoded:
        rendered = render_roles(conversation) if self.template is None else self.template.render(conversation)
        if self.template is None:
            ids, offsets = self._encode_plain(rendered.text)
        else:
            ids, offsets = self._encode(rendered.text, rendered.verbatim)
        trained = trained_tokens(offsets, rendered.spans)
        before, _ = self.around
        if ids[: len(before)] != before:  # the template has not written what every document begins with
            ids, trained = [*before, *ids], [False] * len(before) + trained
        if self.template is None:
            return _ended(conversation, ids, trained, self.end)
        return Encoded(ids=ids, trained=trained, unended=rendered.unended)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokens.decode(list(ids), skip_special_tokens=False)

    def _encode(self, text: str, verbatim: tuple[Span, ...]) -> tuple[list[int], list[Span]]:
        """(ids, characters of each), of the whole at once. verbatim: where people wrote a control token's text."""
        if verbatim:
            return self.verbatim().encode(text, verbatim)
        found = self.tokens.encode(text, add_special_tokens=False)
        return found.ids, found.offsets

    def _encode_plain(self, text: str) -> tuple[list[int], list[Span]]:
        """The same of a text that holds no control token, whatever it looks like."""
        ids, offsets = self._encode(text, ())
        if self.controls.isdisjoint(ids):
            return ids, offsets
        return self.verbatim().encode(text, tuple(found.span() for found in self.pattern.finditer(text)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A folder's chat template. train_inserted: whether empty think blocks of the template's own are trained."""

    tokens: PreTrainedTokenizerBase
    controls: tuple[str, ...]
    keys: KnownKeys
    ends: Ends
    train_inserted: bool

    def render(self, conversation: Conversation) -> Rendered:
        return render_chat(
            conversation,
            _renderer(self.tokens),
            self.ends,
            self.controls,
            train_inserted=self.train_inserted,
        )


def _renderer(tokens: PreTrainedTokenizerBase) -> Any:
    def render(conversation: Conversation, asking: bool) -> str:
        turns = [message.fields for message in conversation.messages]
        text = tokens.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=asking, **conversation.others
        )
        return cast(str, text)

    return render


def open_tokenizer(
    path: str | Path | None, *, train_inserted: bool = False, date: str | None = None
) -> Tokenizer:
    """Bytes without a path; a tokenizer.json file; or a folder in Hugging Face's layout, whose code is never run.

    train_inserted: see `Template`; date: the day that a chat template writes, YYYY-MM-DD; None: today
    """
    if path is None:
        return ByteTokenizer()
    path = Path(path)
    if path.is_dir():
        return _open_folder(path, train_inserted, date)
    if not path.is_file():
        raise ValueError(f"`tokenizer` must be a tokenizer.json or a folder, but {path} does not exist")
    from tokenizers import Tokenizer as FileTokens  # noqa: PLC0415 - slow to import

    try:
        tokens = FileTokens.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"`tokenizer` must be a tokenizer.json, but {path} is not: {error}") from error
    known = (tokens.token_to_id(name) for name in END_NAMES)
    end = next((token for token in known if token is not None), None)
    vocab_size = max(tokens.get_vocab().values()) + 1
    return _file_tokenizer(tokens, vocab_size=vocab_size, end=end)


def _open_folder(path: Path, train_inserted: bool, date: str | None) -> Tokenizer:
    from transformers import AutoTokenizer  # noqa: PLC0415 - slow to import

    try:
        folder = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        own_code = "; its own code (auto_map) is never run" * bool(_notes(path))
        raise ValueError(
            f"`tokenizer` must be a tokenizer.json or a folder that holds a tokenizer, but {path} holds none "
            f"that transformers can read{own_code}; check the path"
        ) from error
    if not folder.is_fast:
        raise ValueError(
            f"`tokenizer` must be one of the tokenizers library (a tokenizer.json), which says where each token is in "
            f"its text, but {path} has none; convert it with transformers"
        )
    tokens = folder.backend_tokenizer
    controls = _controls(tokens)
    template = None
    if date is not None:
        folder.chat_template = dated(folder.chat_template, date)
    if folder.chat_template:
        keys = known_keys(folder.get_chat_template())
        keys = KnownKeys(message=keys.message, record=keys.record - set(folder.special_tokens_map))
        ends = find_ends(_renderer(folder), controls)
        template = Template(
            tokens=folder, controls=controls, keys=keys, ends=ends, train_inserted=train_inserted
        )
    notes = _notes(path)
    if date is not None:
        notes += (f"the chat template writes the day: {date} in all of this run (--chat-template-date)",)
    return _file_tokenizer(
        tokens, vocab_size=len(folder), end=folder.eos_token_id, template=template, notes=notes
    )


def _file_tokenizer(tokens: FileTokens, **facts: Any) -> FileTokenizer:
    controls = _controls(tokens)
    return FileTokenizer(
        tokens=tokens,
        controls=control_ids(tokens, controls),
        pattern=any_of(controls),
        around=_around(tokens),
        verbatim=cache(lambda: Verbatim(tokens, controls)),
        **facts,
    )


def _controls(tokens: FileTokens) -> tuple[str, ...]:
    return tuple(token.content for token in tokens.get_added_tokens_decoder().values() if token.special)


def _around(tokens: FileTokens) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and behind a text (its BOS, its EOS)."""
    whole, plain = (tokens.encode("a", add_special_tokens=special).ids for special in (True, False))
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    return [], []


def _notes(path: Path) -> tuple[str, ...]:
    config = path / "tokenizer_config.json"
    try:
        own = "auto_map" in json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ()
    return (f"{path} names code of its own (auto_map), which is never run",) if own else ()
