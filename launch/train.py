"""`triaxis-train`, or `python -m triaxis.launch.train`: train a model, under torchrun, alone, or on simulated ranks."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress

from triaxis.engine.config import ConfigError, ResolvedRun, RunConfig, run_directory
from triaxis.engine.faults.interruption import EXIT_REQUEUE
from triaxis.engine.rules import resolve
from triaxis.engine.run.resume import adapt, check_same_run, find_start
from triaxis.launch.directory import claim_directory
from triaxis.launch.environment import Launch, LaunchError, overlap_warnings, read_launch
from triaxis.launch.flags import parse_flags

EXIT_CONFIGURATION = 2
EXIT_INTERRUPTED = 130
SPEAKER_SECONDS = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses, checks, trains.

    Returns the exit code: 0; 1 for a run that failed; 2 for one that is refused; 75 for one that saved itself on a
    signal and wants to be started again; 130 for one that was interrupted.
    """
    warnings.filterwarnings("ignore", module="megatron")  # kernels that are not needed to read its files
    config = parse_flags(sys.argv[1:] if arguments is None else list(arguments), _speaks(os.environ))
    try:
        launch = read_launch(os.environ)
        config, resolved = _settle(config, launch)
        if config.simulate and launch.size > 1:
            raise ConfigError(
                (
                    f"`simulate` must not be given under torchrun, but {launch.size} processes were started; "
                    f"use python -m triaxis.launch.train --simulate",
                )
            )
        held = claim_directory(run_directory(config)) if launch.rank == 0 else None
    except LaunchError as error:  # not the same on all ranks
        return _refuse(error)
    except ValueError as error:
        if _speaks(os.environ):
            return _refuse(error)
        time.sleep(SPEAKER_SECONDS)  # a launcher ends all ranks as soon as one is gone: rank 0 speaks first
        return EXIT_CONFIGURATION
    from triaxis.engine.run.peak import give_back_freed_memory  # imports torch
    from triaxis.launch.ranks import run_processes, run_simulated

    for warning in overlap_warnings(os.environ) if launch.rank == 0 else ():
        print(warning, file=sys.stderr, flush=True)
    with held or nullcontext():
        if config.simulate:
            return run_simulated(config, resolved)
        give_back_freed_memory(os.environ)
        return run_processes(config, resolved, launch)


def _settle(config: RunConfig, launch: Launch) -> tuple[RunConfig, ResolvedRun]:
    """What runs, and from where: as given, or as the checkpoint that it goes on from asks. Raises ValueError."""
    if config.elastic and config.resume is None:
        config = dataclasses.replace(config, resume="auto")
    world_size = _world_size(config, launch)
    start = None
    if config.resume in (None, "auto", "never") or os.path.isdir(config.resume):  # else `resolve` refuses it
        start = find_start(config, restarted=launch.restarts > 0)
        config = start.config
        if config.elastic and start.state is not None:
            config = adapt(config, start.state, world_size)
    resolved = resolve(config, world_size)
    if start is not None and start.state is not None:
        check_same_run(start.state, config, resolved)
    return config, resolved


def _refuse(error: ValueError) -> int:
    print(f"The run cannot start:\n{_indented(str(error))}", file=sys.stderr, flush=True)
    return EXIT_CONFIGURATION


def _speaks(environment: Mapping[str, str]) -> bool:
    """Only rank 0 reports what all ranks see alike; a rank that is malformed speaks too."""
    return environment.get("RANK", "0") in ("0", "") or not environment["RANK"].isdigit()


def _world_size(config: RunConfig, launch: Launch) -> int:
    return config.tp * config.pp * config.cp * (config.dp or 1) if config.simulate else launch.size


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _end(code: int) -> None:
    """Ends at once: no rank waits for another, or for a library's threads, while the interpreter is torn down."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _end_early(number: int, frame: object) -> None:
    """SIGTERM or SIGUSR1 while the program still loads."""
    if _speaks(os.environ):
        print(f"{signal.Signals(number).name} before the first step: nothing to save", file=sys.stderr)
    _end(EXIT_REQUEUE)


def command() -> None:
    """The console script."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _end_early)
    try:
        code = main()
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    _end(code)


if __name__ == "__main__":
    command()
