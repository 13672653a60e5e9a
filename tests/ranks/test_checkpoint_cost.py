"""What a checkpoint costs: memory beside the shards, and what is done while training stands still."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
ANSWER_BYTES = 1000
"""What ranks tell each other of a save is less, every part of a state is more."""


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


class Written(TorchDispatchMode):
    """Counts the bytes that operations on tensors write, and remembers where."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self.places: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        changed = [
            value
            for argument, value in zip(function._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for tensor in tree_leaves(changed or ([] if function.is_view else result)):
            if isinstance(tensor, Tensor):
                self.nbytes += tensor.nbytes
                if tensor.nbytes >= ANSWER_BYTES:
                    self.places.add(tensor.data_ptr())
        return result


def test_an_asynchronous_save_stops_training_for_one_copy(tmp_path: Path) -> None:
    """What it does with tensors before it returns is to copy the states once, always to the same place."""

    def main(world: World) -> tuple[list[Written], int]:
        step = open_larger(world)
        store = CheckpointStore(tmp_path, step)
        saves = []
        for number in range(3):
            with Written() as written:
                store.save(state_at(number), asynchronous=True)
            saves.append(written)
            store.finish()
            store.prune(1)
        return saves, store.size_bytes

    saves, size_bytes = run_threads(1, main)[0]
    for written in saves[1:]:
        assert size_bytes <= written.nbytes <= size_bytes + ANSWER_BYTES
        assert written.places == saves[0].places
