"""What a rank imports until its first step is done: a second of CPU a rank, eight ranks a machine, every restart."""

import subprocess
import sys
from pathlib import Path

MAIN = """
import sys
from triaxis.launch.train import main
code = main(sys.argv[1:])
print("late:", *sorted({"torch._dynamo", "torch._inductor", "sympy", "torch.distributed.fsdp"} & set(sys.modules)))
sys.exit(code)
"""


def test_a_rank_starts_without_torchs_compiler(tmp_path: Path) -> None:
    words = "--model tiny --data stdlib --seq 16 --per_device_train_batch_size 1 --steps 1 --save_strategy no"
    ran = subprocess.run(
        [sys.executable, "-c", MAIN, *words.split(), "--output-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "late:"
