"""Text to token ids: bytes, a tokenizer.json, or a Hugging Face tokenizer's folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FileTokens
    from transformers import PreTrainedTokenizerBase

BYTE_END = 256
BYTE_VOCABULARY = 257
END_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eot|>", "[EOS]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A piece of a rendered conversation; `trained` where it is an assistant's answer."""

    text: str
    trained: bool


class Tokenizer(Protocol):
    """vocab_size: ids are below it. end: the id that ends a document, or None where there is none."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end(self) -> int | None: ...

    def encode(self, text: str, *, special: bool) -> list[int]:
        """`special`: with what the tokenizer itself puts around a text (its BOS)."""
        ...

    def render(self, messages: Sequence[Message]) -> list[Segment]: ...


def render_roles(messages: Sequence[Message]) -> list[Segment]:
    r"""The template where a tokenizer has none: "<|role|>\n" before each content, "\n" behind it.

    Of an assistant's message the content and the newline behind it are trained, the role is not.
    """
    segments = []
    for message in messages:
        answer = message.role == "assistant"
        segments.append(Segment(text=f"<|{message.role}|>\n", trained=False))
        segments.append(Segment(text=f"{message.content}\n", trained=answer))
    return segments


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """UTF-8 bytes, and one id more that ends a document."""

    vocab_size: int = BYTE_VOCABULARY
    end: int | None = BYTE_END

    def encode(self, text: str, *, special: bool) -> list[int]:
        del special
        return list(text.encode())

    def render(self, messages: Sequence[Message]) -> list[Segment]:
        return render_roles(messages)


@dataclass(frozen=True, slots=True)
class JsonTokenizer:
    """A tokenizer.json; the end of a document is the first of END_NAMES that it knows."""

    tokens: FileTokens
    vocab_size: int
    end: int | None

    def encode(self, text: str, *, special: bool) -> list[int]:
        return self.tokens.encode(text, add_special_tokens=special).ids

    def render(self, messages: Sequence[Message]) -> list[Segment]:
        return render_roles(messages)


@dataclass(frozen=True, slots=True)
class FolderTokenizer:
    """A folder for transformers' AutoTokenizer, with its chat template where it has one."""

    tokens: PreTrainedTokenizerBase
    vocab_size: int
    end: int | None

    def encode(self, text: str, *, special: bool) -> list[int]:
        return cast(list[int], self.tokens.encode(text, add_special_tokens=special))

    def render(self, messages: Sequence[Message]) -> list[Segment]:
        """An answer is what the template adds to the prompt that asks for it."""
        if not self.tokens.chat_template:
            return render_roles(messages)
        segments: list[Segment] = []
        whole = self._text(messages, asking=False)
        done = 0
        for number, message in enumerate(messages):
            if message.role != "assistant":
                continue
            prompt = self._text(messages[:number], asking=True)
            answered = self._text(messages[: number + 1], asking=False)
            if not (whole.startswith(answered) and answered.startswith(prompt) and done <= len(prompt)):
                raise ValueError(
                    "the chat template changes earlier turns, so that answers cannot be told apart"
                )
            segments.append(Segment(text=whole[done : len(prompt)], trained=False))
            segments.append(Segment(text=whole[len(prompt) : len(answered)], trained=True))
            done = len(answered)
        segments.append(Segment(text=whole[done:], trained=False))
        return segments

    def _text(self, messages: Sequence[Message], *, asking: bool) -> str:
        turns = [{"role": message.role, "content": message.content} for message in messages]
        text = self.tokens.apply_chat_template(turns, tokenize=False, add_generation_prompt=asking)
        return cast(str, text)


def open_tokenizer(path: str | Path | None) -> Tokenizer:
    """Bytes without a path; a tokenizer.json file; or a folder in Hugging Face's layout."""
    if path is None:
        return ByteTokenizer()
    path = Path(path)
    if path.is_dir():
        from transformers import AutoTokenizer  # noqa: PLC0415 - slow to import

        try:
            folder = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"`tokenizer` must be a tokenizer.json or a folder that holds a tokenizer, but {path} holds none "
                f"that transformers can read; check the path"
            ) from error
        return FolderTokenizer(folder, len(folder), folder.eos_token_id)
    if not path.is_file():
        raise ValueError(f"`tokenizer` must be a tokenizer.json or a folder, but {path} does not exist")
    from tokenizers import Tokenizer as FileTokens  # noqa: PLC0415 - slow to import

    try:
        tokens = FileTokens.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"`tokenizer` must be a tokenizer.json, but {path} is not: {error}") from error
    known = (tokens.token_to_id(name) for name in END_NAMES)
    end = next((token for token in known if token is not None), None)
    return JsonTokenizer(tokens, max(tokens.get_vocab().values()) + 1, end)
