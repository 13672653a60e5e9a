"""What is suggested instead of a refused run would start: put to every rule, and to brute force."""

from __future__ import annotations

import json
import random
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from triaxis.engine.advice import bubble_warning, flags_of, resolve_or_advise
from triaxis.engine.config import ConfigError, RunConfig
from triaxis.engine.rules import resolve
from triaxis.launch.flags import parse_flags
from triaxis.models.presets import PRESETS
from triaxis.parallel.pipeline.schedule import ScheduleName

START = re.compile(r"  (?:torchrun --nproc-per-node (\d+) -m triaxis\.launch\.train|triaxis train)(.*)")


def told(world_size: int, **flags: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_or_advise(RunConfig(**flags), world_size)
    return str(caught.value)


def starts(text: str) -> list[tuple[RunConfig, int]]:
    """The runs that a refusal suggests, read back as a person would type them, and their numbers of processes."""
    found = []
    for count, flags in START.findall(text):
        config = parse_flags(shlex.split(flags), True)
        threads = config.tp * config.pp * (config.dp or 1)
        found.append((config, int(count) if count else threads if config.simulate else 1))
    return found


def test_28_heads_on_8_processes() -> None:
    for tp in (8, 7):
        text = told(8, model="qwen2.5-7b", tp=tp, dtype="bf16")
        assert (
            "torchrun --nproc-per-node 8 -m triaxis.launch.train --model qwen2.5-7b --tp 4 --dtype bf16"
            in text
        )
        assert not re.search("7 or 14|4 or 8", text)


def test_6_processes_for_a_model_that_has_no_third() -> None:
    text = told(6, tp=2, pp=2)
    assert [(one.tp, one.pp, size) for one, size in starts(text)] == [(2, 2, 4), (2, 3, 6)]
    assert "tp 3" not in text


def test_three_ways_out_of_too_few_processes() -> None:
    text = told(1, tp=2, pp=2)
    assert [(one.tp, one.pp, one.simulate, size) for one, size in starts(text)] == [
        (2, 2, False, 4), (1, 1, False, 1), (2, 2, True, 4),
    ]  # fmt: skip
    text = told(1, tp=2, dp=2, data_parallel="fsdp")
    assert "--threads" not in text, "torch's fully_shard has no threads"


def test_a_launch_line_is_only_given_where_nothing_else_is_wrong() -> None:
    text = told(8, model="qwen2.5-7b", tp=8, data="none.jsonl")
    assert "a layout that passes, once the rest is mended: --tp 4" in text
    assert not starts(text)


@pytest.mark.parametrize(
    ("flags", "world_size", "change"),
    [
        ({"global_batch": 10, "microbatches": 2}, 4, "--global_batch 8"),
        ({"model": "gpt2-124m", "seq": 2048}, 1, "--seq 1024"),
        ({"sp": True, "tp": 2, "seq": 127, "global_batch": 1}, 2, "--tp 2 --sp --global_batch 1"),
        ({"schedule": "interleaved"}, 1, "triaxis train\n"),
        ({"pp": 64, "tp": 1}, 64, "--pp 8"),
        ({"dp": 2}, 8, "launch.train --dp 2\n  torchrun --nproc-per-node 8 -m triaxis.launch.train\n"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_changed_is_the_nearest(flags: dict[str, Any], world_size: int, change: str) -> None:
    assert change in told(world_size, **flags) + "\n"


def test_advice_is_about_the_folders_model(tmp_path: Path) -> None:
    """A model that transformers builds is whole on each rank; the default model would be cut."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "stablelm", **sizes}))
    (tmp_path / "model.safetensors").touch()
    text = told(4, model_name_or_path=str(tmp_path), tp=2, dp=2)
    assert "`tp` must be 1 for" in text
    assert [(one.tp, one.dp, size) for one, size in starts(text)] == [(1, None, 4)]


DRAWS = {
    "model": ["tiny", "small", "gpt2-124m", "qwen2.5-0.5b", "qwen2.5-7b", "llama2-7b", "llama3-8b"],
    "tp": [1, 2, 3, 4, 5, 7, 8, 16],
    "pp": [1, 1, 2, 3, 4, 6, 64],
    "dp": [None, None, 1, 2, 3],
    "seq": [128, 127, 1024, 3000],
    "sp": [False, True],
    "schedule": ["1f1b", "gpipe", "interleaved"],
    "virtual_stages": [None, None, 2, 3],
    "global_batch": [None, None, 7, 12, 64],
    "microbatches": [None, 2, 3],
    "per_device_train_batch_size": [None, None, 1, 4],
    "data_parallel": ["zero", "zero", "fsdp"],
    "zero": [None, None, 2],
}


def test_whatever_is_suggested_passes_every_rule() -> None:
    """900 random runs: each suggestion starts, and where there is none, no layout of these ranks would do."""
    draw = random.Random(5)
    refused = answered = 0
    for _ in range(900):
        config = RunConfig(**{name: draw.choice(values) for name, values in DRAWS.items()})
        world_size = draw.choice([1, 2, 3, 6, 8, 12])
        try:
            resolve_or_advise(config, world_size)
        except ConfigError as error:
            refused += 1
            found = starts(str(error))
            answered += bool(found)
            for one, size in found:
                resolve(one, size)
            if not found:
                assert not any_layout(config, world_size), str(error)
    assert refused > 500 and answered > 0.95 * refused


def any_layout(config: RunConfig, world_size: int) -> bool:
    """Whether these ranks could start the model at all in one of its layouts, the flags of its batch kept."""
    for tp in range(1, world_size + 1):
        for pp in range(1, world_size // tp + 1):
            kept = {
                name: getattr(config, name) for name in ("model", "seq", "global_batch", "sp", "microbatches")
            }
            try:
                resolve(RunConfig(tp=tp, pp=pp, **kept), world_size)
            except ConfigError:
                continue
            return True
    return False


def test_flags_come_back_as_they_were() -> None:
    config = RunConfig(
        tp=2, sp=True, pack=False, simulate=True, model="small", save_minutes=2.5, schedule="gpipe"
    )
    assert parse_flags(flags_of(config), True) == config


@pytest.mark.parametrize(("saving", "said"), [
    ({"save_steps": 5, "save_minutes": 3.0}, "must not both be given, but are 5 and 3; leave one out"),
    ({"save_best": True, "eval_batches": 0}, "give --eval_steps and --eval_batches"),
    ({"save_best": True, "eval_steps": 5, "eval_batches": 0}, "give --eval_batches"),
])  # fmt: skip
def test_advice_about_saving_works(saving: dict[str, Any], said: str) -> None:
    assert told(1, **saving).endswith(said)


def test_a_large_bubble_is_told_with_what_mends_it() -> None:
    config = RunConfig(pp=4, microbatches=2)
    warning = bubble_warning(config, resolve(config, 4))
    assert warning is not None and "pipeline of 4 stages waits 60% of the time with 2 microbatches" in warning
    assert "--microbatches 6" in warning
    mended = RunConfig(pp=4, microbatches=6)
    assert bubble_warning(mended, resolve(mended, 4)) is None
    default = RunConfig(pp=4)
    assert bubble_warning(default, resolve(default, 4)) is None
    filled = RunConfig(pp=4, microbatches=2, schedule=ScheduleName.ZB_H1)
    assert bubble_warning(filled, resolve(filled, 4)) is None
    deep = RunConfig(
        pp=4, microbatches=4, schedule="interleaved", virtual_stages=1 + (PRESETS["tiny"].layers >= 8)
    )
    if PRESETS["tiny"].layers >= 8:
        assert bubble_warning(deep, resolve(deep, 4)) is None
