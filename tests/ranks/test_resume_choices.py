"""Where a resume begins: from an older, damaged, strange or finished checkpoint, in its own folder or another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from tests.checkpointing import flip_a_byte, forge
from tests.runs import names, rows, run, step, ten_steps
from triaxis.engine.checkpoint.folder import (
    BEST,
    FOLDER,
    complete_checkpoints,
)
from triaxis.engine.checkpoint.manifest import CheckpointError
from triaxis.engine.config import ConfigError, RunConfig
from triaxis.engine.run.resume import find_start
from triaxis.launch.checkpoint import main

pytestmark = pytest.mark.usefixtures("no_picture")


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return ten_steps(tmp_path_factory.mktemp("run"))


def test_a_run_can_go_back_to_an_older_checkpoint_in_its_own_folder(
    flags: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the error of a model that is not the saved one offers; those after it are set aside, not lost."""
    common = {**flags, "output_dir": str(tmp_path), "learning_rate": 1e-2}
    whole = run(common)
    kept = rows(tmp_path)
    newest = tmp_path / FOLDER / step(10)
    forge(newest, lambda body: body["state"].update(eval_loss=body["state"]["eval_loss"] * 1.01))
    with pytest.raises(CheckpointError) as raised:
        run({**common, "resume": "auto"})
    offered = tmp_path / FOLDER / step(8)
    words = f"--resume {offered} goes on from the checkpoint before it, also in the same --output-dir"
    assert words in str(raised.value)
    capsys.readouterr()
    again = run({**common, "resume": str(offered)})
    assert (again.steps, again.loss) == (10, whole.loss)
    told = capsys.readouterr().err
    assert f"{step(10)} is newer than what the run goes on from: it is now aside-1-{step(10)}" in told
    assert names(tmp_path) == sorted([f"aside-1-{step(10)}", *(step(number) for number in (2, 4, 6, 8, 10))])
    assert rows(tmp_path) == kept
    assert run({**common, "resume": "auto"}).steps == 10


def test_a_run_goes_on_with_the_day_of_its_first_start(flags: dict[str, Any], tmp_path: Path) -> None:
    """Or a chat template that writes the day would make other data of it every midnight."""
    common = {**flags, "output_dir": str(tmp_path)}
    assert find_start(RunConfig(**common), restarted=False).config.chat_template_date == f"{date.today()}"
    run({**common, "steps": 2, "chat_template_date": "2024-07-26"})
    again = RunConfig(**common, resume="auto")
    assert find_start(again, restarted=False).config.chat_template_date == "2024-07-26"
    other = replace(again, chat_template_date="2025-01-01")
    assert find_start(other, restarted=False).config.chat_template_date == "2025-01-01"


def test_a_damaged_checkpoint_is_said_and_the_one_before_it_taken(
    flags: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = {**flags, "output_dir": str(tmp_path)}
    run({**common, "steps": 6})
    flip_a_byte(tmp_path / FOLDER / step(6) / "shard-00000.safetensors")
    run({**common, "resume": "auto"})
    told = capsys.readouterr().err
    assert f"{step(6)}/shard-00000.safetensors does not match its checksum; resume from" in told
    assert "resumed at step 4 from" in told


def test_a_fresh_start_never_writes_over_an_older_runs_checkpoints(
    flags: dict[str, Any], tmp_path: Path
) -> None:
    """`train` itself says so, as a program may call it, and every rank does."""
    common = {**flags, "output_dir": str(tmp_path), "dp": 2, "global_batch": 4}
    run({**common, "steps": 4})
    kept = {path: path.read_bytes() for path in (tmp_path / FOLDER).rglob("*") if path.is_file()}
    for resume in (None, "never"):
        with pytest.raises(ConfigError, match=r"has checkpoints up to .*; use --resume auto to go on"):
            run({**common, "steps": 6, "resume": resume})
    assert {path: path.read_bytes() for path in (tmp_path / FOLDER).rglob("*") if path.is_file()} == kept


STATES: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda state: state["extra"].pop("counters"), "state.extra.counters"),
    (lambda state: state["extra"]["counters"].pop("samples"), "state.extra.counters"),
    (lambda state: state["extra"]["counters"].update(step="six"), "state.extra.counters"),
    (lambda state: state["extra"]["counters"].update(more=1), "state.extra.counters"),
    (lambda state: state["extra"].pop("facts"), "state.extra.facts"),
    (lambda state: state["extra"]["facts"].pop("global_batch"), "state.extra.facts"),
    (lambda state: state["extra"].update(replayed_row=[1, 2]), "state.extra.replayed_row"),
    (lambda state: state["extra"]["replayed_row"].update(tokens=None), "state.extra.replayed_row"),
    (lambda state: state["sampler"].pop("rows"), "state.sampler.rows"),
]


