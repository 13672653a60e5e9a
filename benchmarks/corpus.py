"""Runs on a small and on a large JSONL file: what a rank's memory and a start take, with the cache made and there.

    OMP_NUM_THREADS=1 python benchmarks/corpus.py --ranks 4 --megabytes 200

A run is `triaxis train --model tiny` of five steps on as many processes, with a cache of its own in a temporary folder
(the texts are made there too). Memory is the most that any rank ever held, from its metrics.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SMALL_MEGABYTES = 1


def write_texts(path: Path, megabytes: int) -> Path:
    """Lines of some hundred bytes, none like another."""
    with path.open("w") as file:
        number = 0
        while file.tell() < megabytes * 2**20:
            words = " ".join(f"w{number * step % 9973}" for step in range(1, 120))
            file.write(json.dumps({"text": f"line {number}: {words}"}) + "\n")
            number += 1
    return path


def run(data: Path, folder: Path, ranks: int, *more: str) -> tuple[float, float]:
    """(seconds from start to end, MiB of the fullest rank)."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "triaxis.launch.train", "--model", "tiny", "--dp", str(ranks), "--seq", "512"]
    command += ["--data", str(data), "--steps", "5", "--per_device_train_batch_size", "1"]
    command += ["--save_strategy", "no", "--output-dir", str(folder), *more]
    environment = {**os.environ, "HOME": str(data.parent)}
    start, peaks = time.perf_counter(), dict[int, int]()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        for rank in children(process.pid):
            peaks[rank] = max(peaks.get(rank, 0), peak_kib(rank))
        time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"the run ended with {process.returncode}: {' '.join(command)}")
    return time.perf_counter() - start, max(peaks.values()) / 2**10


def children(process: int) -> list[int]:
    """Processes that a process started: under torchrun, the ranks. Who tokenizes is a rank's child."""
    try:
        return [int(one) for one in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def peak_kib(process: int) -> int:
    """The most that a process has held, without what its parent had; 0 where it is gone."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"^VmHWM:\s*(\d+) kB", status, re.MULTILINE)
    return int(found[1]) if found else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=200, help="of the large file (200)")
    parser.add_argument("--train", nargs=argparse.REMAINDER, default=[], help="further flags of the runs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="triaxis-corpus-") as name:
        folder = Path(name)
        small = write_texts(folder / "small.jsonl", SMALL_MEGABYTES)
        large = write_texts(folder / "large.jsonl", arguments.megabytes)
        for title, data in (
            (f"{SMALL_MEGABYTES} MB", small),
            (f"{arguments.megabytes} MB, first start", large),
            (f"{arguments.megabytes} MB, second start", large),
        ):
            seconds, memory = run(data, folder / title.replace(" ", "-"), arguments.ranks, *arguments.train)
            print(f"{title:24} {seconds:6.1f} s, {memory:6.0f} MiB in the fullest rank", flush=True)


if __name__ == "__main__":
    main()
