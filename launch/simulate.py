"""`python -m triaxis.launch.simulate`: a cluster's training step, recorded, proved, priced and drawn on a laptop."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from triaxis.engine.config import ConfigError, DataParallel, ResolvedRun, RunConfig
from triaxis.engine.rules import resolve
from triaxis.launch.flags import parse_with
from triaxis.launch.hardware.hardware import Hardware, load_hardware

EXIT_UNPROVED, EXIT_CONFIGURATION = 1, 2

DESCRIPTION = """What a training run would do on a cluster that you do not have: every rank, message and byte.

`python -m triaxis.launch.simulate --model llama3-70b --hardware h100-80g --dp 8 --tp 8 --pp 2 --sp --dtype bf16 \
--seq 4096 --per-device-train-batch-size 1 --microbatches 16 --report report.html`

The engine's own step runs for every kind of rank, without its numbers. It is proved that no rank waits for ever,
then the step is priced on the hardware. The flags of `triaxis.launch.train` describe the run."""


@dataclass(frozen=True, kw_only=True)
class SimulateFlags:
    """the cluster, and what to write"""

    hardware: Annotated[
        str,
        tyro.conf.arg(help="a100-80g, h100-80g, h200, b200, mi300x, …, or a TOML file (`triaxis doctor`)."),
    ] = "h100-80g"
    gpus: Annotated[int | None, tyro.conf.arg(help="All of them; dp is what tp × pp leaves.")] = None
    documents: Annotated[
        bool, tyro.conf.arg(help="Rows hold several documents, so that attention is masked.")
    ] = False
    straggler: Annotated[
        tuple[str, ...], tyro.conf.arg(help="RANK=FACTOR: its computations take FACTOR times as long.")
    ] = ()
    slow_link: Annotated[
        tuple[str, ...], tyro.conf.arg(help="RANK=FACTOR: so do the messages of its groups.")
    ] = ()
    json: Annotated[bool, tyro.conf.arg(help="Print everything as JSON, for programs.")] = False
    trace: Annotated[
        Path | None, tyro.conf.arg(help="Write the timeline for Perfetto or chrome://tracing.")
    ] = None
    report: Annotated[Path | None, tyro.conf.arg(help="Write one HTML page with pictures of it all.")] = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0; 1 for programs that do not fit together; 2 for a run that is refused."""
    config, flags = parse_with(
        sys.argv[1:] if arguments is None else list(arguments),
        True,
        "triaxis.launch.simulate",
        DESCRIPTION,
        SimulateFlags,
    )
    try:
        hardware = load_hardware(flags.hardware)
        resolved = _resolve(config, flags)
        slower = _factors("straggler", flags.straggler, resolved.topology.world_size)
        links = _factors("slow_link", flags.slow_link, resolved.topology.world_size)
        for name in ("trace", "report"):
            path: Path | None = getattr(flags, name)
            if path is not None and not path.parent.is_dir():
                raise ValueError(
                    f"`{name}` must be a file in a folder that exists, but is {path}; make the folder"
                )
    except ValueError as error:
        print("The simulation cannot start:", file=sys.stderr)
        print("\n".join(f"  {line}" for line in str(error).splitlines()), file=sys.stderr, flush=True)
        return EXIT_CONFIGURATION
    return _run(config, resolved, hardware, flags, slower, links)


def _resolve(config: RunConfig, flags: SimulateFlags) -> ResolvedRun:
    if config.simulate:
        raise ConfigError(("`simulate` must not be given here: it trains on threads; leave it out",))
    if config.data_parallel != DataParallel.ZERO:
        raise ConfigError(
            (
                "`data_parallel` must be zero in a simulation, but is fsdp, whose messages are torch's; use --zero 3",
            )
        )
    model_parallel = config.tp * config.pp * config.cp
    if flags.gpus is not None and flags.gpus < 1:
        raise ConfigError((f"`gpus` must be at least 1, but is {flags.gpus}",))
    return resolve(config, flags.gpus or model_parallel * (config.dp or 1))


def _factors(name: str, given: Sequence[str], world_size: int) -> dict[int, float]:
    factors: dict[int, float] = {}
    for text in given:
        rank, _, factor = text.partition("=")
        try:
            number, times = int(rank), float(factor)
        except ValueError:
            number, times = -1, 0.0
        if not (0 <= number < world_size and times > 0):
            raise ValueError(
                f"`{name}` must read like 3=1.5, a rank below {world_size} and a factor above 0, but is {text!r}"
            )
        factors[number] = times
    return factors


def _run(
    config: RunConfig,
    resolved: ResolvedRun,
    hardware: Hardware,
    flags: SimulateFlags,
    slower: dict[int, float],
    links: dict[int, float],
) -> int:
    from triaxis.launch.simulator.result import as_dict  # imports torch
    from triaxis.launch.simulator.run import simulate_run, smallest_fault
    from triaxis.launch.simulator.summary import print_summary, showing_progress

    with showing_progress() as progress:
        simulation = simulate_run(
            config,
            resolved,
            hardware,
            documents=flags.documents,
            slower=slower,
            links=links,
            progress=progress,
        )
        values = as_dict(simulation)
    if flags.trace is not None:
        from triaxis.launch.simulator.chrome import write_trace

        write_trace(values, flags.trace)
    if flags.report is not None:
        from triaxis.launch.simulator.report import write_report

        write_report(values, flags.report)
    if not simulation.proof.holds:
        print(smallest_fault(config, resolved, documents=flags.documents) or "", file=sys.stderr, flush=True)
    if flags.json:
        print(json.dumps(values))
    else:
        print_summary(values, flags.trace, flags.report)
    return 0 if simulation.proof.holds else EXIT_UNPROVED


if __name__ == "__main__":
    sys.exit(main())
