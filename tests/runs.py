"""Small whole runs on rank threads, for tests of what survives an end: a model, a text, and a signal at a step."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np

from triaxis.engine.checkpoint.folder import FOLDER, complete_checkpoints
from triaxis.engine.checkpoint.manifest import read_manifest
from triaxis.engine.config import RunConfig
from triaxis.engine.faults.interruption import Interruption
from triaxis.engine.faults.supervision import Supervision
from triaxis.engine.rules import resolve
from triaxis.engine.run.trainer import Summary, train
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.thread import run_threads

MODEL = {
    "vocab_size": 257,
    "hidden_size": 16,
    "layers": 2,
    "heads": 2,
    "kv_heads": 2,
    "ffn_size": 24,
    "max_positions": 64,
}
MEASURED = ("tokens_per_s", "mfu", "peak_mem_bytes", "resumed", "seconds", "slowest_rank")


class AskedAt(Interruption):
    """A signal that one rank sees after a step (counted in this process), and the others learn of."""

    def __init__(self, step: int, size: int, number: int = 15) -> None:
        self._looks, self._lock = 0, threading.Lock()
        super().__init__()
        self._after, self._number = step * size, number

    @property
    def signal(self) -> int:
        with self._lock:
            self._looks += 1
            return self._number if self._looks == self._after else 0

    @signal.setter
    def signal(self, number: int) -> None:
        """Real signals do not reach it."""


def prepare(folder: Path) -> dict[str, Any]:
    """Flags of a tiny run: its model and texts are in `folder`, an epoch is a few steps long."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.json").write_text(json.dumps(MODEL))
    random = np.random.default_rng(7)
    for name, count in (("train", 24), ("eval", 6)):
        lines = [
            {"text": "".join(random.choice(list("abcde \n"), random.integers(3, 40)))} for _ in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {
        "model": str(folder / "model.json"),
        "data": str(folder / "train.jsonl"),
        "eval_data": str(folder / "eval.jsonl"),
        "seq": 24,
        "per_device_train_batch_size": 1,
        "microbatches": 2,
        "steps": 20,
        "eval_steps": 2,
        "eval_batches": 1,
        "warmup_steps": 3,
        "learning_rate": 1e-2,
    }


def ten_steps(folder: Path) -> dict[str, Any]:
    """Flags of such a run that saves after every second step."""
    return prepare(folder) | {"steps": 10, "eval_batches": 0, "save_steps": 2, "warmup_steps": 1}


def names(output: Path) -> list[str]:
    """What is in a run's folder of checkpoints."""
    return sorted(path.name for path in (output / FOLDER).iterdir())


def step(number: int) -> str:
    """A checkpoint's name, as people see it."""
    return f"step-{number:08d}"


def run(flags: dict[str, Any], *, ask_at: int | None = None) -> Summary:
    """The run on threads; a signal comes after step `ask_at` of it."""
    config = RunConfig(simulate=True, **flags)
    size = config.tp * config.pp * (config.dp or 1)
    resolved = resolve(config, size)
    supervision = Supervision() if ask_at is None else Supervision(interruption=AskedAt(ask_at, size))

    def rank(world: World) -> Summary:
        return train(config, resolved, world, supervision)

    summaries = run_threads(size, rank)
    assert all(summary == summaries[0] for summary in summaries)
    return summaries[0]


def rows(output: Path) -> list[dict[str, Any]]:
    """The rows of the metrics, without what depends on the clock, the memory and how often the run was resumed."""
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in MEASURED} for line in lines]


def last_state(output: Path) -> tuple[int, dict[str, Any]]:
    """The newest checkpoint's step, and its files' checksums: weights and moments to the bit."""
    manifest = read_manifest(complete_checkpoints(output)[-1])
    return manifest.state.step, {name: record.crc32 for name, record in manifest.files.items()}
