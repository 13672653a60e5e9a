"""Checks of training: layouts as threads on one device against one rank on the CPU, saves, failures, memory, speed."""

from __future__ import annotations

import dataclasses
import math
import tempfile
import warnings
from pathlib import Path

import torch

from tests.frozen.portrait import batches_of, plan_of, topology_of
from tests.frozen.rows import ROWS, Row
from tests.gpu.check import Check, CheckFailed, Figures, require, seconds_of, within
from triaxis.engine.checkpoint.store import CheckpointStore, RunState
from triaxis.engine.plan import Precision, StepPlan
from triaxis.engine.step import StepResult, TrainingStep
from triaxis.engine.trace.rank import trace_rank
from triaxis.models.batch import Batch
from triaxis.models.presets import PRESETS
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.thread import run_threads

LEARNING_RATE = 1e-3
BOUNDS = {"fp64": 1e-10, "fp32": 1e-5}
EXACT = [row for row in ROWS if not row.plan.keys() & {"skip_bad", "accumulate_dtype"}]
"""Layouts whose losses are one rank's, to rounding."""
SMALL_ROWS = ("tp2 dp2 zero 3, sp, qwen", "2 × 2 × 2 zero 1, sp, tied")


def train_row(world: World, row: Row, dtype: str, steps: int) -> list[float]:
    """A rank's losses."""
    mesh = build_mesh(world, topology_of(row))
    step = TrainingStep(plan_of(row, dtype), mesh)
    step.connect()
    own = slice(mesh.dp.rank * row.microbatches, (mesh.dp.rank + 1) * row.microbatches)
    return [
        step.train(batches_of(row, number)[own], LEARNING_RATE, row.most_norm).loss for number in range(steps)
    ]


def one_rank(row: Row, dtype: str, steps: int) -> list[float]:
    """The same run on one rank of the CPU."""
    whole = dataclasses.replace(
        row,
        tp=1,
        pp=1,
        dp=1,
        plan={k: v for k, v in row.plan.items() if k not in ("virtual_stages", "schedule")},
    )
    plan = dataclasses.replace(plan_of(whole, dtype), microbatches=row.microbatches * row.dp)

    def main(world: World) -> list[float]:
        step = TrainingStep(plan, build_mesh(world, Topology()))
        return [step.train(batches_of(row, n), LEARNING_RATE, row.most_norm).loss for n in range(steps)]

    return run_threads(1, main)[0]


def agreement(device: torch.device, small: bool) -> Figures:
    """Every layout as threads on this device: the losses of one rank on the CPU."""
    figures: Figures = {}
    steps = 3 if small else 20
    worst = dict.fromkeys(BOUNDS, 0.0)
    for row in EXACT:
        if small and row.name not in SMALL_ROWS:
            continue
        for dtype in ("fp64",) if small else BOUNDS:
            if dtype not in row.dtypes:
                continue
            expected = one_rank(row, dtype, steps)
            ranks = run_threads(
                row.tp * row.pp * row.dp,
                lambda world: train_row(world, row, dtype, steps),  # noqa: B023
                device=str(device),
            )
            for losses in ranks:
                off = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
                worst[dtype] = max(worst[dtype], off)
                require(off <= BOUNDS[dtype], f"{row.name} in {dtype} is {off:g} off one rank's losses")
    return figures | {f"worst {dtype}": value for dtype, value in worst.items()}


