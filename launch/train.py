"""`triaxis train`, or `python -m triaxis.launch.train`: train a model, under torchrun, alone, or on simulated ranks."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext

from triaxis.engine.advice import bubble_warning, depths_warning, dropout_warning, resolve_or_advise
from triaxis.engine.config import ConfigError, ResolvedRun, RunConfig, run_directory
from triaxis.engine.run.resume import adapt, check_same_run, find_start
from triaxis.launch.directory import asked_to_requeue, claim_directory
from triaxis.launch.ending import Exit, catch_early_requests, end_at_once, refuse, run_command
from triaxis.launch.environment import Launch, LaunchError, launch_warnings, read_launch, speaks
from triaxis.launch.flags import parse_flags
from triaxis.launch.gpu_environment import gpu_environment
from triaxis.launch.hub import located

SPEAKER_SECONDS = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses, checks, trains. Returns the exit code, one of `Exit`."""
    warnings.filterwarnings("ignore", module="megatron")  # kernels that are not needed to read its files
    speaking = speaks(os.environ)
    try:
        config = parse_flags(sys.argv[1:] if arguments is None else list(arguments), speaking, os.environ)
    except SystemExit as ended:
        if ended.code and not speaking:
            time.sleep(SPEAKER_SECONDS)
        raise
    try:
        launch = read_launch(os.environ)
        config, resolved = _settle(config, launch)
        if config.simulate and launch.size > 1:
            raise ConfigError(
                (
                    f"`--threads` must not be given under torchrun, but {launch.size} processes were started; "
                    f"use triaxis train --threads",
                )
            )
        if launch.restarts > 0 and asked_to_requeue(run_directory(config)):
            return Exit.REQUEUE  # it has saved itself on a signal, which a launcher takes for a failure
        held = claim_directory(run_directory(config)) if launch.rank == 0 else None
    except LaunchError as error:  # not the same on all ranks
        return refuse("train", error)
    except (ValueError, OSError) as error:
        if speaking:
            return refuse("train", error)
        _leave_to_rank_0(read_launch(os.environ), error)
        return Exit.REFUSED
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # its warnings are screens of frames; errors are told
    if config.device != "cpu" and not config.simulate:
        os.environ.update(gpu_environment(os.environ, deterministic=config.deterministic))
    from triaxis.engine.run.peak import give_back_freed_memory  # imports torch
    from triaxis.launch.ranks import run_processes, run_simulated

    told = (bubble_warning(config, resolved), depths_warning(config), dropout_warning(config, resolved))
    warnings_here = [*launch_warnings(os.environ), *filter(None, told)]
    for warning in warnings_here if launch.rank == 0 else ():
        print(warning, file=sys.stderr, flush=True)
    with held or nullcontext():
        if config.simulate:
            return run_simulated(config, resolved)
        give_back_freed_memory(os.environ)
        return run_processes(config, resolved, launch)


def _leave_to_rank_0(launch: Launch, error: Exception) -> None:
    """What this rank alone may have found (a file that its machine lacks) is told by rank 0, if that has not ended.

    If rank 0 has found it too, it has spoken and ended, and the launcher ends this process while torch still loads.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from triaxis.parallel.worlds.meeting import Address, say_refusal  # imports torch

    address = Address(host=launch.host, port=launch.port, hosted=launch.hosted)
    say_refusal(address, launch.run_id, launch.rank, str(error))


def _settle(config: RunConfig, launch: Launch) -> tuple[RunConfig, ResolvedRun]:
    """What runs, and from where: as given, or as the checkpoint that it goes on from asks. Raises ValueError."""
    config = located(config)
    if config.elastic and config.resume is None:
        config = dataclasses.replace(config, resume="auto")
    world_size = _world_size(config, launch)
    start = None
    if config.resume in (None, "auto", "never") or os.path.isdir(config.resume):  # else `resolve` refuses it
        start = find_start(config, restarted=launch.restarts > 0)
        config = start.config
        if config.elastic and start.state is not None:
            config = adapt(config, start.state, world_size)
    resolved = resolve_or_advise(config, world_size)
    if start is not None and start.state is not None:
        check_same_run(start.state, config, resolved)
    return config, resolved


def _world_size(config: RunConfig, launch: Launch) -> int:
    return config.tp * config.pp * config.cp * (config.dp or 1) if config.simulate else launch.size


def command() -> None:
    """The program that torchrun starts."""
    catch_early_requests()
    end_at_once(run_command("train", main))


if __name__ == "__main__":
    command()
