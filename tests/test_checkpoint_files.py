"""Checkpoint files: complete or absent, checked when read, never pickled; and the command that looks into them."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from agreement import MODEL, Layout
from checkpointing import open_step, state_at, train
from safetensors.torch import load_file
from torch import Tensor

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
from triaxis.engine.checkpoint.manifest import read_manifest
from triaxis.engine.checkpoint.planner import StatePlanner, share_out, write_item
from triaxis.engine.checkpoint.rectangles import cut_rectangles
from triaxis.engine.checkpoint.store import CheckpointError, CheckpointStore, SaveError
from triaxis.engine.checkpoint.stored import StoredTensors
from triaxis.engine.step import TrainingStep
from triaxis.launch.checkpoint import main
from triaxis.parallel.group import World
from triaxis.parallel.thread_world import run_threads

LAYOUT = Layout(dp=2, zero=1)


def on_ranks(
    work: Callable[[TrainingStep, CheckpointStore], Any], directory: Path, layout: Layout = LAYOUT
) -> list[Any]:
    """What `work` returned on every rank."""

    def rank(world: World) -> Any:  # noqa: ANN401
        step = open_step(world, layout, MODEL, "adamw, clip 1", "fp32")
        return work(step, CheckpointStore(directory, step))

    return run_threads(layout.size, rank)


def save_steps(directory: Path, *numbers: int) -> None:
    """Checkpoints of some steps, each after one step more of training."""

    def work(step: TrainingStep, store: CheckpointStore) -> None:
        for place, number in enumerate(numbers):
            train(step, LAYOUT, range(place, place + 1))
            store.save(state_at(number))

    on_ranks(work, directory)


def load_newest(step: TrainingStep, store: CheckpointStore) -> int:
    path = store.latest()
    assert path is not None
    return store.load(path).step


# Geometry and sharing out.


@pytest.mark.parametrize("shape", [(7,), (4, 4), (3, 5), (2, 3, 4)])
@pytest.mark.parametrize("limit", [1, 6, 100])
def test_rectangles_cover_every_run_in_order(shape: tuple[int, ...], limit: int) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(whole.numel()):
        for stop in range(start, whole.numel() + 1):
            parts = list(cut_rectangles(shape, start, stop, limit))
            found = []
            for part in parts:
                view = whole
                for dim, (low, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
                    view = view.narrow(dim, low, size)
                assert part.first == len(found)
                found += view.reshape(-1).tolist()
            assert found == list(range(start, stop))


def test_an_example_of_rectangles() -> None:
    parts = [(part.offsets, part.sizes) for part in cut_rectangles((4, 4), 3, 14)]
    assert parts == [((0, 3), (1, 1)), ((1, 0), (2, 4)), ((3, 0), (1, 2))]


def test_replicas_are_written_once_by_whom_has_least() -> None:
    from torch.distributed.checkpoint.planner import SavePlan

    def item(name: str, rows: int) -> Any:  # noqa: ANN401
        return write_item(name, torch.float32, (rows, 2), (0, 0), (rows, 2))

    plans = [
        SavePlan([item("a", 9), item("x", 4), item("y", 4)]),
        SavePlan([item("x", 4), item("y", 4)]),
        SavePlan([item("y", 4)]),
    ]
    shares, metadata = share_out(plans)
    assert [[item.index.fqn for item in plan.items] for plan in shares] == [["a"], ["x"], ["y"]]
    assert set(metadata.state_dict_metadata) == {"a", "x", "y"}


def test_replicas_are_balanced_over_ranks_and_written_once(tmp_path: Path) -> None:
    on_ranks(lambda step, store: store.save(state_at(1)), tmp_path, Layout(dp=4, zero=0))
    manifest = read_manifest(complete_checkpoints(tmp_path)[0])
    sizes = [file.size_bytes for file in manifest.files.values()]
    states = 3 * 4 * MODEL.parameters()
    assert len(sizes) == 4
    assert states < sum(sizes) < 1.15 * states  # the rest is file heads
    assert max(sizes) < 1.1 * min(sizes)


# On disk.


def test_files_are_plain_safetensors(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    path = complete_checkpoints(tmp_path)[0]
    chunks: dict[str, Tensor] = {}
    for file in path.glob("*.safetensors"):
        chunks |= load_file(file)
    manifest = read_manifest(path)
    assert len(chunks) == sum(len(tensor.chunks) for tensor in manifest.tensors.values())
    stored = StoredTensors(path)
    for key, values in chunks.items():
        name, _, bounds = key[:-1].partition("[")
        ranges = [tuple(map(int, part.split(":"))) for part in bounds.split(",")]
        read = stored.read(name, tuple(low for low, _ in ranges), tuple(high - low for low, high in ranges))
        assert torch.equal(values, read), key


@pytest.mark.parametrize("read_bytes", [1, 200, 1 << 24])
def test_reading_in_small_blocks_reads_the_same(
    read_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part with rows and columns of its own, across the chunks of two ranks."""
    save_steps(tmp_path, 1)
    path = complete_checkpoints(tmp_path)[0]
    name = "exp_avg/lm_head.weight"
    whole = StoredTensors(path).read(name, (0, 0), (67, 32))
    assert len(read_manifest(path).tensors[name].chunks) > 1
    assert whole.count_nonzero() > 0
    monkeypatch.setattr(storage, "READ_BYTES", read_bytes)
    assert torch.equal(StoredTensors(path).read(name, (5, 3), (60, 20)), whole[5:65, 3:23])


