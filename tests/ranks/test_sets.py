"""Several sets of data by weight: exact shares, on every layout, through resumes with other weights."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runs import prepare, rows, run
from triaxis.engine.checkpoint.folder import complete_checkpoints
from triaxis.engine.checkpoint.manifest import CheckpointError, read_manifest
from triaxis.engine.config import ConfigError, RunConfig
from triaxis.engine.data.course import Course
from triaxis.engine.data.joined import JoinedSource, OpenSet
from triaxis.engine.data.loader import Loader
from triaxis.engine.data.sets import NamedSet, named_sets, turns
from triaxis.engine.data.source import open_source
from triaxis.engine.rules import resolve
from triaxis.engine.run.counters import check_run_state
from triaxis.launch.flags import parse_flags
from triaxis.models.batch import Batch

SIZES = {"a": 40, "b": 9, "c": 7}


@pytest.fixture
def flags(tmp_path: Path) -> dict[str, Any]:
    """A tiny run's flags; a.jsonl, b.jsonl and c.jsonl, in which every line is a row."""
    for name, count in SIZES.items():
        lines = (json.dumps({"text": f"{name} {number}"}) + "\n" for number in range(count))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    more = {"pack": False, "seq": 8, "warmup_steps": 1, "eval_data": None, "eval_steps": None}
    return prepare(tmp_path / "run") | more | {"output_dir": str(tmp_path / "out"), "eval_batches": 0}


def mix(folder: Path, **weights: object) -> str:
    return ",".join(f"{folder / name}.jsonl:{weight}" for name, weight in weights.items())


def test_turns_are_exact_and_never_off_by_one_sample() -> None:
    assert turns([3, 1]).tolist() == [0, 0, 1, 0] and turns([1]).tolist() == [0]
    drawn = random.Random(5)
    for _ in range(40):
        weights = [drawn.randint(1, 40) for _ in range(drawn.randint(1, 6))]
        found, total = turns(weights), sum(weights)
        counts = np.cumsum(found[:, None] == np.arange(len(weights)), axis=0)
        due = np.outer(np.arange(1, total + 1), weights) / total
        assert counts[-1].tolist() == weights and np.abs(counts - due).max() < 1 - 1e-9


def test_a_course_is_its_sets_own_orders_in_turn() -> None:
    course, plain = Course([10, 4], seed=3, weights=[3, 2]), Course([10], seed=3)
    epochs, found = course.places(0, 60)
    first = found < 10
    assert course.taken(60) == (36, 24) and course.taken(61) == (37, 24)
    assert (epochs[first].tolist(), found[first].tolist()) == tuple(p.tolist() for p in plain.places(0, 36))
    assert Counter(found[~first].tolist()) == dict.fromkeys(range(10, 14), 6)
    for start in (7, 31):  # a later start, and other steps, give the same
        assert course.places(start, 60)[1].tolist() == found[start:].tolist()


@pytest.mark.parametrize(
    ("data", "found"),
    [
        ("a.jsonl", [("a.jsonl", None)]),
        ("a.jsonl,b.jsonl", [("a.jsonl,b.jsonl", None)]),
        ("a.jsonl:0.7,b.jsonl:0.3", [("a.jsonl", 7), ("b.jsonl", 3)]),
        ("a:2,b:2,c:4", [("a", 1), ("b", 1), ("c", 2)]),
        ("/x/y:1.5,c:/z:0.25", [("/x/y", 6), ("c:/z", 1)]),
        ("a.jsonl:5", [("a.jsonl", 1)]),
        ("a:0.1,b:0.2", [("a", 1), ("b", 2)]),
    ],
)
def test_names_and_weights(data: str, found: list[tuple[str, int | None]]) -> None:
    assert named_sets(data) == tuple(NamedSet(place=place, weight=weight) for place, weight in found)


