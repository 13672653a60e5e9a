"""What a rank's process holds on a CPU besides its model: measured by training a model that is next to nothing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from triaxis.engine.run.metrics import METRICS_NAME

MODEL: Final = {
    "vocab_size": 257,
    "hidden_size": 16,
    "layers": 2,
    "heads": 2,
    "kv_heads": 2,
    "ffn_size": 24,
    "max_positions": 64,
}
"""Its tensors take 0.2 MB with their gradients and moments."""
FLAGS: Final = {
    "seq": 32,
    "per_device_train_batch_size": 1,
    "steps": 2,
    "eval_batches": 0,
    "save_strategy": "no",
}
MOST_RANKS: Final = 2  # of more ranks each holds the same


def measure_context(ranks: int, timeout_seconds: float = 180.0) -> float:
    """The peak of rank 0's process in a real run, as its metrics have it. Raises RuntimeError if the run fails.

    It holds the interpreter, torch and this engine, the built-in text and its reader, the groups' threads and buffers,
    and what the first steps load (kernels, the optimizer's modules).
    """
    ranks = min(ranks, MOST_RANKS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, output = folder / "model.json", folder / "run"
        model.write_text(json.dumps(MODEL), encoding="utf-8")
        flags = {"model": model, "output-dir": output, "dp": ranks, **FLAGS}
        command = [sys.executable, "-m", "triaxis.launch.train"]
        command += [text for flag, value in flags.items() for text in (f"--{flag}", str(value))]
        _run(command, ranks, folder / "log", time.monotonic() + timeout_seconds)
        row = (output / METRICS_NAME).read_text(encoding="utf-8").splitlines()[-1]
        return float(json.loads(row)["peak_mem_bytes"])


def _run(command: list[str], ranks: int, log: Path, deadline: float) -> None:
    """The ranks of one run, started as torchrun does, without its own process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    started = []
    try:
        with log.open("w", encoding="utf-8") as said:
            for rank in range(ranks):
                environment = {**os.environ, **address, **threads, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                started.append(subprocess.Popen(command, env=environment, stdout=said, stderr=said))
        for process in started:
            if process.wait(max(0.0, deadline - time.monotonic())):
                lines = log.read_text(encoding="utf-8").strip().splitlines() or ["it said nothing"]
                raise RuntimeError(f"the run that measures `context_bytes` failed: {lines[-1]}")
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"the run that measures `context_bytes` was not over in time: {error}") from error
    finally:
        for process in started:
            process.kill()
            process.wait()
