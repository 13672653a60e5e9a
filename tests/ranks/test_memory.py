"""Model states per rank, measured in the run, equal ZeRO's formulas; small gradients are not lost in the sum."""

from __future__ import annotations

import gc
import itertools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from tests.agreement import LENGTH, MODEL, sequences
from tests.runs import prepare, run
from triaxis.engine.plan import Recompute, StepPlan
from triaxis.engine.run.metrics import MetricsWriter, StepRow
from triaxis.engine.step import TrainingStep
from triaxis.models.fields import fields_of, with_fields
from triaxis.parallel.layers.declare import declare_replicated
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.replicas.zero import ZeroDataParallel
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.thread import run_threads
from triaxis.parallel.worlds.trace import TraceWorld

LARGER = with_fields(MODEL, hidden_size=64, ffn_size=192, layers=2, max_positions=LENGTH)
TOLERANCE = 0.03

# Bytes for each parameter that every rank holds, and that the ranks share.
FORMULAS = {
    None: {0: (18, 0), 1: (6, 12), 2: (2, 16), 3: (0, 18)},
    "bf16": {0: (16, 0), 1: (4, 12), 2: (2, 14), 3: (0, 16)},
}


def live_storages() -> dict[int, int]:
    """Address and bytes of every storage that a live tensor of this process uses.

    Fake tensors, which torch's compiler keeps in its caches, have no memory.
    """
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        kind = type(item)
        if issubclass(kind, Tensor) and not issubclass(kind, FakeTensor) and item.device.type == "cpu":
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    storages.pop(0, None)
    return storages


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    counted_bytes: int
    elements: int
    padded_elements: int
    all_ranks_bytes: int


def measure(dp: int, zero: int, accumulate_dtype: str | None, bucket_elements: int) -> list[Measured]:
    """After two steps. `all_ranks_bytes`: what is live in the process that was not before the run."""
    plan = StepPlan(
        model=LARGER,
        microbatch_size=1,
        microbatches=2,
        sequence_length=LENGTH,
        zero=zero,
        dtype="bf16",
        accumulate_dtype=accumulate_dtype,
        bucket_elements=bucket_elements,
    )
    before = live_storages()

    def main(world: World) -> Measured:
        mesh = build_mesh(world, Topology(dp=dp))
        step = TrainingStep(plan, mesh)
        for number in range(2):
            rows = sequences(number, 2 * dp, LARGER.vocab_size)
            step.train(rows[2 * mesh.dp.rank : 2 * mesh.dp.rank + 2], 1e-3)
        del rows
        mesh.everyone.barrier()
        now = live_storages() if world.rank == 0 else {}
        mesh.everyone.barrier()
        buckets = step.data_parallel.buckets
        return Measured(
            counted_bytes=sum(step.state_bytes().values()),
            elements=sum(bucket.elements for bucket in buckets),
            padded_elements=sum(bucket.padded_elements for bucket in buckets),
            all_ranks_bytes=sum(size for place, size in now.items() if place not in before),
        )

    return run_threads(dp, main)


