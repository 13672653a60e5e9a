"""The launch lines that articles print, with the module's name for the script's: on a small model, data and machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from tests.patience import PATIENCE_SECONDS
from tests.pure.test_deepspeed import STAGE3
from tests.ranks.test_huggingface import make
from tests.ranks.test_huggingface_runs import add_tokenizer, chats

pytestmark = pytest.mark.processes
RANKS = 2
MODULE = ["-m", "triaxis.launch.train"]
FIRST = """--model_name_or_path model --data_path ./data/train.jsonl --bf16 --deepspeed ds_config_z3.json
    --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --learning_rate 2e-5 --num_train_epochs 3
    --warmup_ratio 0.03 --lr_scheduler_type cosine --weight_decay 0.01 --save_strategy epoch --output_dir ./output
    --gradient_checkpointing true --logging_steps 10 --report_to tensorboard"""
SECOND = """--model_name_or_path model --deepspeed ds_config_z3.json --per_device_train_batch_size 2
    --gradient_accumulation_steps 8 --learning_rate 2e-5 --num_train_epochs 3 --output_dir ./output
    --save_strategy steps --save_steps 2 --save_total_limit 2 --data_path ./data/train.jsonl"""


@pytest.mark.parametrize("line", [FIRST, pytest.param(SECOND, marks=pytest.mark.full)], ids=["1", "2"])
def test_a_line_of_an_article_trains_and_its_model_is_read_by_transformers(line: str, tmp_path: Path) -> None:
    """Under torchrun as srun starts it, one a node; the JSON as it is but for its batch, which two ranks make 32."""
    make("qwen2-tied", tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    (tmp_path / "data").mkdir()
    chats(tmp_path / "data" / "train.jsonl", count=128)
    (tmp_path / "ds_config_z3.json").write_text(json.dumps(STAGE3 | {"train_batch_size": 16 * RANKS}))
    torchrun = ["-m", "torch.distributed.run", "--nnodes=1", f"--nproc_per_node={RANKS}", "--rdzv_id=7"]
    meeting = ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
    done = subprocess.run(
        [sys.executable, *torchrun, *meeting, *MODULE, *line.split(), "--seq", "64"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ZeRO-3, bf16" in done.stderr and "8 microbatches of 2 a rank" in done.stderr
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "output" / "hf", dtype="auto")
    assert exported.dtype == torch.bfloat16
    assert all(bool(torch.isfinite(parameter).all()) for parameter in exported.parameters())
    before = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    moved = [not torch.equal(a, b) for a, b in zip(exported.parameters(), before.parameters(), strict=True)]
    assert any(moved), "what is exported is what was trained"
