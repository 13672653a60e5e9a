"""A short run in a process of its own: `python -m tests.ending zero` (or fsdp) tells Gloo's threads as it ends."""

from __future__ import annotations

import atexit
import sys
from pathlib import Path

from triaxis.parallel.places.topology import Topology
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.process import open_process_world


def gloo_threads() -> list[str]:
    """The names of this process's threads that are Gloo's."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return sorted(name for name in names if "gloo" in name)


def main(data_parallel: str) -> None:
    world = open_process_world(rank=0, size=1, local_rank=0, timeout_seconds=600, device="cpu")
    from tests.agreement import MODEL, Layout, train_rank  # and torch's optimizers, after there is a world

    layout = Layout(zero=3 if data_parallel == "fsdp" else 0, data_parallel=data_parallel)
    mesh = build_mesh(world, Topology())
    train_rank(mesh, layout, model=MODEL, rule="adamw, clip 1", dtype="fp32", steps=1)
    print("open:", *gloo_threads())
    world.close()


if __name__ == "__main__":
    atexit.register(lambda: print("ended:", *gloo_threads()))  # runs last of all that was registered
    main(sys.argv[1])
