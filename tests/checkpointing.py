"""What the checkpoint tests share: runs of the agreement model that can stop and go on, and their whole states."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.agreement import LEARNING_RATE, MODEL, Layout, Piece, assemble, plan_of, sequences
from triaxis.engine.checkpoint.folder import MANIFEST
from triaxis.engine.checkpoint.store import CheckpointStore, RunState
from triaxis.engine.optimizer import MOMENTS
from triaxis.engine.run.counters import Counters
from triaxis.engine.step import StepResult, TrainingStep
from triaxis.models.config import ModelConfig
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.thread import run_threads


def state_at(step: int, **changes: object) -> RunState:
    facts: dict[str, object] = {
        "step": step,
        "tokens": 128 * step,
        "config": {"model": "agreement", "learning_rate": 1e-3},
        "sampler": {"seed": 0, "samples": 8 * step, "rows": 64},
        "eval_loss": 1 / 3,
        "extra": {
            "facts": {"global_batch": 8},
            "counters": asdict(Counters(step=step, loss=0.5)),
            "replayed_row": {"tokens": [1], "labels": [2], "positions": [0], "documents": None},
        },
    }
    return RunState(**{**facts, **changes})  # type: ignore[arg-type]


def open_step(world: World, layout: Layout, model: ModelConfig, rule: str, dtype: str) -> TrainingStep:
    mesh = build_mesh(world, layout.topology())
    return TrainingStep(plan_of(layout, model, rule, dtype), mesh)


def train(step: TrainingStep, layout: Layout, numbers: range) -> list[StepResult]:
    share = layout.global_batch() // layout.dp
    first = step.mesh.dp.rank * share
    vocab_size = step.plan.model.vocab_size
    return [
        step.train(sequences(number, layout.global_batch(), vocab_size)[first : first + share], LEARNING_RATE)
        for number in numbers
    ]


States = dict[str, Tensor]
Pieces = list[Piece]


def whole_states(ranks: list[Pieces]) -> States:
    whole, equal = assemble(ranks)
    assert equal, "replicas differ"
    return whole


def gathered(step: TrainingStep) -> Pieces:
    """This rank's masters and moments as pieces, the moments by swapping them in for the masters."""
    pieces: Pieces = []
    buckets = list(step.data_parallel.buckets)
    moments = {id(shard): {kind: torch.zeros_like(shard.master) for kind in MOMENTS} for shard in buckets}
    for shard, start, stop, named in step.optimizer.moments():
        for kind, moment in named.items():
            moments[id(shard)][kind][start:stop] = moment
    masters = [bucket.master for bucket in buckets]
    for kind in ("master", *MOMENTS):
        for bucket, master in zip(buckets, masters, strict=True):
            bucket.master = master if kind == "master" else moments[id(bucket)][kind]
        for segment, tensor in step.data_parallel.gathered_masters():
            layout = replace(segment.layout, name=f"{kind}/{segment.layout.name}")
            pieces.append((layout, tensor.clone()))
    for bucket, master in zip(buckets, masters, strict=True):
        bucket.master = master
    return pieces


def weights_of(step: TrainingStep) -> list[Tensor]:
    """The weights that this rank computes with (stage 3: what it would send), as stored."""
    return [(b.shard if b.sharding.parameters else b.parameters).clone() for b in step.data_parallel.buckets]  # type: ignore[attr-defined]


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


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def forge(checkpoint: Path, change: Callable[[Any], object]) -> None:
    """Changes a manifest's body and gives it the checksum that goes with that."""
    document = json.loads((checkpoint / MANIFEST).read_text())
    change(document["manifest"])
    document["crc32"] = zlib.crc32(json.dumps(document["manifest"], sort_keys=True).encode())
    (checkpoint / MANIFEST).write_text(json.dumps(document))
