"""A run that ends and goes on is the run that never ended: metrics, weights and moments, to the bit."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.runs import MEASURED, last_state, prepare, rows, run
from triaxis.engine.checkpoint.folder import complete_checkpoints
from triaxis.engine.checkpoint.manifest import CheckpointError, RunState, read_manifest, write_manifest
from triaxis.engine.config import ConfigError, RunConfig
from triaxis.engine.data.course import Course
from triaxis.engine.data.loader import Loader
from triaxis.engine.data.source import open_source
from triaxis.engine.rules import resolve
from triaxis.engine.run.resume import adapt, check_same_run, find_start
from triaxis.models.batch import Batch
from triaxis.parallel.replicas import initialize

LAYOUTS: list[Any] = [
    pytest.param(
        {"dp": 2, "zero": zero, "dtype": dtype},
        marks=[] if (zero + (dtype == "bf16")) % 2 else [pytest.mark.full],
    )
    for dtype, zero in itertools.product(("fp32", "bf16"), range(4))
]
LAYOUTS += [
    {"half": 10, "async_save": True, "save_steps": 3},
    {"tp": 2, "dtype": "bf16", "sp": True},
    {"pp": 2, "dp": 2, "zero": 3, "schedule": "gpipe", "microbatches": 3},
    {"optimizer": "sgd", "pack": False, "recompute": True},
]


def named(layout: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in layout.items())


pytestmark = pytest.mark.usefixtures("no_picture")


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return prepare(tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize("layout", LAYOUTS, ids=named)
def test_two_halves_are_the_whole(
    layout: dict[str, Any], flags: dict[str, Any], tmp_path: Path
) -> None:  # B71
    """The signal comes within an epoch, with a learning rate on its way down and moments that matter."""
    half = layout.get("half", 3)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    common = {"save_steps": 2 * half, **flags, **layout, "steps": 2 * half}
    common.pop("half", None)
    straight = run({**common, "output_dir": str(whole)})
    first = run({**common, "output_dir": str(parts)}, ask_at=half)
    assert (first.signal, first.steps) == (15, half)
    second = run({**common, "output_dir": str(parts), "resume": "auto"})
    assert (second.signal, second.steps) == (0, 2 * half)
    assert [row["step"] for row in rows(parts)] == list(range(1, 2 * half + 1))
    assert rows(parts) == rows(whole)
    assert last_state(parts) == last_state(whole)
    assert dataclasses.replace(second, directory=whole) == straight


def test_no_value_is_made_that_a_checkpoint_replaces(
    flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = {**flags, "output_dir": str(tmp_path), "steps": 4, "dp": 2, "zero": 2, "dtype": "bf16"}
    run({**common}, ask_at=2)
    monkeypatch.delattr(initialize, "normal_elements")
    with pytest.raises(NameError, match="normal_elements"):
        run({**common, "output_dir": str(tmp_path / "anew")})
    assert run({**common, "resume": "auto"}).steps == 4


@pytest.mark.parametrize("step", [7, 8, 9])
def test_the_schedule_and_the_samples_go_on_where_they_were(
    step: int, flags: dict[str, Any], tmp_path: Path
) -> None:  # B36
    """Step, learning rate and tokens, line for line; also where the save falls on an evaluation (7)."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    common = {**flags, "steps": 12, "eval_steps": 7}
    run({**common, "output_dir": str(whole)})
    run({**common, "output_dir": str(parts)}, ask_at=step)
    run({**common, "output_dir": str(parts), "resume": "auto"})
    assert rows(parts) == rows(whole)


def test_the_rate_of_a_resumed_run_is_that_of_its_step(flags: dict[str, Any], tmp_path: Path) -> None:  # B35
    """Warm-up 10, cosine to 100, from 1e-3 to 1e-4; saved at 40 and resumed, step 50 has 6.281e-4."""
    common = {**flags, "steps": 100, "warmup_steps": 10, "learning_rate": 1e-3, "eval_batches": 0}
    run({**common, "output_dir": str(tmp_path)}, ask_at=40)
    run({**common, "output_dir": str(tmp_path), "resume": "auto"}, ask_at=10)
    found = rows(tmp_path)
    assert [row["step"] for row in found] == list(range(1, 51))
    for row in found[10:]:
        cosine = math.cos(math.pi * (row["step"] - 10) / 90)
        assert row["lr"] == pytest.approx(1e-4 + 0.9e-3 * 0.5 * (1 + cosine), rel=1e-12)
    assert found[49]["lr"] == pytest.approx(6.281e-4, abs=5e-8)


