"""What a rank's process holds while its part of the model is made: at most its states and one bucket.

A small model by default; TRIAXIS_FULL=1 makes one of 400 million parameters.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.agreement import MODEL
from tests.forked import run_processes
from triaxis.engine.config import DataParallel
from triaxis.engine.plan import StepPlan
from triaxis.engine.step import TrainingStep
from triaxis.models.config import ModelConfig
from triaxis.models.fields import with_fields
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import build_mesh

FULL = os.environ.get("TRIAXIS_FULL") == "1"
SIZES = {"hidden_size": 1024, "ffn_size": 4096, "layers": 26} if FULL else {"hidden_size": 512, "layers": 6}
LARGE = with_fields(MODEL, **({"vocab_size": 4096, "ffn_size": 2048, "max_positions": 16} | SIZES))
BUCKET_ELEMENTS = 1 << 22
BESIDE_BYTES = 0 if FULL else 16 << 20
"""The chunk of values under way and what the process itself takes, which a large model's bucket hides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    states_bytes: int
    bucket_bytes: int
    grown_bytes: int


def resident_bytes(what: str) -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"^{what}:\s*(\d+) kB", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def make(world: World, model: ModelConfig, data_parallel: DataParallel) -> Made:
    plan = StepPlan(
        model=model,
        microbatch_size=1,
        microbatches=1,
        sequence_length=16,
        zero=3,
        data_parallel=data_parallel,
        bucket_elements=BUCKET_ELEMENTS,
    )
    mesh = build_mesh(world, Topology(dp=world.size))
    Path("/proc/self/clear_refs").write_text("5")  # the maximum starts anew
    before = resident_bytes("VmRSS")
    step = TrainingStep(plan, mesh)
    grown = resident_bytes("VmHWM") - before
    return Made(
        states_bytes=sum(step.state_bytes().values()),
        bucket_bytes=max(4 * bucket.padded_elements for bucket in step.data_parallel.buckets),
        grown_bytes=grown,
    )


@pytest.mark.parametrize("data_parallel", DataParallel)
def test_a_rank_never_holds_more_than_its_states_and_a_bucket(
    data_parallel: DataParallel, tmp_path: Path
) -> None:
    def main(world: World) -> Made:
        make(world, MODEL, data_parallel)  # whatever is imported or opened once is no part of a model
        return make(world, LARGE, data_parallel)

    ranks = run_processes(4, tmp_path, main)
    for rank in ranks:
        assert isinstance(rank, Made), rank
        print(f"{LARGE.parameters():,} parameters: {rank}")
        assert rank.grown_bytes <= rank.states_bytes + rank.bucket_bytes + BESIDE_BYTES
        assert 4 * LARGE.parameters() > rank.states_bytes + rank.bucket_bytes, "the whole would be seen"
