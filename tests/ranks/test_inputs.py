"""What ranks read is one and the same, or no rank trains; what becomes of the rows is said."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runs import prepare, rows, run
from triaxis.engine.checkpoint.folder import checkpoints_at
from triaxis.engine.config import ConfigError, RunConfig
from triaxis.engine.data import loader as loader_module
from triaxis.engine.data.course import epoch_order
from triaxis.engine.data.fingerprint import fingerprint_files
from triaxis.engine.data.source import Source, open_source
from triaxis.engine.data.stdlib import list_files
from triaxis.engine.data.usage import told_usage
from triaxis.engine.faults.supervision import Supervision
from triaxis.engine.rules import resolve
from triaxis.engine.run import inputs as inputs_module
from triaxis.engine.run.trainer import train
from triaxis.launch.preprocess import writing
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.thread import run_threads


def run_each(flags: list[dict[str, Any]]) -> None:
    """A run of as many ranks as flags, each with its own."""

    def rank(world: World) -> None:
        config = RunConfig(simulate=True, **flags[world.rank])
        train(config, resolve(config, len(flags)), world, Supervision())

    run_threads(len(flags), rank)


@pytest.fixture
def flags(tmp_path: Path) -> dict[str, Any]:
    return prepare(tmp_path) | {"output_dir": str(tmp_path / "out"), "steps": 2, "warmup_steps": 0}


@pytest.mark.parametrize("axis", ["tp", "pp", "dp"])
def test_another_order_of_lines_on_one_rank_is_refused(
    flags: dict[str, Any], axis: str, tmp_path: Path
) -> None:
    lines = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "train.jsonl").write_text("".join([lines[1], lines[0], *lines[2:]]))
    own = [{**flags, axis: 2}, {**flags, axis: 2, "data": str(tmp_path / "other" / "train.jsonl")}]
    with pytest.raises(
        ValueError, match=r"training data: [0-9a-f]+ on rank 1 \(.*\) on .+ \(.*other/train"
    ) as told:
        run_each(own)
    assert "rank 0" in str(told.value) and not (tmp_path / "out" / "metrics.jsonl").exists()


def test_the_same_data_elsewhere_is_no_fault(flags: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "copy.jsonl").write_bytes((tmp_path / "train.jsonl").read_bytes())
    run_each([{**flags, "dp": 2}, {**flags, "dp": 2, "data": str(tmp_path / "copy.jsonl")}])
    assert len(rows(tmp_path / "out")) == 2


@pytest.mark.parametrize(
    ("name", "value"), [("learning_rate", 0.5), ("seed", 9), ("seq", 20), ("on_bad_sample", "skip")]
)
def test_another_flag_on_one_rank_is_refused_by_name(flags: dict[str, Any], name: str, value: object) -> None:
    """Found beside the reports: a start script that was edited on one machine."""
    with pytest.raises(ValueError, match=rf"--{name}: {value} on rank 1 .* but .* on rank 0"):
        run_each([{**flags, "dp": 2}, {**flags, "dp": 2, name: value}])


def test_another_model_file_and_evaluation_on_one_rank(flags: dict[str, Any], tmp_path: Path) -> None:
    model = json.loads((tmp_path / "model.json").read_text())
    (tmp_path / "wider.json").write_text(json.dumps({**model, "max_positions": 128}))
    with pytest.raises(ValueError, match=r"model configuration: .* on rank 1 .*wider\.json"):
        run_each([{**flags, "dp": 2}, {**flags, "dp": 2, "model": str(tmp_path / "wider.json")}])
    with pytest.raises(ValueError, match=r"evaluation data: .* on rank 1"):
        run_each([{**flags, "dp": 2}, {**flags, "dp": 2, "eval_data": flags["data"]}])


def test_a_fault_of_one_rank_is_told_by_all_with_its_machine(flags: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "torn.jsonl").write_text('{"text": "abc"}\n{"text": \n')
    own = [{**flags, "dp": 2}, {**flags, "dp": 2, "data": str(tmp_path / "torn.jsonl")}]
    with pytest.raises(ValueError, match=r"torn\.jsonl:2: is not JSON .* \(on rank 1 \(.*\) on .+\)"):
        run_each(own)


def test_other_content_of_as_many_rows_is_not_gone_on_from(flags: dict[str, Any], tmp_path: Path) -> None:
    run({**flags, "save_steps": 2})
    text = tmp_path / "train.jsonl"
    lines = text.read_text().splitlines(keepends=True)
    text.write_text("".join([lines[1], lines[0], *lines[2:]]))
    with pytest.raises(ConfigError, match=r"the training data must stay as saved.*train\.jsonl"):
        run({**flags, "save_steps": 2, "steps": 4, "resume": "auto"})
    text.write_text("".join(lines))
    run({**flags, "save_steps": 2, "steps": 4, "resume": "auto"})
    assert len(rows(tmp_path / "out")) == 4


def test_a_file_beyond_reading_whole_is_known_by_its_size_and_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triaxis.engine.data.fingerprint.WHOLE_BYTES", 1000)
    monkeypatch.setattr("triaxis.engine.data.fingerprint.SAMPLES", 4)
    monkeypatch.setattr("triaxis.engine.data.fingerprint.SAMPLE_BYTES", 100)
    path = tmp_path / "x.bin"
    path.write_bytes(bytes(2000))
    whole = fingerprint_files([path])
    for place, seen in ((0, True), (50, True), (1999, True), (1300, True), (300, False)):
        content = bytearray(2000)
        content[place] = 1
        path.write_bytes(bytes(content))
        assert (fingerprint_files([path]) != whole) == seen, place
    path.write_bytes(bytes(2001))
    assert fingerprint_files([path]) != whole


def test_the_default_data_is_all_there_or_refused(tmp_path: Path) -> None:
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "one.py").write_text("x = 1\n")
    if os.geteuid():  # root may read anything
        (tmp_path / "json" / "closed").mkdir(mode=0)
        with pytest.raises(ValueError, match="must be readable by this account"):
            list_files(tmp_path)
    (tmp_path / "_sysconfigdata__linux.py").write_text("home = '/home/someone'\n")
    (tmp_path / "config-3.11").mkdir()
    (tmp_path / "config-3.11" / "python-config.py").write_text("x")
    assert [path.name for path in list_files(tmp_path)] == ["one.py"]


def test_the_default_data_of_another_python_is_told_by_its_build(
    flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rows in number, then more; at a resume, then on one rank. Equal text is no fault."""
    modules = sorted(sys.stdlib_module_names)[:60]
    for name, text in (
        ("3.11.7", "x = 1"),
        ("3.12.1", "y = 2"),
        ("3.13.0", "z = 3" * 50),
        ("3.11.8", "x = 1"),
    ):
        (tmp_path / name).mkdir()
        for number, module in enumerate(modules):
            (tmp_path / name / f"{module}.py").write_text(f"{text} {number}")
    here = ["3.11.7"]
    monkeypatch.setattr(inputs_module, "this_python", lambda: here[-1])
    monkeypatch.setattr("triaxis.engine.data.stdlib.sysconfig.get_path", lambda _: str(tmp_path / here[-1]))
    common = {**flags, "data": "stdlib", "eval_data": None, "eval_batches": 0, "save_strategy": "steps"}
    run(common)
    for build, said in (
        ("3.12.1", "the training data must stay as saved"),
        ("3.13.0", "`data` must stay as it"),
    ):
        here[:] = [build]
        with pytest.raises(ConfigError, match=said) as told:
            run({**common, "resume": "auto", "steps": 3})
        assert f"saved with 3.11.7, here with {build}; go on with that Python, or start" in str(told.value)
    here[:] = ["3.11.8"]
    assert run({**common, "resume": "auto", "steps": 3}).steps == 3


