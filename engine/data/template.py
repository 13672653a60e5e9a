"""A tokenizer's chat template, and where the answers are in what it renders.

A template may rewrite earlier turns, insert empty think blocks, close an answer only where the next turn begins. So
answers are looked for in the whole text itself: it is rendered a second time with marks (characters that no text has)
at the edges of what the assistant wrote, and where the marks come out is where the answers are.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from triaxis.engine.data.chat import (
    BARE_KEYS,
    TRAIN_KEYS,
    BadLine,
    Conversation,
    KnownKeys,
    Message,
    Rendered,
    Span,
    marked_verbatim,
    strings_in,
)

MARKS = range(0x10F000, 0x10FFFE)
"""Of a private plane: characters that mean nothing anywhere."""
VERBATIM = chr(MARKS.stop)
REASONING = ("reasoning_content", "reasoning", "thinking")
OPENED, CLOSED = "<think>", "</think>"

Render = Callable[[Conversation, bool], str]
"""(conversation, whether to ask for the next answer) → text; whatever it raises is the template's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """What a template puts around every answer. header: what asks for one. stop: what ends it. "": nothing does."""

    header: str
    stop: str


@dataclass(slots=True)
class _Marks:
    """The marks at one answer's edges. starts: with whether what begins there is a thought."""

    starts: list[tuple[str, bool]]
    ends: list[str]


def known_keys(template: str) -> KnownKeys:
    """What the template's source reads. Raises ValueError where it is no template."""
    from jinja2 import nodes  # noqa: PLC0415 - with transformers, slow to import
    from jinja2.exceptions import TemplateSyntaxError
    from jinja2.meta import find_undeclared_variables
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        environment = _compile_jinja_template(template).environment
        tree = environment.parse(template)
    except TemplateSyntaxError as error:
        raise ValueError(
            f"the tokenizer's chat template must be one that jinja reads, but line {error.lineno}: {error.message}"
        ) from error
    names = {node.attr for node in tree.find_all(nodes.Getattr)}
    names |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    if names & set(REASONING):
        names |= set(REASONING)  # transformers passes each under the others' names
    given = {"messages", "add_generation_prompt", *environment.globals}
    return KnownKeys(
        message=(BARE_KEYS | names) - set(TRAIN_KEYS),
        record=frozenset(find_undeclared_variables(tree)) - given,
    )


def find_ends(render: Render, controls: Sequence[str]) -> Ends:
    """Tried on a small conversation; a template that refuses it has no header and no stop that are known."""
    asked = Message(role="user", fields={"role": "user", "content": "a"}, trained=False)
    content = chr(MARKS.start)
    answer = Message(role="assistant", fields={"role": "assistant", "content": content}, trained=True)
    try:
        open_ = render(Conversation(messages=(asked,)), False)
        asking = render(Conversation(messages=(asked,)), True)
        tail = render(Conversation(messages=(asked, answer)), False).rpartition(content)[2]
    except Exception:  # a template may raise anything
        return Ends(header="", stop="")
    header = asking.removeprefix(open_) if asking.startswith(open_) else ""
    first = re.search("|".join(map(re.escape, _longest_first(controls))) or "(?!)", tail)
    return Ends(header=_without_thought(header), stop=tail[: first.end()] if first else tail.rstrip())


def _without_thought(header: str) -> str:
    """A header up to a think block that it opens: templates open it when they ask, and drop it when they show."""
    return header.partition(OPENED)[0]


def _longest_first(texts: Sequence[str]) -> list[str]:
    return sorted(texts, key=len, reverse=True)


def render_chat(
    conversation: Conversation, render: Render, ends: Ends, controls: Sequence[str], *, train_inserted: bool
) -> Rendered:
    """The text, what is trained of it, and where it holds controls that people wrote. Raises BadLine."""
    if any(c >= chr(MARKS.start) for text in _texts(conversation) for c in text):
        raise BadLine("holds characters from U+10F000 on, which no text may")
    text = _rendered(render, conversation)
    marks = (chr(number) for number in MARKS)
    sought: dict[int, _Marks] = {}
    messages = []
    for number, message in enumerate(conversation.messages):
        if message.trained:
            message, sought[number] = _mark(message, marks)
        messages.append(message)
    marked = _rendered(render, replace(conversation, messages=tuple(messages)))
    places = _places(marked, text)
    spans, unended = [], 0
    for number, edges in sought.items():
        truncated = replace(conversation, messages=tuple(messages[: number + 1]))
        tail = functools.partial(_rendered, render, truncated)
        span, ended = _answer(text, places, edges, ends, controls, tail, train_inserted=train_inserted)
        spans.append(span)
        unended += not ended
    return Rendered(
        text=text,
        spans=tuple(sorted(spans)),
        unended=unended,
        verbatim=_verbatim(conversation, text, render, controls),
    )


def _rendered(render: Render, conversation: Conversation) -> str:
    try:
        return render(conversation, False)
    except Exception as error:  # a template may raise anything: {{ 1 / 0 }}
        raise BadLine(f"the tokenizer's chat template refuses it: {error}") from error


def _texts(conversation: Conversation) -> list[str]:
    return strings_in([conversation.others, *(message.fields for message in conversation.messages)])


