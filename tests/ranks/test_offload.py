"""States in the host's memory: on a CPU they are there anyway; on a GPU the run is refused until it can be done."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.runs import prepare, rows, run
from triaxis.engine.config import ConfigError, RunConfig
from triaxis.engine.rules import resolve
from triaxis.engine.run.trainer import train
from triaxis.parallel.worlds.group import World


def both(folder: Path, **choice: Any) -> None:
    flags = prepare(folder) | {"steps": 4, "dp": 2, "zero": 3}
    run(flags | {"output_dir": str(folder / "plain")})
    run(flags | {"output_dir": str(folder / "offload"), **choice})
    assert rows(folder / "plain") == rows(folder / "offload")


def test_offload_optimizer_changes_nothing_on_a_cpu(tmp_path: Path) -> None:
    both(tmp_path, offload_optimizer="cpu")


def test_offload_param_changes_nothing_on_a_cpu(tmp_path: Path) -> None:
    both(tmp_path, offload_param="cpu")


def test_a_gpu_run_is_refused(tmp_path: Path) -> None:
    config = RunConfig(**prepare(tmp_path) | {"offload_optimizer": "cpu", "steps": 4})
    world = cast(World, SimpleNamespace(device=torch.device("cuda"), rank=0, size=1))
    with pytest.raises(ConfigError, match="`offload_optimizer` must be none on GPUs"):
        train(config, resolve(config, 1), world)
    with pytest.raises(ConfigError, match="`offload_param` must be none but with zero 3"):
        resolve(RunConfig(offload_param="cpu", zero=2), 1)
