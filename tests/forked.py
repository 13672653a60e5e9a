"""Gloo ranks for tests: forked processes that meet in a file."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.patience import NEVER_SECONDS, PATIENCE_SECONDS
from triaxis.parallel.worlds.device import Transport
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.process import open_process_world


def run_processes(
    size: int,
    folder: Path,
    main: Callable[[World], Any],
    *,
    transport: Transport = "auto",
    before: Callable[[int], None] = lambda rank: None,
) -> list[Any]:
    """What `main` returned, or the text of what it raised, by rank; None for a rank that was killed.

    before: what each rank's process does first
    """
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        for other, (_, writer) in enumerate(pipes):
            if other != rank:
                writer.close()
        try:
            before(rank)
            world = open_process_world(
                rank=rank,
                size=size,
                local_rank=rank,
                timeout_seconds=NEVER_SECONDS,
                init_method=f"file://{folder}/store",
                device="cpu",
                transport=transport,
            )
            result: Any = main(world)
            world.close()
        except Exception as error:  # noqa: BLE001  (sent to the test)
            result = f"{type(error).__name__}: {error}"
        pipes[rank][1].send_bytes(
            pickle.dumps(result)
        )  # not `send`: it would share tensors, and its process ends

    for _ in range(
        2
    ):  # a dry trace's step that nobody holds may map more than the machine has, and then no fork works
        gc.collect()
    processes = [context.Process(target=run, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    for _, writer in pipes:
        writer.close()
    results: list[Any] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    for reader, _ in pipes:
        left = max(0.0, deadline - time.monotonic())
        try:
            results.append(
                pickle.loads(reader.recv_bytes()) if reader.poll(left) else "TimeoutError: no result"
            )
        except EOFError:
            results.append(None)
    for process in processes:
        process.join(max(1.0, deadline - time.monotonic()))
        process.kill()
    return results
