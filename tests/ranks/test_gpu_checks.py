"""`make gpu-check` on a machine without a GPU: its checks' CPU forms, and how verdicts, limits and figures are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.gpu import __main__ as gpu_check
from tests.gpu.check import Check, CheckFailed, Figures
from triaxis.launch.gpu_environment import DEFAULTS, DETERMINISTIC

ON_CPU = [check for check in gpu_check.CHECKS if check.cpu]


@pytest.mark.parametrize("check", ON_CPU, ids=lambda check: check.name)
def test_checks_pass_on_a_cpu(check: Check) -> None:
    figures = check.ask(torch.device("cpu"), True)
    assert figures


def test_the_checks_that_a_cpu_can_do_are_all_there() -> None:
    assert {check.name for check in ON_CPU} == {
        *(
            "attention",
            "weight gradient",
            "products agree",
            "head",
            "norm, swiglu, rotary",
            "update on views",
        ),
        *("agreement of threads", "save and resume", "failures", "determinism"),
    }
    assert len({check.name for check in gpu_check.CHECKS}) == len(gpu_check.CHECKS)
    assert {check.gpus for check in gpu_check.CHECKS} == {1, 2, 8}


def test_without_a_gpu_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert gpu_check.main(["--gpus", "2"]) == 0
    assert capsys.readouterr().out == "gpu-check: skipped, since this machine has 0 GPUs and not 2\n"


def test_a_check_is_a_process_with_figures_and_a_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    assert gpu_check.main(["--device", "cpu", "--only", "products agree", "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text())["checks"]
    assert (row["verdict"], row["name"]) == ("PASS", "products agree")
    assert row["figures"]["relative difference"] <= 1e-2
    assert "1 of 1 checks passed on the CPU" in capsys.readouterr().out


def test_a_check_that_fails_or_takes_too_long_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(device: torch.device, small: bool) -> Figures:
        raise CheckFailed("x must be 1, but is 2")

    assert gpu_check._answer(Check(name="failing", limit_seconds=1, ask=failing), "cpu") == 1
    assert json.loads(capsys.readouterr().out) == {"figures": {}, "fault": "x must be 1, but is 2"}
    row = gpu_check._run(Check(name="products agree", limit_seconds=0.01, ask=failing), "cpu")
    assert row["verdict"] == "FAIL"
    assert "was not done within 0.01 s" in capsys.readouterr().out


def test_the_page_on_gpus_has_what_is_set_and_what_is_checked() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "gpu.md").read_text(encoding="utf-8")
    for name, value in DEFAULTS.items():
        assert f"| `{name}` | `{value}` |" in page
    for name, value in DETERMINISTIC.items():
        assert f"`{name}={value}`" in page
    rows = {
        line.split("|")[1].strip(): line.split("|")[3].strip() for line in page.splitlines() if "|" in line
    }
    assert {check.name: "yes" * check.cpu for check in gpu_check.CHECKS}.items() <= rows.items()
