"""What a machine has and how fast it is: the file is one that the planner takes, and its numbers are the machine's."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.patience import PATIENCE_SECONDS
from triaxis.launch.doctor import main
from triaxis.launch.hardware.collectives import collective_seconds
from triaxis.launch.hardware.hardware import Link, load_hardware
from triaxis.launch.hardware.machine import inspect_machine
from triaxis.launch.hardware.measured import curve, fit_link, hardware_toml

SIZES = (1 << 12, 1 << 18, 1 << 22, 1 << 28)
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize(
    "link",
    [Link(latency_s=4e-6, bytes_per_s=230e9), Link(latency_s=1e-3, bytes_per_s=0.7e9)],
    ids=["fast", "slow"],
)
def test_the_link_is_the_one_that_made_the_times(link: Link, ranks: int) -> None:
    hardware = dataclasses.replace(load_hardware("a100-80g"), intra=link)
    times = {
        (operation, float(size)): collective_seconds(operation, size, range(ranks), hardware)
        for operation in OPERATIONS
        for size in SIZES
    }
    found = fit_link(times, ranks)
    assert found.bytes_per_s == pytest.approx(link.bytes_per_s, rel=0.05)
    assert found.latency_s == pytest.approx(link.latency_s, rel=0.05)


def test_times_below_the_fixed_start_still_give_a_bandwidth() -> None:
    found = fit_link({("all_gather", 1e3): 5e-6, ("all_gather", 1e9): 1e-2}, 2)
    assert found.latency_s == 0.0
    assert found.bytes_per_s == pytest.approx(5e10, rel=0.05)


def test_the_curve_never_falls() -> None:
    products = {("fp32", 1e6): 1e9, ("fp32", 1e8): 4e9, ("fp32", 1e10): 3e9, ("fp64", 1e6): 9e9}
    assert curve(products, "fp32") == (4e9, [(1e6, 0.25), (1e8, 1.0), (1e10, 1.0)])


def test_the_file_is_hardware(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    products = {("bf16", 1e6): 1.25e12, ("bf16", 1e12): 5e14, ("fp32", 1e6): 6e13}
    text = hardware_toml(
        name='a "quoted" name',
        source="a test",
        memory_bytes=80e9,
        memory_bytes_per_s=1.2345e12,
        launch_overhead_s=4e-6,
        products=products,
        collectives={},
        ranks=1,
        context_bytes=3.712e8,
    )
    path.write_text(text)
    hardware = load_hardware(str(path))
    assert hardware.name == 'a "quoted" name'
    assert hardware.memory_bytes == 80e9
    assert hardware.context_bytes == 3.712e8
    assert hardware.memory_bytes_per_s == pytest.approx(1.2345e12, rel=1e-3)
    assert dict(hardware.peak_flops) == {"bf16": 5e14, "fp32": 6e13}
    assert hardware.matmul_seconds(1e6, "bf16") == pytest.approx(1e6 / 1.25e12)
    assert hardware.gpus_per_node == 1
    misspelt = tmp_path / "misspelt.toml"
    misspelt.write_text(text.replace("memory_bytes =", "memory_byte ="))
    with pytest.raises(ValueError, match="memory_byte"):
        load_hardware(str(misspelt))


def test_what_is_missing_says_why() -> None:
    sections = inspect_machine()
    items = {item.name: item for section in sections.values() for item in section}
    assert items["torch"].detail == str(torch.__version__)
    assert items["Gloo"].present
    for item in items.values():
        assert item.detail, item.name
    if not torch.cuda.is_available():
        assert not items["NCCL"].present
        assert "needs a CUDA GPU" in items["flash attention"].detail
        assert "ranks run on CPUs" in items["GPU"].detail


@pytest.mark.processes
def test_two_ranks_measure_and_the_planner_takes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "hardware.toml"
    command = [sys.executable, "-m", "triaxis.launch.doctor", "--ranks", "2", "--seconds", "1", "--json"]
    done = subprocess.run(
        [*command, "--out", str(path)], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["measured"]["file"] == str(path)
    hardware = load_hardware(str(path))
    if not torch.cuda.is_available():
        assert hardware.context_bytes == pytest.approx(told["measured"]["context_bytes"], rel=1e-3)
        assert 1e8 < hardware.context_bytes < 2e9, "of Python and torch"
    assert hardware.gpus_per_node == 2
    assert hardware.matmul_seconds(2e6, "fp32") < 1
    seen = {
        each["bytes"]: each["seconds"]
        for each in told["measured"]["collectives"]
        if each["operation"] == "all_reduce"
    }
    assert len(seen) == 5
    for nbytes, seconds in seen.items():
        predicted = collective_seconds("all_reduce", nbytes, range(2), hardware)
        assert 0.1 < predicted / seconds < 10, "a busy machine varies, orders of magnitude do not"


def test_without_measuring_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--no-measure"]) == 0
    told = capsys.readouterr().out
    assert "flash attention" in told and "torch" in told
    assert not list(tmp_path.iterdir())
    with pytest.raises(SystemExit):
        main(["--ranks", "0"])
    assert "`--ranks` must be from 1 to 1,024, but is '0'" in capsys.readouterr().err
