"""What a checkpoint costs: memory beside the shards, and the time for which training stands still."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from tests.agreement import LENGTH, MODEL
from tests.checkpointing import state_at
from triaxis.engine.checkpoint.store import CheckpointStore
from triaxis.engine.plan import StepPlan
from triaxis.engine.step import TrainingStep
from triaxis.models.fields import with_fields
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.thread import run_threads

LARGER = with_fields(MODEL, vocab_size=12_000, hidden_size=256, ffn_size=1024, layers=8, max_positions=LENGTH)
BUCKET_ELEMENTS = 4_000_000


def open_larger(world: World, dp: int = 1) -> TrainingStep:
    """A step of 14 M parameters whose states are all in memory."""
    plan = StepPlan(
        model=LARGER,
        microbatch_size=1,
        microbatches=1,
        sequence_length=LENGTH,
        zero=1,
        bucket_elements=BUCKET_ELEMENTS,
    )
    step = TrainingStep(plan, build_mesh(world, Topology(dp=dp)))
    for _, _, _, moments in step.optimizer.moments():
        for moment in moments.values():
            moment.fill_(0.5)
    return step


def memory_bytes(name: str) -> int:
    """A line of this process's status: "VmRSS", or its maximum "VmHWM"."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {name}")


def peak_bytes(work: Callable[[], object]) -> int:
    """By how much the process grew at most."""
    Path("/proc/self/clear_refs").write_text("5")  # the maximum starts anew
    before = memory_bytes("VmRSS")
    work()
    return memory_bytes("VmHWM") - before


def test_save_and_load_need_less_than_a_bucket_beside_the_shard(tmp_path: Path) -> None:
    def main(world: World) -> tuple[int, int, int]:
        step = open_larger(world)
        store = CheckpointStore(tmp_path, step)
        store.save(state_at(1))
        path = store.latest()
        assert path is not None
        saving = peak_bytes(lambda: store.save(state_at(2)))
        return saving, peak_bytes(lambda: store.load(path)), store.size_bytes

    saving, loading, size_bytes = run_threads(1, main)[0]
    bucket_bytes = 3 * 4 * BUCKET_ELEMENTS
    assert size_bytes > 3 * bucket_bytes  # else nothing is shown
    assert saving < bucket_bytes
    assert loading < bucket_bytes


def test_an_asynchronous_save_stops_training_for_one_copy(tmp_path: Path) -> None:
    """Blocked for at most 1.3 × the time of copying the states once, best of several; the buffers are reused."""

    def main(world: World) -> tuple[float, float, int]:
        step = open_larger(world)
        store = CheckpointStore(tmp_path, step)
        held = [view for tensor in store._held.values() for view in tensor.chunks.values()]
        places = [torch.empty_like(view) for view in held]

        def copy() -> None:
            for place, view in zip(places, held, strict=True):
                place.copy_(view)

        def seconds(work: Callable[[], object]) -> float:
            start = time.perf_counter()
            work()
            return time.perf_counter() - start

        copying, blocking, buffers = [], [], set()
        for number in range(20):  # on a busy machine the best of many counts
            copying.append(seconds(copy))
            blocking.append(seconds(lambda number=number: store.save(state_at(number), asynchronous=True)))  # type: ignore[misc]
            buffers.add(next(iter(store._planner._copies.values())).data_ptr())
            store.finish()
            store.prune(1)
            if number > 2 and min(blocking[1:]) <= 1.3 * min(copying[1:]):
                break
        return min(copying[1:]), min(blocking[1:]), len(buffers)

    copying, blocking, buffers = run_threads(1, main)[0]
    assert buffers == 1
    assert blocking <= 1.3 * copying, f"{1e3 * blocking:.1f} ms for a copy of {1e3 * copying:.1f} ms"
