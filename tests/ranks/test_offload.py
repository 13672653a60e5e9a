"""States in the host's memory or in files: no number changes; on a GPU both are refused yet."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.ranks.test_step import PLAN
from tests.runs import last_state, prepare, rows, run, ten_steps
from triaxis.engine.config import ConfigError, RunConfig
from triaxis.engine.rules import resolve
from triaxis.engine.run.trainer import train
from triaxis.engine.state_files import StateFiles
from triaxis.engine.step import TrainingStep
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.thread import run_threads


def both(folder: Path, **choice: Any) -> None:
    flags = prepare(folder) | {"steps": 4, "dp": 2, "zero": 3}
    run(flags | {"output_dir": str(folder / "plain")})
    run(flags | {"output_dir": str(folder / "offload"), **choice})
    assert rows(folder / "plain") == rows(folder / "offload")


def test_offload_optimizer_changes_nothing_on_a_cpu(tmp_path: Path) -> None:
    both(tmp_path, offload_optimizer="cpu")


def test_offload_param_changes_nothing_on_a_cpu(tmp_path: Path) -> None:
    both(tmp_path, offload_param="cpu")


@pytest.mark.parametrize(
    "choice",
    [
        {"zero": 1, "dtype": "bf16"},
        pytest.param({"zero": 3, "dtype": "bf16"}, marks=pytest.mark.full),
        pytest.param({"zero": 2, "pp": 2}, marks=pytest.mark.full),
        pytest.param({"zero": 0}, marks=pytest.mark.full),
    ],
)
def test_states_in_files_change_no_bit_and_checkpoints_know_nothing_of_them(
    choice: dict[str, Any], tmp_path: Path
) -> None:
    """The states are compared through checkpoints; each run goes on from the other's."""
    flags = ten_steps(tmp_path) | {"dp": 2, **choice}
    files = {"offload_optimizer": str(tmp_path / "states")}
    for name, first, then in (("plain", {}, files), ("files", files, {})):
        run(flags | {"output_dir": str(tmp_path / name), **first}, ask_at=5)
        run(flags | {"output_dir": str(tmp_path / name), "resume": "auto", **then})
    run(flags | {"output_dir": str(tmp_path / "whole")})
    for name in ("plain", "files"):
        assert rows(tmp_path / name) == rows(tmp_path / "whole")
        assert last_state(tmp_path / name) == last_state(tmp_path / "whole")
    assert (tmp_path / "states").is_dir() and not list((tmp_path / "states").iterdir())


def test_pages_of_states_are_let_go_and_their_values_stay(tmp_path: Path) -> None:
    files = StateFiles(tmp_path)
    tensor = files.moved(torch.arange(1 << 20, dtype=torch.float32))
    assert _mapped_bytes(tmp_path) == 0
    tensor[100:].add_(1)
    assert _mapped_bytes(tmp_path) == tensor.nbytes
    files.let_go((tensor[5:9],))
    assert _mapped_bytes(tmp_path) == 0
    assert torch.equal(tensor[98:102], torch.tensor([98.0, 99.0, 101.0, 102.0]))


def _mapped_bytes(folder: Path) -> int:
    """Bytes in memory of the folder's files that this process has mapped."""
    maps = Path("/proc/self/smaps").read_text()
    found = re.findall(rf"{re.escape(str(folder))}/.*\n(?:.*\n)*?Rss:\s+(\d+) kB", maps)
    return 1024 * sum(map(int, found))


def test_an_optimizer_keeps_masters_and_moments_in_its_files(tmp_path: Path) -> None:
    made: list[int] = []

    class Counting(StateFiles):
        def zeros_like(self, tensor: torch.Tensor) -> torch.Tensor:
            made.append(tensor.numel())
            return super().zeros_like(tensor)

    plan = replace(PLAN, dtype="bf16", zero=1)
    (step,) = run_threads(
        1, lambda world: TrainingStep(plan, build_mesh(world, Topology()), state_files=Counting(tmp_path))
    )
    masters = sum(bucket.master.numel() for bucket in step.data_parallel.buckets)
    taken = sum(made)  # at the start, before any update
    moments = sum(stop - start for _, start, stop, _ in step.optimizer.moments())
    assert sum(made) == taken == masters + 2 * moments


def test_a_full_disk_and_a_word_that_is_no_folder_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        OSError, match=r"must be a folder that can be written, but .*file is none \(File exists\)"
    ):
        StateFiles(tmp_path / "file")

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        OSError, match="`offload_optimizer` must be a folder with room for 40 bytes more, but"
    ):
        StateFiles(tmp_path).zeros_like(torch.ones(10))
    with pytest.raises(ConfigError, match=r"must be none, cpu or a folder \(./cpuu\), but is 'cpuu'"):
        resolve(RunConfig(offload_optimizer="cpuu"), 1)


def test_a_gpu_run_is_refused(tmp_path: Path) -> None:
    config = RunConfig(**prepare(tmp_path) | {"offload_optimizer": "cpu", "steps": 4})
    world = cast(World, SimpleNamespace(device=torch.device("cuda"), rank=0, size=1))
    with pytest.raises(ConfigError, match="`offload_optimizer` must be none on GPUs"):
        train(config, resolve(config, 1), world)
    with pytest.raises(ConfigError, match="`offload_param` must be none but with zero 3"):
        resolve(RunConfig(offload_param="cpu", zero=2), 1)
