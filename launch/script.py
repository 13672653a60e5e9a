"""`python -m triaxis.launch.script`: how to start a run on machines, Slurm or Kubernetes. Starts nothing itself."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from triaxis.engine.advice import advice
from triaxis.engine.config import ConfigError, RunConfig
from triaxis.engine.rules import resolve
from triaxis.launch.command_line import Parser, one_of, whole, within
from triaxis.launch.ending import Exit, printable, refuse, run_command
from triaxis.launch.flags import parse_flags
from triaxis.launch.jobs.artefacts import (
    GRACE_SECONDS,
    Cluster,
    Job,
    job_name,
    pytorch_job,
    recovery_flags,
    slurm_script,
    torchrun_script,
    train_job,
)
from triaxis.launch.jobs.sbatch_check import check_sbatch
from triaxis.launch.writing import add_overwrite, write_text
from triaxis.models.reading import read_small_file

DESCRIPTION = """Writes what starts a run, to standard output or a file. The flags of triaxis.launch.train follow `--`;
they are checked for the ranks that the script will start, so a run that cannot work is refused here.

  triaxis script torchrun --gpus-per-node 8 -- --model llama2-7b --zero 1
  triaxis script slurm --nodes 8 --time 72:00:00 -- --model llama2-70b --tp 4 --pp 2 > run.sbatch
  triaxis script kubernetes --nodes 8 --image IMAGE --claim VOLUME -- --model llama2-70b --tp 8
  triaxis script slurm --check theirs.sbatch"""

MOST_RANKS, MOST_RESTARTS, DAY_SECONDS = 100_000, 1000, 86_400
_ELSEWHERE = ("`data`", "`eval_data`", "`tokenizer`")
"""Faults that may be right where the run starts, though not here: files."""


def _parser() -> Parser:
    parser = Parser(prog="triaxis script", description=DESCRIPTION)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="{torchrun,slurm,kubernetes}")
    for kind, text in (
        ("torchrun", "a shell script for one machine, or for each of several"),
        ("slurm", "an sbatch script: one torchrun a node, saves before the time limit, requeues, resumes"),
        ("kubernetes", "a Kubeflow manifest: TrainJob, or PyTorchJob for the older operator"),
    ):
        _ADD[kind](_common(kinds.add_parser(kind, help=text, description=text)))
    return parser


def _common(parser: Parser) -> Parser:
    parser.add_argument("--name", help="of the job; by default the model's")
    parser.add_argument(
        "--nodes", type=within(whole, 1, MOST_RANKS), default=1, help="machines (default: %(default)s)"
    )
    parser.add_argument(
        "--gpus-per-node",
        type=within(whole, 1, MOST_RANKS),
        default=8,
        help="ranks on each machine (default: %(default)s)",
    )
    parser.add_argument(
        "--max-restarts",
        type=within(whole, 0, MOST_RESTARTS),
        default=3,
        help="restarts after a failure (default: %(default)s)",
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable for every rank, such as NCCL_IB_HCA=mlx5 or NCCL_SOCKET_IFNAME=eth0; repeatable",
    )
    parser.add_argument(
        "--setup",
        action="append",
        default=[],
        metavar="LINE",
        help="a shell line before the start; repeatable",
    )
    parser.add_argument("--out", type=Path, help="write to this file instead of standard output")
    add_overwrite(parser)
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="flags of triaxis.launch.train")
    return parser


def _add_slurm(parser: Parser) -> None:
    parser.add_argument(
        "--check",
        type=Path,
        metavar="FILE",
        help="say what is wrong with a script; exit code 1 if it would not work",
    )
    parser.add_argument("--time", default="24:00:00", help="limit of one job (default: %(default)s)")
    parser.add_argument(
        "--warning",
        type=within(whole, 1, DAY_SECONDS),
        default=GRACE_SECONDS,
        metavar="SECONDS",
        help="save so long before the limit (default: %(default)s)",
    )
    parser.add_argument(
        "--cpus-per-gpu", type=within(whole, 1, MOST_RANKS), default=8, help="default: %(default)s"
    )
    parser.add_argument("--partition", help="the queue")
    parser.add_argument("--account", help="who pays")


def _add_kubernetes(parser: Parser) -> None:
    parser.add_argument("--image", required=True, help="container image that has triaxis")
    parser.add_argument(
        "--claim",
        required=True,
        help="persistent volume claim that every node can write; holds data, output and checkpoints",
    )
    parser.add_argument("--mount", default="/data", help="where it is mounted (default: %(default)s)")
    parser.add_argument("--namespace", default="default", help="default: %(default)s")
    parser.add_argument(
        "--kind",
        dest="resource",
        type=one_of(("trainjob", "pytorchjob")),
        metavar="KIND",
        default="trainjob",
        help="trainjob or pytorchjob; default: %(default)s",
    )


_ADD = {"torchrun": lambda parser: None, "slurm": _add_slurm, "kubernetes": _add_kubernetes}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        if options.kind == "slurm" and options.check is not None:
            return _check(options.check)
        text = _render(options, _job(options))
        if options.out is None:
            sys.stdout.write(text)
        else:
            write_text(options.out, text, "out", overwrite=options.overwrite)
            print(f"wrote {options.out}")
    except (ValueError, OSError) as error:
        return refuse(f"script {options.kind}", error)
    return Exit.DONE


def _job(options: argparse.Namespace) -> Job:
    config = parse_flags(options.flags, speaks=True)
    warnings = faults_here(config, options.nodes * options.gpus_per_node)
    for warning in warnings:
        print(f"note: {warning} (on this machine)", file=sys.stderr)
    return Job(
        name=options.name
        if options.name is not None
        else job_name(Path(config.model).stem if "/" in config.model else config.model),
        flags=(*options.flags, *recovery_flags(options.flags)),
        nodes=options.nodes,
        gpus_per_node=options.gpus_per_node,
        max_restarts=options.max_restarts,
        environment=dict(_pair(text) for text in options.env),
        setup=tuple(options.setup),
    )


def faults_here(config: RunConfig, ranks: int) -> tuple[str, ...]:
    """Files that are missing on this machine; any other fault of the run raises ConfigError."""
    try:
        resolve(config, ranks)
    except ConfigError as error:
        elsewhere = tuple(fault for fault in error.faults if fault.startswith(_ELSEWHERE))
        if len(elsewhere) < len(error.faults):
            raise ConfigError((*error.faults, *advice(config, ranks, error.faults))) from error
        return elsewhere
    return ()


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign:
        raise ValueError(f"`--env` must be NAME=VALUE, but is {text!r}")
    return name, value


def _render(options: argparse.Namespace, job: Job) -> str:
    if options.kind == "torchrun":
        return torchrun_script(job)
    if options.kind == "slurm":
        return slurm_script(
            job,
            time=options.time,
            cpus_per_gpu=options.cpus_per_gpu,
            partition=options.partition,
            account=options.account,
            warning_seconds=options.warning,
        )
    cluster = Cluster(
        image=options.image, claim=options.claim, mount=options.mount, namespace=options.namespace
    )
    return {"trainjob": train_job, "pytorchjob": pytorch_job}[options.resource](job, cluster)


def _check(path: Path) -> int:
    findings = check_sbatch(read_small_file(path, "check"))
    for found in findings:
        print(f"{printable(str(path))}:{found.line}: {'error' if found.fatal else 'note'}: {found.text}")
    if not findings:
        print(f"{printable(str(path))}: nothing wrong found")
    return Exit.FAILED if any(found.fatal for found in findings) else Exit.DONE


if __name__ == "__main__":
    sys.exit(run_command("script", main))
