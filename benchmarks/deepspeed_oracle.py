"""DeepSpeed 0.19.8 as the oracle: the same JSON, weights and batches in both engines; their losses side by side.

python benchmarks/deepspeed_oracle.py            stages 0 to 3 on two ranks, fp32, ten steps
make peers                                       installs DeepSpeed into an environment of its own

Rows of one length with a loss at every token first; then rows of unequal lengths, where DeepSpeed takes the mean of
the microbatches' means and we the mean over the global batch's tokens, and again with its losses weighed by tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.run import find_python  # noqa: E402

RANKS, SEQUENCE, VOCABULARY = 2, 64, 257
WITHIN = 1e-5
TIMEOUT_SECONDS = 300


def deepspeed_python() -> str | None:
    """The interpreter that has DeepSpeed; None where there is none."""
    python = find_python("deepspeed", [], os.environ)
    check = "import importlib.util as u, sys; sys.exit(u.find_spec('deepspeed') is None)"
    done = subprocess.run([python, "-c", check], capture_output=True, check=False)
    return None if done.returncode else python


def make_model(folder: Path) -> None:
    """A small Llama with random weights, as transformers saves it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=SEQUENCE, **sizes, **heads)
    LlamaForCausalLM(config).save_pretrained(folder)


def make_data(path: Path, *, even: bool) -> None:
    """One long document, or a document for each row, some short."""
    letters = random.Random(3)
    lengths = [40_000] if even else [letters.randint(3, SEQUENCE - 2) for _ in range(400)]
    texts = ["".join(letters.choices("abcdefgh \n", k=length)) for length in lengths]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def deepspeed_config(stage: int) -> dict[str, Any]:
    update = {"lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "torch_adam": True}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": update},
    }


def our_losses(folder: Path, case: dict[str, Any]) -> list[float]:
    """As a person would run it: the JSON with --deepspeed, the model's folder, the data."""
    (folder / "ds.json").write_text(json.dumps(case["deepspeed"]))
    out = folder / f"ours-{case['deepspeed']['zero_optimization']['stage']}-{case['pack']}"
    line = ["--model_name_or_path", case["folder"], "--data_path", case["data"], "--deepspeed", "ds.json"]
    line += ["--seq", str(case["seq"]), "--pack", str(case["pack"]), "--max_steps", str(case["steps"])]
    line += ["--lr_scheduler_type", "constant", "--eval_batches", "0", "--output-dir", str(out)]
    command = [sys.executable, "-m", "triaxis.launch.run", "-n", str(RANKS), *line]
    _run(command, folder)
    rows = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row)["loss"] for row in rows]


def their_losses(python: str, folder: Path, case: dict[str, Any]) -> list[float]:
    (folder / "case.json").write_text(json.dumps(case))
    answer = folder / "answer.json"
    answer.unlink(missing_ok=True)
    launch = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    peer = str(Path(__file__).with_name("deepspeed_peer.py"))
    _run([*launch, peer, str(folder / "case.json"), str(answer)], folder)
    losses: list[float] = json.loads(answer.read_text())["losses"]
    return losses


def _run(command: list[str], folder: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:6])} … failed:\n{done.stderr[-3000:]}")


def difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest over the steps, relative."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def compare(python: str, stages: Sequence[int], steps: int) -> list[dict[str, Any]]:
    """A row for each stage and kind of data: losses of both, and how far apart they are."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        for even in (True, False):
            data = folder / f"even-{even}.jsonl"
            make_data(data, even=even)
            for stage in stages if even else stages[-1:]:
                case = {
                    "folder": str(folder / "model"),
                    "data": str(data),
                    "seq": SEQUENCE,
                    "pack": even,
                    "steps": steps,
                    "vocab_size": VOCABULARY,
                    "deepspeed": deepspeed_config(stage),
                }
                ours = our_losses(folder, case)
                for by_tokens in (False,) if even else (False, True):
                    theirs = their_losses(python, folder, case | {"by_tokens": by_tokens})
                    rows = {"stage": stage, "even": even, "by_tokens": by_tokens}
                    found.append(rows | {"ours": ours, "theirs": theirs, "apart": difference(ours, theirs)})
    return found


def told(row: dict[str, Any]) -> str:
    kind = "a loss at every token" if row["even"] else "rows of unequal lengths"
    weighed = ", DeepSpeed's losses weighed by tokens" if row["by_tokens"] else ""
    first, last = row["ours"][0], row["ours"][-1]
    losses = f"{first:.6f} → {last:.6f} (DeepSpeed {row['theirs'][-1]:.6f})"
    return f"stage {row['stage']}, {kind}{weighed}: {losses}, apart {row['apart']:.1e}"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stage", action="append", type=int, choices=range(4), help="may be repeated (all)")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the rows there")
    arguments = parser.parse_args(words)
    python = deepspeed_python()
    if python is None:
        print("DeepSpeed is not installed; make peers installs it into an environment of its own")
        return 0
    rows = compare(python, arguments.stage or [0, 1, 2, 3], arguments.steps)
    for row in rows:
        print(told(row))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1))
    agreed = all(row["apart"] <= WITHIN for row in rows if row["even"] or row["by_tokens"])
    return 0 if agreed else 1


if __name__ == "__main__":
    sys.exit(main())