def test_rows_after_the_checkpoint_are_cut_off(flags: dict[str, Any], tmp_path: Path) -> None:
    """A run that died at step 17 goes on at 15; none of its steps comes twice."""
    run({**flags, "output_dir": str(tmp_path), "save_steps": 5, "steps": 17, "lr_scheduler_type": "constant"})
    for late in (path for path in complete_checkpoints(tmp_path) if path.name > "step-00000015"):
        shutil.rmtree(late)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 18, "lo')
    before = rows_before_the_tear(tmp_path)
    run({**flags, "output_dir": str(tmp_path), "resume": "auto", "lr_scheduler_type": "constant"})
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 21))
    assert rows(tmp_path)[:15] == before[:15]
    assert [row["loss"] for row in rows(tmp_path)[15:17]] == [row["loss"] for row in before[15:17]]


def rows_before_the_tear(output: Path) -> list[dict[str, Any]]:
    lines = (output / "metrics.jsonl").read_text().splitlines()[:-1]
    return [{k: v for k, v in json.loads(line).items() if k not in MEASURED} for line in lines]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "no manifest"])
def test_a_damaged_checkpoint_is_passed_over_and_named(
    damage: str, flags: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = {**flags, "output_dir": str(tmp_path), "dp": 2}
    run({**common, "save_steps": 5, "steps": 10})
    newest = complete_checkpoints(tmp_path)[-1]
    file = sorted(newest.glob("shard-*"))[-1]
    content = file.read_bytes()
    if damage == "truncated":
        file.write_bytes(content[:-7])
    elif damage == "flipped":
        file.write_bytes(content[:-7] + bytes([content[-7] ^ 4]) + content[-6:])
    else:
        (newest / "manifest.json").unlink()
    capsys.readouterr()
    run({**common, "resume": "auto", "steps": 10})
    told = capsys.readouterr().err
    assert "resumed at step 5" in told
    assert damage == "no manifest" or str(file) in told
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 11))
    if damage != "no manifest":
        shutil.rmtree(complete_checkpoints(tmp_path)[0])
        with pytest.raises(CheckpointError, match=str(file)):
            run({**common, "resume": str(newest), "steps": 10})


def test_a_model_that_is_not_the_saved_one_is_noticed(flags: dict[str, Any], tmp_path: Path) -> None:  # B65
    """The stored batch's loss betrays it; on the same layout to the last bit, on another within rounding."""
    common = {**flags, "output_dir": str(tmp_path), "dp": 2}
    run({**common, "save_steps": 5, "steps": 10})
    newest = complete_checkpoints(tmp_path)[-1]
    manifest = read_manifest(newest)
    assert manifest.state.eval_loss is not None
    for factor, layout, fits in (
        (1 + 1e-12, {}, False),
        (1 + 1e-12, {"dp": 1}, True),
        (1 + 1e-4, {"dp": 1}, False),
    ):
        state = dataclasses.replace(manifest.state, eval_loss=manifest.state.eval_loss * factor)
        (newest / "manifest.json").unlink()
        write_manifest(newest, dataclasses.replace(manifest, state=state))
        asked = {**common, **layout, "resume": "auto", "steps": 10, "global_batch": 4, "microbatches": None}
        if fits:
            run(asked)
        else:
            with pytest.raises(CheckpointError, match="the loss of the row stored with step 10 must be"):
                run(asked)


def start_of(output: Path, *, restarted: bool = False, **changes: Any) -> Any:
    return find_start(RunConfig(output_dir=str(output), **changes), restarted=restarted)


