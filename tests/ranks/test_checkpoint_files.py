"""Checkpoint files: who writes what, what they hold, and what happens to damaged ones."""

from __future__ import annotations

import json
import os
import pickle
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.agreement import MODEL, Layout
from tests.checkpointing import flip_a_byte, load_newest, on_ranks, open_step, save_steps, state_at, train
from triaxis.engine.checkpoint import storage
from triaxis.engine.checkpoint.assignment import share_out, write_item
from triaxis.engine.checkpoint.folder import (
    FOLDER,
    MANIFEST,
    complete_checkpoints,
)
from triaxis.engine.checkpoint.manifest import read_manifest
from triaxis.engine.checkpoint.states import held_states
from triaxis.engine.checkpoint.store import CheckpointError, CheckpointStore
from triaxis.engine.checkpoint.stored import StoredTensors
from triaxis.engine.step import TrainingStep
from triaxis.launch.checkpoint import main
from triaxis.parallel.places.rectangles import cut_rectangles
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.thread import run_threads


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


def test_files_are_plain_safetensors(tmp_path: Path) -> None:  # B145
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


def test_names_and_shapes_are_those_of_the_whole_model(tmp_path: Path) -> None:  # B81, B86
    layout = Layout(tp=2, dp=2, zero=3)
    on_ranks(lambda step, store: store.save(state_at(1)), tmp_path, layout)
    tensors = read_manifest(complete_checkpoints(tmp_path)[0]).tensors
    assert tensors["master/lm_head.weight"].shape == (67, 32)  # a prime: padding is not stored
    assert tensors["exp_avg_sq/model.layers.3.self_attn.k_proj.weight"].shape == (8, 32)
    assert {name.partition("/")[0] for name in tensors} == {"master", "exp_avg", "exp_avg_sq"}
    for other in (Layout(), Layout(recompute=True), Layout(tp=4, zero=0), Layout(pp=2, dp=2, zero=2)):
        on_ranks(lambda step, store: store.save(state_at(2)), tmp_path, other)
        found = read_manifest(complete_checkpoints(tmp_path)[-1]).tensors
        assert {name: tensor.shape for name, tensor in found.items()} == {
            name: tensor.shape for name, tensor in tensors.items()
        }, other


def test_the_state_comes_back_exactly(tmp_path: Path) -> None:
    state = state_at(3, eval_loss=0.1 + 0.2, extra={"skipped_steps": [1, 2], "best": None})

    def work(step: TrainingStep, store: CheckpointStore) -> bool:
        store.save(state)
        path = store.latest()
        assert path is not None
        return store.load(path) == state

    assert on_ranks(work, tmp_path) == [True, True]


def test_the_optimizers_step_is_a_whole_number(tmp_path: Path) -> None:  # B75
    """257 does not fit into bfloat16."""

    def work(step: TrainingStep, store: CheckpointStore) -> tuple[int, set[float]]:
        step.optimizer.resume_at(257)
        store.save(state_at(300))
        step.optimizer.resume_at(0)
        load_newest(step, store)
        return step.optimizer.steps, {float(counter) for counter in step.optimizer.counters()}

    assert on_ranks(work, tmp_path) == [(257, {257.0})] * 2


def test_types_and_bits_of_every_state_come_back(tmp_path: Path) -> None:  # B75
    """Weights in bf16 beside fp32 masters and moments; what a rank holds takes the same memory after a load."""
    layout = Layout(dp=2, zero=1)
    States = dict[str, tuple[Tensor, ...]]

    def states(step: TrainingStep) -> States:
        held = held_states(step.data_parallel.buckets, step.optimizer)
        found = {
            name: tuple(chunk.clone() for chunk in tensor.chunks.values()) for name, tensor in held.items()
        }
        weights = tuple(bucket.parameters.clone() for bucket in step.data_parallel.buckets)  # type: ignore[attr-defined]
        return {**found, "weights": weights}

    def rank(world: World) -> tuple[States, States, dict[str, int], dict[str, int]]:
        step = open_step(world, layout, MODEL, "adamw, clip 1", "bf16")
        train(step, layout, range(1))
        saved, size_bytes = states(step), step.state_bytes()
        CheckpointStore(tmp_path, step).save(state_at(1))
        step = open_step(world, layout, MODEL, "adamw, clip 1", "bf16")
        load_newest(step, CheckpointStore(tmp_path, step))
        return saved, states(step), size_bytes, step.state_bytes()

    for saved, loaded, before, after in run_threads(2, rank):
        assert before == after
        assert saved.keys() == loaded.keys()
        assert {tensor.dtype for tensor in saved["weights"]} == {torch.bfloat16}
        for name in saved:
            for one, other in zip(saved[name], loaded[name], strict=True):
                assert one.dtype == other.dtype == (torch.bfloat16 if name == "weights" else torch.float32)
                assert torch.equal(one, other), name


