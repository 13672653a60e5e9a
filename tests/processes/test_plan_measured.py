"""With a file from doctor, layouts come out in the order in which they were measured, with the memory that they take.

The order needs a quiet machine. What is measured is what a user sees: real ranks over Gloo, and of each the peak that
the engine reports.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch

from tests.forked import run_processes
from tests.patience import PATIENCE_SECONDS
from triaxis.engine.config import RunConfig
from triaxis.engine.plan import step_plan
from triaxis.engine.rules import resolve
from triaxis.engine.run.peak import give_back_freed_memory, peak_memory_bytes
from triaxis.engine.step import TrainingStep
from triaxis.launch.doctor import main as doctor
from triaxis.launch.hardware.hardware import Hardware, load_hardware
from triaxis.launch.planner.cost import step_time
from triaxis.launch.planner.held import stage_memory
from triaxis.launch.planner.layout import Layout
from triaxis.models.batch import Batch
from triaxis.models.config import ModelConfig
from triaxis.models.fields import dense_model, fields_of, with_fields
from triaxis.models.presets import load_config
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import build_mesh

ROOT = Path(__file__).resolve().parents[2]
RANKS, LENGTH, SEQUENCES, STEPS, ROUNDS = 2, 128, 16, 3, 3
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
            documents=None,
        )
        for row in tokens
    ]


def measure(world: World, config: RunConfig) -> float:
    """The least seconds of a step, after one to warm up."""
    give_back_freed_memory({})  # as every rank of a run does
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
    return min(times[1:])


def measured_once(folder: Path) -> list[float]:
    """Every layout's seconds, one after the other, so that a busy moment falls on one of them and one round."""
    measured: list[float] = []
    for number, config in enumerate(CONFIGS):
        (folder / str(number)).mkdir(parents=True)
        ranks = run_processes(
            RANKS, folder / str(number), lambda world, config=config: measure(world, config)
        )
        assert all(isinstance(rank, float) for rank in ranks), ranks
        measured.append(max(ranks))
    return measured


def layout_of(config: RunConfig, model: ModelConfig, hardware: Hardware, ranks: int) -> Layout:
    resolved = resolve(config, ranks, model)
    return Layout(plan=step_plan(config, resolved), topology=resolved.topology, hardware=hardware)


def predict(config: RunConfig, hardware: str) -> float:
    return step_time(layout_of(config, MODEL, load_hardware(hardware), RANKS)).seconds


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    def ranks(values: Sequence[float]) -> list[float]:
        return [float(place) for place in numpy.argsort(numpy.argsort(values))]

    return statistics.correlation(ranks(one), ranks(other))


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.timeout(900)
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


# Memory. Model states take several times what a process takes without a model.

LARGE = dense_model(
    name="44M",
    vocab_size=16384,
    hidden_size=512,
    layers=8,
    heads=8,
    kv_heads=8,
    ffn_size=1536,
    max_positions=512,
)
MEMORY_ROWS = [  # ranks, flags; without AVX-512, 16-bit products of CPUs take ten times as long: few tokens
    (2, {"zero": 0, "per_device_train_batch_size": 4, "global_batch": 8}),
    (2, {"zero": 1, "per_device_train_batch_size": 1, "global_batch": 4}),
    (2, {"zero": 1, "per_device_train_batch_size": 16, "global_batch": 32, "recompute": True}),
    (2, {"zero": 1, "per_device_train_batch_size": 1, "global_batch": 2, "seq": 32, "dtype": "bf16"}),
    (2, {"zero": 2, "per_device_train_batch_size": 4, "global_batch": 16}),
    (2, {"zero": 3, "per_device_train_batch_size": 4, "global_batch": 8}),
    (
        2,
        {
            "zero": 3,
            "per_device_train_batch_size": 2,
            "global_batch": 4,
            "seq": 32,
            "dtype": "bf16",
            "recompute": True,
        },
    ),
    (2, {"tp": 2, "per_device_train_batch_size": 8, "global_batch": 8}),
    (2, {"tp": 2, "sp": True, "per_device_train_batch_size": 16, "global_batch": 16, "recompute": True}),
    (2, {"tp": 2, "per_device_train_batch_size": 2, "global_batch": 2, "seq": 32, "dtype": "bf16"}),
    (2, {"pp": 2, "per_device_train_batch_size": 4, "global_batch": 16}),
    (
        2,
        {
            "pp": 2,
            "per_device_train_batch_size": 1,
            "global_batch": 2,
            "seq": 32,
            "dtype": "bf16",
            "recompute": True,
        },
    ),
    (4, {"tp": 2, "zero": 1, "per_device_train_batch_size": 4, "global_batch": 8}),
    (4, {"pp": 2, "zero": 2, "per_device_train_batch_size": 4, "global_batch": 16}),
]
MEMORY_STEPS = 3
MEMORY_TOLERANCE = 0.05
RANK = """
import json, os, sys, torch
from triaxis.engine.run.peak import peak_memory_bytes
from triaxis.launch.train import main
assert main(sys.argv[2:]) == 0
with open(f"{sys.argv[1]}/peak{os.environ['RANK']}", "w") as file:
    json.dump(peak_memory_bytes(torch.device("cpu")), file)
"""