def test_what_resume_means(flags: dict[str, Any], tmp_path: Path) -> None:
    """A fresh run never lands on an older one; a launcher's restart goes on by itself."""
    output, other = tmp_path / "a", tmp_path / "b"
    run({**flags, "output_dir": str(output), "save_steps": 5, "steps": 10})
    old, newest = complete_checkpoints(output)
    for asked in (None, "never"):
        with pytest.raises(ConfigError, match=r"checkpoints up to step-00000010; use --resume auto"):
            start_of(output, resume=asked)
        assert start_of(other, resume=asked).config.resume is None
    assert start_of(output, restarted=True).path == newest
    assert start_of(other, restarted=True).state is None
    assert start_of(output, resume=str(newest)).path == newest
    assert start_of(other, resume=str(output)).path == newest
    assert start_of(other, resume=str(output / "checkpoints")).path == newest
    assert start_of(other, resume=str(old)).state.step == 5
    assert start_of(output, resume=str(old)).path == old
    run({**flags, "output_dir": str(other), "save_steps": 5, "steps": 5})
    with pytest.raises(ConfigError, match="is not of this `output_dir`, which has checkpoints of its own"):
        start_of(other, resume=str(old))
    assert start_of(output, resume=str(old), restarted=True).config.resume == "auto"
    with pytest.raises(ConfigError, match=r"a folder that holds a checkpoint, but .* has none"):
        start_of(other, resume=str(tmp_path))
    with pytest.raises(ConfigError, match=r"`resume` must be auto, never, or a folder"):
        resolve(RunConfig(resume="no/such/folder"), 1)


def test_another_run_is_refused_by_name(flags: dict[str, Any], tmp_path: Path) -> None:  # B85
    common = {**flags, "output_dir": str(tmp_path)}
    run({**common, "save_steps": 5, "steps": 5})
    shutil.copy(flags["data"], tmp_path / "moved.jsonl")
    model = json.loads(Path(flags["model"]).read_text()) | {"layers": 3}
    (tmp_path / "model.json").write_text(json.dumps(model))
    changes: dict[str, Any] = {
        "seed": 1,
        "seq": 32,
        "optimizer": "sgd",
        "dtype": "bf16",
        "pack": False,
        "model": str(tmp_path / "model.json"),
        "microbatches": 4,
        "steps": 3,
    }
    for name, value in changes.items():
        wrong = "global_batch" if name == "microbatches" else name
        start = start_of(tmp_path, resume="auto", **{**flags, name: value, "warmup_steps": 1})
        with pytest.raises(ConfigError, match=f"`{wrong}` must") as caught:
            check_same_run(start.state, start.config, resolve(start.config, 1))
        assert len(caught.value.faults) == 1
    moved = {"data": str(tmp_path / "moved.jsonl")}  # content is what counts
    told = run({**common, **moved, "resume": "auto", "learning_rate": 1e-3, "save_total_limit": 3})
    assert told.steps == 20


def test_a_larger_batch_goes_on_with_the_next_sample(flags: dict[str, Any], tmp_path: Path) -> None:  # B110
    """Ten steps of 8 sequences, then one of 16: the samples 80 to 95, and no other."""
    common = {**flags, "output_dir": str(tmp_path), "lr_scheduler_type": "constant", "eval_steps": None}
    run({**common, "microbatches": 8, "steps": 10, "save_steps": 10})
    seen: list[tuple[int, int]] = []
    made = Loader._batch

    def noted(self: Loader, places: Sequence[tuple[int, int]]) -> Batch:
        seen.extend(places)
        return made(self, places)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loader, "_batch", noted)
        # The end's evaluation would be of rows too.
        run(
            {
                **common,
                "microbatches": 16,
                "global_batch": 16,
                "steps": 11,
                "eval_batches": 0,
                "resume": "auto",
            }
        )
    rows = len(open_source(flags["data"], split="train", sequence_length=flags["seq"]))
    epochs, places = Course([rows], seed=0).places(80, 96)
    assert seen == list(zip(epochs.tolist(), places.tolist(), strict=True))


