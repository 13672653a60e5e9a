"""JSON lines: packing, answers, and every kind of bad line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from triaxis.engine.data.chat import Conversation, Message, render_roles
from triaxis.engine.data.jsonl import Tally, read_documents
from triaxis.engine.data.source import open_source
from triaxis.engine.data.tokenizer import BYTE_END, ByteTokenizer
from triaxis.models.batch import IGNORED


def write(path: Path, *lines: bytes | dict[str, object]) -> Path:
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return path


def test_text_lines_are_packed_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", {"text": "abc"}, {"text": "de"}, {"text": "f"})
    source = open_source(path, split="train", sequence_length=8)
    assert len(source) == 2  # abc. de. | f.
    row = source.sample(0, 0)
    assert row.tokens_L.tolist() == [*b"abc", BYTE_END, *b"de", BYTE_END, 0]
    assert row.labels_L.tolist() == [*b"bc", BYTE_END, IGNORED, ord("e"), BYTE_END, IGNORED, IGNORED]
    assert source.describe(0, 4) == f"{path}:2" and source.describe(1, 0) == f"{path}:3"
    assert "read 3, kept 3, empty 0, bad 0" in source.summary()
    alone = open_source(path, split="train", sequence_length=8, pack=False)
    assert len(alone) == 3 and alone.sample(0, 1).documents_L is None


def test_only_answers_are_trained(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    path = write(tmp_path / "x.jsonl", {"messages": talk})
    row = open_source(path, split="train", sequence_length=64).sample(0, 0)
    assert bytes(row.labels_L[row.labels_L != IGNORED].tolist()[:-1]) == b"yo\n"
    assert row.labels_L[row.labels_L != IGNORED][-1] == BYTE_END
    messages = tuple(Message(role=m["role"], fields=m, trained=m["role"] == "assistant") for m in talk)
    rendered = render_roles(Conversation(messages=messages))
    assert rendered.text == "<|user|>\nhi\n<|assistant|>\nyo\n" and rendered.spans == ((26, 29),)


BAD = {
    b"{": "is not JSON",
    b'{"text": "\xff"}': r"is not UTF-8 \(byte 10 of the line\)",
    b'{"body": "x"}': "must have the key `text` or `messages`, but has 'body'",
    b'{"text": null}': "`text` must be a string, but is null",
    b'{"text": 3}': "`text` must be a string, but is of type int",
    b"[1]": "must be a JSON object, but is of type list",
    b'{"text": "\\ud800"}': "half a surrogate pair",
    b'{"messages": "x"}': "`messages` must be a list",
    b'{"messages": [{"role": "user"}]}': "message 0 must be an object with `role` and `content`",
    b'{"messages": [{"role": "user", "content": null}]}': "message 0 must be a string, but is null",
    b'{"messages": [{"role": "user", "content": "x"}]}': "must have an assistant's answer",
    b"[" * 100_000: "is not JSON",
    b'{"text": "x", "n": ' + b"1" * 5000 + b"}": "a number is too long",
}


@pytest.mark.parametrize("line", BAD, ids=lambda line: line[:24].decode("latin-1"))
def test_a_bad_line_is_named_or_left_out(tmp_path: Path, line: bytes) -> None:  # B115
    path = write(tmp_path / "x.jsonl", {"text": "a"}, line, {"text": "b"})
    with pytest.raises(ValueError, match=rf"x\.jsonl:2: .*{BAD[line]}"):
        open_source(path, split="train", sequence_length=8)
    source = open_source(path, split="train", sequence_length=8, on_bad_sample="skip")
    assert "read 3, kept 2, empty 0, bad 1" in source.summary() and "x.jsonl:2: " in source.summary()
    only = write(tmp_path / "only.jsonl", line)
    with pytest.raises(ValueError, match="must hold at least one document, but has none"):
        open_source(only, split="train", sequence_length=8, on_bad_sample="skip")


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("empty", [{"text": ""}, {"text": " \n\t"}, {"messages": []}], ids=str)
def test_empty_documents_are_counted_and_left_out(
    tmp_path: Path, place: int, empty: dict[str, object]
) -> None:  # B115
    lines: list[bytes | dict[str, object]] = [{"text": "a"}, {"text": "b"}]
    lines.insert(place, empty)
    source = open_source(write(tmp_path / "x.jsonl", *lines), split="train", sequence_length=4)
    assert "read 3, kept 2, empty 1, bad 0" in source.summary()
    assert source.sample(0, 0).tokens_L.tolist() == [ord("a"), BYTE_END, ord("b"), BYTE_END]
    with pytest.raises(ValueError, match=r"none \(read 1, kept 0, empty 1, bad 0\)"):
        open_source(write(tmp_path / "y.jsonl", empty), split="train", sequence_length=4)


def test_byte_order_mark_line_ends_blank_and_long_lines(tmp_path: Path) -> None:  # B115
    path = tmp_path / "x.jsonl"
    text = "x" * 1_000_000
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "%s"}\r\n{"text": "c"}' % text.encode())
    tally = Tally()
    found = list(read_documents(path, ByteTokenizer(), tally, "error"))
    assert [document.line for document in found] == [1, 4, 5]
    assert [len(document.ids) for document in found] == [2, 1_000_001, 2]
    assert str(tally) == "read 3, kept 3, empty 0, bad 0"


def test_three_bad_lines_of_a_thousand(tmp_path: Path) -> None:  # B116
    lines: list[bytes | dict[str, object]] = [{"text": f"line {number}"} for number in range(1, 1001)]
    for number in (1, 500, 1000):
        lines[number - 1] = b'{"text": "trunc'
    path = write(tmp_path / "x.jsonl", *lines)
    with pytest.raises(ValueError, match=r"x\.jsonl:1: is not JSON .*set on_bad_sample to skip"):
        open_source(path, split="train", sequence_length=64)
    summary = open_source(path, split="train", sequence_length=64, on_bad_sample="skip").summary()
    assert "read 1000, kept 997, empty 0, bad 3" in summary and "\n" not in summary
    assert all(f"x.jsonl:{number}: is not JSON" in summary for number in (1, 500, 1000))
    with pytest.raises(ValueError, match="`on_bad_sample` must be error or skip, but is 'ignore'"):
        open_source(path, split="train", sequence_length=64, on_bad_sample="ignore")
    with pytest.raises(ValueError, match="does not exist"):
        open_source(tmp_path / "none.jsonl", split="train", sequence_length=64)


def test_rows_without_a_target_are_left_out(tmp_path: Path) -> None:
    """A one-token document trains nothing: a batch of such rows would be a step with a loss of zero."""
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("abcd", "x" * 8, "abcd")))
    source = open_source(path, split="train", sequence_length=4, pack=True)
    labels = [source.sample(0, index).labels_L for index in range(len(source))]
    assert len(source) >= 4
    assert all((row != -100).any() for row in labels)
