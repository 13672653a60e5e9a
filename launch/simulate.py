"""`python -m triaxis.launch.simulate`: a cluster's training step, recorded, proved, priced and drawn on a laptop."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from triaxis.engine.advice import resolve_or_advise
from triaxis.engine.config import IN_MEMORY, ConfigError, DataParallel, ResolvedRun, RunConfig
from triaxis.engine.plan import StepPlan, step_plan
from triaxis.launch.command_line import Claim, Parser, whole, within
from triaxis.launch.ending import Exit, refuse, run_command
from triaxis.launch.flags import config_of, train_parser
from triaxis.launch.hardware.hardware import Hardware, load_hardware
from triaxis.launch.hardware.nearly import line_rate, with_network
from triaxis.launch.writing import add_overwrite, check_target, written_aside
from triaxis.models.huggingface.guest import refuse_guest
from triaxis.parallel.places.topology import Topology

MOST_GPUS, MOST_FACTOR, MOST_DOCUMENT_TOKENS = 1_000_000, 1e6, 100_000_000

DESCRIPTION = """What a training run would do on a cluster that you do not have: every rank, message and byte.

  triaxis simulate --model llama3-70b --hardware h100-80g --dp 8 --tp 8 --pp 2 --sp --dtype bf16 \
--seq 4096 --per-device-train-batch-size 1 --microbatches 16 --report report.html

The engine's own step runs for every kind of rank, without its numbers. It is proved that no rank waits for ever,
then the step is priced on the hardware. The flags of `triaxis train` describe the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateFlags:
    """The cluster, and what to write."""

    hardware: str
    network: float | None
    gpus: int | None
    document_tokens: int | None
    straggler: tuple[str, ...]
    slow_link: tuple[str, ...]
    json: bool
    trace: Path | None
    report: Path | None
    overwrite: bool


def simulate_parser() -> Parser:
    parser = train_parser("triaxis simulate", DESCRIPTION)
    group = parser.add_argument_group("the cluster, and what to write")
    group.add_argument(
        "--hardware",
        default="h100-80g",
        help="a100-80g, h100-80g, h200, b200, mi300x, …, or a TOML file (triaxis doctor writes one)",
    )
    group.add_argument(
        "--network",
        type=line_rate,
        metavar="RATE",
        help="another line rate of each network card, such as 100Gb/s",
    )
    group.add_argument(
        "--gpus", type=within(whole, 1, MOST_GPUS), help="all of them; dp is what tp × pp leaves"
    )
    group.add_argument(
        "--document-tokens",
        type=within(whole, 1, MOST_DOCUMENT_TOKENS),
        metavar="N",
        help="mean length of the documents packed into rows; default: a row is one",
    )
    for name, what in (
        ("straggler", "its computations take"),
        ("slow-link", "the messages of its groups take"),
    ):
        group.add_argument(
            f"--{name}", nargs="+", action="extend", default=[], metavar="RANK=FACTOR",
            help=f"{what} FACTOR times as long",
        )  # fmt: skip
    group.add_argument("--json", action=Claim, help="print everything as JSON, for programs")
    group.add_argument("--trace", type=Path, metavar="FILE", help="write the timeline for Perfetto")
    group.add_argument(
        "--report", type=Path, metavar="FILE", help="write one HTML page with pictures of it all"
    )
    add_overwrite(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0; 1 for what does not fit together, or into memory; 2 for a run that is refused."""
    options = simulate_parser().parse_args(arguments)
    config = config_of(options)
    values = {field.name: getattr(options, field.name) for field in fields(SimulateFlags)}
    flags = SimulateFlags(**values | {name: tuple(values[name]) for name in ("straggler", "slow_link")})
    try:
        hardware = with_network(load_hardware(flags.hardware), flags.network)
        resolved = _resolve(config, flags)
        slower = _factors("straggler", flags.straggler, resolved.topology.world_size)
        links = _factors("slow_link", flags.slow_link, resolved.topology.world_size)
        for name in ("trace", "report"):
            path: Path | None = getattr(flags, name)
            if path is not None:
                check_target(path, name, overwrite=flags.overwrite)
    except ValueError as error:
        return refuse("simulate", error)
    target = "cuda" if config.device == "cuda" else "cpu"
    plan = replace(
        step_plan(config, resolved),
        document_tokens=flags.document_tokens,
        kernels="",  # what others' kernels do inside, no trace can count
    )
    return _run(plan, resolved.topology, hardware, flags, target, slower, links)


def _resolve(config: RunConfig, flags: SimulateFlags) -> ResolvedRun:
    if config.simulate:
        raise ConfigError(("`--threads` must not be given here: it trains on threads; leave it out",))
    if config.data_parallel != DataParallel.ZERO:
        raise ConfigError(
            (
                "`data_parallel` must be zero in a simulation, but is fsdp, whose messages are torch's; use --zero 3",
            )
        )
    if config.offload_optimizer not in IN_MEMORY:
        raise ConfigError(
            (
                f"`offload_optimizer` must be none or cpu in a simulation, but is {config.offload_optimizer}: what a "
                "disk takes is not priced; leave it out",
            )
        )
    model_parallel = config.tp * config.pp * config.cp
    resolved = resolve_or_advise(config, flags.gpus or model_parallel * (config.dp or 1))
    refuse_guest(resolved.model, "simulated")
    return resolved


def _factors(name: str, given: Sequence[str], world_size: int) -> dict[int, float]:
    factors: dict[int, float] = {}
    for text in given:
        rank, _, factor = text.partition("=")
        try:
            number, times = int(rank), float(factor)
        except ValueError:
            number, times = -1, 0.0
        if not (0 <= number < world_size and 0 < times <= MOST_FACTOR):
            raise ValueError(
                f"`{name}` must read like 3=1.5, a rank below {world_size} and a factor above 0, but is {text!r}"
            )
        factors[number] = times
    return factors


def _run(
    plan: StepPlan,
    topology: Topology,
    hardware: Hardware,
    flags: SimulateFlags,
    target: str,
    slower: dict[int, float],
    links: dict[int, float],
) -> int:
    from triaxis.launch.simulator.result import as_dict  # imports torch
    from triaxis.launch.simulator.run import simulate_run, smallest_fault
    from triaxis.launch.simulator.summary import print_summary, showing_progress

    with showing_progress() as progress:
        simulation = simulate_run(
            plan,
            topology,
            hardware,
            target=target,
            slower=slower,
            links=links,
            progress=progress,
        )
        values = as_dict(simulation)
    if flags.trace is not None:
        from triaxis.launch.simulator.chrome import write_trace

        with written_aside(flags.trace, "trace", overwrite=flags.overwrite) as draft:
            write_trace(values, draft)
    if flags.report is not None:
        from triaxis.launch.simulator.report import write_report

        with written_aside(flags.report, "report", overwrite=flags.overwrite) as draft:
            write_report(values, draft)
    if not simulation.proof.holds:
        print(smallest_fault(plan, topology) or "", file=sys.stderr, flush=True)
    if flags.json:
        print(json.dumps(values))
    else:
        print_summary(values, flags.trace, flags.report)
    return Exit.DONE if simulation.proof.holds and simulation.fits else Exit.FAILED


if __name__ == "__main__":
    sys.exit(run_command("simulate", main))
