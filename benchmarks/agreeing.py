"""What it costs that ranks compare copies and agree on their data, beside the training that it guards.

    OMP_NUM_THREADS=1 python benchmarks/agreeing.py

Two replicas of a small model, as threads. Comparing is done once in `--save-steps` steps (500 by default) and at the
start; agreeing at the start alone: fingerprints of 11 million tokens and of the code, and telling each other.
Promised: below 1% of training, and below 2 s at the start.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from triaxis.engine.data.fingerprint import fingerprint_arrays, fingerprint_code
from triaxis.engine.faults.replicas import check_replicas
from triaxis.engine.plan import StepPlan
from triaxis.engine.run.saving import DEFAULT_SAVE_STEPS
from triaxis.engine.step import TrainingStep
from triaxis.models.batch import Batch
from triaxis.models.fields import dense_model
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.worlds.agreement import gather_json
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.thread import run_threads

ROOT = Path(__file__).resolve().parents[1]
ROOMS = [ROOT / room for room in ("parallel", "models", "engine")]
REPLICAS, TOKENS, LEARNING_RATE = 2, 11_000_000, 1e-3
SHARE_PROMISED, START_SECONDS_PROMISED = 0.01, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of the slowest replica. parameters: of the model; start_seconds: comparing and agreeing, once."""

    parameters: int
    step_seconds: float
    comparing_seconds: float
    start_seconds: float

    @property
    def share(self) -> float:
        """Of training at the default interval of saves."""
        return self.comparing_seconds / (DEFAULT_SAVE_STEPS * self.step_seconds)


def measure(*, hidden: int = 256, length: int = 128, tokens: int = TOKENS, rounds: int = 5) -> Cost:
    model = dense_model(
        name="agreeing",
        vocab_size=12_000,
        hidden_size=hidden,
        layers=8,
        heads=8,
        kv_heads=8,
        ffn_size=4 * hidden,
        max_positions=length,
    )
    plan = StepPlan(model=model, microbatch_size=1, microbatches=1, sequence_length=length)
    ids = np.arange(tokens, dtype=np.int32)

    def rank(world: World) -> tuple[float, float, float]:
        step = TrainingStep(plan, build_mesh(world, Topology(dp=REPLICAS)))
        ids_BL = torch.arange(length)[None]
        batch = Batch(tokens_BL=ids_BL, labels_BL=ids_BL + 1, positions_BL=ids_BL, documents=None)

        def agree_and_compare() -> None:
            told = [fingerprint_arrays(ids), fingerprint_code(ROOMS)]
            gather_json(step.mesh.everyone, told, world.device)
            check_replicas(step, "at the start", way_out="")

        start = _seconds(agree_and_compare)
        step.train([batch], LEARNING_RATE)  # the first makes what later ones have
        pairs = [
            (
                _seconds(lambda: step.train([batch], LEARNING_RATE)),
                _seconds(lambda: check_replicas(step, "now", way_out="")),
            )
            for _ in range(rounds)
        ]
        training, comparing = (statistics.median(each) for each in zip(*pairs, strict=True))
        return training, comparing, start

    training, comparing, start = map(max, zip(*run_threads(REPLICAS, rank), strict=True))
    return Cost(
        parameters=model.parameters(),
        step_seconds=training,
        comparing_seconds=comparing,
        start_seconds=start,
    )


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def told(cost: Cost) -> str:
    return (
        f"{cost.parameters / 1e6:.1f} M parameters, {REPLICAS} replicas: "
        f"a step takes {1e3 * cost.step_seconds:.1f} ms\n"
        f"comparing copies: {1e3 * cost.comparing_seconds:.1f} ms, once in {DEFAULT_SAVE_STEPS} steps: "
        f"{cost.share:.4%} of training (promised: below {SHARE_PROMISED:.0%})\n"
        f"agreeing on data and comparing at the start: {cost.start_seconds:.2f} s "
        f"(promised: below {START_SECONDS_PROMISED:g} s)"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where both promises are kept, else 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the model")
    parser.add_argument("--rounds", type=int, default=5, help="steps and comparisons; the median counts")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cost = measure(hidden=options.hidden, rounds=options.rounds)
    print(told(cost))
    return 0 if cost.share < SHARE_PROMISED and cost.start_seconds < START_SECONDS_PROMISED else 1


if __name__ == "__main__":
    raise SystemExit(main())
