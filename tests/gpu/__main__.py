"""What a machine with GPUs does, in minutes: `python -m tests.gpu --gpus 1|2|8 [--json FILE] [--device cpu]`.

Each check is a process with a time limit; its name, figures and verdict are printed. Exit code 1 if one fails.
With `--device cpu` the checks that have a CPU form run, small, through the same code.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from tests.gpu import arithmetic, several, training
from tests.gpu.check import Check, CheckFailed, Figures

CHECKS: tuple[Check, ...] = (*arithmetic.CHECKS, *training.CHECKS, *several.CHECKS)


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.child:
        return _answer(next(check for check in CHECKS if check.name == options.child), options.device)
    if options.device == "cuda" and torch.cuda.device_count() < options.gpus:
        print(
            f"gpu-check: skipped, since this machine has {torch.cuda.device_count()} GPUs and not {options.gpus}"
        )
        return 0
    chosen = [
        check
        for check in CHECKS
        if (check.cpu or options.device == "cuda")
        and check.gpus <= options.gpus
        and (not options.only or check.name in options.only)
    ]
    rows = [_run(check, options.device) for check in chosen]
    failed = [row for row in rows if row["verdict"] != "PASS"]
    print(f"{len(rows) - len(failed)} of {len(rows)} checks passed on {_machine(options.device)}")
    if options.json is not None:
        facts = {"machine": _machine(options.device), "torch": torch.__version__, "checks": rows}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return 1 if failed or not rows else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--gpus", type=int, choices=[1, 2, 8], default=1)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--only", nargs="+", metavar="CHECK", help="by name")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser


def _machine(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "the CPU"


def _answer(check: Check, device: str) -> int:
    """In the check's own process: one line of JSON."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    place = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    try:
        figures, fault = check.ask(place, device == "cpu"), ""
    except CheckFailed as error:
        figures, fault = {}, str(error)
    print(json.dumps({"figures": figures, "fault": fault}), flush=True)
    return 1 if fault else 0


def _run(check: Check, device: str) -> dict[str, object]:
    started = time.perf_counter()
    command = [sys.executable, "-m", "tests.gpu", "--child", check.name, "--device", device]
    figures: Figures = {}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=check.limit_seconds
        )
        told = json.loads(done.stdout.strip().splitlines()[-1]) if done.stdout.strip() else {}
        figures = told.get("figures", {})
        fault = told.get("fault") if told else f"ended with {done.returncode}: {done.stderr.strip()[-600:]}"
    except subprocess.TimeoutExpired:
        fault = f"was not done within {check.limit_seconds:g} s"
    seconds = time.perf_counter() - started
    verdict = "FAIL" if fault else "PASS"
    text = ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in figures.items()
    )
    print(f"{verdict}  {check.name} ({seconds:.0f} s): {fault or text}", flush=True)
    return {
        "name": check.name,
        "seconds": seconds,
        "verdict": verdict,
        "figures": figures,
        "fault": fault or "",
    }


if __name__ == "__main__":
    sys.exit(main())
