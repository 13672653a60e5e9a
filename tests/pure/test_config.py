"""The rules of a run: what is settled, what is refused, in which words; the learning rate; the launcher's variables."""

from __future__ import annotations

import dataclasses
import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from triaxis.engine.config import ConfigError, RunConfig, learning_rate_at, warmup_steps_of
from triaxis.engine.rules import resolve
from triaxis.launch.environment import launch_warnings, read_launch
from triaxis.launch.flags import GROUPS, parse_flags
from triaxis.models.fields import with_fields
from triaxis.models.presets import PRESETS
from triaxis.parallel.pipeline.schedule import ScheduleName


def faults(world_size: int, **flags: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        resolve(RunConfig(**flags), world_size)
    return caught.value.faults


@pytest.mark.parametrize(
    ("flags", "world_size", "size", "microbatches", "global_batch"),
    [
        ({}, 1, 4, 1, 4),
        ({"pp": 2}, 8, 4, 4, 64),
        ({"global_batch": 48, "microbatches": 3}, 4, 4, 3, 48),
        ({"global_batch": 48, "per_device_train_batch_size": 2}, 4, 2, 6, 48),
        ({"global_batch": 8, "pp": 4}, 8, 1, 4, 8),
        ({"global_batch": 12}, 1, 4, 3, 12),
        ({"gradient_accumulation_steps": 5, "microbatches": 5}, 2, 4, 5, 40),
    ],
)
def test_any_two_of_the_batch_sizes_decide_the_third(
    flags: dict[str, Any], world_size: int, size: int, microbatches: int, global_batch: int
) -> None:
    run = resolve(RunConfig(**flags), world_size)
    assert (run.microbatch_size, run.microbatches, run.global_batch) == (size, microbatches, global_batch)


@pytest.mark.parametrize(
    ("flags", "world_size", "words"),
    [
        ({"tp": 3}, 3, ("`tp` must divide the 4 attention heads", "but is 3")),
        (
            {"tp": 2, "pp": 2, "dp": 2},
            4,
            ("tp × pp × dp = 8 but 4 processes were started",),
        ),
        ({"tp": 2}, 1, ("tp × pp = 2 but 1 process was started",)),
        ({"dp": 2}, 8, ("`world_size` must be dp 2 × tp 1 × pp 1 × cp 1 = 2, but is 8",)),
        ({"pp": 64}, 64, ("layers of tiny", "pp 64")),
        ({"pp": 2, "schedule": "interleaved", "virtual_stages": 99}, 2, ("pp 2 × virtual_stages 99 = 198",)),
        ({"virtual_stages": 2, "pp": 2}, 2, ("`virtual_stages` must be 1 with schedule 1f1b, but is 2",)),
        ({"schedule": "interleaved"}, 1, ("needs pp and virtual_stages of at least 2, but pp is 1",)),
        ({"cp": 2}, 2, ("`cp` must be 1, but is 2", "not available yet")),
        ({"ep": 2}, 2, ("`ep` must be 1 for a dense model",)),
        ({"zero": 4}, 1, ("`zero` must be 0, 1, 2 or 3, but is 4",)),
        ({"data_parallel": "fsdp", "zero": 1}, 1, ("`zero` must be 3 or left out",)),
        ({"data_parallel": "fsdp", "simulate": True}, 1, ("must be zero with --threads",)),
        (
            {"sp": True, "tp": 2, "seq": 127, "per_device_train_batch_size": 1},
            2,
            ("127 tokens must be a multiple of tp 2",),
        ),
        ({"model": "gpt2-124m", "seq": 2048}, 1, ("1024 positions of gpt2-124m, but is 2048",)),
        ({"model": "tinny"}, 1, ("'tinny'", "nearest presets: tiny")),
        ({"data": "no/such.jsonl"}, 1, ("`data` must be a file", "no/such.jsonl does not exist")),
        (
            {"data": "no/such.jsonl", "eval_data": "no/held.jsonl"},
            1,
            ("`eval_data` must be a file", "no/held.jsonl does not exist"),
        ),
        ({"data": "no/prefix"}, 1, ("no file no/prefix.bin and no file no/prefix.idx",)),
        ({"data": "a.jsonl", "data_path": "b.jsonl"}, 1, ("are a.jsonl and b.jsonl",)),
        ({"steps": 3, "num_train_epochs": 1.0}, 1, ("must not both be given, but are 3 and 1",)),
        ({"steps": 3, "warmup_steps": 3}, 1, ("less than steps 3", "at most 2")),
        ({"microbatches": 2, "gradient_accumulation_steps": 3}, 1, ("are 2 and 3",)),
        ({"global_batch": 10, "microbatches": 2}, 4, ("dp 4 = 8, but is 10",)),
        (
            {"global_batch": 9, "microbatches": 2, "per_device_train_batch_size": 4},
            1,
            ("`global_batch` must equal", "= 8, but is 9"),
        ),
        ({"accumulate_dtype": "bf16"}, 1, ("with dtype fp32", "--dtype bf16")),
        ({"seq": 0, "learning_rate": float("nan")}, 1, ("`seq` must be finite and more than 0, but is 0",)),
    ],
)
def test_a_wrong_run_is_refused_in_words(
    flags: dict[str, Any], world_size: int, words: tuple[str, ...]
) -> None:  # B20 and B31 (ep, cp above 1), B45, B50, B55
    text = "\n".join(faults(world_size, **flags))
    assert all(word in text for word in words), text


def test_all_faults_are_reported_together() -> None:  # B55, B131
    found = faults(8, tp=3, cp=2, model="tinny", data="x.jsonl", steps=1, num_train_epochs=1.0)
    assert len(found) == 5
    assert all("\n" not in fault for fault in found)


def test_stages_are_refused_exactly_where_there_are_too_few_layers() -> None:  # B50, B51
    """Every number of layers up to 24, 6 stages and 4 chunks: uneven cuts and any number of microbatches work."""
    for layers, pp, chunks in itertools.product(range(1, 25), range(1, 7), range(1, 5)):
        model = dataclasses.replace(PRESETS["tiny"], layers=layers)
        schedule = ScheduleName.INTERLEAVED if chunks > 1 else ScheduleName.ONE_F_ONE_B
        config = RunConfig(pp=pp, virtual_stages=chunks, schedule=schedule, microbatches=6)
        if pp * chunks <= layers and (chunks == 1 or pp > 1):
            assert resolve(config, pp, model).virtual_stages == chunks
            continue
        with pytest.raises(ConfigError) as caught:
            resolve(config, pp, model)
        numbers = f"pp {pp} × virtual_stages {chunks} = {pp * chunks}" if chunks > 1 else f"pp {pp} = {pp}"
        needs = f"pp is {pp} and virtual_stages is {chunks}"
        assert any(word in str(caught.value) for word in (numbers, needs)), str(caught.value)


def test_few_kv_heads_are_shared_by_more_tensor_ranks() -> None:
    model = with_fields(PRESETS["tiny"], heads=12, kv_heads=6, hidden_size=192, ffn_size=192)
    assert resolve(RunConfig(tp=12), 12, model).topology.tp == 12
    with pytest.raises(ConfigError, match=r"6 key/value heads .* but is 4$"):
        resolve(RunConfig(tp=4), 4, model)


def test_the_learning_rate_warms_up_and_decays() -> None:  # B35, N17
    def rate(number: int, decay: str = "cosine") -> float:
        return learning_rate_at(
            number - 1, total_steps=100, warmup_steps=10, peak=1e-3, minimum_ratio=0.1, decay=decay
        )

    assert rate(1) == pytest.approx(1e-4)
    assert rate(10) == pytest.approx(1e-3)
    assert rate(50) == pytest.approx(6.281e-4, abs=5e-8)
    assert rate(100) == pytest.approx(1e-4)
    assert rate(55, "linear") == pytest.approx(5.5e-4)
    assert rate(100, "constant") == pytest.approx(1e-3)


def test_warm_up_is_a_ratio_or_a_number_of_steps() -> None:
    assert warmup_steps_of(RunConfig(warmup_ratio=0.05), 100) == 5
    assert warmup_steps_of(RunConfig(warmup_steps=7), 100) == 7
    assert warmup_steps_of(RunConfig(), 100) == 0
    assert warmup_steps_of(RunConfig(warmup_ratio=1.0), 100) == 99


def test_every_flag_has_help_and_reads_with_hyphens_or_underscores() -> None:
    named = [name for helps in GROUPS.values() for name in helps]
    assert sorted(named) == sorted(field.name for field in dataclasses.fields(RunConfig))
    for spelling in ("--per_device_train_batch_size", "--per-device-train-batch-size"):
        config = parse_flags(
            [spelling, "3", "--sp", "--schedule", "interleaved", "--lr_scheduler_type", "linear"], True
        )
        assert config == RunConfig(
            per_device_train_batch_size=3, sp=True, schedule="interleaved", lr_scheduler_type="linear"
        )


@pytest.mark.parametrize(
    "flag",
    [
        "--attention_dropout",  # B21: there is none
        "--hf_checkpoint",  # --model_name_or_path
    ],
)
def test_a_flag_that_there_is_none_of_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_flags([flag, "x"], True)
    assert ended.value.code == 2
    assert f"there is no option {flag!r}" in capsys.readouterr().err


LAUNCHED = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


def test_no_launcher_is_one_process() -> None:  # B156
    assert read_launch({}).size == 1
    assert read_launch(LAUNCHED).rank == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"WORLD_SIZE": ""}, "`WORLD_SIZE` must be set"),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "`MASTER_ADDR`, `MASTER_PORT` must be set"),
        ({"WORLD_SIZE": "abc"}, "`WORLD_SIZE` must be a whole number, but is 'abc'"),
        ({"RANK": "2"}, "`RANK` must be less than WORLD_SIZE 2, but is 2"),
        ({"RANK": "-1"}, "`RANK` must be a whole number, but is '-1'"),
        (
            {"LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "2"},
            "`LOCAL_RANK` must be less than LOCAL_WORLD_SIZE 2, but is 4",
        ),
        ({"LOCAL_RANK": "4(x2)"}, r"`LOCAL_RANK` must be a whole number, but is '4\(x2\)'"),
        ({"MASTER_PORT": "99999"}, "`MASTER_PORT` must be from 1 to 65535"),
    ],
)
def test_a_launcher_that_is_broken_is_named(changes: dict[str, str], words: str) -> None:  # B155, B156
    with pytest.raises(ValueError, match=words):
        read_launch(LAUNCHED | changes)


def test_variables_that_hide_overlap_are_told() -> None:  # B165
    assert launch_warnings({"CUDA_DEVICE_MAX_CONNECTIONS": "8", "CUDA_LAUNCH_BLOCKING": "0"}) == []
    found = launch_warnings({"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_LAUNCH_BLOCKING": "1", "RANK": "0"})
    assert len(found) == 2
    assert all(re.match(r"warning: CUDA_\w+=1 is set: .*; unset it", line) for line in found)


def test_a_refused_run_ends_with_code_2_before_torch_is_imported(tmp_path: Path) -> None:  # B55
    program = (
        "import sys; from triaxis.launch.train import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--tp", "3"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "`tp` must divide" in done.stderr
