"""`triaxis run -n 8 …`: starts `train` on several processes, over torch's elastic agent, and adds no report of its own.

What a rank says last is the last thing that is printed, and the run's own exit code is this command's.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from triaxis.engine.advice import TORCHRUN, flags_of, resolve_or_advise
from triaxis.engine.config import ConfigError, RunConfig, run_directory
from triaxis.launch.command_line import Parser, whole, within
from triaxis.launch.directory import asked_to_requeue
from triaxis.launch.ending import Exit, refusal, refuse, run_command
from triaxis.launch.flags import config_of, train_parser

DESCRIPTION = """Train on several processes of this machine, or of each of several machines.

  triaxis run -n 8 --tp 2 --pp 2 --dp 2 --steps 100
  triaxis run -n 8 --nodes 2 --node-rank 0 --master-addr node1 …    (on node1; --node-rank 1 on the other)

Flags of `triaxis train` describe the run; they are checked before any process starts. The ranks meet on the interface
that --master-addr names, on this machine alone if there is no other."""

LOCAL = "127.0.0.1"
MOST_RANKS = 100_000
PORT = 29500
SHUTDOWN_SECONDS = 240
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
SAVING = (signal.SIGTERM, signal.SIGUSR1)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: the run's own, one of `Exit`."""
    options = _parser().parse_args(arguments)
    config = config_of(options)
    try:
        _check(options, config)
    except ValueError as error:
        return refuse("run", error)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as train does; the processes inherit it
    return _start(options, config)


def _parser() -> Parser:
    parser = train_parser("triaxis run", DESCRIPTION)
    group = parser.add_argument_group("the processes")
    count = within(whole, 1, MOST_RANKS)
    group.add_argument(
        "-n", "--nproc-per-node", type=count, required=True, metavar="N", help="on each machine"
    )
    group.add_argument(
        "--nodes", "--nnodes", type=count, default=1, metavar="N", help="machines (default: 1)"
    )
    group.add_argument(
        "--node-rank", type=within(whole, 0, MOST_RANKS), default=0, metavar="N", help="of this machine"
    )
    group.add_argument(
        "--master-addr", default=LOCAL, metavar="HOST", help="machine 0, as the others reach it"
    )
    group.add_argument(
        "--master-port",
        type=within(whole, 1, 65535),
        metavar="N",
        help=f"there ({PORT}; alone: any that is free)",
    )
    group.add_argument(
        "--max-restarts",
        type=within(whole, 0, 1000),
        default=0,
        metavar="N",
        help="after a failure (default: 0)",
    )
    return parser


def _check(options: argparse.Namespace, config: RunConfig) -> None:
    """What can be seen before the ranks start: a run that cannot work is told once. Raises ValueError."""
    if options.node_rank >= options.nodes:
        raise ConfigError(
            (f"`node_rank` must be less than nodes {options.nodes}, but is {options.node_rank}",)
        )
    if options.nodes > 1 and options.master_addr == LOCAL:
        raise ConfigError((f"`master_addr` must be given with nodes {options.nodes}: the name of machine 0",))
    if config.simulate:
        raise ConfigError(
            ("`--threads` must not be given here, where ranks are processes; use triaxis train",)
        )
    if not config.elastic:  # which settles its batch with the checkpoint
        launcher = "triaxis run -n {}" if options.nodes == 1 else TORCHRUN
        resolve_or_advise(config, options.nproc_per_node * options.nodes, launcher)


def _start(options: argparse.Namespace, config: RunConfig) -> int:
    """Runs the ranks of this machine to their end."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    from triaxis.launch.node_meeting import register

    logging.disable(logging.CRITICAL)  # the agent's words about what the ranks say themselves
    port = options.master_port or (PORT if options.nodes > 1 else _free_port())
    register()
    with tempfile.TemporaryDirectory(prefix="triaxis-run-") as logs:
        launch = LaunchConfig(
            min_nodes=options.nodes,
            max_nodes=options.nodes,
            nproc_per_node=options.nproc_per_node,
            run_id=uuid.uuid4().hex[:12] if options.nodes == 1 else f"run{port}",
            rdzv_backend="triaxis",
            rdzv_endpoint=f"{options.master_addr}:{port}",
            rdzv_configs={"rank": options.node_rank, "timeout": config.timeout_seconds},
            max_restarts=options.max_restarts,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            signals_to_handle=SIGNALS,
            shutdown_timeout=SHUTDOWN_SECONDS,
        )
        try:
            launch_agent(launch, sys.executable, ["-m", "triaxis.launch.train", *flags_of(config)])
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            return _ended(rank, failure.pid, failure.exitcode)
        except SignalException as error:
            return _stopped(config, error.sigval)
        except (RuntimeError, OSError) as error:
            return refuse("run", error)
    return Exit.DONE


def _free_port() -> int:
    with socket.create_server((LOCAL, 0)) as server:
        return int(server.getsockname()[1])


def _ended(rank: int, process: int, code: int) -> int:
    """The code of the first rank that failed; one that was killed has not said so itself."""
    if code >= 0:
        return code
    text = f"rank {rank} (process {process}) was ended by {signal.Signals(-code).name}"
    print(refusal("run", text), file=sys.stderr, flush=True)
    return Exit.FAILED


def _stopped(config: RunConfig, number: int) -> int:
    """The agent has passed the signal on and waited; whether the ranks have saved, they leave behind."""
    saved = asked_to_requeue(Path(run_directory(config)))
    return Exit.REQUEUE if saved or number in SAVING else Exit.INTERRUPTED


if __name__ == "__main__":
    sys.exit(run_command("run", main))
