"""Text files of every kind, their cache, a part held out, batches made ahead, and rows shown."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runs import prepare, rows, run
from triaxis.engine.config import ConfigError, RunConfig
from triaxis.engine.data import corpus
from triaxis.engine.data.ahead import Ahead
from triaxis.engine.data.loader import Loader
from triaxis.engine.data.megatron import HEADER, MAGIC, check_index
from triaxis.engine.data.show import shown_rows
from triaxis.engine.data.source import Source, open_source
from triaxis.engine.data.tokenizer import ByteTokenizer
from triaxis.engine.rules import resolve
from triaxis.launch import preprocess as preprocess_module
from triaxis.launch.preprocess import main, preprocess
from triaxis.models.batch import Batch

TEXTS = [f"text number {n}" for n in range(40)]


def lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def tokens(source: Source) -> list[list[int]]:
    return [
        [*source.sample(0, n).tokens_L.tolist(), *source.sample(0, n).labels_L.tolist()]
        for n in range(len(source))
    ]


def opened(data: object, **options: Any) -> Source:
    return open_source(str(data), **{"split": "train", "sequence_length": 64, **options})


@pytest.mark.parametrize(
    "kind", ["folder", "pattern", "several", "gzip", "zstandard", "json", "json lines", "parquet", "txt"]
)
def test_the_same_texts_in_any_kind_of_file(tmp_path: Path, kind: str) -> None:
    plain = tokens(opened(lines(tmp_path / "all.jsonl", TEXTS)))
    (tmp_path / "d" / "inner").mkdir(parents=True)
    data: object = tmp_path / "d"
    if kind in ("folder", "pattern", "several"):
        first = lines(tmp_path / "d" / "a.jsonl", TEXTS[:15])
        second = lines(tmp_path / "d" / "inner" / "b.jsonl", TEXTS[15:])
        (tmp_path / "d" / "README.md").write_text("no data")
        data = {"folder": data, "pattern": f"{data}/**/*.jsonl", "several": f"{first},{second}"}[kind]
    elif kind == "gzip":
        data = tmp_path / "d" / "a.jsonl.gz"
        data.write_bytes(gzip.compress((tmp_path / "all.jsonl").read_bytes()))
    elif kind == "zstandard":
        import pyarrow

        data = tmp_path / "d" / "a.jsonl.zst"
        with pyarrow.OSFile(str(data), "wb") as file, pyarrow.CompressedOutputStream(file, "zstd") as packed:
            packed.write((tmp_path / "all.jsonl").read_bytes())
    elif kind.startswith("json"):
        data = tmp_path / "d" / "a.json"
        whole = json.dumps([{"text": text} for text in TEXTS], indent=1)
        data.write_text(whole if kind == "json" else (tmp_path / "all.jsonl").read_text())
    elif kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        data = tmp_path / "d" / "a.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS, "none": [None] * len(TEXTS)}), data)
    else:
        for number, text in enumerate(TEXTS):
            (tmp_path / "d" / f"{number:03}.txt").write_text(text)
    source = opened(data)
    assert tokens(source) == plain
    expected = {"folder": "inner/b.jsonl:25", "several": "inner/b.jsonl:25", "pattern": "inner/b.jsonl:25"}
    assert source.describe(len(source) - 1, 60).endswith(
        expected.get(kind, {"txt": "039.txt:1"}.get(kind, ":40"))
    )


@pytest.mark.parametrize(
    ("content", "texts", "said"),
    [
        ('{\n  "text": "one"\n}\n', ["one"], ""),
        ('{"text": "one"}', ["one"], ""),
        ('[{"text": "a"},\n {"text": "b"}]', ["a", "b"], ""),
        ('{"text": "a"}\n\n{"text": "b"}\n', ["a", "b"], ""),
        (
            '{\n "name": 1,\n "seed": 2\n}',
            [],
            r"x\.json:1: must have the key `text` or `messages`, but has 'name', 'seed'",
        ),
        ('[\n{"text": "a"}\n,\n]', [], r"x\.json:1: is not JSON \(Expecting value: line 4"),
        ('{"text": "a"}\n{"text":\n', [], r"x\.json:2: is not JSON"),
        ("[[1]]", [], r"x\.json:1: must be a JSON object, but is of type list"),
    ],
)
def test_a_json_file_is_a_list_an_object_or_lines(
    tmp_path: Path, content: str, texts: list[str], said: str
) -> None:
    (tmp_path / "x.json").write_text(content)
    if said:
        with pytest.raises(ValueError, match=said):
            opened(tmp_path)
        return
    source = opened(tmp_path, pack=False)
    found = [bytes(t for t in row[:64] if t < 256).rstrip(b"\0").decode() for row in tokens(source)]
    assert found == texts


def test_what_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for data, said in (
        (str(tmp_path / "empty"), "empty holds none"),
        (f"{tmp_path}/*.txt", "does not exist"),
        (f"{lines(tmp_path / 'a.jsonl', TEXTS)},{tmp_path}/b.jsonl", "b.jsonl does not exist"),
    ):
        with pytest.raises(ConfigError, match=said):
            resolve(RunConfig(data=data), 1)


def test_a_part_is_held_out_by_content(tmp_path: Path) -> None:
    path = lines(tmp_path / "x.jsonl", TEXTS)
    both = [opened(path, split=split, eval_fraction=0.25, pack=False) for split in ("train", "eval")]
    sides = [
        {bytes(t for t in row[:64] if t < 256).rstrip(b"\0").decode() for row in tokens(s)} for s in both
    ]
    assert sides[0] | sides[1] == set(TEXTS) and not sides[0] & sides[1] and 3 <= len(sides[1]) <= 20
    more = lines(tmp_path / "y.jsonl", ["another", *reversed(TEXTS), TEXTS[0]])
    held = opened(more, split="eval", eval_fraction=0.25, pack=False)
    assert sides[1] <= {bytes(t for t in row[:64] if t < 256).rstrip(b"\0").decode() for row in tokens(held)}
    with pytest.raises(ValueError, match="none is in the held-out part"):
        opened(path, split="eval", eval_fraction=1e-9)
    with pytest.raises(
        ConfigError, match="`eval_fraction` must be left out with eval_data and with data stdlib"
    ):
        resolve(RunConfig(eval_fraction=0.1), 1)


def test_a_run_evaluates_on_the_part_held_out(tmp_path: Path) -> None:
    flags = prepare(tmp_path) | {"eval_data": None, "eval_fraction": 0.3, "output_dir": str(tmp_path / "out")}
    run({**flags, "steps": 4, "eval_steps": 2})
    assert [row["step"] for row in rows(tmp_path / "out") if "eval_loss" in row] == [2, 4]


# The cache


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "CACHED_FROM_BYTES", 0)


def talks(path: Path) -> Path:
    with path.open("w") as file:
        for number in range(30):
            turns = [
                {"role": "user", "content": f"{number}?"},
                {"role": "assistant", "content": "yes " * number},
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


@pytest.mark.parametrize("make", [lambda p: lines(p, TEXTS), talks], ids=["texts", "talks"])
@pytest.mark.parametrize("block", [3, 4096])
def test_rows_from_the_cache_are_those_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, block: int
) -> None:
    path = make(tmp_path / "x.jsonl")
    memory = opened(path)
    monkeypatch.setattr(corpus, "CACHED_FROM_BYTES", 0)
    monkeypatch.setattr("triaxis.engine.data.stream.BLOCK", block)
    stored = opened(path, cache=tmp_path / "cache")
    assert tokens(stored) == tokens(memory) and stored.fingerprint == memory.fingerprint
    (entry,) = (path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock")
    assert stored.summary() == f"{memory.summary()}\n  tokenized once, into {entry}"
    assert stored.describe(1, 3) == memory.describe(1, 3)


def test_it_is_tokenized_once_and_anew_when_something_changed(
    tmp_path: Path, cached: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, made = lines(tmp_path / "x.jsonl", TEXTS), []
    plain = corpus.tokenize_apart

    def noted(*given: Any) -> None:
        made.append(threading.get_ident())
        plain(*given)

    monkeypatch.setattr(corpus, "tokenize_apart", noted)
    start = threading.Barrier(4)

    def rank() -> None:
        start.wait()
        opened(path, cache=tmp_path / "cache")

    ranks = [threading.Thread(target=rank) for _ in range(4)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    assert len(made) == 1
    opened(path, cache=tmp_path / "cache", sequence_length=16)  # rows are cut from the same tokens
    assert len(made) == 1
    lines(path, [*TEXTS[1:], TEXTS[0]])
    assert tokens(opened(path, cache=tmp_path / "cache"))[0][:3] == [*b"tex"] and len(made) == 2
    opened(path, cache=tmp_path / "cache", on_bad_sample="skip")
    assert len(made) == 3


def test_a_fault_while_it_is_made_leaves_no_entry(tmp_path: Path, cached: None) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "abc"}\n{"text": \n')
    with pytest.raises(ValueError, match=r"x\.jsonl:2: is not JSON"):
        opened(path, cache=tmp_path / "cache")
    assert [entry.suffix for entry in (tmp_path / "cache").iterdir()] == [".lock"]


PEAK = """
import sys
from pathlib import Path
from triaxis.engine.data.source import open_source
from triaxis.engine.data.loader import Loader
source = open_source(sys.argv[1], split="train", sequence_length=512, cache=Path(sys.argv[2]))
loader = Loader(source, seed=0, global_batch=8, microbatch_size=8, data_rank=0, data_size=1, vocab_size=257)
for step in range(200):
    loader.step_batches(step)