def test_a_file_whose_name_looks_like_a_weight_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a:1").touch()
    assert named_sets("a:1") == (NamedSet(place="a:1"),)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("a.jsonl:0.7,b.jsonl", "must give a weight for every set or for none, but b.jsonl has none"),
        ("a.jsonl:1,b.jsonl:0", "must have weights above 0, but that of b.jsonl is 0"),
        ("a.jsonl:1,a.jsonl:2", "must name each set once, but names a.jsonl again"),
        ("stdlib:1,a.jsonl:2", "must be stdlib alone"),
        ("a.jsonl:0.123457,b.jsonl:1", r"they are 1,123,457 \(123457 : 1000000\); round them"),
        ("missing.jsonl:1,b.jsonl:1", "missing.jsonl does not exist"),
    ],
)
def test_weights_that_cannot_be_are_refused(
    flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        resolve(RunConfig(**{**flags, "data": data}), 1)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            {"steps": None, "num_train_epochs": 2.0},
            "`num_train_epochs` must be left out where data has weights",
        ),
        ({"save_strategy": "epoch"}, "`save_strategy` must not be epoch where data has weights"),
    ],
)
def test_epochs_are_refused_with_weights(
    flags: dict[str, Any], tmp_path: Path, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve(RunConfig(**{**flags, "data": mix(tmp_path, a=1, b=1), **more}), 1)


def test_words_of_the_command_line_are_one_setting() -> None:
    assert (
        parse_flags(["--data", "a.jsonl:0.7", "b.jsonl:0.3", "--tp", "2"], True).data
        == "a.jsonl:0.7,b.jsonl:0.3"
    )
    assert parse_flags(["--data", "a.jsonl"], True).data == "a.jsonl"
    assert parse_flags(["--eval-data", "a.txt", "b.txt"], True).eval_data == "a.txt,b.txt"


def trained(flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int]]:
    """How often the ranks of a run made each (epoch, row)."""
    seen: Counter[tuple[int, int]] = Counter()
    plain = Loader._batch

    def noted(self: Loader, places: Sequence[tuple[int, int]]) -> Batch:
        seen.update(places)
        return plain(self, places)

    with monkeypatch.context() as patch:
        patch.setattr(Loader, "_batch", noted)
        run(flags)
    return seen


def own(rows_of_set: int, first_row: int, start: int, stop: int) -> set[tuple[int, int]]:
    """(epoch, row) of a set's own samples [start, stop)."""
    epochs, found = Course([rows_of_set], seed=0).places(start, stop)
    return {(epoch, first_row + row) for epoch, row in zip(epochs.tolist(), found.tolist(), strict=True)}


