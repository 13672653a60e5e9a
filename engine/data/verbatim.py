"""Texts that hold what looks like a control token, tokenized as text.

A tokenizer finds its control tokens wherever their text stands, whoever wrote it. A copy of it that knows each of
them by another text (characters of a private plane, as many) finds those that a template wrote, which are written so
before, and takes the rest for what it is. The whole text is still tokenized at once: what stands at the beginning of
a piece is treated otherwise by tokenizers with a word marker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from triaxis.engine.data.chat import BadLine, Span

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FileTokens

FIRST = 0x100000
MOST = 0xF000
"""Below what templates are marked with, see `triaxis.engine.data.template`."""
NOWHERE = "\U0010fffd"
"""A character that no vocabulary has."""


def any_of(texts: Sequence[str]) -> re.Pattern[str]:
    """Matches the longest of them."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


def control_ids(tokens: FileTokens, controls: Sequence[str]) -> frozenset[int]:
    """Ids that no text may become. What stands for an unknown character is one that texts have."""
    unknown = tokens.encode(NOWHERE, add_special_tokens=False).ids
    found = (tokens.token_to_id(control) for control in controls)
    return frozenset(number for number in found if number is not None and number not in unknown)


class Verbatim:
    """A tokenizer to which only what is said to be a control token is one."""

    def __init__(self, tokens: FileTokens, controls: Sequence[str]) -> None:
        names = {control: chr(FIRST + n % MOST) * len(control) for n, control in enumerate(controls)}
        self._names, self._pattern = names, any_of(controls)
        self._tokens = _renamed(tokens, names)
        ids = ((self._tokens.token_to_id(name), tokens.token_to_id(old)) for old, name in names.items())
        self._ids = {here: there for here, there in ids if here is not None and there is not None}
        self._counted = control_ids(tokens, controls)

    def encode(self, text: str, written: Sequence[Span]) -> tuple[list[int], list[Span]]:
        """(ids, characters of each). written: where people wrote a control's text; elsewhere it is the control.

        Raises BadLine where the tokenizer has no other way to write it.
        """
        if any(character >= chr(FIRST) for character in text):
            raise BadLine("holds what looks like a control token, and characters from U+100000 on")
        theirs = set(written)
        true = 0

        def name(found: re.Match[str]) -> str:
            nonlocal true
            if found.span() in theirs:
                return found[0]
            true += 1
            return self._names[found[0]]

        encoding = self._tokens.encode(self._pattern.sub(name, text), add_special_tokens=False)
        ids = [self._ids.get(token, token) for token in encoding.ids]
        if sum(token in self._counted for token in ids) != true:
            raise BadLine("holds what looks like a control token, which this tokenizer cannot write as text")
        return ids, encoding.offsets


def _renamed(tokens: FileTokens, names: dict[str, str]) -> FileTokens:
    """The tokenizer with other texts for its control tokens, in its vocabulary too unless merges speak of them."""
    from tokenizers import Tokenizer as FileTokens  # noqa: PLC0415 - slow to import

    whole: dict[str, Any] = json.loads(tokens.to_str())
    whole |= {"post_processor": None, "truncation": None, "padding": None}
    for token in whole["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model, vocabulary = whole["model"], whole["model"]["vocab"]
    renamed = dict(model)
    if isinstance(vocabulary, dict):
        renamed["vocab"] = {names.get(text, text): number for text, number in vocabulary.items()}
    else:
        renamed["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
    if "unk_token" in model:
        renamed["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    try:
        return FileTokens.from_str(json.dumps(whole | {"model": renamed}))
    except Exception:  # noqa: BLE001 - the library raises bare Exception
        return FileTokens.from_str(json.dumps(whole))
