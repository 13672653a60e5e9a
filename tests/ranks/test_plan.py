"""The planner as people ask it: the decision table, the search, what does not fit, and commands that start."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_SECONDS
from tests.yardstick import yardsticks
from triaxis.engine.config import ConfigError
from triaxis.engine.plan import Precision, Recompute
from triaxis.engine.rules import resolve
from triaxis.launch.flags import parse_flags
from triaxis.launch.hardware.hardware import Link, load_hardware
from triaxis.launch.pages import present
from triaxis.launch.plan import main
from triaxis.launch.planner.explain import (
    PARTS,
    difference,
    explain,
    neighbours,
    parse_wish,
    seconds_text,
)
from triaxis.launch.planner.reprice import reprice
from triaxis.launch.planner.run_flags import model_toml, run_flags
from triaxis.launch.planner.search import Plan, Request, Space, candidates, lightest, pareto, search
from triaxis.launch.planner.table import (
    DENSE_671B,
    LAYER_PARAMETERS,
    QWEN_1_8B,
    SIZES,
    STAGE_LAYERS,
    topology_by_rule,
)
from triaxis.launch.published.memory_tables import counts, least_accelerators, model_states, needs
from triaxis.launch.published.recommended import nearest, recommendations
from triaxis.launch.published.score import SHIPPED
from triaxis.models.fields import fields_of
from triaxis.models.presets import load_config

TABLE = {"7B": (8, 8, 1, 1), "13B": (16, 8, 2, 1), "70B": (64, 8, 4, 2), "671B": (256, 16, 8, 2)}
"""GPUs, dp, tp, pp."""

Ask = Callable[..., dict[str, Any]]


def request(model: str = "llama2-7b", gpus: int = 8, hardware: str = "h100-80g", **others: Any) -> Request:
    settings: dict[str, Any] = {"seq": 4096, "global_batch": 64, **others}
    return Request(
        model=load_config(model), name=model, hardware=load_hardware(hardware), gpus=gpus, **settings
    )


@pytest.fixture(scope="module")
def plan_70b() -> Plan:
    return search(request("llama2-70b", 64, "a100-80g", global_batch=1024))


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Runs the command with --json and returns what it said."""

    def run(*arguments: str, code: int = 0) -> dict[str, Any]:
        assert main([*arguments, "--json"]) == code
        said: dict[str, Any] = json.loads(capsys.readouterr().out)
        return said

    return run


# The decision table.


@pytest.fixture(scope="module")
def table() -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "triaxis.launch.plan", "--table", "--json"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=True,
    )
    return {row["model"]: row for row in json.loads(done.stdout)["rows"]}


