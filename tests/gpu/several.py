"""Checks of processes on GPUs of their own: NCCL comes up and goes, layouts agree, settings of the environment hold.

Each starts torchrun on `tests.gpu.several ROW`, whose rank 0 prints the losses.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping

import torch

from tests.frozen.rows import ROWS
from tests.gpu.check import Check, CheckFailed, Figures, require
from tests.gpu.training import BOUNDS, EXACT, one_rank, train_row
from triaxis.launch.gpu_environment import DETERMINISTIC, gpu_environment
from triaxis.launch.world import open_world

STEPS = 5
ROWS_OF_TWO = [row for row in EXACT if row.tp * row.pp * row.dp == 2]
SETTINGS: tuple[Mapping[str, str], ...] = (
    {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    {"CUDA_DEVICE_MAX_CONNECTIONS": "8"},
    {"CUDA_LAUNCH_BLOCKING": "1"},
    {"NCCL_P2P_DISABLE": "1"},
    {"NCCL_MAX_NCHANNELS": "1"},
)


def losses_of(name: str, ranks: int, dtype: str, **environment: str) -> list[float]:
    """What rank 0 of a torchrun printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, "-m", "tests.gpu.several", name, dtype],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, **gpu_environment(os.environ, deterministic=False), **environment},
    )
    if done.returncode:
        raise CheckFailed(
            f"{name} in {dtype} with {environment} ended with {done.returncode}: {done.stderr[-800:]}"
        )
    found: list[float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def start_and_stop(device: torch.device, small: bool) -> Figures:
    """From torchrun to the end of a few steps, with a clean exit."""
    started = time.perf_counter()
    losses_of(ROWS_OF_TWO[0].name, 2, "fp32")
    return {"seconds": time.perf_counter() - started}


def layouts_of_two(device: torch.device, small: bool) -> Figures:
    """Every layout of two ranks against one rank on the CPU."""
    worst = 0.0
    for row in ROWS_OF_TWO:
        for dtype in row.dtypes:
            if dtype not in BOUNDS:
                continue
            expected = one_rank(row, dtype, STEPS)
            found = losses_of(row.name, 2, dtype)
            off = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
            require(off <= BOUNDS[dtype], f"{row.name} in {dtype} is {off:g} off one rank's losses")
            worst = max(worst, off)
    return {"layouts": len(ROWS_OF_TWO), "worst": worst}


def settings(device: torch.device, small: bool) -> Figures:
    """Pipelines and stage 3 under other numbers of connections and channels: none hangs."""
    rows = [row for row in ROWS_OF_TWO if row.pp == 2 or row.plan.get("zero") == 3]
    for row in rows:
        expected = one_rank(row, "fp32", STEPS)
        for setting in SETTINGS:
            found = losses_of(row.name, 2, "fp32", **setting)
            off = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
            require(off <= BOUNDS["fp32"], f"{row.name} with {setting} is {off:g} off")
    return {"runs": len(rows) * len(SETTINGS)}


def lifetimes(device: torch.device, small: bool) -> Figures:
    """Bits do not depend on when memory is given back: nothing is used after it was freed, or before it was there."""
    rows = [row for row in ROWS_OF_TWO if row.pp == 2 or row.plan.get("zero") in (2, 3)]
    for row in rows:
        runs = [
            losses_of(row.name, 2, "fp32", **DETERMINISTIC, **more)
            for more in ({}, {"CUDA_LAUNCH_BLOCKING": "1"}, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
        ]
        require(
            runs[0] == runs[1] == runs[2], f"{row.name}: losses depend on the order of the device: {runs}"
        )
    return {"layouts": len(rows)}


def eight(device: torch.device, small: bool) -> Figures:
    """The layouts of eight ranks against one rank on the CPU."""
    worst = 0.0
    rows = [row for row in EXACT if row.tp * row.pp * row.dp == 8 and "fp64" in row.dtypes]
    for row in rows:
        expected, found = one_rank(row, "fp64", STEPS), losses_of(row.name, 8, "fp64")
        off = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
        require(off <= BOUNDS["fp64"], f"{row.name} is {off:g} off one rank's losses")
        worst = max(worst, off)
    return {"layouts": len(rows), "worst": worst}


CHECKS = (
    Check(name="start and stop", limit_seconds=120, ask=start_and_stop, gpus=2, cpu=False),
    Check(name="layouts of two", limit_seconds=900, ask=layouts_of_two, gpus=2, cpu=False),
    Check(name="settings", limit_seconds=900, ask=settings, gpus=2, cpu=False),
    Check(name="lifetimes", limit_seconds=600, ask=lifetimes, gpus=2, cpu=False),
    Check(name="layouts of eight", limit_seconds=900, ask=eight, gpus=8, cpu=False),
)


def main(name: str, dtype: str) -> None:
    """One rank under torchrun."""
    with open_world() as world:
        losses = train_row(world, next(row for row in ROWS if row.name == name), dtype, STEPS)
        if world.rank == 0:
            print(json.dumps(losses), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