def test_ranks_with_other_default_data_are_told_with_their_python(
    flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, builds = open_source, iter(("3.12.1", "3.11.7"))
    lock = threading.Lock()

    def other(*given: Any, **named: Any) -> Source:
        with lock:
            return OtherContent(plain(*given, **named))

    class OtherContent:
        """A source that no other is equal to."""

        def __init__(self, source: Source) -> None:
            self._source, self.fingerprint = source, f"{id(source):x}"

        def __getattr__(self, name: str) -> Any:
            return getattr(self._source, name)

        def __len__(self) -> int:
            return len(self._source)

    monkeypatch.setattr(inputs_module, "open_source", other)
    monkeypatch.setattr(inputs_module, "this_python", lambda: next(builds))
    common = {**flags, "data": "stdlib", "eval_data": None, "dp": 2}
    with pytest.raises(
        ValueError, match=r"training data: [0-9a-f]+ on rank .*\(text of Python 3\.1.* but .*3\.1"
    ):
        run_each([common, common])


# What becomes of the rows


@pytest.mark.parametrize(
    ("rows_", "samples", "batch", "epochs", "expected"),
    [
        (13, 8, 8, 1, "trains on 8 of 13 rows, each once; 5 samples of the one epoch are left over"),
        (2, 8, 8, 1, "trains on all 2 rows, each 4 times; that is 4 epochs, not 1"),
        (9, 8, 4, 1, "trains on 8 of 9 rows, each once; 1 sample of the one epoch is left over"),
        (9, 24, 4, 3, "9 rows: 6 of them 3 times, the others twice; 3 samples of the 3 epochs are left over"),
        (3, 3, 3, 0.5, "all 3 rows, each once; that is 1 epoch, not 0.5"),
        (3, 8, 8, 1, "3 rows: 2 of them 3 times, the others twice; that is 2.67 epochs, not 1"),
        (8, 16, 8, 2, "trains on all 8 rows, each twice"),
        (10, 8, 8, None, "trains on 8 of 10 rows, each once"),
        (1, 1, 1, 1.0, "trains on all 1 row, each once"),
    ],
)
def test_the_use_of_rows_is_said(
    rows_: int, samples: int, batch: int, epochs: float | None, expected: str
) -> None:  # N16
    told = told_usage(rows_, samples, batch, epochs)
    assert expected in told
    if (epochs is not None and samples == rows_ * epochs) or epochs is None:
        assert ";" not in told


def test_the_start_says_what_is_left_over(
    flags: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": f"line {n}"}) + "\n" for n in range(13)))
    run(
        {
            **flags,
            "data": str(tmp_path / "t.jsonl"),
            "pack": False,
            "dp": 4,
            "microbatches": None,
            "steps": None,
            "per_device_train_batch_size": 2,
            "num_train_epochs": 1,
        }
    )
    assert "trains on 8 of 13 rows, each once; 5 samples" in " ".join(capsys.readouterr().err.split())
    (row,) = rows(tmp_path / "out")
    assert (
        row["tokens"] == 8 * 7 + sum(n >= 10 for n in seen(flags, tmp_path))
        and row["trained_tokens"] == row["tokens"] - 8
    )


def seen(flags: dict[str, Any], tmp_path: Path) -> list[int]:
    """The lines that the first 8 samples are."""
    order = epoch_order(13, seed=flags.get("seed", 0), epoch=0)
    return order[:8].tolist()


def test_cut_and_dropped_rows_are_counted(tmp_path: Path) -> None:
    """24 of 32 conversations have a prompt that fills rows of its own."""
    with (tmp_path / "x.jsonl").open("w") as file:
        for number in range(32):
            asked = "x" * (90 if number < 24 else 5)
            talk = [{"role": "user", "content": asked}, {"role": "assistant", "content": "yes"}]
            file.write(json.dumps({"messages": talk}) + "\n")
    source = open_source(tmp_path / "x.jsonl", split="train", sequence_length=64, pack=False)
    assert len(source) == 32
    assert "24 documents longer than a row were cut" in source.summary()
    assert "24 rows without a trained token dropped (1,536 tokens)" in source.summary()


def test_rows_of_token_files_without_a_target_are_dropped_and_counted(tmp_path: Path) -> None:
    with writing(tmp_path / "x", np.uint16) as builder:
        for length in (1, 1, 1, 1, 5, 1, 1, 1):
            builder.add_document(np.arange(length, dtype=np.uint16), [length])
    source = open_source(tmp_path / "x", split="train", sequence_length=4)
    found = [source.sample(0, index).labels_L for index in range(len(source))]
    assert len(found) == 1 and (found[0] != -100).sum() == 4
    assert "2 rows without a trained token dropped (8 tokens)" in source.summary()
    with writing(tmp_path / "y", np.uint16) as builder:
        for _ in range(8):
            builder.add_document(np.zeros(1, dtype=np.uint16), [1])
    with pytest.raises(ValueError, match=r"y\.bin must hold a document of at least 2 tokens"):
        open_source(tmp_path / "y", split="train", sequence_length=4)


# Evaluation data


def test_a_bad_token_in_evaluation_data_is_found_before_the_first_step(
    flags: dict[str, Any], tmp_path: Path
) -> None:
    with writing(tmp_path / "bad", np.uint16) as builder:
        builder.add_document(np.array([1, 2, 300, 4], dtype=np.uint16), [4])
    with pytest.raises(ValueError, match=r"below vocab_size 257 .* has 300 at position 2"):
        run({**flags, "eval_data": str(tmp_path / "bad"), "dp": 2})
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


@pytest.mark.parametrize("ranks", [[0, 1], [1]])
def test_evaluation_data_that_is_lost_later_costs_no_checkpoint_and_no_row(
    flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: list[int]
) -> None:
    calls: dict[int, int] = {}
    plain = loader_module.Loader.eval_batches

    def lost(self: loader_module.Loader, batches: int | None = None) -> object:
        calls[self.data_rank] = calls.get(self.data_rank, 0) + 1
        if calls[self.data_rank] > 1 and self.data_rank in ranks:
            raise OSError(5, "Input/output error")
        return plain(self, batches)

    monkeypatch.setattr(loader_module.Loader, "eval_batches", lost)
    with pytest.raises(ValueError, match="Input/output error"):
        run({**flags, "dp": 2, "steps": 4, "eval_steps": 2, "save_steps": 4})
    assert [row["step"] for row in rows(tmp_path / "out")] == [1, 2]
    assert [path.name for path in checkpoints_at(tmp_path / "out")] == ["step-00000002"]


def test_best_without_anything_to_evaluate_is_refused(flags: dict[str, Any]) -> None:
    config = RunConfig(**{**flags, "eval_data": None, "save_best": True, "save_steps": 2})
    with pytest.raises(ConfigError, match="`save_best` needs data to evaluate on, but there is none"):
        resolve(config, 1)