def test_the_table_has_its_four_topologies_and_each_fits(table: dict[str, dict[str, Any]]) -> None:
    assert {name: (row["gpus"], row["dp"], row["tp"], row["pp"]) for name, row in table.items()} == TABLE
    for row in table.values():
        assert row["fits"] and row["fits_surely"]
        assert 0 < row["memory_bytes"] <= 80e9
        assert sum(row["memory"].values()) == pytest.approx(row["memory_bytes"])
        assert sum(row["time"].values()) == pytest.approx(row["step_seconds"])
        assert row["best"]["fits"] and row["reason"]
        assert row["published"], "somebody publishes a layout of this size"
    assert table["671B"]["note"], "it is said that the model is dense"


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.name)
def test_the_table_follows_from_the_rule(size: Any) -> None:
    model, hardware = size.model, load_hardware("h100-80g")
    fields = fields_of(model)
    layer = 2 * model.hidden_size * (fields.heads + fields.kv_heads) * model.rotary_size()
    layer += 3 * model.hidden_size * fields.ffn_size
    tp = next(width for width in (1, 2, 4, 8) if layer / width <= LAYER_PARAMETERS or width == 8)
    pp = next(stages for stages in (1, 2, 4, 8) if model.layers / stages <= STAGE_LAYERS)
    assert topology_by_rule(model, size.gpus, hardware) == (size.gpus // tp // pp, tp, pp)
    assert (size.gpus, *topology_by_rule(model, size.gpus, hardware)) == TABLE[size.name]


def test_the_zero_stage_is_found(table: dict[str, dict[str, Any]]) -> None:
    """Less sharding than the table's fits for none, or is slower."""
    assert table["7B"]["zero"] >= 1 and table["671B"]["zero"] == 3
    hardware = load_hardware("h100-80g")
    for size in SIZES:
        row = table[size.name]
        wish = Request(
            model=size.model,
            name=size.model.name,
            hardware=hardware,
            gpus=size.gpus,
            seq=4096,
            global_batch=1024,
        )
        below = candidates(wish, [(row["dp"], row["tp"], row["pp"])], Space(zeros=range(row["zero"])))
        fitting = [one for one in below if one.fits_surely]
        assert all(one.seconds > row["step_seconds"] for one in fitting), size.name
    bare = request("llama2-7b", 8, global_batch=1024)
    plain = min(one.memory.model_states for one in candidates(bare, [(8, 1, 1)], Space(zeros=(0,))))
    assert plain > 112e9


def test_the_rule_refuses_what_does_not_divide() -> None:
    with pytest.raises(
        ValueError, match=r"`gpus` must be a multiple of tp 4 × pp 2 = 8.*is 12; use 8 or 16, or --policy"
    ):
        topology_by_rule(load_config("llama2-70b"), 12, load_hardware("h100-80g"))
    assert topology_by_rule(load_config("llama2-70b"), 16, load_hardware("rtx4090")) == (2, 4, 2)


def test_the_671b_stand_in_is_of_that_size() -> None:
    assert DENSE_671B.parameters() == pytest.approx(671e9, rel=1e-3)


def test_published_rows_are_near_and_read_whole() -> None:
    assert len(recommendations()) > 50
    for one in recommendations():
        assert one.gpus % (one.tp * one.pp * one.cp) == 0 and one.dp >= 1
    assert {"NVIDIA NeMo performance recipes (f4130f5)", "torchtitan benchmarks"} <= {
        one.source for one in nearest(70e9, 64)
    }


# The search.


def test_the_front_is_what_nothing_beats(plan_70b: Plan) -> None:
    front = {id(one) for one in plan_70b.pareto}
    assert front and not any(one.crosses_nodes for one in plan_70b.pareto)
    assert not any(one.crosses_nodes for one in plan_70b.candidates), "priced only where nothing else fits"
    for one in (one for one in plan_70b.fitting if not one.crosses_nodes):
        beaten = any(
            other.seconds <= one.seconds
            and other.memory_bytes <= one.memory_bytes
            and (other.seconds, other.memory_bytes) != (one.seconds, one.memory_bytes)
            for other in plan_70b.pareto
        )
        equal = any(
            (other.seconds, other.memory_bytes) == (one.seconds, one.memory_bytes)
            for other in plan_70b.pareto
        )
        assert beaten != (id(one) in front or equal)
    assert not pareto([])


def test_the_best_is_the_fastest_that_surely_fits(plan_70b: Plan) -> None:
    best = plan_70b.best
    assert best is not None and best.fits_surely
    within = [one.seconds for one in plan_70b.candidates if one.fits_surely and one.layout.tp <= 8]
    assert best.seconds <= 1.02 * min(within)
    tried = {one.topology for one in plan_70b.candidates}
    assert all(dp * tp * pp == 64 for dp, tp, pp in tried)
    assert {(64, 1, 1), (8, 4, 2), (1, 1, 64), (1, 8, 8)} <= tried
    assert {one.layout.zero for one in plan_70b.candidates} == {0, 1, 2, 3}
    assert {one.layout.plan.recompute for one in plan_70b.candidates} == {Recompute.NONE, Recompute.FULL}
    assert {one.layout.plan.schedule for one in plan_70b.candidates} == {"1f1b", "interleaved"}


@pytest.mark.parametrize(
    ("model", "gpus", "hardware", "global_batch"),
    [
        ("llama2-70b", 64, "a100-80g", 1024),
        ("qwen2.5-7b", 6, "h200", 48),
        ("gpt2-124m", 8, "a100-40g", 32),
        ("tiny", 8, "v100-16g", 16),
    ],
)
def test_every_command_starts_what_was_priced(
    model: str, gpus: int, hardware: str, global_batch: int
) -> None:
    seq = min(1024, load_config(model).max_positions)
    dtype = "bf16" if hardware != "v100-16g" else "fp32"
    wish = request(model, gpus, hardware, seq=seq, global_batch=global_batch, dtype=Precision(dtype))
    plan = search(wish)
    assert plan.best is not None
    for one in plan.fitting[:: len(plan.fitting) // 5 + 1]:
        config = parse_flags(run_flags(wish, one, tokens=1e9), speaks=True)
        resolved = resolve(config, gpus)
        layout, topology = one.layout, resolved.topology
        assert (topology.dp, topology.tp, topology.pp) == one.topology
        assert (resolved.zero, resolved.microbatch_size, resolved.global_batch) == (
            layout.zero,
            layout.microbatch,
            global_batch,
        )
        assert resolved.microbatches == layout.microbatches
        assert resolved.virtual_stages == layout.virtual_stages
        assert (config.sp, config.recompute) == (
            layout.plan.sequence_parallel,
            layout.recomputes,
        )
        assert config.steps == -(-(10**9) // (global_batch * seq))


@pytest.mark.parametrize(
    ("model", "gpus", "global_batch", "limit"),
    [
        ("llama2-70b", 64, 1024, 40),
        pytest.param("llama3-405b", 16384, 2048, 480, marks=pytest.mark.full),
    ],
)
def test_a_search_is_quick(model: str, gpus: int, global_batch: int, limit: float) -> None:
    """Some 5 seconds on a machine of 2024, a minute for 16,384 GPUs."""
    plans = []
    spent = yardsticks(lambda: plans.append(search(request(model, gpus, global_batch=global_batch))))
    assert plans[0].best is not None and plans[0].best.layout.gpus == gpus
    assert spent < limit


def test_starting_takes_less_than_a_second_and_no_torch() -> None:
    program = (
        "import sys\nfrom triaxis.launch.plan import main\nfrom triaxis.launch import script\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", program]
    assert yardsticks(lambda: subprocess.run(command, check=True, capture_output=True)) < 7


def test_no_legal_layout_says_why() -> None:
    with pytest.raises(ConfigError, match="positions of llama2-7b"):
        search(request(seq=8192))


def test_nothing_in_its_table_beats_the_choice(plan_70b: Plan) -> None:
    best = plan_70b.best
    assert best is not None
    for one in plan_70b.pareto:
        assert not (one.seconds <= best.seconds and one.memory_bytes < best.memory_bytes)


def test_the_stage_that_limits_is_named(plan_70b: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    """In memory and in time, where there are stages; nothing is said of the only one."""
    by_pp = {one.layout.pp > 1: one for one in plan_70b.candidates if one.fits}
    for several, candidate in by_pp.items():
        present.console().print(present.choice_view(candidate, None, None))
        told = " ".join(capsys.readouterr().out.split())
        named = re.findall(r"; stage (\d+) of (\d+) is the one that limits", told)
        stages = [str(candidate.memory.stage), str(candidate.time.stage)]
        assert named == [(stage, str(candidate.layout.pp)) for stage in stages] * several
    assert len(by_pp) == 2


def test_the_least_is_not_rounded_to_whole_nodes() -> None:
    """16 are too few, 24 are more than it takes."""
    model = load_config("llama2-70b")
    found = least_accelerators(model, model.name, load_hardware("a100-80g"), 4096)
    assert found is not None and found.layout.gpus == 20


def test_what_a_plan_chooses_a_simulation_does_not_refuse() -> None:
    """One account of memory: on links so slow that the choice is another, the choice fits in both."""
    slow = replace(load_hardware("a100-40g"), inter=Link(latency_s=15e-6, bytes_per_s=1e9))
    plan = search(replace(request("llama2-13b", 32, global_batch=128), hardware=slow))
    assert plan.best is not None
    found = reprice(plan.best)
    assert found.works
    assert found.memory_bytes == pytest.approx(plan.best.memory_bytes, rel=0.03)


# Why not.


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ("dp=64,zero=1", "GB too much (gradients "),
        ("dp=64,zero=1", "does not fit even at the best microbatch, recompute, virtual_stages"),
        ("tp=3", "cannot start: `world_size` must be a multiple of tp 3"),
        ("dp=4,tp=4,pp=2", "cannot start: `world_size` must be dp 4 × tp 4 × pp 2"),
        ("dp=8,tp=8,pp=1", "× the time: +"),
        ("dp=1,tp=8,pp=8,zero=2", "nobody to share with"),
        ("tp=64", "× the time: +"),
        ("dp=8,tp=4,pp=2,microbatch=32,recompute=no", "does not fit even at the best virtual_stages, zero"),
        ("dp=8,tp=4,pp=2,microbatch=128,recompute=yes,zero=3", "GB too much (activations "),
        ("tp=8,pp=8", "loses to dp"),
    ],
)
def test_a_layout_that_lost_is_explained(plan_70b: Plan, wish: str, said: str) -> None:
    assert said in explain(plan_70b, parse_wish(wish)).verdict


def test_explained_numbers_are_those_of_the_layout(plan_70b: Plan) -> None:
    best = plan_70b.best
    assert best is not None
    layout = best.layout
    text = f"dp={layout.dp},tp={layout.tp},pp={layout.pp},zero={layout.zero},microbatch={layout.microbatch}"
    wish = f"{text},virtual_stages={layout.virtual_stages},recompute=no"
    assert explain(plan_70b, parse_wish(wish)).verdict == "is the choice"
    lost = explain(plan_70b, parse_wish("dp=8,tp=8,pp=1")).candidate
    assert lost is not None and lost.topology == (8, 8, 1)
    parts = difference(best, lost)
    assert parts.startswith(f"{lost.seconds / best.seconds:.2f}× the time")
    gaps = {name: getattr(lost.time, name) - getattr(best.time, name) for name in PARTS}
    largest = max(gaps, key=lambda name: gaps[name])
    assert f": +{seconds_text(gaps[largest])} {PARTS[largest]}" in parts
    assert len(neighbours(plan_70b)) >= 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("dp=8,tpp=2", "but has 'tpp'; nearest: tp"),
        ("dp=many", "dp must be a whole number, but is 'many'"),
        ("recompute=perhaps", "recompute must be yes or no"),
    ],
)
def test_a_wish_that_cannot_be_read(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_wish(text)


def test_extra_prediction_depths_are_priced_and_in_the_command(ask: Ask) -> None:
    wish = ("--model", "tiny-v3", "--gpus", "4", "--seq", "128", "--global-batch", "16")
    without, with_one = ask(*wish), ask(*wish, "--mtp-depths", "1")
    assert "--mtp_depths" not in without["command"] and "--mtp_depths 1" in with_one["command"]
    assert with_one["request"]["parameters"] > without["request"]["parameters"]
    assert with_one["best"]["step_seconds"] > without["best"]["step_seconds"]


# What does not fit.


def test_an_impossible_request_says_the_least_that_would_do(
    ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    wish = ("--model", "llama3-405b", "--gpus", "8", "--hardware", "rtx4090", "--global-batch", "64")
    said = ask(*wish, code=1)
    assert said["best"] is None and said["command"] is None and said["fitting"] == 0
    assert said["needed_bytes_per_gpu"] > 405e9 * 18 / 8
    found = said["least_gpus"]
    hardware = load_hardware("rtx4090")
    assert found * 24e9 > 405e9 * 18
    before = [count for count in counts(hardware) if count < found][-1]
    for count, fits in ((found, True), (before, False), (found - hardware.gpus_per_node, False)):
        light = lightest(request("llama3-405b", count, "rtx4090", global_batch=4 * count))
        assert any(one.fits for one in light) == fits
    assert main(list(wish)) == 1
    told = capsys.readouterr().out
    assert f"The least that would do: {found} × rtx4090" in told
    assert "8 GPUs of 963" in told or "8 GPUs of" in told


def test_the_least_there_is() -> None:
    hardware = load_hardware("v100-16g")
    assert (
        least_accelerators(load_config("llama2-7b"), "llama2-7b", hardware, 4096, Precision.FP32) is not None
    )
    assert list(counts(load_hardware("a100-80g"), 64)) == [1, 2, 4, 8, 16, 24, 32, 48, 64]


# The memory tables.


def test_model_states_are_those_of_the_zero_paper() -> None:
    model = load_config("llama2-7b")
    count = model.parameters()
    found = {(one.engine, one.stage): one for one in model_states(model, 8, load_hardware("a100-80g"))}
    assert found["DeepSpeed", 0].total == pytest.approx(16 * count)
    assert found["DeepSpeed", 1].total == pytest.approx((4 + 12 / 8) * count)
    assert found["triaxis", 0].total == pytest.approx(18 * count)
    assert found["triaxis", 1].total == pytest.approx((6 + 12 / 8) * count)
    assert found["Megatron-LM", 1].total == pytest.approx((6 + 12 / 8) * count)
    assert found["PyTorch FSDP", 0].total == pytest.approx(16 * count)
    for engine in ("triaxis", "DeepSpeed", "PyTorch FSDP"):
        sharded = found[engine, 3]
        whole = found[engine, 0]
        assert sharded.total - sharded.buffers == pytest.approx(whole.total / 8)
    assert ("Megatron-LM", 3) not in found and ("PyTorch FSDP", 1) not in found


def test_savings_in_the_limit_are_four_eight_and_n() -> None:
    found = {
        one.stage: one
        for one in model_states(load_config("llama2-7b"), 4096, load_hardware("a100-80g"))
        if one.engine == "DeepSpeed"
    }
    states = {stage: one.parameters + one.gradients + one.optimizer for stage, one in found.items()}
    assert states[0] / states[1] == pytest.approx(4, rel=0.01)
    assert states[0] / states[2] == pytest.approx(8, rel=0.01)
    assert states[0] / states[3] == pytest.approx(4096, rel=0.01)


def test_needs_are_least(table: dict[str, dict[str, Any]]) -> None:
    hardware = load_hardware("h100-80g")
    models = {"7B": load_config("llama2-7b"), "13B": load_config("llama2-13b")}
    for need in needs(hardware, 4096, models):
        assert need.least is not None and need.recommended is not None
        assert need.least.layout.gpus <= need.recommended.layout.gpus
        assert need.recommended.memory_bytes <= 0.8 * hardware.memory_bytes
        assert need.recommended.layout.plan.recompute == Recompute.NONE
        half = need.least.layout.gpus // 2
        light = lightest(request(need.model.name, half, global_batch=4 * half))
        assert not any(one.fits for one in light)


# The command.


def test_a_plan_in_full(ask: Ask, tmp_path: Path) -> None:
    said = ask(
        *("--model", "llama2-13b", "--gpus", "16", "--global-batch", "64", "--tokens", "300B"),
        *("--price", "2.5", "--explain", "tp=8", "--write", str(tmp_path)),
    )
    best = said["best"]
    assert best["dp"] * best["tp"] * best["pp"] == 16
    per_second = best["tokens_per_s_per_gpu"] * 16
    assert said["days"] == pytest.approx(300e9 / per_second / 86400)
    assert said["cost"] == pytest.approx(said["days"] * 24 * 16 * 2.5)
    assert best["step_seconds"] == pytest.approx(64 * 4096 / per_second)
    assert said["explanations"][0]["wish"] == {"tp": 8}
    assert {Path(name).name for name in said["written"]} == {
        "torchrun.sh",
        "slurm.sbatch",
        "pytorchjob.yaml",
        "trainjob.yaml",
    }
    words = shlex.split(said["command"])
    assert words[:5] == ["torchrun", "--nnodes", "2", "--nproc-per-node", "8"]
    flags = words[words.index("triaxis.launch.train") + 1 :]
    assert resolve(parse_flags(flags, speaks=True), 16).topology.tp == best["tp"]
    assert f"--tp {best['tp']}" in (tmp_path / "slurm.sbatch").read_text()


def test_the_policy_of_the_table(ask: Ask) -> None:
    best = ask("--model", "13B", "--gpus", "16", "--global-batch", "64", "--policy", "table")["best"]
    assert (best["dp"], best["tp"], best["pp"]) == (8, 2, 1)


def test_a_size_that_is_no_preset_is_written_as_a_file(ask: Ask, tmp_path: Path) -> None:
    said = ask("--model", "1.8B", "--gpus", "2", "--global-batch", "8", "--write", str(tmp_path))
    path = tmp_path / "qwen1.5-1.8b.toml"
    assert load_config(str(path)) == QWEN_1_8B
    flags = shlex.split(said["command"])
    assert flags[flags.index("--model") + 1] == path.name


@pytest.mark.parametrize("flag", ["--write", "--report"])
def test_a_place_that_cannot_be_written_is_named(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    wish = ("--model", "gpt2-124m", "--gpus", "2", "--seq", "256", "--global-batch", "8")
    assert main([*wish, flag, str(file / "inside")]) == 2
    said = capsys.readouterr().err
    assert f"`{flag}` must be a place that can be written, but {file / 'inside'} is not" in said


@pytest.mark.parametrize("count", [2])
def test_the_best_are_priced_again_by_simulation(ask: Ask, count: int) -> None:
    wish = ("--model", "gpt2-124m", "--gpus", "4", "--seq", "256", "--global-batch", "16")
    said = ask(*wish, "--simulate", str(count))
    found = said["simulated"]
    assert len(found) == count and all(one["proved"] and one["works"] for one in found)
    assert found[0]["step_seconds"] == min(one["step_seconds"] for one in found)
    assert found[0]["layout"] == said["best"]
    for one in found:
        allocated = sum(
            size for name, size in one["layout"]["memory"].items() if name not in ("context", "fragments")
        )
        assert allocated == pytest.approx(one["allocated_bytes"], rel=0.05)


def test_a_model_is_the_same_out_of_its_file(tmp_path: Path) -> None:
    for name in ("gpt2-124m", "qwen3-8b"):
        path = tmp_path / f"{name}.toml"
        path.write_text(model_toml(load_config(name)))
        assert load_config(str(path)) == load_config(name)


def test_what_people_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["--model", "7B", "--gpus", "8", "--global-batch", "64", "--tokens", "2T", "--price", "2"]) == 0
    )
    told = capsys.readouterr().out
    for text in ("6.74 B parameters, on 8 × h100-80g", "what nothing beats", "why not", "for 2T tokens"):
        assert text in told
    assert "torchrun --nproc-per-node 8" in told
    assert main(["--memory", "--gpus", "8"]) == 0
    told = capsys.readouterr().out
    assert "distributed optimizer" in told and "FULL_SHARD" in told and "671B" in told


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "llama2-70", "--gpus", "8"], "nearest presets: llama2-70b"),
        (["--model", "7B", "--gpus", "8", "--hardware", "a100-80"], "nearest: a100-80g"),
        (["--model", "7B", "--gpus", "8", "--hardware", "v100-32g"], "`dtype` must be one of"),
        (
            ["--model", "7B", "--gpus", "8", "--global-batch", "3", "--policy", "table"],
            "must be a multiple of",
        ),
        (["--model", "7B", "--gpus", "8", "--seq", "10000"], "positions of llama2-7b, but is 10000"),
    ],
)
def test_what_cannot_be_asked(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_scoring_is_one_of_the_questions(ask: Ask, tmp_path: Path) -> None:
    lines = SHIPPED.read_text(encoding="utf-8").splitlines()
    few = tmp_path / "runs.csv"
    few.write_text("\n".join(lines[:10]) + "\n", encoding="utf-8")
    said = ask("--score", str(few))
    assert said["overall"]["throughput"]["rows"] == len(said["rows"]) == 9
    assert said["overall"]["throughput"]["mean_absolute_percentage_error"] < 25
    assert main(["--score", str(tmp_path / "none.csv")]) != 0


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m triaxis.launch.plan --model tiny --gpus 1 --seq 64 --json | head -c 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and not done.stderr


def test_a_question_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--model", "7B"], ["--model", "7B", "--gpus", "8", "--tokens", "lots"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
    assert "such as 300B or 2T" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--model", "7B", "--gpus", "0"])
    assert "`--gpus` must be from 1 to 1,000,000, but is '0'" in capsys.readouterr().err


def test_one_name_for_all_programs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "triaxis.launch.cli", "plan", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "120"},
    )
    assert "--explain" in done.stdout
    wrong = subprocess.run(
        [sys.executable, "-m", "triaxis.launch.cli", "plam"], capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 2 and "nearest: plan" in wrong.stderr


def test_the_documents_figures_are_the_forms() -> None:
    text = (Path(__file__).parents[2] / "docs" / "memory.md").read_text(encoding="utf-8")
    states = list(model_states(load_config("llama2-7b"), 8, load_hardware("a100-80g")))
    assert len(states) == 13
    for one in states:
        cells = (one.parameters, one.gradients, one.optimizer, one.total - one.buffers)
        row = " | ".join([one.engine, one.name, *(f"{cell / 1e9:.1f}" for cell in cells)])
        assert f"| {row} |" in text