def save_and_resume(device: torch.device, small: bool) -> Figures:
    """Four steps in a row, and two, a save, a load into another layout, and two more."""
    row = next(row for row in ROWS if row.name == SMALL_ROWS[0])
    other = dataclasses.replace(row, tp=1, dp=4, microbatches=row.microbatches // 2)

    def part(world: World, of: Row, numbers: range, folder: Path, load: bool) -> list[StepResult]:
        mesh = build_mesh(world, topology_of(of))
        step = TrainingStep(plan_of(of, "fp64"), mesh)
        store = CheckpointStore(folder, step)
        if load:
            latest = store.latest()
            assert latest is not None
            store.load(latest)
        share = row.microbatches * row.dp // of.dp
        own = slice(mesh.dp.rank * share, (mesh.dp.rank + 1) * share)
        found = [step.train(batches_of(row, number)[own], LEARNING_RATE) for number in numbers]
        state = RunState(step=numbers.stop, tokens=0, config={}, sampler={}, eval_loss=None, extra={})
        store.save(state, asynchronous=True)
        store.finish()
        return found

    with tempfile.TemporaryDirectory() as name:
        whole, parts = Path(name) / "whole", Path(name) / "parts"

        def run(of: Row, numbers: range, folder: Path, load: bool) -> list[float]:
            size = of.tp * of.pp * of.dp
            ranks = run_threads(size, lambda w: part(w, of, numbers, folder, load), device=str(device))
            return [result.loss for result in ranks[0]]

        expected = run(row, range(4), whole, False)
        found = run(row, range(2), parts, False) + run(other, range(2, 4), parts, True)
    figures: Figures = {}
    within(
        figures, "relative error", max(abs(a - b) / b for a, b in zip(found, expected, strict=True)), 1e-10
    )
    return figures


def failures(device: torch.device, small: bool) -> Figures:
    """A step whose loss is no number is skipped and leaves every bit; a norm above its bound too."""
    row = next(row for row in ROWS if row.name == SMALL_ROWS[0])
    plan = dataclasses.replace(plan_of(row, "fp32"), skip_bad=True)

    def main(world: World) -> bool:
        mesh = build_mesh(world, topology_of(row))
        step = TrainingStep(plan, mesh)
        own = slice(mesh.dp.rank * row.microbatches, (mesh.dp.rank + 1) * row.microbatches)
        step.train(batches_of(row, 0)[own], LEARNING_RATE)
        before = [bucket.master.clone() for bucket in step.data_parallel.buckets]
        results = [step.train(batches_of(row, 1)[own], LEARNING_RATE, 1e-9)]
        bucket = step.data_parallel.buckets[0]
        kept = bucket.master[0].clone()
        bucket.master[0] = math.nan
        step.data_parallel.publish()
        results.append(step.train(batches_of(row, 2)[own], LEARNING_RATE))
        bucket.master[0] = kept
        same = all(torch.equal(a, b.master) for a, b in zip(before, step.data_parallel.buckets, strict=True))
        return same and all(result.skipped for result in results)

    ranks = run_threads(row.tp * row.pp * row.dp, main, device=str(device))
    require(
        all(ranks),
        f"skipped steps changed the weights of ranks {[r for r, same in enumerate(ranks) if not same]}",
    )
    return {"ranks": len(ranks)}


def determinism(device: torch.device, small: bool) -> Figures:
    """The same run twice, on GPUs with deterministic algorithms, to the bit."""
    row = next(row for row in ROWS if row.name == SMALL_ROWS[1])
    steps = 2 if small else 10
    torch.use_deterministic_algorithms(device.type == "cuda")
    try:
        runs = [
            run_threads(8, lambda world: train_row(world, row, "fp32", steps), device=str(device))
            for _ in range(2)
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    require(runs[0] == runs[1], f"two runs differ: {runs[0][0]} and {runs[1][0]}")
    return {"steps": steps}


def _one_gpu(microbatches: int) -> StepPlan:
    return StepPlan(
        model=PRESETS["llama3.2-1b"],
        microbatch_size=1,
        microbatches=microbatches,
        sequence_length=4096,
        dtype=Precision.BF16,
    )


def _batches(plan: StepPlan) -> list[Batch]:
    shape = plan.microbatch_size, plan.sequence_length
    positions = torch.arange(plan.sequence_length).expand(shape).contiguous()
    return [
        Batch(
            tokens_BL=torch.randint(0, plan.model.vocab_size, shape),
            labels_BL=torch.randint(0, plan.model.vocab_size, shape),
            positions_BL=positions,
            documents=None,
        )
        for _ in range(plan.microbatches)
    ]


def host_reads(device: torch.device, small: bool) -> Figures:
    """How often the host waits for the device: once a step."""
    plan = _one_gpu(8)

    def main(world: World) -> int:
        step = TrainingStep(plan, build_mesh(world, Topology()))
        batches = _batches(plan)
        step.train(batches, LEARNING_RATE)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            for _ in range(3):
                step.train(batches, LEARNING_RATE)
            torch.cuda.set_sync_debug_mode("default")
        return len([one for one in caught if "synchroniz" in str(one.message)])

    figures: Figures = {}
    within(figures, "waits a step", run_threads(1, main, device=str(device))[0] / 3, 1)
    return figures


def memory(device: torch.device, small: bool) -> Figures:
    """The peak while building and in a step, against the dry trace of a GPU's path."""
    plan = _one_gpu(2)
    traced = trace_rank(dataclasses.replace(plan, seed=None), Topology(), 0, target="cuda")

    def main(world: World) -> tuple[int, int]:
        torch.cuda.reset_peak_memory_stats(device)
        step = TrainingStep(plan, build_mesh(world, Topology()))
        built = torch.cuda.max_memory_allocated(device)
        for _ in range(2):
            step.train(_batches(plan), LEARNING_RATE)
        return built, torch.cuda.max_memory_allocated(device)

    built, peak = run_threads(1, main, device=str(device))[0]
    held = total = sum((traced.program.held or {}).values())
    most = total
    for part in traced.program.steps:
        for delta in part.segment.memory.deltas:
            total += delta
            most = max(most, total)
    figures: Figures = {"peak bytes": peak, "predicted bytes": most}
    within(figures, "building over held", built / held, 1.0)
    within(figures, "off the prediction", abs(peak - most) / peak, 0.03)
    return figures


def speed(device: torch.device, small: bool) -> Figures:
    """Tokens a second and the share of the products' peak rate, with and without borders of documents."""
    plan = _one_gpu(4)

    def main(world: World) -> float:
        step = TrainingStep(plan, build_mesh(world, Topology()))
        batches = _batches(plan)
        for _ in range(5):
            step.train(batches, LEARNING_RATE)
        return seconds_of(lambda: step.train(batches, LEARNING_RATE), device, repeats=8)

    seconds = run_threads(1, main, device=str(device))[0]
    tokens = plan.microbatches * plan.sequence_length
    model = plan.model
    flops = (
        6 * model.parameters() * tokens + 6 * model.layers * tokens * plan.sequence_length * model.hidden_size
    )
    size = 8192
    square = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    peak = 2 * size**3 / seconds_of(lambda: square @ square, device)
    share = flops / seconds / peak
    figures: Figures = {"tokens a second": tokens / seconds, "products' rate": peak, "share of it": share}
    if share < 0.5:
        raise CheckFailed(f"a step must reach half of the rate of its products, but reaches {share:.2f}")
    return figures


CHECKS = (
    Check(name="agreement of threads", limit_seconds=300, ask=agreement),
    Check(name="save and resume", limit_seconds=90, ask=save_and_resume),
    Check(name="failures", limit_seconds=60, ask=failures),
    Check(name="determinism", limit_seconds=60, ask=determinism),
    Check(name="host reads", limit_seconds=90, ask=host_reads, cpu=False),
    Check(name="memory", limit_seconds=90, ask=memory, cpu=False),
    Check(name="speed", limit_seconds=120, ask=speed, cpu=False),
)
