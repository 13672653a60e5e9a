"""All copies of every weight are compared, over every axis: a copy that drifts is named before anything is saved."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import triaxis.parallel.replicas.zero
from tests.runs import MODEL as TINY
from tests.runs import prepare, run
from triaxis.engine.checkpoint.folder import complete_checkpoints
from triaxis.engine.checkpoint.states import HeldTensor, held_masters, held_moments
from triaxis.engine.checkpoint.store import CheckpointStore
from triaxis.engine.faults.replicas import ReplicaError
from triaxis.engine.step import TrainingStep
from triaxis.parallel.replicas.data_parallel import Shard
from triaxis.parallel.worlds.mesh import Mesh

NORM = "model.layers.0.input_layernorm.weight"
EMBEDDING = "model.embed_tokens.weight"
KEYS = "model.layers.0.self_attn.k_proj.weight"


pytestmark = pytest.mark.usefixtures("no_picture")


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run with saves after steps 2, 4 and 6."""
    return prepare(tmp_path_factory.mktemp("run")) | {"steps": 6, "eval_batches": 0, "save_steps": 2}


def tied(flags: dict[str, Any]) -> dict[str, Any]:
    path = Path(flags["model"]).with_name("tied.json")
    path.write_text(json.dumps({**TINY, "tied": True}))
    return {**flags, "model": str(path)}


def scale(held: dict[str, HeldTensor], name: str) -> None:
    chunks = held[name].chunks
    assert chunks, f"this rank holds nothing of {name}"
    for chunk in chunks.values():
        chunk.mul_(1.05)


def plant(
    monkeypatch: pytest.MonkeyPatch, rank: int, work: Callable[[TrainingStep], None], after: int = 3
) -> None:
    """Does something to one rank's model after a step."""
    trained = TrainingStep.train

    def strays(self: TrainingStep, *arguments: Any) -> Any:
        result = trained(self, *arguments)
        if self.mesh.rank == rank and self.optimizer.steps == after:
            work(self)
        return result

    monkeypatch.setattr(TrainingStep, "train", strays)


def scaled_master(name: str) -> Callable[[TrainingStep], None]:
    return lambda step: scale(held_masters(step.data_parallel.buckets), f"master/{name}")


def scaled_moment(name: str) -> Callable[[TrainingStep], None]:
    return lambda step: scale(held_moments(step.optimizer), f"exp_avg/{name}")


def swapped_rows(step: TrainingStep) -> None:
    """Two elements change places: their sum is what it was."""
    (chunk,) = held_masters(step.data_parallel.buckets)[f"master/{NORM}"].chunks.values()
    chunk.copy_(chunk[torch.tensor([1, 0, *range(2, len(chunk))])])


def computing_weights(step: TrainingStep) -> None:
    """What a rank computes with, which the next update would write over."""
    for segment, weights in step.data_parallel.computing_weights():
        if segment.layout.name == NORM:
            weights.mul_(1.05)


RIFTS: list[tuple[str, dict[str, Any], int, Callable[[TrainingStep], None], str, str]] = [
    ("tied", {"pp": 2}, 1, scaled_master(EMBEDDING), EMBEDDING, "pp 1, tp 0) not as on rank 0 "),
    ("tied", {"pp": 2, "dp": 2, "zero": 1}, 2, scaled_master(EMBEDDING), EMBEDDING, "not as on ranks 0 (dp 0, pp 0"),
    ("tied", {"pp": 2}, 0, scaled_moment(EMBEDDING), EMBEDDING, "pp 1, tp 0) not as on rank 0 "),
    ("norm", {"tp": 2, "sp": True}, 1, scaled_master(NORM), NORM, "rank 1 (dp 0, pp 0, tp 1) not as on rank 0 "),
    ("norm", {"tp": 2}, 1, scaled_master(NORM), NORM, "rank 1 (dp 0, pp 0, tp 1) not as on rank 0 "),
    ("norm", {"tp": 2, "dp": 2, "zero": 3}, 1, scaled_master(NORM), NORM, "rank 1 (dp 0, pp 0, tp 1) not as on"),
    ("norm", {"dp": 2, "zero": 0}, 1, swapped_rows, NORM, "rank 1 (dp 1, pp 0, tp 0) not as on rank 0 "),
    ("norm", {"dp": 3, "zero": 1, "dtype": "bf16"}, 2, computing_weights, NORM, "rank 2 (dp 2, pp 0, tp 0) not as"),
    ("keys", {"tp": 2}, 1, scaled_master(KEYS), KEYS, "rank 1 (dp 0, pp 0, tp 1) not as on rank 0 "),
]  # fmt: skip


