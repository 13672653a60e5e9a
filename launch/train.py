"""`triaxis-train`, or `python -m triaxis.launch.train`: train a model, under torchrun, alone, or on simulated ranks."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress

from triaxis.engine.config import ConfigError, RunConfig, resolve, run_directory
from triaxis.launch.directory import claim_directory
from triaxis.launch.environment import Launch, LaunchError, read_launch
from triaxis.launch.flags import parse_flags

EXIT_CONFIGURATION = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses, checks, trains. Returns the exit code: 0, 2 for a run that is refused, 1 for one that failed."""
    warnings.filterwarnings("ignore", module="megatron")  # kernels that are not needed to read its files
    config = parse_flags(sys.argv[1:] if arguments is None else list(arguments), _speaks(os.environ))
    try:
        launch = read_launch(os.environ)
        resolved = resolve(config, _world_size(config, launch))
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
        return _refuse(error) if _speaks(os.environ) else EXIT_CONFIGURATION
    from triaxis.launch.ranks import run_processes, run_simulated  # imports torch

    with held or nullcontext():
        if config.simulate:
            return run_simulated(config, resolved)
        return run_processes(config, resolved, launch)


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


def command() -> None:
    """The console script."""
    try:
        code = main()
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    _end(code)


if __name__ == "__main__":
    command()