@pytest.mark.parametrize("resumed", [Layout(dp=4, zero=1), Layout(dp=2, zero=1)], ids=str)
def test_one_giant_tensor_among_many_small_ones(resumed: Layout, tmp_path: Path) -> None:  # B66
    """Ranks that hold a part of the embedding only, and ranks that hold all the norms."""
    model = replace(MODEL, vocab_size=50_000, hidden_size=64, layers=6, tied=True)
    saved = Layout(dp=4, zero=1, bucket_elements=1 << 25)
    resumed = replace(resumed, bucket_elements=saved.bucket_elements)

    def sample(step: TrainingStep) -> dict[str, float]:
        held = held_states(step.data_parallel.buckets, step.optimizer)
        return {name: sum(float(c.double().sum()) for c in t.chunks.values()) for name, t in held.items()}

    def save(world: World) -> tuple[dict[str, float], float]:
        step = open_step(world, saved, model, "adamw, clip 1", "fp32")
        train(step, saved, range(1))
        CheckpointStore(tmp_path, step).save(state_at(1))
        return sample(step), train(step, saved, range(1, 2))[0].loss

    def resume(world: World) -> tuple[dict[str, float], float]:
        step = open_step(world, resumed, model, "adamw, clip 1", "fp32")
        load_newest(step, CheckpointStore(tmp_path, step))
        return sample(step), train(step, resumed, range(1, 2))[0].loss

    before, after = run_threads(saved.size, save), run_threads(resumed.size, resume)
    assert len({len(held) for held, _ in before}) > 1, (
        "the ranks' lists must differ for this to show anything"
    )
    totals = [Counter[str]() for _ in range(2)]
    for total, ranks in zip(totals, (before, after), strict=True):
        for held, _ in ranks:
            total.update(held)
    assert totals[0] == pytest.approx(totals[1], rel=1e-9)
    assert after[0][1] == pytest.approx(before[0][1], rel=1e-6)


def test_leftovers_are_ignored_and_removed_by_the_next_save(tmp_path: Path) -> None:  # B60
    save_steps(tmp_path, 1)
    leftover = tmp_path / FOLDER / ".tmp-step-00000009-dead0123"
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


def test_another_model_or_optimizer_is_refused_with_every_name(tmp_path: Path) -> None:  # B85
    save_steps(tmp_path, 1, 2)
    path = complete_checkpoints(tmp_path)[1]
    document = json.loads((path / MANIFEST).read_text())
    tensors = document["manifest"]["tensors"]
    tensors["master/model.more"] = tensors.pop("master/model.norm.weight")
    (_, _, file, first_byte), *_ = tensors["exp_avg/model.norm.weight"]["chunks"]
    tensors["exp_avg/model.norm.weight"] |= {"shape": [9], "chunks": [[[0], [9], file, first_byte]]}
    body = json.dumps(document["manifest"], sort_keys=True).encode()
    document["crc32"] = zlib.crc32(body)
    (path / MANIFEST).write_text(json.dumps(document))
    with pytest.raises(CheckpointError) as raised:
        on_ranks(load_newest, tmp_path)
    for words in (
        "master/model.norm.weight is missing",
        "master/model.more is not in the model",
        "exp_avg/model.norm.weight must be F32 (32,), but is F32 (9,)",
    ):
        assert words in str(raised.value)
    assert raised.value.previous is None  # an older one would not fit either


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
