"""DeepSpeed's JSON and the Trainer's flags: honoured, named as changing nothing, or refused by the right key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from triaxis.engine.config import RunConfig
from triaxis.launch.flags import parse_flags
from triaxis.launch.foreign.deepspeed import KEYS, read_deepspeed
from triaxis.launch.foreign.keys import combined, settled
from triaxis.launch.foreign.trainer_flags import SWITCHES, VALUES, translated

STAGE3 = {
    "train_batch_size": 128,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 8,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "wall_clock_breakdown": False,
}
"""As people have it (an article's ds_config_z3.json)."""


def written(folder: Path, values: Any) -> str:
    path = folder / "ds.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return str(path)


def test_the_file_that_people_have_is_read_whole(tmp_path: Path) -> None:
    found = read_deepspeed(written(tmp_path, STAGE3))
    assert found.implied == {"save_hf"}
    assert {name: value for name, value in found.values.items() if name != "save_hf"} == {
        "global_batch": 128,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 8,
        "zero": 3,
        "offload_optimizer": "cpu",
        "offload_param": "cpu",
        "dtype": "bf16",
        "max_grad_norm": 1.0,
    }
    told = "\n".join(found.notes)
    assert "`zero_optimization.overlap_comm`" in told and "`wall_clock_breakdown`" in told


def test_gather_on_save_exports_beside_the_checkpoints(tmp_path: Path) -> None:
    """N23: true is the whole weights, false a line that says how to get them; a flag of one's own wins."""
    path = written(tmp_path, STAGE3)
    assert parse_flags(["--deepspeed", path, "--output_dir", "out"], speaks=False).save_hf == "out/hf"
    assert parse_flags(["--deepspeed", path], speaks=False).save_hf == "output/hf"
    assert parse_flags(["--deepspeed", path, "--save_hf", "mine"], speaks=False).save_hf == "mine"
    assert parse_flags(["--deepspeed", path, "--save_strategy", "no"], speaks=False).save_hf is None
    key = "stage3_gather_16bit_weights_on_model_save"
    found = read_deepspeed(written(tmp_path, {"zero_optimization": {key: False}}))
    assert not found.values and "triaxis convert OUTPUT --to hf DIR" in found.notes[0]


CONFIGS = json.loads((Path(__file__).parents[1] / "deepspeed_configs.json").read_text())
HONOURED = [(row["config"], row["fields"]) for row in CONFIGS["honoured"]]
REFUSED = [(row["config"], row["says"]) for row in CONFIGS["refused"]]


@pytest.mark.parametrize(("values", "expected"), HONOURED, ids=lambda value: json.dumps(value)[:60])
def test_what_is_honoured(values: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    found = settled([read_deepspeed(written(tmp_path, values))])
    assert {name: value for name, value in found.values.items() if name not in found.implied} == expected
    RunConfig(**found.values)  # every value is of a field of a run


@pytest.mark.parametrize(("values", "words"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_cannot_be_honoured_is_refused_by_its_key(values: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        settled([read_deepspeed(written(tmp_path, values))])
    assert words in str(caught.value)


def test_all_faults_are_told_at_once_and_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        settled([read_deepspeed(written(tmp_path, {"amp": {"enabled": True}, "gradient_cliping": 1}))])
    assert str(caught.value).count("\n") == 1
    with pytest.raises(ValueError, match="No such file"):
        read_deepspeed(str(tmp_path / "none.json"))


def test_flags_fill_what_is_auto_and_a_conflict_names_both(tmp_path: Path) -> None:
    path = written(tmp_path, STAGE3 | {"gradient_clipping": "auto"})
    config = parse_flags(
        ["--deepspeed", path, "--max_grad_norm", "0.5", "--learning_rate", "2e-5"], speaks=False
    )
    assert (config.max_grad_norm, config.zero, config.dtype, config.learning_rate) == (0.5, 3, "bf16", 2e-5)
    with pytest.raises(
        ValueError, match=r"--zero 2 and 3 \(`zero_optimization.stage` of /.*\) must not differ"
    ):
        combined(settled([read_deepspeed(path)]), {"zero": 2})
    with pytest.raises(SystemExit):
        parse_flags(["--deepspeed", path, "--zero", "2"], speaks=False)


def test_no_key_is_known_twice() -> None:
    assert {"zero_optimization", "bf16", "optimizer", "scheduler"} <= set(KEYS)
    assert not set(VALUES) & set(SWITCHES)


LINES: list[tuple[str, dict[str, Any]]] = [
    ("--bf16", {"dtype": "bf16"}),
    ("--bf16 True --learning_rate 2e-5", {"dtype": "bf16", "learning_rate": 2e-5}),
    ("--bf16 false", {"dtype": "fp32"}),
    ("--max_steps 30 --warmup_ratio 0.03", {"steps": 30, "warmup_ratio": 0.03}),
    ("--max_steps 30 --warmup_steps 0.1", {"steps": 30, "warmup_ratio": 0.1}),  # N17
    ("--max_steps 30 --warmup_steps 3", {"steps": 30, "warmup_steps": 3}),
    ("--max-steps -1", {"steps": None}),
    ("--gradient_checkpointing true --logging_steps 5", {"recompute": True, "logging_steps": 5}),
    ("--gradient_checkpointing=False", {"recompute": False}),
    ("--max_seq_length 256", {"seq": 256}),
    ("--resume_from_checkpoint True", {"resume": "auto"}),
    ("--resume_from_checkpoint run/checkpoints/step-00000003", {"resume": "run/checkpoints/step-00000003"}),
    ("--optim adamw_torch_fused", {"optimizer": "adamw"}),
    ("--eval_strategy no", {"eval_batches": 0}),
    ("--eval_strategy steps --eval_steps 4", {"eval_steps": 4}),
    ("--torch_dtype bfloat16", {"dtype": "bf16"}),
    ("--fp16 --bf16 false", {"dtype": "fp16"}),
    ("--torch_dtype float16", {"dtype": "fp16"}),
    ("--lr_scheduler_type constant_with_warmup", {"lr_scheduler_type": "constant"}),
    ("--lr_scheduler_type cosine --report_to tensorboard", {"report_to": "tensorboard"}),
    ("--fsdp full_shard,auto_wrap", {"data_parallel": "fsdp"}),
    ("--ddp_timeout 1800 --local_rank 3", {"timeout_seconds": 1800.0}),
    (
        "--save_strategy epoch --save_total_limit 5 --output_dir ./output",
        {"save_strategy": "epoch", "output_dir": "./output"},
    ),
]


@pytest.mark.parametrize(
    ("line", "expected"), LINES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_the_trainers_flags_mean_the_same(line: str, expected: dict[str, Any]) -> None:
    config = parse_flags(line.split(), speaks=False)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--fp16 --bf16 true", "`--bf16` and `--fp16` must not both be given"),
        ("--optim paged_adamw_8bit", "is paged_adamw_8bit, which is not available"),
        ("--eval_strategy epoch", "must be no or steps"),
        ("--fsdp hybrid_shard", "has hybrid_shard, which is not available"),
        ("--torch_dtype float8", "must be float32, bfloat16, float16 or auto, but is float8"),
        ("--report_to wandb", "--report-to"),
        ("--lora_rank 8", "there is no option"),
    ],
)
def test_what_has_no_meaning_here_is_named(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_flags(line.split(), speaks=True)
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_what_changes_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    parse_flags(["--attn_implementation", "sdpa", "--tf32", "True"], speaks=True)
    told = capsys.readouterr().err
    assert "note: --attn-implementation" in told and "note: --tf32" in told
    line = translated(["--steps", "3", "--", "--bf16"])
    assert line.words == ("--steps", "3", "--", "--dtype", "bf16")


def test_the_articles_lines_are_read_as_they_stand(tmp_path: Path) -> None:
    path = written(tmp_path, STAGE3)
    line = (
        f"--model_name_or_path Qwen/Qwen2.5-7B --data_path ./data/train.jsonl --bf16 --deepspeed {path} "
        "--per_device_train_batch_size 2 --gradient_accumulation_steps 8 --learning_rate 2e-5 --num_train_epochs 3 "
        "--warmup_ratio 0.03 --lr_scheduler_type cosine --weight_decay 0.01 --save_strategy epoch "
        "--output_dir ./output --gradient_checkpointing true --logging_steps 10 --report_to tensorboard"
    )
    config = parse_flags(line.split(), speaks=False)
    assert (config.zero, config.recompute, config.num_train_epochs, config.data_path) == (
        3,
        True,
        3.0,
        "./data/train.jsonl",
    )