@pytest.mark.parametrize("accumulate_dtype", [None, "bf16"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("dp", "bucket_elements"), [(2, 1 << 20), (4, 20_000)])
def test_model_states_equal_the_formulas(
    dp: int, bucket_elements: int, zero: int, accumulate_dtype: str | None
) -> None:  # B146
    ranks = measure(dp, zero, accumulate_dtype, bucket_elements)
    whole, shared = FORMULAS[accumulate_dtype][zero]
    for rank in ranks:
        assert rank.elements == LARGER.parameters()
        padding = rank.padded_elements - rank.elements
        formula = rank.elements * (whole + shared / dp)
        padding_bytes = padding * (whole + shared / dp)
        assert formula * (1 - TOLERANCE) <= rank.counted_bytes <= formula * (1 + TOLERANCE) + padding_bytes
    counted = sum(rank.counted_bytes for rank in ranks)
    assert counted <= ranks[0].all_ranks_bytes <= counted * (1 + TOLERANCE)


def most_allocated(work: Callable[[], object]) -> int:
    """Bytes that were live at once beside those before, by PyTorch's own account."""
    gc.collect()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        work()
    events = profile.profiler.kineto_results.events()
    return max(itertools.accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


def test_stage_3_needs_less_than_stage_2_also_at_its_peak() -> None:  # B146
    """On one real rank of two: while the model is made and at the height of a step, within a layer's parameters."""
    model = replace(LARGER, layers=8)
    layer_bytes = 4 * model.layer_parameters()
    made, states, peaks = [], [], []
    for zero in range(4):
        plan = StepPlan(
            model=model,
            microbatch_size=1,
            microbatches=2,
            sequence_length=LENGTH,
            zero=zero,
            bucket_elements=model.layer_parameters(),
        )
        steps: list[TrainingStep] = []

        def make(plan: StepPlan = plan, steps: list[TrainingStep] = steps) -> None:
            steps.append(TrainingStep(plan, build_mesh(TraceWorld(0, 2), Topology(dp=2))))

        made.append(most_allocated(make))
        (step,) = steps
        batches = sequences(0, 2, model.vocab_size)
        without_moments = sum(step.state_bytes().values())
        step.train(batches, 1e-3)
        states.append(sum(step.state_bytes().values()))
        peak = most_allocated(lambda step=step, batches=batches: step.train(batches, 1e-3))  # type: ignore[misc]
        peaks.append(states[-1] + peak)
        assert made[-1] < without_moments + 1.5 * layer_bytes, "the model is made a bucket at a time"
    parameter_bytes = 4 * model.parameters()
    assert [size / parameter_bytes for size in states] == pytest.approx([4, 3, 2.5, 2], rel=TOLERANCE)
    assert made[3] < 0.75 * made[1]
    beside = [peak - held for peak, held in zip(peaks, states, strict=True)]
    assert peaks[3] < peaks[2] < peaks[0]
    assert beside[3] <= beside[2] + layer_bytes, "beside its states stage 3 has one unit's parameters more"


@pytest.mark.parametrize("recompute", Recompute)
def test_the_peak_of_a_step_is_that_of_any_accumulation(recompute: Recompute) -> None:  # B140
    """Of two microbatches and of 32, by PyTorch's own account: no microbatch leaves its graph or logits behind."""

    def peak(microbatches: int) -> int:
        def main(world: World) -> int:
            plan = StepPlan(
                model=LARGER,
                microbatch_size=1,
                microbatches=microbatches,
                sequence_length=LENGTH,
                recompute=recompute,
            )
            step = TrainingStep(plan, build_mesh(world, Topology()))
            batches = sequences(0, microbatches, LARGER.vocab_size)
            step.train(batches, 1e-3)
            return most_allocated(lambda: step.train(batches, 1e-3))

        return run_threads(1, main)[0]

    few = peak(2)
    assert few > 4 * LENGTH * fields_of(LARGER).ffn_size * LARGER.layers
    assert peak(32) <= 1.01 * few


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a process holds. open_files: descriptors"""

    objects: int
    tensors: int
    tensor_bytes: int
    resident_bytes: int
    open_files: int
    threads: int


def held_now() -> Held:
    storages = live_storages()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Held(
        objects=len(gc.get_objects()),
        tensors=len(storages),
        tensor_bytes=sum(storages.values()),
        resident_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
        open_files=len(os.listdir("/proc/self/fd")),
        threads=threading.active_count(),
    )


@pytest.mark.parametrize("layout", [{"pp": 2}, {"dp": 2, "zero": 3}], ids=str)
def test_a_run_holds_at_its_end_what_it_held_at_its_start(
    layout: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # B140, B141
    """Rows, evaluations and checkpoints included; fifty steps, where a leak of one object a step would show."""
    found: dict[int, Held] = {}
    write, everyone = MetricsWriter.write, threading.Barrier(2)

    def counted(self: MetricsWriter, row: StepRow) -> None:
        write(self, row)
        if row.step in (5, 10, 60):
            everyone.wait()
            try:
                if self._file is not None:
                    found[row.step] = held_now()
            except BaseException:
                everyone.abort()  # or the other rank would wait for ever
                raise
            everyone.wait()

    monkeypatch.setattr(MetricsWriter, "write", counted)
    monkeypatch.setattr("triaxis.engine.run.trainer.plot_run", lambda directory: directory)
    flags = prepare(tmp_path) | {"steps": 61, "eval_steps": 3, "save_steps": 4, "save_total_limit": 1}
    run({**flags, **layout, "output_dir": str(tmp_path / "out")})
    early, late = found[10], found[60]
    assert late.objects <= early.objects + 25, (early, late)
    assert late.resident_bytes <= 1.01 * early.resident_bytes
    same = ("tensors", "tensor_bytes", "open_files", "threads")
    assert [getattr(late, name) for name in same] == [getattr(early, name) for name in same]


LARGE, SMALL, SMALL_COUNT = 1.0, 0.00193, 256  # in bf16, 1 + 0.00193 is 1


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))

    def forward(self, factor: Tensor) -> Tensor:
        return (self.weight * factor).sum()


def accumulated(zero: int, accumulate_dtype: torch.dtype | None) -> Tensor:
    """The gradient of one large and many small microbatches on each of two ranks."""

    def main(world: World) -> Tensor:
        mesh = build_mesh(world, Topology(dp=2))
        module = Scaled()
        declare_replicated(module, mesh.tp.rank)
        parallel = ZeroDataParallel([module], mesh, stage=zero, accumulate_dtype=accumulate_dtype)
        parallel.start_step()
        for number, factor in enumerate([LARGE] + [SMALL] * SMALL_COUNT):
            loss = module(torch.tensor(factor, dtype=torch.bfloat16))
            parallel.start_backward(0, last=number == SMALL_COUNT)
            loss.backward()
            parallel.finish_backward(0)
        parallel.synchronize_gradients()
        ((_, gradient),) = list(parallel.gathered_gradients())
        return gradient.clone()

    return run_threads(2, main)[0]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_small_gradients_of_bf16_weights_are_not_lost(zero: int) -> None:
    small = torch.tensor(SMALL, dtype=torch.bfloat16).item()
    gradient = accumulated(zero, None)
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(
        gradient, torch.full((5,), 2 * (LARGE + SMALL_COUNT * small)), rtol=1e-6, atol=0
    )


def test_a_sum_in_bf16_loses_them() -> None:
    assert accumulated(0, torch.bfloat16).tolist() == [2 * LARGE] * 5