def test_a_save_at_an_epochs_end_skips_nothing(flags: dict[str, Any], tmp_path: Path) -> None:  # B111
    """Three epochs, saved at the end of each: from any of them, the run still has all its steps."""
    epochs = {key: value for key, value in flags.items() if key != "steps"} | {"num_train_epochs": 3.0}
    whole = tmp_path / "whole"
    steps = run({**epochs, "output_dir": str(whole), "save_strategy": "epoch"}).steps
    assert len(complete_checkpoints(whole)) == 3
    for path in complete_checkpoints(whole)[:2]:
        part = tmp_path / path.name
        assert run({**epochs, "output_dir": str(part), "resume": str(path)}).steps == steps
        assert rows(part) == rows(whole)[-len(rows(part)) :]
        assert rows(part)[-1]["step"] == steps


def test_nothing_left_to_do_is_said(
    flags: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # B65
    common = {**flags, "output_dir": str(tmp_path), "save_steps": 5, "steps": 5}
    done = run(common)
    again = run({**common, "resume": "auto"})
    assert (again.steps, again.loss) == (5, done.loss)
    assert len(rows(tmp_path)) == 5
    (path,) = complete_checkpoints(tmp_path)
    loaded = (
        f"resumed at step 5 from {path}: all {len(read_manifest(path).tensors)} tensors, and the stored row"
    )
    assert loaded in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags_given", "ranks", "found"),
    [
        ({"dp": 3, "per_device_train_batch_size": 4, "microbatches": 2}, 2, (2, 4, 3)),
        ({"dp": 3, "per_device_train_batch_size": 4, "microbatches": 2}, 4, (4, 3, 2)),
        ({"per_device_train_batch_size": 4}, 6, (6, 4, 1)),
        ({"tp": 2, "per_device_train_batch_size": 5}, 4, (2, 4, 3)),
        ({}, 8, (8, 3, 1)),
    ],
)
def test_elastic_keeps_the_global_batch(
    flags_given: dict[str, Any], ranks: int, found: tuple[int, int, int]
) -> None:
    state = RunState(
        step=1, tokens=1, config={}, sampler={}, eval_loss=None, extra={"facts": {"global_batch": 24}}
    )
    resolved = resolve(adapt(RunConfig(elastic=True, **flags_given), state, ranks), ranks)
    assert resolved.global_batch == 24
    assert (resolved.topology.dp, resolved.microbatch_size, resolved.microbatches) == found
    with pytest.raises(ConfigError, match=r"`dp` must divide the global batch 24 .* start 4 or 6 ranks"):
        adapt(RunConfig(elastic=True), state, 5)


def test_fewer_and_more_replicas_train_the_same_run(flags: dict[str, Any], tmp_path: Path) -> None:  # B110
    common = {**flags, "dtype": "fp64", "global_batch": 4, "microbatches": None}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run({**common, "output_dir": str(whole), "dp": 2})
    run({**common, "output_dir": str(parts), "dp": 2}, ask_at=6)
    run({**common, "output_dir": str(parts), "dp": 1, "resume": "auto"}, ask_at=6)
    run({**common, "output_dir": str(parts), "dp": 4, "zero": 2, "resume": "auto"})
    for a, b in zip(rows(parts), rows(whole), strict=True):
        assert a["step"] == b["step"] and a["tokens"] == b["tokens"] and a["lr"] == b["lr"]
        assert math.isclose(a["loss"], b["loss"], rel_tol=1e-10)
        assert math.isclose(a["grad_norm"], b["grad_norm"], rel_tol=1e-10)


def test_a_head_size_told_in_two_ways_is_the_same_model(flags: dict[str, Any], tmp_path: Path) -> None:
    """`head_dim` null, and written out: one model, whichever of them a checkpoint's version has kept."""
    common = {**flags, "output_dir": str(tmp_path)}
    run({**common, "save_steps": 5, "steps": 5})
    state = start_of(tmp_path, resume="auto").state
    config = RunConfig(**{**common, "steps": 10})
    resolved = resolve(config, 1)
    facts = state.extra["facts"]
    size = facts["model"]["hidden_size"] // facts["model"]["heads"]
    for head_dim, same in ((None, True), (size, True), (2 * size, False)):
        told = {**facts, "model": facts["model"] | {"head_dim": head_dim}}
        saved = dataclasses.replace(state, extra=state.extra | {"facts": told})
        if same:
            check_same_run(saved, config, resolved)
        else:
            with pytest.raises(ConfigError, match="`model`"):
                check_same_run(saved, config, resolved)
