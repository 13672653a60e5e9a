"""Runs this project and its peers in turn on the same cases, and prints how they compare.

python benchmarks/run.py            everything; python benchmarks/run.py --quick   a look
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.cases import LAYOUTS, QUICK_LAYOUTS, SIZES, Case, parse_layout  # noqa: E402
from benchmarks.report import Rounds, case_report, case_table, draw  # noqa: E402
from benchmarks.stacks import OURS, STACKS, Measurement, Stack  # noqa: E402

VARIABLE = "TRIAXIS_PEER_PYTHON_"


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a look: one round, few steps, two layouts")
    parser.add_argument("--rounds", type=int, help="times that every stack runs a case (3)")
    parser.add_argument("--steps", type=int, help="timed steps of a run (8)")
    parser.add_argument("--layout", action="append", help="tp,pp,dp; may be repeated")
    parser.add_argument("--hidden", action="append", type=int, choices=sorted(SIZES), help="may be repeated")
    parser.add_argument("--zero", type=int, default=0, choices=range(4), help="ours; megatron's from 1 (0)")
    parser.add_argument("--dtype", action="append", choices=("fp32", "bf16"), help="may be repeated (both)")
    parser.add_argument("--sp", action="store_true", help="ours with sequence parallelism")
    parser.add_argument("--stack", action="append", choices=[s.name for s in STACKS], help="only these")
    parser.add_argument("--peers-dir", type=Path, default=ROOT.parent / "shared" / "peers")
    parser.add_argument("--peer-python", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--output-dir", type=Path, default=ROOT / "output" / "bench")
    parser.add_argument("--timeout-seconds", type=float, default=600.0, help="of one run")
    arguments = parser.parse_args(words)
    arguments.rounds = arguments.rounds or (1 if arguments.quick else 3)
    arguments.steps = arguments.steps or (3 if arguments.quick else 8)
    return arguments


def make_cases(arguments: argparse.Namespace) -> list[Case]:
    sizes = arguments.hidden or ([256] if arguments.quick else sorted(SIZES))
    named = [parse_layout(text) for text in arguments.layout or []]
    layouts = named or (QUICK_LAYOUTS if arguments.quick else LAYOUTS)
    return [
        Case(
            size=SIZES[size],
            layout=layout,
            steps=arguments.steps,
            zero=arguments.zero,
            sequence_parallel=arguments.sp,
            dtype=dtype,
        )
        for dtype in arguments.dtype or (["fp32"] if arguments.quick else ["fp32", "bf16"])
        for size in sizes
        for layout in layouts
    ]


def find_python(name: str, given: Sequence[str], environment: Mapping[str, str]) -> str:
    """The interpreter of a stack: the flag's, the environment's, its own environment's, this one."""
    for text in given:
        key, separator, path = text.partition("=")
        if not separator:
            raise ValueError(f"`peer_python` must be NAME=PATH, but is {text!r}")
        if key == name:
            return path
    own = ROOT / ".venv-peers" / name / "bin" / "python"
    return environment.get(VARIABLE + name.upper()) or (str(own) if own.exists() else sys.executable)


def why_not(stack: Stack, python: str, peers: Path) -> str | None:
    """Why a stack cannot run here at all; None if it can."""
    if stack.name != OURS and not (peers / stack.script).is_file():
        return f"there is no {stack.script} in {peers}; name its folder with --peers-dir"
    try:
        check = f"import importlib.util as u, sys; sys.exit(u.find_spec({stack.module!r}) is None)"
        found = subprocess.run([python, "-c", check], capture_output=True, check=False, timeout=120)
    except OSError as error:
        return f"its interpreter {python} does not start: {error}"
    if found.returncode:
        return (
            f"{python} cannot import {stack.module}; name an interpreter that can with "
            f"--peer-python {stack.name}=PATH or {VARIABLE}{stack.name.upper()}"
        )
    return None


def run_once(
    stack: Stack, python: str, case: Case, *, peers: Path, timeout_seconds: float
) -> Measurement | None:
    """One run; where it fails, its last words are printed and None is returned."""
    environment = {**os.environ, **stack.environment, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                stack.command(python, peers, case, answer),
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = f"exit status {process.wait(timeout_seconds)}"
            except subprocess.TimeoutExpired:
                status = f"no end within {timeout_seconds:g} s"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if process.returncode == 0 and answer.is_file():
            return stack.read(answer)
        tail = "\n".join("    " + line for line in log.read_text(errors="replace").splitlines()[-15:])
        print(f"  {stack.name} failed ({status}):\n{tail}", flush=True)
        return None


def run_case(
    case: Case, pythons: Mapping[str, str], *, rounds: int, peers: Path, timeout_seconds: float
) -> Rounds:
    """All stacks that can run the case, one after the other, and that `rounds` times."""
    results: Rounds = {}
    for number in range(rounds):
        for stack in STACKS:
            if stack.name not in pythons:
                continue
            refusal = stack.refusal(case)
            if refusal is not None:
                if number == 0:
                    print(f"  {stack.name} skipped: {refusal}", flush=True)
                continue
            run = run_once(stack, pythons[stack.name], case, peers=peers, timeout_seconds=timeout_seconds)
            results.setdefault(stack.name, []).append(run)
    return results


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(words)
    cases = make_cases(arguments)
    pythons: dict[str, str] = {}
    for stack in STACKS:
        if arguments.stack and stack.name not in arguments.stack:
            continue
        python = find_python(stack.name, arguments.peer_python, os.environ)
        reason = why_not(stack, python, arguments.peers_dir)
        if reason is None:
            pythons[stack.name] = python
        else:
            print(f"{stack.name} skipped: {reason}", flush=True)
    results: list[tuple[Case, Rounds]] = []
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    report, picture = arguments.output_dir / "results.json", arguments.output_dir / "ratios.png"
    for case in cases:
        rounds = run_case(
            case,
            pythons,
            rounds=arguments.rounds,
            peers=arguments.peers_dir,
            timeout_seconds=arguments.timeout_seconds,
        )
        results.append((case, rounds))
        print(case_table(case, rounds), flush=True)
        report.write_text(json.dumps([case_report(*result) for result in results], indent=1) + "\n")
    draw(results, picture)
    print(f"figures: {report}\npicture: {picture}")
    failed = any(run is None for _, rounds in results for runs in rounds.values() for run in runs)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