def test_names_and_shapes_are_those_of_the_whole_model(tmp_path: Path) -> None:
    layout = Layout(tp=2, dp=2, zero=3)
    on_ranks(lambda step, store: store.save(state_at(1)), tmp_path, layout)
    tensors = read_manifest(complete_checkpoints(tmp_path)[0]).tensors
    assert tensors["master/lm_head.weight"].shape == (67, 32)  # a prime: padding is not stored
    assert tensors["exp_avg_sq/model.layers.3.self_attn.k_proj.weight"].shape == (8, 32)
    assert {name.partition("/")[0] for name in tensors} == {"master", "exp_avg", "exp_avg_sq"}


def test_the_state_comes_back_exactly(tmp_path: Path) -> None:
    state = state_at(3, eval_loss=0.1 + 0.2, extra={"skipped_steps": [1, 2], "best": None})

    def work(step: TrainingStep, store: CheckpointStore) -> bool:
        store.save(state)
        path = store.latest()
        assert path is not None
        return store.load(path) == state

    assert on_ranks(work, tmp_path) == [True, True]


def test_the_optimizers_step_is_a_whole_number(tmp_path: Path) -> None:
    """257 does not fit into bfloat16."""

    def work(step: TrainingStep, store: CheckpointStore) -> tuple[int, set[float]]:
        step.optimizer.resume_at(257)
        store.save(state_at(300))
        step.optimizer.resume_at(0)
        load_newest(step, store)
        states = [state for _, update, _ in step.optimizer._updates for state in update.state.values()]
        return step.optimizer.steps, {float(state["step"]) for state in states}

    assert on_ranks(work, tmp_path) == [(257, {257.0})] * 2


