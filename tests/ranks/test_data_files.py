"""Tokenizer files, Megatron's indexed datasets and `launch.preprocess`."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from triaxis.engine.data.megatron import check_index
from triaxis.engine.data.source import open_source
from triaxis.engine.data.tokenizer import BYTE_END, open_tokenizer
from triaxis.launch.preprocess import main, merge, preprocess
from triaxis.models.batch import IGNORED

WORDS = ["[UNK]", "</s>", "hi", "yo", "user", "assistant", ":", "there"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} : {{ m.content }} "
    "{% if m.role == 'assistant' %}</s> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)


def write_texts(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def tokenizer_file(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["</s>"])
    folder.mkdir(exist_ok=True)
    words.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def tokenizer_folder(folder: Path, template: str | None) -> Path:
    from transformers import PreTrainedTokenizerFast

    tokens = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_file=str(tokenizer_file(folder)), eos_token="</s>"
    )
    tokens.chat_template = template
    tokens.save_pretrained(folder)
    return folder


def talk_file(path: Path) -> Path:
    roles = ("user", "assistant", "user", "assistant")
    talk = [
        {"role": role, "content": word} for role, word in zip(roles, ("hi", "yo", "hi", "there"), strict=True)
    ]
    path.write_text(json.dumps({"messages": talk}) + "\n")
    return path


def test_a_tokenizer_file_ends_documents_with_its_end_token(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "x.jsonl", "hi there", "yo")
    source = open_source(
        path, split="train", sequence_length=5, tokenizer_path=tokenizer_file(tmp_path / "t")
    )
    assert source.vocab_size == len(WORDS)
    assert source.sample(0, 0).tokens_L.tolist() == [2, 7, 1, 3, 1]
    with pytest.raises(ValueError, match=r"`tokenizer` must be a tokenizer\.json, but .* is not"):
        open_tokenizer(path)
    with pytest.raises(ValueError, match=r"but .*none does not exist"):
        open_tokenizer(tmp_path / "none")


def test_a_chat_template_trains_answers_and_their_end(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "t", TEMPLATE)
    source = open_source(
        talk_file(tmp_path / "x.jsonl"), split="train", sequence_length=20, tokenizer_path=folder
    )
    row = source.sample(0, 0)
    words = [WORDS[token] for token in row.tokens_L[:14]]
    assert words == [
        "user",
        ":",
        "hi",
        "assistant",
        ":",
        "yo",
        "</s>",
        "user",
        ":",
        "hi",
        "assistant",
        ":",
        "there",
        "</s>",
    ]
    assert [WORDS[token] for token in row.labels_L[row.labels_L != IGNORED]] == [
        "yo",
        "</s>",
        "there",
        "</s>",
    ]


def test_a_template_that_rewrites_earlier_turns_is_read_whole(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "t", "{{ messages | length }} " + TEMPLATE)
    source = open_source(
        talk_file(tmp_path / "x.jsonl"), split="train", sequence_length=20, tokenizer_path=folder
    )
    row = source.sample(0, 0)
    assert [WORDS[token] for token in row.labels_L[row.labels_L != IGNORED]] == [
        "yo",
        "</s>",
        "there",
        "</s>",
    ]


def test_a_folder_without_a_template_prefixes_roles(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "t", None)
    source = open_source(
        talk_file(tmp_path / "x.jsonl"), split="train", sequence_length=20, tokenizer_path=folder
    )
    row = source.sample(0, 0)
    assert [WORDS[token] for token in row.labels_L[row.labels_L != IGNORED]] == ["yo", "there", "</s>"]


def test_indexed_dataset_rows_equal_those_of_the_stream(tmp_path: Path) -> None:
    texts = ["abc", "d" * 20, "ef", "g"]
    prefix = tmp_path / "out" / "x"
    preprocess(write_texts(tmp_path / "x.jsonl", *texts), prefix)
    stream = np.concatenate([[*text.encode(), BYTE_END] for text in texts])
    for name in (prefix, f"{prefix}.bin", f"{prefix}.idx"):
        source = open_source(name, split="train", sequence_length=8, seed=1)
        rows = [source.sample(0, index) for index in range(len(source))]
        assert np.concatenate([row.tokens_L for row in rows])[: len(stream)].tolist() == stream.tolist()
    labels = np.concatenate([row.labels_L for row in rows])[: len(stream)]
    ends = np.flatnonzero(stream == BYTE_END)
    assert (labels[ends] == IGNORED).all()
    assert (np.delete(labels, ends) == stream[np.delete(np.arange(len(stream)), ends) + 1]).all()
    assert source.vocab_size == 0 and "read 4, kept 4, empty 0, bad 0" in source.summary()
    assert source.describe(0, 4) == f"{prefix}.bin, non-empty document 1"
    assert rows[0].documents_L is not None and rows[0].documents_L.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_megatrons_own_builder_with_empty_and_many_part_documents(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype=np.int32)
    builder.add_document(np.array([5, 6, 7]), [1, 2])  # one document of two sequences
    builder.end_document()  # an empty one
    builder.add_document(np.array([], dtype=np.int32), [0])
    builder.add_document(np.array([8, 70000]), [2])
    builder.finalize(str(tmp_path / "x.idx"))
    source = open_source(tmp_path / "x", split="train", sequence_length=8)
    row = source.sample(0, 0)
    assert row.tokens_L.tolist() == [5, 6, 7, 8, 70000, 0, 0, 0]
    assert row.labels_L.tolist() == [6, 7, IGNORED, 70000] + [IGNORED] * 4
    assert "read 4, kept 2, empty 2" in source.summary()


def test_merged_halves_are_the_bytes_of_one_pass(tmp_path: Path) -> None:  # B120
    texts = [f"text {number} " * (number % 5 + 1) for number in range(20)]
    halves = {"a": texts[:7], "b": texts[7:], "whole": texts}
    for name, part in halves.items():
        path = write_texts(tmp_path / f"{name}.jsonl", *part)
        assert main(["--input", str(path), "--output", str(tmp_path / name)]) == 0
    parts = [str(tmp_path / "a"), str(tmp_path / "b.idx")]
    assert main(["--merge", *parts, "--output", str(tmp_path / "merged.bin")]) == 0
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"merged{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()
    assert not list(tmp_path.glob("*.part"))


def test_merging_refuses_other_types_and_its_own_output(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    preprocess(write_texts(tmp_path / "x.jsonl", "a"), tmp_path / "a")
    builder = IndexedDatasetBuilder(str(tmp_path / "b.bin"), dtype=np.int32)
    builder.add_document(np.array([1]), [1])
    builder.finalize(str(tmp_path / "b.idx"))
    with pytest.raises(ValueError, match=r"b\.idx: the token type must be uint16 .*, but is int32"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    with pytest.raises(ValueError, match="`--output` must be a new prefix"):
        merge([tmp_path / "a", tmp_path / "a"], tmp_path / "a")
    assert not (tmp_path / "c.bin").exists()


def test_preprocess_reports_and_writes_all_or_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # B115, B116
    path = write_texts(tmp_path / "x.jsonl", "", "a", " ", "b")
    path.write_bytes(path.read_bytes() + b'{"text": "trunc')
    prefix = tmp_path / "x"
    assert main(["--input", str(path), "--output", str(prefix)]) == 2
    assert f"triaxis preprocess: {path}:5: is not JSON" in capsys.readouterr().err
    assert not list(tmp_path.glob("x.bin*")) and not list(tmp_path.glob("x.idx*"))
    assert main(["--input", str(path), "--output", str(prefix), "--skip-bad"]) == 0
    out = capsys.readouterr().out
    assert "read 5, kept 2, empty 2, bad 1" in out and f"left out {path}:5: " in out
    assert check_index(prefix).documents == 2
    assert main(["--input", str(talk_file(path)), "--output", str(prefix), "--overwrite"]) == 2
    assert "must have `text`, but has `messages`" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--merge", "a", "--skip-bad", "--output", "c"])


def header(
    magic: bytes = b"MMIDIDX\0\0", version: int = 1, code: int = 8, sequences: int = 2, borders: int = 3
) -> bytes:
    return struct.pack("<9sQBQQ", magic, version, code, sequences, borders)


def index(
    start: bytes,
    lengths: tuple[int, ...] = (2, 2),
    offsets: tuple[int, ...] = (0, 4),
    borders: tuple[int, ...] = (0, 1, 2),
) -> bytes:
    return start + struct.pack("<2i2q3q", *lengths, *offsets, *borders)


GOOD = index(header())
DATA = b"\1\0" * 4
BROKEN = {
    "zero length": (b"", DATA, r"x\.idx: the size of an index must be at least 34 bytes, but is 0 bytes"),
    "short header": (GOOD[:20], DATA, r"x\.idx: .*at least 34 bytes, but is 20 bytes"),
    "truncated": (GOOD[:-1], DATA, r"x\.idx: .* must be 82 bytes, but is 81 bytes"),
    "too long": (GOOD + b"\0", DATA, r"x\.idx: .* must be 82 bytes, but is 83 bytes"),
    "magic": (
        index(header(b"TNTIDX\0\0\1")),
        DATA,
        r"x\.idx: magic must be .*MMIDIDX.*, but is .*TNTIDX.*another",
    ),
    "version": (index(header(version=2)), DATA, r"x\.idx: version must be 1, but is 2"),
    "type": (
        index(header(code=99)),
        DATA,
        r"x\.idx: the code of the token type must be one of .*, but is 99",
    ),
    "float": (index(header(code=7)), DATA, r"x\.idx: the code of the token type .* but is 7"),
    "wider type": (index(header(code=4)), DATA, r"x\.idx: sequence 1 must be at byte 8 .*, but is at byte 4"),
    "negative": (index(header(), lengths=(-2, 2)), DATA, r"x\.idx: sequence 0 .* length -2"),
    "borders": (
        index(header(), borders=(0, 1, 3)),
        DATA,
        r"x\.idx: document borders .* 0 to 2, but is \[0, 3\]",
    ),
    "descending": (index(header(), borders=(0, 3, 2)), DATA, r"document borders .* but is descending"),
    "short data": (
        GOOD,
        DATA[:-2],
        r"x\.bin: the size of 4 tokens of 2 bytes must be 8 bytes, but is 6 bytes",
    ),
    "long data": (GOOD, DATA + b"\0", r"x\.bin: .* must be 8 bytes, but is 9 bytes"),
    "swapped": (DATA * 2, GOOD, r"x\.idx: magic must be .*x\.bin are swapped"),
    "empty": (
        header(sequences=0, borders=1) + bytes(8),
        b"",
        r"x\.bin: the number of tokens must be at least 1",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_index_is_one_clear_message(tmp_path: Path, case: str) -> None:  # B121
    index_bytes, data, message = BROKEN[case]
    (tmp_path / "x.idx").write_bytes(index_bytes)
    (tmp_path / "x.bin").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        open_source(tmp_path / "x", split="train", sequence_length=4)


def test_missing_files_and_the_good_index(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x\.idx does not exist"):
        open_source(tmp_path / "x", split="train", sequence_length=4)
    (tmp_path / "x.idx").write_bytes(GOOD)
    with pytest.raises(ValueError, match=r"x\.bin does not exist"):
        open_source(tmp_path / "x", split="train", sequence_length=4)
    (tmp_path / "x.bin").write_bytes(DATA)
    assert (
        open_source(tmp_path / "x", split="train", sequence_length=4).sample(0, 0).tokens_L.tolist()
        == [1] * 4
    )
