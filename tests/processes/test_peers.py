"""DeepSpeed and Accelerate themselves, where `make peers` has installed them: launchers, keys and losses."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import deepspeed_oracle
from tests.patience import PATIENCE_SECONDS
from triaxis.launch.foreign.accelerate import ACCELERATE_KEYS
from triaxis.launch.foreign.deepspeed import KEYS
from triaxis.launch.foreign.deepspeed_zero import ZERO
from triaxis.launch.foreign.fsdp import FSDP_KEYS

PYTHON = deepspeed_oracle.deepspeed_python()
pytestmark = [
    pytest.mark.processes,
    pytest.mark.full,
    pytest.mark.skipif(
        PYTHON is None, reason="make peers installs DeepSpeed and Accelerate; neither is here"
    ),
]

SMALL = ["--seq", "16", "--per_device_train_batch_size", "1", "--eval_batches", "0", "--max_steps", "2"]


def program(name: str) -> str:
    assert PYTHON is not None
    return str(Path(PYTHON).with_name(name))


def run(command: list[str], folder: Path) -> str:
    """What it says; it must end well."""
    assert PYTHON is not None
    paths = [str(Path(PYTHON).parent), os.environ["PATH"]]
    variables = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PATH": os.pathsep.join(paths)}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def losses(folder: Path) -> list[float]:
    return [json.loads(row)["loss"] for row in (folder / "metrics.jsonl").read_text().splitlines()]


def test_deepspeeds_losses_are_ours() -> None:
    assert PYTHON is not None
    for row in deepspeed_oracle.compare(PYTHON, [0, 1, 2, 3], 10):
        if row["even"] or row["by_tokens"]:
            assert row["apart"] < 1e-5, deepspeed_oracle.told(row)
        else:
            assert row["apart"] > 1e-4, "a mean of means is another loss, or the comparison sees nothing"


def asked(code: str) -> Any:
    assert PYTHON is not None
    done = subprocess.run(
        [PYTHON, "-c", code], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_key_of_deepspeed_is_known() -> None:
    found = asked(
        "import json; from deepspeed.runtime.zero.config import DeepSpeedZeroConfig as Z\n"
        "names = [n for k, f in Z.model_fields.items() for n in (k, f.alias) if n]\n"
        "from deepspeed.runtime.precision_config import DeepSpeedBF16Config as B, DeepSpeedFP16Config as F\n"
        "from deepspeed.monitor.config import DeepSpeedMonitorConfig as M\n"
        "print(json.dumps({'zero': names, 'bf16': list(B.model_fields), 'monitor': list(M.model_fields)}))"
    )
    assert [name for name in found["zero"] if name not in ZERO] == []
    assert [name for name in found["monitor"] if name not in KEYS] == []
    assert len(found["zero"]) > 40 and len(found["bf16"]) > 3


def test_every_key_of_accelerate_is_known() -> None:
    found = asked(
        "import json; from accelerate.commands.config.config_args import ClusterConfig as C\n"
        "from accelerate.commands.launch import launch_command_parser as p\n"
        "flags = [o[2:] for a in p()._actions for o in a.option_strings if o.startswith('--fsdp_')]\n"
        "print(json.dumps({'cluster': list(C.__dataclass_fields__), 'fsdp': flags}))"
    )
    assert [name for name in found["cluster"] if name not in ACCELERATE_KEYS] == []
    assert [name for name in found["fsdp"] if name not in FSDP_KEYS] == []


def test_the_deepspeed_launcher_starts_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        json.dumps({"zero_optimization": {"stage": 3}, "gradient_clipping": 0.5})
    )
    train = ["--module", "triaxis.launch.train", *SMALL, "--deepspeed", "ds.json", "--output_dir", "out"]
    said = run([program("deepspeed"), "--num_gpus", "2", "--master_port", "29631", *train], tmp_path)
    assert "on 2 ranks (dp 2" in said and "ZeRO-3" in said and len(losses(tmp_path / "out")) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("distributed_type: FSDP\nuse_cpu: true\nfsdp_config:\n  fsdp_version: 2\n", "fully_shard, fp32"),
        (
            "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n  zero_stage: 3\n"
            "  gradient_accumulation_steps: 2\n",
            "ZeRO-3, bf16",
        ),
    ],
    ids=["fsdp", "deepspeed"],
)
def test_accelerate_launch_starts_the_ranks(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "accelerate.yaml").write_text(f"num_processes: 2\nnum_machines: 1\n{text}")
    start = [
        program("accelerate"),
        "launch",
        "--config_file",
        "accelerate.yaml",
        "--main_process_port",
        "29632",
    ]
    said = run([*start, "-m", "triaxis.launch.train", *SMALL, "--output_dir", "out"], tmp_path)
    assert "on 2 ranks (dp 2" in said and words in said and len(losses(tmp_path / "out")) == 2
