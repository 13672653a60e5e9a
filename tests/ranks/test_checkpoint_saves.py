"""Saves that fail leave nothing behind and all ranks in agreement; asynchronous ones hold their step's values."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.agreement import MODEL, Layout
from tests.checkpointing import LAYOUT, load_newest, on_ranks, open_step, save_steps, state_at, train
from tests.patience import PATIENCE_SECONDS
from triaxis.engine.checkpoint import storage
from triaxis.engine.checkpoint.assignment import StatePlanner
from triaxis.engine.checkpoint.folder import (
    FOLDER,
    complete_checkpoints,
)
from triaxis.engine.checkpoint.store import CheckpointError, CheckpointStore, SaveError
from triaxis.engine.step import TrainingStep
from triaxis.launch.checkpoint import main
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.thread import run_threads


def fails_on_both_ranks(step: TrainingStep, store: CheckpointStore, *, asynchronous: bool = False) -> str:
    """The message of a save that fails; training goes on."""
    with pytest.raises(SaveError) as raised:
        store.save(state_at(2), asynchronous=asynchronous)
        store.finish()
    assert raised.value.step == 2
    train(step, LAYOUT, range(1))
    return str(raised.value)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_fails_the_save_on_all_ranks(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # B60
    save_steps(tmp_path, 1)
    written = storage.ShardWriter.write_data

    def write_data(self: Any, plan: Any, planner: Any) -> Any:  # noqa: ANN401
        if plan.storage_data == "shard-00001.safetensors":
            (self._folder / plan.storage_data).write_bytes(b"")  # zero bytes beside good ones
            with storage._named(self._folder / plan.storage_data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written(self, plan, planner)

    with monkeypatch.context() as patch:
        patch.setattr(storage.ShardWriter, "write_data", write_data)
        texts = on_ranks(
            lambda step, store: fails_on_both_ranks(step, store, asynchronous=asynchronous), tmp_path
        )
    assert texts[0] == texts[1]
    for words in ("step 2", "rank 1", "No space left on device", "shard-00001.safetensors"):
        assert words in texts[0]
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["step-00000001"]
    assert on_ranks(load_newest, tmp_path) == [1, 1]


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[None]:
    """A file system of that size at `folder`; skips where this user may not mount one."""
    folder.mkdir()
    made = (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)],
            capture_output=True,
            check=False,
        )
        if shutil.which("mount")
        else None
    )
    if made is None or made.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:  # B60
    one_checkpoint = 12 * MODEL.parameters()
    with small_disk(tmp_path / "disk", int(1.7 * one_checkpoint)):
        save_steps(tmp_path / "disk", 1)
        texts = on_ranks(fails_on_both_ranks, tmp_path / "disk")
        assert "No space left on device" in texts[0]
        assert on_ranks(load_newest, tmp_path / "disk") == [1, 1]
        assert [path.name for path in (tmp_path / "disk" / FOLDER).iterdir()] == ["step-00000001"]


def test_a_folder_that_cannot_be_made_fails_the_save_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("not a folder")
    texts = on_ranks(fails_on_both_ranks, tmp_path)
    assert texts[0] == texts[1]
    assert str(tmp_path / FOLDER) in texts[0]


def test_a_read_only_disk_fails_the_save_on_all_ranks(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20):
        save_steps(tmp_path / "disk", 1)
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "disk")], check=True)
        texts = on_ranks(fails_on_both_ranks, tmp_path / "disk")
        assert texts[0] == texts[1]
        assert "Read-only file system" in texts[0]
        assert on_ranks(load_newest, tmp_path / "disk") == [1, 1]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_checkpoint_is_told_to_take_12_bytes_a_parameter(dtype: str, tmp_path: Path) -> None:  # B61
    """fp32 masters and two moments; weights in bf16 are not stored beside them. File heads come on top."""

    def main(world: World) -> tuple[int, int]:
        step = open_step(world, LAYOUT, replace(MODEL, vocab_size=2000), "adamw, clip 1", dtype)
        store = CheckpointStore(tmp_path, step)
        store.save(state_at(1))
        return store.size_bytes, step.plan.model.parameters()

    for told, parameters in run_threads(2, main):
        assert told == 12 * parameters
        (path,) = complete_checkpoints(tmp_path)
        assert told < sum(file.stat().st_size for file in path.glob("shard-*")) < 1.1 * told


def test_folders_that_nodes_do_not_share_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # B70
    """Each rank is a node with a folder of its own; then each has what only its rank wrote."""
    monkeypatch.setattr(socket, "gethostname", lambda: f"node{threading.current_thread().name[-1]}")

    def save(world: World) -> str:
        step = open_step(world, LAYOUT, MODEL, "adamw, clip 1", "fp32")
        return fails_on_both_ranks(step, CheckpointStore(tmp_path / f"node{world.rank}", step))

    texts = run_threads(2, save)
    assert texts[0] == texts[1]
    for words in ("by rank 1 on node1: ", "node1/checkpoints/.tmp-", "`output_dir` that all nodes share"):
        assert words in texts[0]

    save_steps(tmp_path / "shared", 1)
    (written,) = complete_checkpoints(tmp_path / "shared")
    for rank in range(2):
        own = tmp_path / f"node{rank}" / FOLDER / written.name
        shutil.copytree(written, own)
        (own / f"shard-0000{1 - rank}.safetensors").unlink()

    def load(world: World) -> str:
        step = open_step(world, Layout(tp=2), MODEL, "adamw, clip 1", "fp32")
        with pytest.raises(CheckpointError) as raised:
            load_newest(step, CheckpointStore(tmp_path / f"node{world.rank}", step))
        return str(raised.value)

    texts = run_threads(2, load)
    assert texts[0] == texts[1]
    for rank in range(2):
        file = f"node{rank}/checkpoints/step-00000001/shard-0000{1 - rank}.safetensors"
        assert f"rank {rank} on node{rank}: " in texts[0] and file in texts[0]


def test_an_asynchronous_save_holds_the_values_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if nothing is written before training has gone on; a second save waits for the first."""
    may_write = threading.Event()
    written = storage.ShardWriter.write_data

    def write_data(self: Any, plan: Any, planner: Any) -> Any:  # noqa: ANN401
        may_write.wait(PATIENCE_SECONDS)
        return written(self, plan, planner)

    monkeypatch.setattr(storage.ShardWriter, "write_data", write_data)

    def work(step: TrainingStep, store: CheckpointStore) -> None:
        train(step, LAYOUT, range(1))
        store.save(state_at(1), asynchronous=True)
        assert not store.poll()
        assert not store.commit_if_ready()
        train(step, LAYOUT, range(1, 2))
        assert complete_checkpoints(tmp_path / "later") == []
        step.mesh.everyone.barrier()
        may_write.set()
        store.save(state_at(2), asynchronous=True)
        assert len(complete_checkpoints(tmp_path / "later")) == 1
        train(step, LAYOUT, range(2, 3))
        while not store.commit_if_ready():
            pass
        assert store.poll()
        assert not store.commit_if_ready()

    on_ranks(work, tmp_path / "later")
    may_write.set()
    save_steps(tmp_path / "at once", 1, 2)
    for number in range(2):
        one, other = (complete_checkpoints(tmp_path / name)[number] for name in ("later", "at once"))
        assert main(["diff", str(one), str(other)]) == 0


def test_a_rank_without_a_share_stages_nothing() -> None:
    planner = StatePlanner()
    planner.set_up_planner({})
    plan = planner.create_local_plan()
    assert plan.items == []
    planner.stage(plan)
    assert planner._copies == {}


def test_a_failed_asynchronous_save_is_told_by_its_step_and_the_next_one_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # B61: a quota counts as a full disk
    written = storage.ShardWriter.write_data

    def write_data(self: Any, plan: Any, planner: Any) -> Any:  # noqa: ANN401
        if "step-00000001" in str(self._folder) and plan.storage_data == "shard-00000.safetensors":
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return written(self, plan, planner)

    monkeypatch.setattr(storage.ShardWriter, "write_data", write_data)

    def work(step: TrainingStep, store: CheckpointStore) -> int:
        store.save(state_at(1), asynchronous=True)
        with pytest.raises(SaveError, match=r"step 1 was not saved, by rank 0.*[Qq]uota"):
            store.save(state_at(2))
        return load_newest(step, store)

    assert on_ranks(work, tmp_path) == [2, 2]
