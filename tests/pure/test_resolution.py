"""`triaxis config`: every value with where it came from, and the learning rate of the run's steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from triaxis.engine.config import RunConfig, learning_rate_at, learning_rate_of
from triaxis.launch.config import main
from triaxis.launch.flags import GROUPS
from triaxis.launch.resolution import CURVE_POINTS, curve_of, sparkline


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["--json", *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def written(folder: Path, values: dict[str, Any]) -> str:
    (folder / "ds.json").write_text(json.dumps(values))
    return str(folder / "ds.json")


def test_every_value_has_an_origin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(
        tmp_path,
        {
            "train_batch_size": 64,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 8,
            "zero_optimization": {"stage": 2},
            "bf16": {"enabled": "auto"},
            "gradient_clipping": "auto",
        },
    )
    line = ("--deepspeed", path, "--bf16", "--max_steps", "100", "--warmup_ratio", "0.1", "--tp", "2")
    found = told(capsys, *line)
    run = found["run"]
    assert found["ranks"] == 8, "tp 2, and the three sizes decide dp 4"
    assert run["zero"] == {"value": 2, "from": f"`zero_optimization.stage` of {path}"}
    assert run["dtype"] == {"value": "bf16", "from": "--bf16"}
    assert run["steps"] == {"value": 100, "from": "--max_steps"}
    assert run["dp"] == {"value": 4, "from": "8 ranks / (tp 2 × pp 1)"}
    assert run["gradient_accumulation_steps"]["value"] == 8
    assert run["max_grad_norm"] == {"value": 1.0, "from": "default"}
    assert run["warmup_steps"] == {"value": 10, "from": "warmup_ratio 0.1 of all steps"}
    names = {name for helps in GROUPS.values() for name in helps} - {"data_path", "microbatches"}
    assert set(run) == names
    assert found["model"]["layers"] == {"value": 8, "from": "preset tiny"}


def test_the_curve_is_the_runs_own(capsys: pytest.CaptureFixture[str]) -> None:
    line = ("--steps", "1000", "--warmup_steps", "37", "--learning_rate", "3e-4")
    rates = told(capsys, *line)["learning_rate"]
    config = RunConfig(steps=1000, warmup_steps=37, learning_rate=3e-4)
    assert rates["total_steps"] == 1000 and rates["warmup_steps"] == 37
    assert [step for step, _ in rates["curve"]][-1] == 1000
    assert 37 in [step for step, _ in rates["curve"]] and len(rates["curve"]) <= CURVE_POINTS + 2
    for step, rate in rates["curve"]:
        assert rate == learning_rate_of(config, step - 1, 1000)
    short = curve_of(RunConfig(warmup_steps=2), 5)
    assert [step for step, _ in short] == [1, 2, 3, 4, 5]


def test_a_logarithmic_warm_up_is_steep_at_first_and_moves_the_first_step() -> None:
    def rate(number: int) -> float:
        return learning_rate_at(
            number - 1,
            total_steps=100,
            warmup_steps=10,
            peak=1.0,
            minimum_ratio=0.0,
            decay="linear",
            warmup_type="log",
        )

    assert 0.2 < rate(1) < 0.3 and rate(5) > 0.7
    assert rate(10) == 1.0 and rate(11) < 1.0 and rate(100) == 0.0


def test_the_rate_of_a_deepspeed_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """N19: a WarmupLR without a peak keeps the optimizer's; N20: 0 and 1 steps of warm-up begin at the peak."""
    for steps in (0, 1):
        params = {"warmup_num_steps": steps, "warmup_type": "log"}
        values = {
            "optimizer": {"type": "AdamW", "params": {"lr": 5e-7}},
            "scheduler": {"type": "WarmupLR", "params": params},
        }
        found = told(capsys, "--deepspeed", written(tmp_path, values), "--steps", "5")
        assert [rate for _, rate in found["learning_rate"]["curve"]] == [5e-7] * 5
        assert found["run"]["learning_rate"]["from"].startswith("`optimizer.params.lr` of")
    assert found["run"]["weight_decay"]["from"].startswith("`optimizer.params.weight_decay, left out` of")
    found = told(capsys, "--deepspeed", written(tmp_path, values), "--weight_decay", "0.01")
    assert found["run"]["weight_decay"] == {"value": 0.01, "from": "--weight-decay"}


def test_a_file_and_a_flag_that_differ_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """N22: a schedule of the file's and another of the flag's."""
    path = written(tmp_path, {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}})
    with pytest.raises(SystemExit) as ended:
        main(["--deepspeed", path, "--lr_scheduler_type", "cosine"])
    assert ended.value.code == 2
    words = capsys.readouterr().err
    assert f"--lr-scheduler-type cosine and constant (`scheduler.type` of {path}) must not differ" in words


def test_what_people_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--steps", "40", "--warmup_steps", "4", "--attn_implementation", "sdpa"]) == 0
    words = capsys.readouterr().out
    assert "note: --attn-implementation" in words and "values more are defaults" in words
    assert "step        4  1.000e-03, the last of the warm-up" in words
    assert sparkline([0, 1, 2, 4], 4) == "▁▃▅█" and sparkline([], 4) == ""
    assert main(["--tp", "3"]) == 2
    assert "`tp` must" in capsys.readouterr().err