@pytest.mark.parametrize("number", range(len(STATES)))
def test_a_state_that_no_run_can_go_on_from_is_passed_over(
    number: int, flags: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, key = STATES[number]
    common = {**flags, "output_dir": str(tmp_path)}
    run({**common, "steps": 4})
    forge(tmp_path / FOLDER / step(4), lambda body: change(body["state"]))
    asked = RunConfig(output_dir=str(tmp_path), resume="auto")
    assert find_start(asked, restarted=False).path == tmp_path / FOLDER / step(2)
    run({**common, "steps": 4, "resume": "auto"})
    told = capsys.readouterr().err
    assert f"is no run's to go on from: `{key}` must be" in told
    assert "resumed at step 2 from" in told
    with pytest.raises(CheckpointError, match=key):
        forge(tmp_path / FOLDER / step(4), lambda body: change(body["state"]))
        find_start(
            RunConfig(output_dir=str(tmp_path), resume=str(tmp_path / FOLDER / step(4))), restarted=False
        )


def test_a_finished_run_resumed_elsewhere_leaves_a_checkpoint_there(
    flags: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run({**flags, "output_dir": str(tmp_path / "a"), "steps": 4})
    capsys.readouterr()
    there = {**flags, "output_dir": str(tmp_path / "b"), "steps": 4, "resume": str(tmp_path / "a")}
    assert run(there).steps == 4
    told = capsys.readouterr().err
    assert "all 4 steps were done before" in told
    assert names(tmp_path / "b") == [step(4)]
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0


def test_a_changed_batch_is_told_with_what_follows(
    flags: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = {**flags, "output_dir": str(tmp_path), "microbatches": 4}
    run({**common, "steps": 2})
    capsys.readouterr()
    run({**common, "microbatches": 8, "global_batch": 8, "resume": "auto", "steps": 4})
    told = capsys.readouterr().err
    assert (
        "changed since it was saved: global_batch 4 → 8: the data goes on at sample 8, each step takes 8"
        in told
    )


def test_one_checkpoint_is_marked_as_the_best(
    flags: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of them was, when it was saved; the replayed row's loss has another name than the held-out one."""
    run(
        {
            **flags,
            "output_dir": str(tmp_path),
            "eval_batches": 1,
            "eval_steps": 2,
            "save_best": True,
            "steps": 6,
        }
    )
    for path in complete_checkpoints(tmp_path):
        (path / BEST).touch()
    capsys.readouterr()
    assert main(["ls", str(tmp_path)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split("  ")[-2:] == ["held-out loss", "stored row's loss"]
    assert [line.count("best") for line in lines] == [0, 0, 1]
    losses = [row["eval_loss"] for row in rows(tmp_path) if "eval_loss" in row]
    assert [line.split()[-2] for line in lines] == [f"{loss:.4f}" for loss in losses]


def test_a_checkpoint_of_another_folder_is_not_mixed_in(flags: dict[str, Any], tmp_path: Path) -> None:
    for name in ("a", "b"):
        run({**flags, "output_dir": str(tmp_path / name), "steps": 2})
    with pytest.raises(ConfigError, match="is not of this `output_dir`"):
        find_start(RunConfig(output_dir=str(tmp_path / "a"), resume=str(tmp_path / "b")), restarted=False)