def trained_peaks(ranks: int, flags: dict[str, object], folder: Path) -> list[float]:
    """Bytes that each rank's process had at most in a run of `triaxis.launch.train`, up to its last step."""
    folder.mkdir()
    fields = ("vocab_size", "hidden_size", "layers", "heads", "kv_heads", "ffn_size", "max_positions")
    (folder / "model.json").write_text(json.dumps({name: getattr(fields_of(LARGE), name) for name in fields}))
    given: dict[str, object] = {
        "model": folder / "model.json",
        "output-dir": folder / "run",
        "seq": LENGTH,
        "steps": MEMORY_STEPS,
        "eval_batches": 0,
        "save_strategy": "no",
        **flags,
    }
    text = [f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items()]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(folder), *text],
            env=os.environ | {name: str(value) for name, value in common.items()} | {"RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    said = [process.communicate(timeout=PATIENCE_SECONDS)[1] for process in started]
    assert not any(process.returncode for process in started), said
    peaks = [float(json.loads((folder / f"peak{rank}").read_text())) for rank in range(ranks)]
    rows = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    peaks[0] = json.loads(rows[-1])["peak_mem_bytes"]  # without the picture that rank 0 draws at the end
    return peaks


def predicted_peaks(config: RunConfig, model: ModelConfig, hardware: Hardware, ranks: int) -> list[float]:
    """Bytes of each rank: what the planner says of its stage."""
    layout = layout_of(config, model, hardware, ranks)
    totals = [stage_memory(layout, stage).total for stage in range(layout.pp)]
    topology = resolve(config, ranks, model).topology
    return [totals[topology.coordinates(rank)["pp"]] for rank in range(ranks)]


def compare_peaks(name: str, measured: Sequence[float], predicted: Sequence[float]) -> tuple[float, str]:
    """The largest error of any rank, and the line that tells it."""
    errors = [said / real - 1 for said, real in zip(predicted, measured, strict=True)]
    worst = max(errors, key=abs)
    ranks = ", ".join(
        f"{real / 1e6:.0f} MB, predicted {said / 1e6:.0f}"
        for real, said in zip(measured, predicted, strict=True)
    )
    return abs(worst), f"{name}: {ranks}: {worst:+.1%}"


SMALLER = replace(LARGE, name="15M", vocab_size=8192, layers=2)
NEXT_TO_NOTHING = with_fields(LARGE, name="nothing", vocab_size=256, hidden_size=16, ffn_size=24, layers=2)
SAMPLE = [  # most of whose tensors take 1 MiB: smaller ones stay in the heap, 20 to 30 MB of them
    {"dp": 2, "zero": 1, "per_device_train_batch_size": 4, "global_batch": 8},
    {"tp": 2, "per_device_train_batch_size": 4, "global_batch": 4},
    {"pp": 2, "per_device_train_batch_size": 2, "global_batch": 4},
]


def forked_peak(world: World, config: RunConfig, model: ModelConfig) -> int:
    """Bytes of this rank's process, which has what the test's process had at the fork besides."""
    give_back_freed_memory({})
    resolved = resolve(config, RANKS, model)
    step = TrainingStep(step_plan(config, resolved), build_mesh(world, resolved.topology))
    for _ in range(2):
        step.train(batches(resolved.microbatches, resolved.microbatch_size), 1e-3)
    return peak_memory_bytes(world.device)


def compare_sample(folder: Path) -> list[tuple[float, str]]:
    """The error and the figures of each layout of SAMPLE, its ranks forked from this process."""

    def measured(name: str, config: RunConfig, model: ModelConfig) -> list[float]:
        (folder / name).mkdir()
        ranks = run_processes(RANKS, folder / name, lambda world: forked_peak(world, config, model))
        assert all(isinstance(rank, int) for rank in ranks), ranks
        return ranks

    importlib.import_module("torch._dynamo")  # which torch's optimizers load: here once, else in every fork
    configs = [RunConfig(seq=LENGTH, **row) for row in SAMPLE]  # type: ignore[arg-type]
    # All is measured before anything is priced: what pricing leaves in the heap would be in later forks.
    context = max(measured("nothing", configs[0], NEXT_TO_NOTHING))
    peaks = [measured(str(number), config, SMALLER) for number, config in enumerate(configs)]
    hardware = replace(load_hardware("a100-80g"), context_bytes=float(context))
    found = []
    for row, config, real in zip(SAMPLE, configs, peaks, strict=True):
        found.append(compare_peaks(str(row), real, predicted_peaks(config, SMALLER, hardware, RANKS)))
    return found


@pytest.mark.processes
def test_predicted_memory_is_what_forked_ranks_take(tmp_path: Path) -> None:
    """From a process of its own: ranks forked from this one would begin with what other tests left in its heap."""
    command = [sys.executable, "-m", "tests.processes.test_plan_measured", str(tmp_path)]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    told = subprocess.run(command, env=alone, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout
    found = json.loads(told.splitlines()[-1])
    assert len(found) == len(SAMPLE)
    assert max(error for error, _ in found) <= MEMORY_TOLERANCE, "\n".join(line for _, line in found)


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.timeout(1800)
def test_predicted_memory_is_what_every_rank_takes(tmp_path: Path) -> None:
    file = str(tmp_path / "hardware.toml")
    assert doctor(["--ranks", str(RANKS), "--seconds", "1", "--out", file]) == 0
    hardware = load_hardware(file)
    assert hardware.context_bytes is not None
    found = []
    for number, (ranks, flags) in enumerate(MEMORY_ROWS):
        measured = trained_peaks(ranks, flags, tmp_path / str(number))
        config = RunConfig(**{"seq": LENGTH, **flags})  # type: ignore[arg-type]
        predicted = predicted_peaks(config, LARGE, hardware, ranks)
        found.append(compare_peaks(f"{ranks} ranks, {flags}", measured, predicted))
        print(found[-1][1], flush=True)
    assert max(error for error, _ in found) <= MEMORY_TOLERANCE, "\n".join(line for _, line in found)


if __name__ == "__main__":
    print(json.dumps(compare_sample(Path(sys.argv[1]))))