status = Path("/proc/self/status").read_text()  # getrusage keeps what the parent had
print(int(status.partition("VmHWM:")[2].split()[0]) // 1024)
"""


def test_a_ranks_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:  # N14
    """Full: 200 MB at four ranks, 100 MB above those of a file of 1 MB; else 16 MB at one rank, half of that above."""
    full = bool(os.environ.get("TRIAXIS_FULL"))
    ranks, size, most = (4, 200, 100) if full else (1, 16, 8)

    def peak(megabytes: int, ranks: int) -> int:
        path = tmp_path / f"{megabytes}.jsonl"
        line = json.dumps({"text": "some words of a long text " * 40}) + "\n"
        path.write_text(line * (megabytes * 2**20 // len(line)))
        started = [
            subprocess.Popen(
                [sys.executable, "-c", PEAK, str(path), str(tmp_path / "cache")],
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(ranks)
        ]
        return max(int(process.communicate()[0]) for process in started)

    small = peak(1, 1)
    assert peak(size, ranks) <= small + most
    assert peak(size, 1) <= small + most  # from the cache


# Batches ahead


def equal(one: list[Batch], other: list[Batch]) -> bool:
    return all(
        bool((getattr(a, name) == getattr(b, name)).all())
        for a, b in zip(one, other, strict=True)
        for name in ("tokens_BL", "labels_BL", "positions_BL")
    )


@pytest.mark.parametrize("workers", [1, 3])
def test_batches_made_ahead_are_the_same(tmp_path: Path, workers: int) -> None:
    source = opened(lines(tmp_path / "x.jsonl", TEXTS), sequence_length=16)
    loader = Loader(
        source, seed=3, global_batch=4, microbatch_size=2, data_rank=1, data_size=2, vocab_size=257
    )
    with Ahead(loader, workers=workers, total_steps=30) as ahead:
        for step in range(30):
            assert equal(ahead.step_batches(step, 4 * step), loader.step_batches(step))


def test_reading_hides_behind_the_step_and_fails_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = opened(lines(tmp_path / "x.jsonl", TEXTS), sequence_length=16)
    loader = Loader(
        source, seed=3, global_batch=4, microbatch_size=2, data_rank=0, data_size=1, vocab_size=257
    )
    plain, begun = Loader.step_batches, threading.Event()

    def slow(self: Loader, step: int, *, first_sample: int | None = None) -> list[Batch]:
        if step == 1:
            begun.set()
        if step == 2:
            raise OSError("torn")
        return plain(self, step, first_sample=first_sample)

    monkeypatch.setattr(Loader, "step_batches", slow)
    with Ahead(loader, workers=1, total_steps=3) as ahead:
        ahead.step_batches(0, 0)
        assert begun.wait(60)  # nobody has asked for it
        ahead.step_batches(1, 4)
        with pytest.raises(OSError, match="torn"):
            ahead.step_batches(2, 8)


def test_a_run_is_the_same_with_and_without(tmp_path: Path) -> None:
    flags = prepare(tmp_path) | {"steps": 5, "dp": 2}
    for workers in (0, 2):
        run({**flags, "dataloader_num_workers": workers, "output_dir": str(tmp_path / f"{workers}")})
    assert rows(tmp_path / "0") == rows(tmp_path / "2")


# Shown


def test_rows_are_shown_with_what_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = opened(talks(tmp_path / "x.jsonl"), sequence_length=80, pack=False)
    (first, second) = shown_rows(source, ByteTokenizer(), 2)
    assert first.startswith(f"row 0 ({tmp_path / 'x.jsonl'}:1):\n<|user|>\n0?\n<|assistant|>\n")
    assert "<|assistant|>\n⟦yes \n<end>⟧" in second
    flags = prepare(tmp_path) | {"steps": 1, "warmup_steps": 0, "output_dir": str(tmp_path / "out")}
    run({**flags, "show_samples": 1})
    assert "row 0 (" in capsys.readouterr().err


# Written files


def test_an_output_that_is_there_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lines(tmp_path / "x.jsonl", TEXTS)
    given = ["--input", str(path), "--output", str(tmp_path / "out")]
    assert main(given) == 0
    before = (tmp_path / "out.bin").read_bytes()
    lines(path, TEXTS[:3])
    assert main(given) == 2 and "exists; name another, or give --overwrite" in capsys.readouterr().err
    assert (tmp_path / "out.bin").read_bytes() == before
    assert main([*given, "--overwrite"]) == 0 and (tmp_path / "out.bin").read_bytes() != before


def test_two_that_write_one_output_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = lines(tmp_path / "a.jsonl", TEXTS), lines(tmp_path / "b.jsonl", TEXTS[:5])
    plain, inner = preprocess_module.read_documents, [True]

    def interrupted(*given: Any, **named: Any) -> Any:
        yield from plain(*given, **named)
        if inner.pop():
            inner.append(False)
            preprocess(other, tmp_path / "out")

    monkeypatch.setattr(preprocess_module, "read_documents", interrupted)
    with pytest.raises(ValueError, match="exists; name another"):
        preprocess(one, tmp_path / "out")
    assert check_index(tmp_path / "out").documents == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl", "out.bin", "out.idx"]


def test_links_and_long_names_and_faults_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lines(tmp_path / "x.jsonl", TEXTS)
    target = tmp_path / "precious"
    target.write_text("mine")
    for suffix in (".bin.part", ".idx.part"):
        (tmp_path / f"out{suffix}").symlink_to(target)
    assert main(["--input", str(path), "--output", str(tmp_path / "out")]) == 0
    (tmp_path / "linked.bin").symlink_to(target)
    assert main(["--input", str(path), "--output", str(tmp_path / "linked")]) == 2
    assert target.read_text() == "mine"
    capsys.readouterr()
    assert main(["--input", str(path), "--output", str(tmp_path / ("n" * 300))]) == 2
    assert "name too long" in capsys.readouterr().err.lower()
    monkeypatch.setattr(
        Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left", "out.bin"))
    )
    assert main(["--input", str(path), "--output", str(tmp_path / "full")]) == 2
    assert "No space left" in capsys.readouterr().err
    assert not list(tmp_path.glob("full*")) and not list(tmp_path.glob(".full*"))


@pytest.mark.parametrize("border", [-(2**63), 2**62, -1])
def test_borders_that_wrap_are_refused(tmp_path: Path, border: int) -> None:
    lengths, offsets = np.array([1, 1], np.int32), np.array([0, 2], np.int64)
    borders = np.array([0, 2**62, border, 2], np.int64)
    (tmp_path / "x.bin").write_bytes(bytes(4))
    header = HEADER.pack(MAGIC, 1, 8, 2, len(borders))
    (tmp_path / "x.idx").write_bytes(header + lengths.tobytes() + offsets.tobytes() + borders.tobytes())
    with pytest.raises(
        ValueError, match=r"x\.idx: document borders must be ascending from 0 to 2, but is descending"
    ):
        check_index(tmp_path / "x")


@pytest.mark.parametrize("place", ["file", "folder"])
def test_a_preset_takes_the_vocabulary_of_a_larger_tokenizer(tmp_path: Path, place: str) -> None:
    """README's line: a tokenizer, and the default model, whose own vocabulary is of bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(1000)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    words.add_special_tokens(["</s>"])
    words.save(str(tmp_path / "tokenizer.json"))
    path = lines(tmp_path / "x.jsonl", ["w999 w1 w2"] * 8)
    flags = {
        "tokenizer": str(tmp_path / "tokenizer.json" if place == "file" else tmp_path),
        "data": str(path),
        "seq": 16,
        "steps": 1,
        "per_device_train_batch_size": 1,
        "output_dir": str(tmp_path / "out"),
    }
    assert resolve(RunConfig(**flags), 1).model.vocab_size == 1001
    if place == "file":
        run(flags)
        assert rows(tmp_path / "out")[0]["trained_tokens"] > 0
    assert resolve(RunConfig(data=str(path)), 1).model.vocab_size == 257
