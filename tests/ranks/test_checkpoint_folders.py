"""Checkpoints come and go whole: killed at any moment, pruned, or read meanwhile."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.agreement import MODEL, Layout
from tests.checkpointing import flip_a_byte, on_ranks, open_step, save_steps, state_at
from triaxis.engine.checkpoint import storage
from triaxis.engine.checkpoint.folder import (
    BEST,
    FOLDER,
    MANIFEST,
    begin_folder,
    complete_checkpoints,
    place_folder,
    prune_folders,
    reading,
)
from triaxis.engine.checkpoint.store import CheckpointStore
from triaxis.engine.step import TrainingStep
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.thread import run_threads


class Killed(BaseException):
    """The process is gone: nothing catches this."""


OPERATIONS = ("mkdir", "rename", "fsync", "unlink", "rmdir")


def kill_before(patch: pytest.MonkeyPatch, number: int) -> None:
    """From now on the n-th change to the file system does not happen, nor anything after it."""
    done = 0

    def counted(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
            nonlocal done
            done += 1
            if done >= number:
                raise Killed
            return operation(*arguments, **options)

        return run

    for name in OPERATIONS:
        patch.setattr(os, name, counted(getattr(os, name)))


@pytest.mark.parametrize("second_step", [1, 2])
def test_killed_between_any_two_operations_a_whole_checkpoint_is_left(
    second_step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 1 is saved; then step 2, or step 1 again, dies at one operation after the other until it lives."""

    def main(world: World) -> int:
        step = open_step(world, Layout(), MODEL, "adamw, clip 1", "fp32")
        master = step.data_parallel.buckets[0].master
        number = 0
        while True:
            number += 1
            store = CheckpointStore(tmp_path / str(number), step)
            master.fill_(1.0)
            store.save(state_at(1))
            master.fill_(2.0)
            with monkeypatch.context() as patch:
                kill_before(patch, number)
                try:
                    store.save(state_at(second_step))
                    store.prune(1)
                    lived = True
                except Killed:
                    lived = False
            again = CheckpointStore(tmp_path / str(number), step)
            for path in complete_checkpoints(tmp_path / str(number)):  # none of them is damaged
                again.load(path)
            assert float(master[0]) in ((2.0,) if lived else (1.0, 2.0)), number
            master.fill_(3.0)
            again.save(state_at(3))
            again.prune(1)
            assert [p.name for p in (tmp_path / str(number) / FOLDER).iterdir()] == ["step-00000003"], number
            shutil.rmtree(tmp_path / str(number))
            if lived:
                return number

    assert run_threads(1, main)[0] > 8


def made_checkpoints(folder: Path, *steps: int, best: tuple[int, ...] = ()) -> None:
    for step in steps:
        temporary = begin_folder(folder, step)
        (temporary / MANIFEST).write_text("{}")
        if step in best:
            (temporary / BEST).touch()
        place_folder(temporary, step)


@pytest.mark.parametrize(
    ("keep", "best", "left"),
    [
        (2, (), [30, 40]),
        (1, (), [40]),
        (0, (), [40]),
        (1, (20,), [20, 40]),
        (3, (10, 20), [20, 30, 40]),
        (2, (10,), [10, 30, 40]),
        (3, (10,), [10, 20, 30, 40]),
        (9, (), [10, 20, 30, 40]),
    ],
)
def test_pruning_keeps_the_newest_and_the_best(
    keep: int, best: tuple[int, ...], left: list[int], tmp_path: Path
) -> None:
    made_checkpoints(tmp_path / FOLDER, 10, 20, 30, 40, best=best)
    prune_folders(tmp_path / FOLDER, keep)
    assert [path.name for path in complete_checkpoints(tmp_path)] == [f"step-{step:08d}" for step in left]
    assert len(list((tmp_path / FOLDER).iterdir())) == len(left)


def test_a_checkpoint_being_read_is_not_pruned(tmp_path: Path) -> None:
    made_checkpoints(tmp_path / FOLDER, 10, 20, 30)
    with reading(tmp_path / FOLDER / "step-00000010"):
        prune_folders(tmp_path / FOLDER, 1)
        assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000010", "step-00000030"]
    prune_folders(tmp_path / FOLDER, 1)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000030"]


def test_a_damaged_newer_one_does_not_cost_the_good_one(tmp_path: Path) -> None:
    """Saved 1 and 3, 3 is damaged: the run goes on from 1, saves 2, and keeps one checkpoint."""
    save_steps(tmp_path, 1, 3)
    first, damaged = complete_checkpoints(tmp_path)
    flip_a_byte(damaged / "shard-00000.safetensors")

    def work(step: TrainingStep, store: CheckpointStore) -> list[str]:
        store.load(first)
        store.prune(1)
        step.mesh.everyone.barrier()
        after_load = [path.name for path in complete_checkpoints(tmp_path)]
        step.mesh.everyone.barrier()
        store.save(state_at(2))
        store.prune(1)
        return after_load

    assert on_ranks(work, tmp_path)[0] == ["step-00000001", "step-00000003"]
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000002", "step-00000003"]


def test_loading_marks_the_checkpoint_as_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_steps(tmp_path, 1, 2)
    read = storage.ShardReader.read_data
    left: list[int] = []

    def read_data(self: Any, plan: Any, planner: Any) -> Any:  # noqa: ANN401
        prune_folders(tmp_path / FOLDER, 1)
        left.append(len(complete_checkpoints(tmp_path)))
        return read(self, plan, planner)

    monkeypatch.setattr(storage.ShardReader, "read_data", read_data)
    on_ranks(lambda step, store: store.load(complete_checkpoints(tmp_path)[0]), tmp_path)
    assert left == [2, 2]