def test_each_set_goes_on_at_its_own_next_sample_with_other_weights_and_layout(  # N76
    flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """1:1 for 50 samples at dp 2, 2:1 for 60 at tp 2, then b comes back after c was there in its place."""
    common = {**flags, "save_strategy": "steps", "save_steps": 100}
    first = trained(
        {**common, "data": mix(tmp_path, a=1, b=1), "dp": 2, "microbatches": 5, "steps": 5}, monkeypatch
    )
    assert first == Counter(own(40, 0, 0, 25) | own(9, 40, 0, 25))
    told = capsys.readouterr().err
    assert (
        "2 sets of data, by weight:" in told and "a.jsonl: 1 of every 2 samples; trains on 25 of 40" in told
    )

    common |= {"resume": "auto", "microbatches": 10}
    second = trained({**common, "data": mix(tmp_path, a=2, b=1), "tp": 2, "steps": 11}, monkeypatch)
    assert second == Counter(dict.fromkeys(own(40, 0, 25, 65) | own(9, 40, 25, 45), 2))  # on both ranks of tp
    told = " ".join(capsys.readouterr().err.split())
    assert "a.jsonl 50%" in told and "b.jsonl 33.3333%" in told and "goes on at its own sample 25" in told

    third = trained({**common, "data": mix(tmp_path, a=3, c=2), "steps": 13}, monkeypatch)
    assert third == Counter(own(40, 0, 65, 77) | own(7, 40, 0, 8))
    told = " ".join(capsys.readouterr().err.split())
    assert "c.jsonl begins" in told and "b.jsonl is not read any more; its place, sample 45, is kept" in told

    last = trained({**common, "data": mix(tmp_path, c=1, b=1), "steps": 14}, monkeypatch)
    assert last == Counter(own(7, 0, 8, 13) | own(9, 7, 45, 50))
    (newest,) = complete_checkpoints(Path(flags["output_dir"]))[-1:]
    kept: Any = read_manifest(newest).state.sampler
    assert [Path(one["name"]).name for one in kept["away"]] == ["a.jsonl"] and kept["away"][0]["taken"] == 77


def test_a_resume_with_the_same_weights_is_the_whole_run(flags: dict[str, Any], tmp_path: Path) -> None:
    common = {**flags, "data": mix(tmp_path, a=0.7, b=0.2, c=0.1), "microbatches": 3, "steps": 6}
    common["lr_scheduler_type"] = "constant"
    run({**common, "save_steps": 2})
    whole = rows(tmp_path / "out")
    third = complete_checkpoints(tmp_path / "out")[0]
    part = {**common, "output_dir": str(tmp_path / "part"), "resume": str(third), "save_steps": 2}
    run({**part, "steps": 4})
    run({**part, "resume": "auto"})  # whose weights hold since the very first sample
    assert rows(tmp_path / "part") == whole[2:]


def test_one_set_becomes_two_and_weights_stay(
    flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = {**flags, "save_strategy": "steps", "save_steps": 100, "microbatches": 4}
    trained({**common, "data": str(tmp_path / "a.jsonl"), "steps": 2}, monkeypatch)
    common["resume"] = "auto"
    found = trained({**common, "data": mix(tmp_path, a=1, b=1), "steps": 3}, monkeypatch)
    assert found == Counter(own(40, 0, 8, 10) | own(9, 40, 0, 2))
    with pytest.raises(
        ConfigError, match=r"`data` must give weights, as it did when .*a.jsonl:1 .*b.jsonl:1 was"
    ):
        run({**common, "data": str(tmp_path / "a.jsonl"), "steps": 4})
    (tmp_path / "b.jsonl").write_text('{"text": "else"}\n')
    with pytest.raises(
        ConfigError, match=r"the set .*b.jsonl must stay as it was saved, but its content is another"
    ):
        run({**common, "data": mix(tmp_path, a=1, b=1), "steps": 4})


def test_equal_content_under_two_names_is_refused(flags: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "twin.jsonl").write_text((tmp_path / "a.jsonl").read_text())
    with pytest.raises(
        ValueError, match=r"must name each set once, but .*twin.jsonl holds what .*a.jsonl does"
    ):
        run({**flags, "data": mix(tmp_path, a=1, twin=1)})


def test_layouts_train_alike_and_ranks_must_mix_alike(flags: dict[str, Any], tmp_path: Path) -> None:
    common = {**flags, "data": mix(tmp_path, a=0.7, b=0.3), "steps": 4, "per_device_train_batch_size": 1}
    run({**common, "microbatches": 4})
    run({**common, "microbatches": 2, "dp": 2, "pp": 2, "output_dir": str(tmp_path / "wide")})
    one, other = rows(tmp_path / "out"), rows(tmp_path / "wide")
    assert [row["tokens"] for row in one] == [row["tokens"] for row in other]
    assert [row["loss"] for row in one] == pytest.approx([row["loss"] for row in other], rel=1e-5)


def joined(tmp_path: Path, *, mixed: bool, weights: tuple[int, int] = (1, 1)) -> JoinedSource:
    sets = [
        OpenSet(
            name=name,
            weight=weight,
            weighed=True,
            source=open_source(tmp_path / f"{name}.jsonl", split="train", sequence_length=8, pack=False),
        )
        for name, weight in zip("ab", weights, strict=True)
    ]
    return JoinedSource(sets, mixed=mixed)


def test_joined_rows_lie_behind_each_other_or_in_proportion(flags: dict[str, Any], tmp_path: Path) -> None:
    plain, mixed = (joined(tmp_path, mixed=mixed) for mixed in (False, True))
    assert len(plain) == 49 and plain.vocab_size == 257
    assert plain.describe(39, 0).endswith("a.jsonl:40") and plain.describe(40, 0).endswith("b.jsonl:1")
    texts = [plain.sample(0, index).tokens_L.tobytes() for index in range(49)]
    assert sorted(mixed.sample(0, index).tokens_L.tobytes() for index in range(49)) == sorted(texts)
    for count in (5, 10, 49):
        of_b = sum("b.jsonl" in mixed.describe(index, 0) for index in range(count))
        assert abs(of_b - count * 9 / 49) < 1
    every = np.arange(49)
    assert (
        plain.tokens_of(every)
        == mixed.tokens_of(every)
        == sum(len(f"{name} {n}") + 1 for name in "ab" for n in range(SIZES[name]))
    )
    assert plain.tokens_of(every[40:41]) == len("b 0") + 1
    assert plain.fingerprint != joined(tmp_path, mixed=False, weights=(2, 1)).fingerprint
    assert plain.summary().count("\n") == 1


def test_what_is_held_out_of_every_set_is_evaluated(flags: dict[str, Any], tmp_path: Path) -> None:
    more = {"eval_fraction": 0.3, "eval_batches": 100, "steps": 2, "data": mix(tmp_path, a=1, b=1)}
    run({**flags, **more})
    assert rows(tmp_path / "out")[-1]["eval_loss"] > 0


@pytest.mark.parametrize(
    "change",
    [
        lambda sampler: sampler["sets"][0].pop("taken"),
        lambda sampler: sampler["sets"][0].update(weight=0),
        lambda sampler: sampler["sets"][0].update(taken=-1),
        lambda sampler: sampler.update(sets=[]),
        lambda sampler: sampler.update(away="x"),
        lambda sampler: sampler.update(since=10**6),
    ],
)
def test_a_damaged_state_of_sets_is_refused(flags: dict[str, Any], tmp_path: Path, change: Any) -> None:
    run({**flags, "data": mix(tmp_path, a=1, b=1), "steps": 1, "save_strategy": "steps", "warmup_steps": 0})
    (path,) = complete_checkpoints(tmp_path / "out")
    state = read_manifest(path).state
    check_run_state(state, path)
    change(state.sampler)
    with pytest.raises(CheckpointError, match=r"`state.sampler.sets` must be sets of data"):
        check_run_state(state, path)