def _places(marked: str, text: str) -> dict[str, int]:
    """Where each mark stands in the text without marks, which must be `text`. Raises BadLine."""
    places: dict[str, int] = {}
    plain: list[str] = []
    for character in marked:
        if character >= chr(MARKS.start):
            places.setdefault(character, len(plain))
        else:
            plain.append(character)
    if "".join(plain) != text:
        raise BadLine(
            "the tokenizer's chat template changes what an answer says, so that answers cannot be told apart"
        )
    return places


def _mark(message: Message, marks: Iterator[str]) -> tuple[Message, _Marks]:
    """The message with marks at the edges of its text, its thought and its tool calls, inside of whitespace."""
    fields = dict(message.fields)
    edges = _Marks(starts=[], ends=[])

    def wrap(text: str, *, thought: bool = False, empty: bool = False) -> str:
        core = text.strip()
        if not core and not empty:
            return text  # templates ask whether there is anything
        before, after = next(marks, ""), next(marks, "")
        if not after:
            raise BadLine("has more answers than can be told apart")
        edges.starts.append((before, thought))
        edges.ends.append(after)
        lead = text[: len(text) - len(text.lstrip())] if core else ""
        return lead + before + core + after + text[len(lead) + len(core) :]

    def wrap_content(text: str) -> str:
        """A thought within the content is a part of its own."""
        head, closed, answer = text.partition(CLOSED)
        if not closed or OPENED not in head:
            return wrap(text)
        before, opened, inner = head.partition(OPENED)
        return before + opened + wrap(inner, thought=True) + closed + wrap(answer)

    for key in REASONING:
        if isinstance(fields.get(key), str):
            fields[key] = wrap(fields[key], thought=True)
    content = fields.get("content")
    if isinstance(content, str):
        fields["content"] = wrap_content(content)
    elif isinstance(content, list):
        fields["content"] = [
            {**part, "text": wrap(part["text"])}
            if isinstance(part, dict) and isinstance(part.get("text"), str)
            else part
            for part in content
        ]
    if isinstance(fields.get("tool_calls"), list):
        fields["tool_calls"] = [_mark_call(call, wrap) for call in fields["tool_calls"]]
    if not edges.starts and isinstance(content, str):
        fields["content"] = wrap(content, empty=True)
    return replace(message, fields=fields), edges


def _mark_call(call: Any, wrap: Callable[..., str]) -> Any:
    """A tool call with marks around its function's name."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("name"), str):
        return {**call, "name": wrap(call["name"])}
    return {**call, "function": _mark_call(call["function"], wrap)} if "function" in call else call


def _answer(
    text: str,
    places: dict[str, int],
    edges: _Marks,
    ends: Ends,
    controls: Sequence[str],
    truncated: Callable[[], str],
    *,
    train_inserted: bool,
) -> tuple[Span, bool]:
    """(span of an answer and its end, whether it has an end). truncated: renders, with marks, up to this answer."""
    starts = [(places[mark], thought) for mark, thought in edges.starts if mark in places]
    last = max((places[mark] for mark in edges.ends if mark in places), default=None)
    if not starts or last is None:
        raise BadLine("the tokenizer's chat template leaves an answer out, so that it cannot be trained")
    start, thought = min(starts)
    head = text.rfind(ends.header, 0, start) if ends.header else -1
    if head >= 0:
        between = text[head + len(ends.header) : start]
        # What a template writes between asking and answer is the template's, as at inference, unless it is what opens
        # a thought or a call of the answer's own.
        own = thought or train_inserted or CLOSED not in between
        if own and not any(control in between for control in controls):
            start -= len(between)
    stop = text.find(ends.stop, last) if ends.stop else -1
    if stop >= 0 and not text[last:stop].strip():
        return (start, stop + len(ends.stop)), True
    # A call goes on behind the last mark: as far as the text is the same without what comes after the answer.
    tail = truncated()
    rest = "".join(c for c in tail[max(map(tail.rfind, edges.ends)) :] if c < chr(MARKS.start))
    same = last + next(
        (i for i, (a, b) in enumerate(zip(rest, text[last:], strict=False)) if a != b), len(rest)
    )
    if last <= stop <= same - len(ends.stop):
        return (start, stop + len(ends.stop)), True
    for control in controls:  # the next turn's beginning may begin alike
        cut = text.rfind(control, last, same + len(control) - 1)
        same = cut if cut >= 0 and cut + len(control) > same else same
    return (start, min(same, len(text))), False


def _verbatim(
    conversation: Conversation, text: str, render: Render, controls: Sequence[str]
) -> tuple[Span, ...]:
    marked = marked_verbatim(conversation, controls, VERBATIM)
    if marked is None:
        return ()
    found = _rendered(render, marked)
    if found.replace(VERBATIM, "") != text:
        raise BadLine("holds what looks like a control token, and the chat template changes it")
    spans: list[Span] = []
    for number, place in enumerate(match.start() for match in re.finditer(VERBATIM, found)):
        start = place - number - 1
        control = next(c for c in _longest_first(controls) if text.startswith(c, start))
        spans.append((start, start + len(control)))
    return tuple(spans)
