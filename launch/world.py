"""The world of a script of one's own under torchrun, or of one process without it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from triaxis.launch.environment import read_launch
from triaxis.parallel.worlds.device import DeviceKind
from triaxis.parallel.worlds.process import ProcessWorld, open_process_world


@contextmanager
def open_world(*, timeout_seconds: float = 600.0, device: DeviceKind = "auto") -> Iterator[ProcessWorld]:
    """Joins the processes that a launcher started, and closes the world at the block's end. Collective.

    timeout_seconds: a collective that waits longer fails; device: "cpu", "cuda", or by default a GPU where there is one
    """
    launch = read_launch(os.environ)
    world = open_process_world(
        rank=launch.rank,
        size=launch.size,
        local_rank=launch.local_rank,
        timeout_seconds=timeout_seconds,
        device=device,
        start=launch.run_id,
    )
    try:
        yield world
    finally:
        world.close()