@pytest.mark.parametrize(("what", "layout", "rank", "work", "name", "words"), RIFTS)
def test_a_copy_that_drifts_is_named_before_the_next_save(
    what: str,
    layout: dict[str, Any],
    rank: int,
    work: Callable[[TrainingStep], None],
    name: str,
    words: str,
    flags: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over dp, over tp, at both ends of a pipeline; in the masters, the moments and what a rank computes with."""
    own = dict(tied(flags) if what == "tied" else flags)
    if what == "keys":  # one head, two tensor ranks: both hold it
        path = Path(own["model"]).with_name("keys.json")
        path.write_text(json.dumps({**TINY, "kv_heads": 1}))
        own["model"] = str(path)
    if layout.get("dp") == 3:
        own["microbatches"] = 1
    common = {**own, **layout, "output_dir": str(tmp_path)}
    with monkeypatch.context() as patch:
        plant(patch, rank, work, after=4 if work is computing_weights else 3)
        with pytest.raises(ReplicaError) as raised:
            run(common)
    text = str(raised.value)
    assert "equal to the bit after step 4" in text
    assert f"{name}, on rank" in text
    assert words in text
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000002"]
    assert run({**common, "resume": "auto"}).steps == 6  # as the message says


def test_a_sum_over_tp_that_is_left_out_is_found(
    flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under sp each rank sees a part of the tokens: without the sum of a norm's gradient its copies part ways."""
    summed = triaxis.parallel.replicas.zero.sum_partial_gradients

    def without(shards: Sequence[Shard], mesh: Mesh) -> None:
        kept = [
            (shard, segment, shard.gradient_shard[segment.start : segment.stop].clone())
            for shard in shards
            for segment in shard.segments
            if segment.layout.name == NORM
        ]
        summed(shards, mesh)
        for shard, segment, run_of_it in kept:
            shard.gradient_shard[segment.start : segment.stop] = run_of_it

    monkeypatch.setattr(triaxis.parallel.replicas.zero, "sum_partial_gradients", without)
    with pytest.raises(ReplicaError, match=f"after step 2, but these are not: {NORM}, on rank 1"):
        run({**flags, "tp": 2, "sp": True, "output_dir": str(tmp_path)})
    assert complete_checkpoints(tmp_path) == []


def test_a_run_that_saves_nothing_compares_at_its_end(
    flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, 1, scaled_master(NORM))
    for strategy in ("no", None):
        with pytest.raises(ReplicaError, match=f"after step 6, but these are not: {NORM}, on rank 1"):
            run(
                {**flags, "tp": 2, "save_strategy": strategy, "save_steps": None, "output_dir": str(tmp_path)}
            )


def test_copies_that_begin_unequal_are_refused(
    flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank draws other initial values: nothing is trained."""
    made = TrainingStep.__init__

    def strays(self: TrainingStep, *arguments: Any) -> None:
        made(self, *arguments)
        if self.mesh.rank == 2:
            scale(held_masters(self.data_parallel.buckets), f"master/{NORM}")

    monkeypatch.setattr(TrainingStep, "__init__", strays)
    monkeypatch.setattr(TrainingStep, "train", lambda *_: pytest.fail("a step was begun"))
    with pytest.raises(
        ReplicaError, match=rf"before the first step, .*{NORM}, on rank 2 \(dp 2, pp 0, tp 0\) not"
    ):
        run({**flags, "dp": 3, "zero": 0, "microbatches": 1, "output_dir": str(tmp_path)})


def test_a_load_that_gives_a_rank_other_bits_is_found(
    flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = {**flags, "tp": 2, "output_dir": str(tmp_path)}
    run(common)
    loaded = CheckpointStore.load

    def strays(self: CheckpointStore, path: Path) -> Any:
        state = loaded(self, path)
        if self._group.rank == 1:
            scale(held_moments(self._step.optimizer), f"exp_avg_sq/{NORM}")
        return state

    monkeypatch.setattr(CheckpointStore, "load", strays)
    with pytest.raises(ReplicaError, match=f"step-00000006 was loaded, but these are not: {NORM}, on rank 1"):
        run({**common, "resume": "auto"})
