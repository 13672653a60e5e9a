"""fp16: a scale that changes nothing but what is rounded; overflows that all ranks see, survive, and end with."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.agreement import LEARNING_RATE, Layout, held_weights, plan_of, sequences
from tests.ranks.test_depths import MODEL as EVERYTHING
from tests.ranks.test_faults import spoiled
from tests.runs import last_state, prepare, rows, run, step
from triaxis.engine.checkpoint.folder import FOLDER
from triaxis.engine.checkpoint.manifest import read_manifest
from triaxis.engine.config import ConfigError, RunConfig
from triaxis.engine.plan import Precision, step_plan
from triaxis.engine.rules import resolve
from triaxis.engine.step import StepResult, TrainingStep
from triaxis.launch.flags import parse_flags
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.thread import run_threads

pytestmark = pytest.mark.usefixtures("no_picture")
FP16 = {"dtype": "fp16", "eval_batches": 0, "warmup_steps": 1}


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return prepare(tmp_path_factory.mktemp("run")) | FP16


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2, dp=2, ep=2, zero=2)], ids=str)
def test_a_scale_changes_nothing_where_nothing_is_rounded(layout: Layout) -> None:
    """A power of two in fp64, with every loss that a model can have: told numbers and weights are equal to the bit."""

    def main(world: World, scale: float) -> tuple[list[StepResult], list[Tensor]]:
        mesh = build_mesh(world, layout.topology())
        training = TrainingStep(plan_of(layout, EVERYTHING, "adamw, clip 1", "fp64"), mesh)
        share = layout.global_batch() // layout.dp
        results = []
        for number in range(2):
            batch = sequences(number, layout.global_batch(), EVERYTHING.vocab_size)
            own = batch[mesh.dp.rank * share : (mesh.dp.rank + 1) * share]
            results.append(training.train(own, LEARNING_RATE, math.inf, scale))
        return results, [tensor for _, tensor in held_weights(training)]

    plain = run_threads(layout.size, lambda world: main(world, 1.0))
    scaled = run_threads(layout.size, lambda world: main(world, 2.0**20))
    for (results, weights), (others, scaled_weights) in zip(plain, scaled, strict=True):
        assert [replace(result, load=None) for result in results] == [
            replace(result, load=None) for result in others
        ]
        assert results[0].auxiliary_loss > 0 and len(results[0].depth_losses) == 2
        assert all(torch.equal(a, b) for a, b in zip(weights, scaled_weights, strict=True))


LAYOUTS: list[dict[str, Any]] = [
    *({"dp": 2, "zero": zero} for zero in range(4)),
    {"tp": 2, "pp": 2},
    {"tp": 2, "sp": True, "dp": 2, "zero": 3, "recompute": True},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_trains_alike(flags: dict[str, Any], tmp_path: Path, layout: dict[str, Any]) -> None:
    """Within fp16's rounding of one rank's; stages of ZeRO with the same replicas to the bit."""
    common = {**flags, "steps": 6, "global_batch": 4, "microbatches": 4 // layout.get("dp", 1)}
    losses = []
    for name, cut in (("one", {"microbatches": 4}), ("cut", layout)):
        run({**common, **cut, "output_dir": str(tmp_path / name)})
        losses.append([row["loss"] for row in rows(tmp_path / name)])
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    if layout.keys() == {"dp", "zero"}:
        run({**common, **layout, "zero": 0, "output_dir": str(tmp_path / "zero")})
        assert [row["loss"] for row in rows(tmp_path / "zero")] == losses[1]


def test_one_ranks_overflow_is_all_ranks_and_the_next_step_is_normal(
    flags: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # N67
    common = {**flags, "tp": 2, "pp": 2, "steps": 6, "hysteresis": 1, "output_dir": str(tmp_path)}
    with spoiled(1, range(2, 3), float("inf"), gradient=True):
        run(common)
    told = capsys.readouterr().err
    assert (
        "step 3: numbers leave the range of fp16 at a loss scale of 65,536 (every rank's loss is finite"
        in told
    )
    assert "the update is left out, and the scale is now 32,768" in told
    assert "1 update left out" in told
    found = rows(tmp_path)
    assert [row["grad_norm"] is None for row in found] == [False, False, True, False, False, False]
    assert [row["loss_scale"] for row in found] == [65536.0] * 3 + [32768.0] * 3
    assert [row["skipped_steps"] for row in found] == [0, 0, 1, 1, 1, 1]
    assert found[3]["lr"] == found[2]["lr"] > found[4]["lr"], "the schedule waits for the update"


def test_a_run_that_overflows_on_and_on_ends_with_the_reason(
    flags: dict[str, Any], tmp_path: Path
) -> None:  # N68
    numbers = itertools.count()
    for settings, steps, why in (
        ({}, 10, "at a loss scale of 256 .*, for the 10th time in a row; lower --learning_rate"),
        ({"loss_scale": 128.0}, 10, "at a loss scale of 128 .*, for the 10th time in a row"),
        (
            {"initial_scale_power": 2, "hysteresis": 1},
            3,
            "at a loss scale of 1 .*, the least that --min-loss-scale allows",
        ),
        (
            {"min_loss_scale": 32768.0, "hysteresis": 1},
            2,
            "at .*, the least that .*or use --dtype bf16, which has the range",
        ),
    ):
        output = tmp_path / str(next(numbers))
        with (
            spoiled(0, range(100), float("inf"), gradient=True),
            pytest.raises(FloatingPointError, match=rf"step {steps}: numbers leave the range of fp16 {why}"),
        ):
            run({**flags, "steps": 30, **settings, "output_dir": str(output)})
        assert len(rows(output)) == steps - 1


def test_the_scale_goes_on_where_it_was(flags: dict[str, Any], tmp_path: Path) -> None:
    """It rises every second update, and falls once: a resumed run has the scales, and the weights, of one piece."""
    common = {**flags, "dp": 2, "steps": 10, "save_steps": 5, "loss_scale_window": 2, "hysteresis": 1}
    for name, asked in (("whole", None), ("halves", 5)):
        with spoiled(1, range(3, 4), float("inf"), gradient=True):
            run({**common, "output_dir": str(tmp_path / name)}, ask_at=asked)
    run({**common, "resume": "auto", "output_dir": str(tmp_path / "halves")})
    found = [row["loss_scale"] / 65536 for row in rows(tmp_path / "whole")]
    assert found == [1, 1, 2, 2, 1, 1, 2, 2, 4, 4]
    assert rows(tmp_path / "halves") == rows(tmp_path / "whole")
    assert last_state(tmp_path / "halves") == last_state(tmp_path / "whole")
    state = read_manifest(tmp_path / "whole" / FOLDER / step(10)).state.extra["counters"]
    assert isinstance(state, dict)
    assert state["scale"] == {"value": 8 * 65536.0, "patience": 1, "clean": 6} and state["overflows"] == 1


def test_fp16_as_people_ask_for_it(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    scaling = {"loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 3}
    for enabled, words in ((True, []), ("auto", ["--fp16"])):
        more = {"min_loss_scale": 2, "consecutive_hysteresis": True}
        file.write_text(json.dumps({"fp16": {"enabled": enabled, **scaling, **more}}))
        config = parse_flags(["--deepspeed", str(file), *words], True)
        made = step_plan(config, resolve(config, 1)).loss_scaling
        assert made is not None and made.consecutive and config.dtype == Precision.FP16
        assert (made.fixed, made.initial_power, made.window, made.hysteresis, made.least) == (
            0,
            12,
            500,
            3,
            2,
        )
    file.write_text(json.dumps({"fp16": {"enabled": "auto", **scaling}}))
    config = parse_flags(["--deepspeed", str(file), "--bf16"], True)  # its settings mean nothing then
    assert config.dtype == "bf16" and config.initial_scale_power == 16 and resolve(config, 1)
    with pytest.raises(ConfigError, match="`hysteresis` must be left out with dtype bf16, but is 3"):
        resolve(RunConfig(dtype="bf16", hysteresis=3), 1)
    with pytest.raises(ConfigError, match="`loss_scale_window` must be finite and more than 0, but is 0"):
        resolve(RunConfig(dtype="fp16", loss_scale_window=0), 1)