def test_leftovers_are_ignored_and_removed_by_the_next_save(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    leftover = tmp_path / FOLDER / ".tmp-step-00000009-dead"
    leftover.mkdir()
    (leftover / "shard-00000.safetensors").write_bytes(b"half")
    headless = tmp_path / FOLDER / "step-00000008"
    headless.mkdir()
    assert on_ranks(load_newest, tmp_path) == [1, 1]
    save_steps(tmp_path, 2)
    assert not leftover.exists()
    assert on_ranks(load_newest, tmp_path) == [2, 2]


def test_a_step_saved_again_replaces_the_old_one(tmp_path: Path) -> None:
    save_steps(tmp_path, 5)
    first = StoredTensors(complete_checkpoints(tmp_path)[0])
    before = first.read("master/model.norm.weight", (0,), (32,))
    save_steps(tmp_path, 4, 5)
    names = [path.name for path in complete_checkpoints(tmp_path)]
    assert names == ["step-00000004", "step-00000005"]
    after = StoredTensors(complete_checkpoints(tmp_path)[1]).read("master/model.norm.weight", (0,), (32,))
    assert not torch.equal(before, after)


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


# Damage.


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def change_a_digit(path: Path) -> None:
    text = path.read_text()
    path.write_text(text.replace('"tokens": 256', '"tokens": 257'))


DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [
    (
        "shard-00001.safetensors",
        lambda path: os.truncate(path, path.stat().st_size - 1),
        "bytes, but was written with",
    ),
    ("shard-00001.safetensors", flip_a_byte, "does not match its checksum"),
    ("shard-00000.safetensors", Path.unlink, "cannot be read (No such file or directory)"),
    (MANIFEST, lambda path: os.truncate(path, 1000), "is not a manifest"),
    (MANIFEST, change_a_digit, "does not match its own checksum"),
    (MANIFEST, Path.unlink, "No such file or directory"),
]


@pytest.mark.parametrize(
    ("file", "damage", "words"), DAMAGES, ids=lambda part: getattr(part, "__name__", str(part))
)
def test_damage_is_found_named_and_the_previous_offered(
    file: str, damage: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    save_steps(tmp_path, 1, 2)
    first, second = complete_checkpoints(tmp_path)
    damage(second / file)

    def work(step: TrainingStep, store: CheckpointStore) -> tuple[str, int, bool]:
        before = [bucket.master.clone() for bucket in step.data_parallel.buckets]
        with pytest.raises(CheckpointError) as raised:
            store.load(second)
        assert raised.value.previous == first
        untouched = all(map(torch.equal, before, [bucket.master for bucket in step.data_parallel.buckets]))
        return str(raised.value), store.load(first).step, untouched

    ranks = on_ranks(work, tmp_path)
    assert ranks[0] == ranks[1]
    text, step, untouched = ranks[0]
    assert file in text
    assert words in text
    assert (step, untouched) == (1, True)


def test_another_model_or_optimizer_is_refused_with_every_name(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    path = complete_checkpoints(tmp_path)[0]
    document = json.loads((path / MANIFEST).read_text())
    tensors = document["manifest"]["tensors"]
    tensors["master/model.more"] = tensors.pop("master/model.norm.weight")
    tensors["exp_avg/model.norm.weight"]["shape"] = [33]
    body = json.dumps(document["manifest"], sort_keys=True).encode()
    document["crc32"] = zlib.crc32(body)
    (path / MANIFEST).write_text(json.dumps(document))
    with pytest.raises(CheckpointError) as raised:
        on_ranks(load_newest, tmp_path)
    for words in (
        "master/model.norm.weight is missing",
        "master/model.more is not in the model",
        "exp_avg/model.norm.weight must be F32 (32,), but is F32 (33,)",
    ):
        assert words in str(raised.value)


def test_nothing_pickled_is_ever_opened(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "executed",))

    save_steps(tmp_path, 1)
    path = complete_checkpoints(tmp_path)[0]
    for name in (".metadata", "shard-00000.distcp", "state.pt"):
        (path / name).write_bytes(pickle.dumps(Bomb()))
    assert on_ranks(load_newest, tmp_path) == [1, 1]
    (path / "shard-00000.safetensors").write_bytes(pickle.dumps(Bomb()))
    (path / MANIFEST).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError):
        on_ranks(load_newest, tmp_path)
    assert main(["verify", str(tmp_path)]) == 1
    assert not (tmp_path / "executed").exists()


# Saves that fail.


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
) -> None:
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


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
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


# Asynchronous saves.


