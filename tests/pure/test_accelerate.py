"""FSDP's and Accelerate's files, and what `accelerate launch` leaves in the environment: honoured or refused by key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from triaxis.engine.config import RunConfig
from triaxis.launch.flags import parse_flags, train_parser
from triaxis.launch.foreign.accelerate import read_accelerate, read_environment
from triaxis.launch.foreign.fsdp import read_fsdp_config
from triaxis.launch.foreign.keys import Reading, settled
from triaxis.launch.foreign.trainer_flags import SWITCHES, VALUES

CONFIGS = json.loads((Path(__file__).parents[1] / "accelerate_configs.json").read_text())


def rows(name: str, *keys: str) -> Any:
    return pytest.mark.parametrize(
        keys, [tuple(row.values()) for row in CONFIGS[name]], ids=lambda value: str(value)[:50]
    )


def accelerate(text: str, folder: Path) -> Reading:
    path = folder / "accelerate.yaml"
    path.write_text(text)
    return settled([read_accelerate(str(path))])


@rows("accelerate", "text", "expected")
def test_an_accelerate_file_is_honoured(text: str, expected: dict[str, Any], tmp_path: Path) -> None:
    found = accelerate(text, tmp_path)
    assert found.values == expected
    RunConfig(**found.values)


@rows("accelerate_refused", "text", "words")
def test_an_accelerate_file_is_refused_by_its_key(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        accelerate(text, tmp_path)
    assert words in str(caught.value)


@rows("fsdp", "config", "expected")
def test_an_fsdp_config_is_honoured(config: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "fsdp.json"
    path.write_text(json.dumps(config))
    for given in (str(path), json.dumps(config)):
        assert settled([read_fsdp_config(given)]).values == expected


@rows("fsdp_refused", "config", "words")
def test_an_fsdp_config_is_refused_by_its_key(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        settled([read_fsdp_config(json.dumps(config))])
    assert words in str(caught.value)


@rows("environments", "variables", "expected")
def test_the_environment_of_accelerate_launch_is_honoured(
    variables: dict[str, str], expected: dict[str, Any]
) -> None:
    found = read_environment(variables)
    assert found is not None and settled([found]).values == expected
    config = parse_flags([], speaks=False, environment=variables)
    assert {name: getattr(config, name) for name in expected} == expected


def test_without_accelerate_nothing_is_read() -> None:
    assert read_environment({"FSDP_VERSION": "2", "PATH": "/bin"}) is None


def test_a_deepspeed_file_that_accelerate_names_is_read(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, "fp17": {}}))
    text = f"distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: {tmp_path}/ds.json\n"
    with pytest.raises(ValueError, match=r"ds.json: `fp17` is no key that is known; nearest: `fp16`"):
        accelerate(text, tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    assert accelerate(text, tmp_path).keys == {"zero": f"`zero_optimization.stage` of {tmp_path}/ds.json"}


def test_files_that_differ_are_both_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"bf16": {"enabled": True}, "gradient_clipping": 1.0}))
    path = tmp_path / "accelerate.yaml"
    path.write_text(
        "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n  gradient_clipping: 0.5\n"
    )
    with pytest.raises(SystemExit):
        parse_flags(["--deepspeed", str(tmp_path / "ds.json"), "--accelerate_config", str(path)], speaks=True)
    told = capsys.readouterr().err
    assert f"1.0 (`gradient_clipping` of {tmp_path}/ds.json)" in told
    assert f"0.5 (`deepspeed_config.gradient_clipping` of {path}) must not differ" in told
    assert "dtype" not in told, "equal values are no fault"


LINES: list[tuple[str, dict[str, Any]]] = [
    ("--fsdp --bf16", {"data_parallel": "fsdp", "dtype": "bf16"}),
    ("--fsdp true", {"data_parallel": "fsdp"}),
    ("--fsdp=shard_grad_op,auto_wrap", {"zero": 2}),
    ("--fsdp no_shard", {"zero": 0}),
    ("--fsdp=full_shard,offload", {"data_parallel": "fsdp", "zero": 3, "offload_param": "cpu"}),
    ('--fsdp full_shard --fsdp_config {"activation_checkpointing":true}', {"recompute": True}),
]


@pytest.mark.parametrize(("line", "expected"), LINES, ids=[line for line, _ in LINES])
def test_the_trainers_fsdp_flags(line: str, expected: dict[str, Any]) -> None:
    config = parse_flags(line.split(), speaks=False)
    assert {name: getattr(config, name) for name in expected} == expected


def test_every_flag_of_training_arguments_is_known() -> None:
    """The fields of transformers 5.24's class, and those of earlier versions that launch lines still have."""
    known = {*train_parser("triaxis train", "")._option_string_actions, *VALUES, *SWITCHES}
    names = CONFIGS["trainer_arguments"]
    assert len(names) > 130
    assert [name for name in names if f"--{name.replace('_', '-')}" not in known] == []
