"""Where a step's time goes on each rank, and which rank the others wait for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from triaxis.parallel.worlds.mesh import Mesh

STEPS_IN_A_ROW = 10
"""Steps for which a rank must be the slow one before it is told; then it is told again every hundred."""
TOLD_EVERY = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """One step of this rank, in seconds.

    data: until the batch was there; wait: for others, by group; compute: the rest
    slowest_rank: the rank that was longest at its own work (data and compute), the same on all ranks
    """

    data: float
    compute: float
    wait: Mapping[str, float]
    slowest_rank: int


class StepTimes:
    """Measures each step between `start` and `finish`.

    On a GPU a wait ends before its communication does, so that what others cost shows up as compute there.
    factor: a rank whose own work takes so many times the median of its stage's is slow
    """

    def __init__(self, mesh: Mesh, factor: float, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._mesh, self._factor, self._clock = mesh, factor, clock
        self._started = self._read = 0.0
        self._waited: dict[str, float] = {}
        self._slow, self._in_a_row = -1, 0
        self._own: list[list[float]] = []

    def start(self) -> None:
        """The step begins with its data."""
        self._started = self._read = self._clock()
        self._waited = {name: group.waited_seconds for name, group in self._mesh.groups.items()}

    def data_is_there(self) -> None:
        self._read = self._clock()

    def finish(self) -> StepTime:
        """The step is over. Collective, one small message."""
        data, all_seconds = self._read - self._started, self._clock() - self._started
        wait = {
            name: group.waited_seconds - self._waited.get(name, 0.0)
            for name, group in self._mesh.groups.items()
            if group.size > 1
        }
        compute = max(0.0, all_seconds - data - sum(wait.values()))
        self._own = self._exchange(data, compute)
        work = [data + compute for data, compute in self._own]
        slowest = max(range(len(work)), key=work.__getitem__)
        self._count(slowest, work)
        return StepTime(data=data, compute=compute, wait=wait, slowest_rank=slowest)

    def straggler(self) -> str | None:
        """What to say of a rank that has been slow for long; None mostly."""
        if (
            self._slow < 0
            or self._in_a_row < STEPS_IN_A_ROW
            or (self._in_a_row - STEPS_IN_A_ROW) % TOLD_EVERY
        ):
            return None
        data, compute = self._own[self._slow]
        most = "reading data" if data > compute else "computing"
        return (
            f"warning: rank {self._slow} ({self._mesh.topology.place(self._slow)}) is slow: for {self._in_a_row} steps "
            f"it takes more than {self._factor:g} times as long as its like, now {data + compute:.3g} s, mostly "
            f"{most}; the others wait for it"
        )

    def _exchange(self, data: float, compute: float) -> list[list[float]]:
        everyone = self._mesh.everyone
        told = torch.zeros(everyone.size, 2, dtype=torch.float32, device=self._mesh.world.device)
        told[everyone.rank, 0], told[everyone.rank, 1] = data, compute
        everyone.all_reduce(told, label="times of a step")
        rows: list[list[float]] = told.tolist()
        return rows

    def _count(self, slowest: int, work: list[float]) -> None:
        """Whether the slowest rank is slow beside its like: the other ranks of its stage, or all where it has none."""
        topology = self._mesh.topology
        stage = topology.coordinates(slowest)["pp"]
        like = [
            rank for rank in range(len(work)) if topology.coordinates(rank)["pp"] == stage and rank != slowest
        ]
        others = like or [rank for rank in range(len(work)) if rank != slowest]
        slow = bool(others) and work[slowest] > self._factor * statistics.median(
            work[rank] for rank in others
        )
        self._in_a_row = self._in_a_row + 1 if slow and slowest == self._slow else int(slow)
        self._slow = slowest if slow else -1