def test_an_asynchronous_save_holds_the_values_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if nothing is written before training has gone on; a second save waits for the first."""
    may_write = threading.Event()
    written = storage.ShardWriter.write_data

    def write_data(self: Any, plan: Any, planner: Any) -> Any:  # noqa: ANN401
        may_write.wait(20)
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
    planner.stage(planner.create_local_plan())


def test_a_failed_asynchronous_save_is_told_by_its_step_and_the_next_one_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


# Pruning.


def made_checkpoints(folder: Path, *steps: int, best: tuple[int, ...] = ()) -> None:
    for step in steps:
        temporary = begin_folder(folder, step, "x")
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


# The command.


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    save_steps(folder, 1, 2)
    return folder


def test_ls_and_show(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(run_folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["checkpoint", "step-00000001", "step-00000002"]
    assert lines[1].split()[1:4] == ["complete", "1", "128"]
    assert main(["show", str(run_folder)]) == 0
    text = capsys.readouterr().out
    assert "config.learning_rate" in text
    assert "2 (2 updates)" in text
    assert "master/model.layers.0.self_attn.q_proj.weight" in text
    assert "32 × 32" in text


def test_verify_names_the_damaged_file(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(run_folder)]) == 0
    shutil.copytree(run_folder, tmp_path / "copy")
    flip_a_byte(tmp_path / "copy" / FOLDER / "step-00000002" / "shard-00001.safetensors")
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "copy")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("as written")
    assert "step-00000002/shard-00001.safetensors does not match its checksum" in lines[1]


def test_diff_names_what_differs(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = complete_checkpoints(run_folder)
    assert main(["diff", str(first), str(first)]) == 0
    capsys.readouterr()
    assert main(["diff", str(first), str(second)]) == 1
    lines = capsys.readouterr().out.splitlines()
    found = {line.split()[0]: line.split()[-1] for line in lines[1:-1]}
    expected = max(
        float((a - b).abs().max())
        for a, b in [
            [StoredTensors(path).read("master/model.norm.weight", (0,), (32,)) for path in (first, second)]
        ]
    )
    assert float(found["master/model.norm.weight"]) == pytest.approx(expected, rel=1e-3)
    assert lines[-1].split()[-3:] == ["1", "against", "2"]


@pytest.mark.parametrize("files", [1, 3])
def test_a_resharded_checkpoint_is_the_same_and_loads(
    files: int, run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reshard", str(run_folder), "--out", str(tmp_path), "--files", str(files)]) == 0
    (path,) = complete_checkpoints(tmp_path)
    sizes = [file.size_bytes for file in read_manifest(path).files.values()]
    assert len(sizes) == files
    assert max(sizes) < 1.3 * min(sizes)
    assert main(["verify", str(tmp_path)]) == 0
    assert main(["diff", str(run_folder), str(tmp_path)]) == 0
    assert on_ranks(load_newest, tmp_path, Layout(tp=2)) == [2, 2]
    with pytest.raises(SystemExit):
        main(["reshard", str(run_folder), "--out", str(tmp_path), "--files", "2"])
    assert "without checkpoints" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_not_resharded(run_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(run_folder, tmp_path / "copy")
    flip_a_byte(tmp_path / "copy" / FOLDER / "step-00000002" / "shard-00000.safetensors")
    with pytest.raises(SystemExit):
        main(["reshard", str(tmp_path / "copy"), "--out", str(tmp_path / "out"), "--files", "1"])
    assert complete_checkpoints(tmp_path / "out") == []


def test_a_folder_without_checkpoints_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("ls", "show", "verify"):
        with pytest.raises(SystemExit) as ended:
            main([command, str(tmp_path)])
        assert ended.value.code == 2
    assert "must hold a complete checkpoint" in capsys.readouterr().err


def test_looking_at_checkpoints_needs_no_torch() -> None:
    names = (
        "engine.checkpoint.folder",
        "engine.checkpoint.manifest",
        "engine.checkpoint.rectangles",
        "launch.checkpoint",
    )
    lines = ["import sys", *(f"import triaxis.{name}" for name in names), "assert 'torch' not in sys.modules"]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)
