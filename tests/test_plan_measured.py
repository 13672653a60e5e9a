"""With a file from doctor, layouts come out in the order in which they were measured. Needs a quiet machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy
import pytest
import torch
from processes import run_processes

from triaxis.engine.config import RunConfig, resolve
from triaxis.engine.step import TrainingStep
from triaxis.engine.trainer import step_plan
from triaxis.launch.doctor import main as doctor
from triaxis.launch.planner.cost import step_time
from triaxis.launch.planner.hardware import load_hardware
from triaxis.launch.planner.layout import Layout, Recompute
from triaxis.launch.planner.shapes import shape_of
from triaxis.models.batch import Batch
from triaxis.models.presets import load_config
from triaxis.parallel.group import World
from triaxis.parallel.mesh import build_mesh

RANKS, LENGTH, SEQUENCES, STEPS, ROUNDS = 2, 128, 16, 3, 2
MODEL = load_config("tiny")
ROWS = [  # apart by more than what noise can turn round
    {"dp": 2, "zero": 1, "per_device_train_batch_size": 8},
    {"dp": 2, "zero": 2, "per_device_train_batch_size": 4, "recompute": True},
    {"dp": 2, "zero": 3, "per_device_train_batch_size": 1, "recompute": True},
    {"pp": 2, "per_device_train_batch_size": 2},
    {"tp": 2, "sp": True, "per_device_train_batch_size": 1},
    {"tp": 2, "sp": True, "per_device_train_batch_size": 2},
    {"tp": 2, "sp": True, "per_device_train_batch_size": 4},
    {"tp": 2, "sp": True, "per_device_train_batch_size": 8},
    {"tp": 2, "sp": True, "per_device_train_batch_size": 16},
    {"tp": 2, "sp": True, "per_device_train_batch_size": 1, "recompute": True},
    {"tp": 2, "sp": True, "per_device_train_batch_size": 2, "recompute": True},
    {"tp": 2, "sp": True, "per_device_train_batch_size": 4, "recompute": True},
]
CONFIGS = [RunConfig(model="tiny", seq=LENGTH, global_batch=SEQUENCES, **row) for row in ROWS]  # type: ignore[arg-type]


def batches(count: int, size: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (count, size, LENGTH + 1), generator=generator)
    positions = torch.arange(LENGTH).expand(size, LENGTH).contiguous()
    return [
        Batch(
            tokens_BL=row[:, :-1].contiguous(),
            labels_BL=row[:, 1:].contiguous(),
            positions_BL=positions,
            documents_BL=None,
        )
        for row in tokens
    ]


def measure(world: World, configs: Sequence[RunConfig]) -> list[float]:
    """The least seconds of a step of each layout, after one to warm up."""
    found = []
    for config in configs:
        resolved = resolve(config, RANKS, MODEL)
        mesh = build_mesh(world, resolved.topology)
        step = TrainingStep(step_plan(config, resolved), mesh)
        data = batches(resolved.microbatches, resolved.microbatch_size)
        times = []
        for _ in range(STEPS):
            mesh.everyone.barrier()
            start = time.perf_counter()
            step.train(data, 1e-3)
            mesh.everyone.barrier()
            times.append(time.perf_counter() - start)
        found.append(min(times[1:]))
    return found


def measured_once(folder: Path) -> list[float]:
    """Every layout's seconds, three to a start of the ranks."""
    measured: list[float] = []
    for start in range(0, len(CONFIGS), 3):
        few = CONFIGS[start : start + 3]
        (folder / str(start)).mkdir(parents=True)
        ranks = run_processes(RANKS, folder / str(start), lambda world, few=few: measure(world, few))
        assert all(isinstance(rank, list) for rank in ranks), ranks
        measured += [max(times) for times in zip(*ranks, strict=True)]
    return measured


def predict(config: RunConfig, hardware: str) -> float:
    resolved = resolve(config, RANKS, MODEL)
    topology = resolved.topology
    return step_time(
        Layout(
            shape=shape_of(MODEL),
            hardware=load_hardware(hardware),
            dp=topology.dp,
            tp=topology.tp,
            pp=topology.pp,
            zero=resolved.zero,
            microbatch=resolved.microbatch_size,
            global_batch=SEQUENCES,
            sequence=LENGTH,
            sequence_parallel=config.sp,
            recompute=Recompute.FULL if config.recompute else Recompute.NONE,
            dtype="fp32",
        )
    ).seconds


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    def ranks(values: Sequence[float]) -> list[float]:
        return [float(place) for place in numpy.argsort(numpy.argsort(values))]

    return statistics.correlation(ranks(one), ranks(other))


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_predicted_steps_rank_like_the_measured_ones(tmp_path: Path) -> None:
    file = str(tmp_path / "hardware.toml")
    assert doctor(["--ranks", str(RANKS), "--seconds", "10", "--out", file]) == 0
    rounds = [measured_once(tmp_path / f"round{number}") for number in range(ROUNDS)]
    measured = [min(times) for times in zip(*rounds, strict=True)]
    predicted = [predict(config, file) for config in CONFIGS]
    told = [
        f"{row}: measured {real:.3f} s, predicted {said:.3f} s"
        for row, real, said in zip(ROWS, measured, predicted, strict=True)
    ]
    assert spearman(measured, predicted) >= 0.8, "\n".join(told)
