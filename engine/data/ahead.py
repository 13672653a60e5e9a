"""Batches made ahead: threads read the next steps' rows while a step computes. The same batches, bit for bit."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from triaxis.engine.data.loader import Loader
from triaxis.models.batch import Batch


class Ahead:
    """Hands out a loader's batches step by step, and has up to `workers` steps in the making.

    workers: threads; 0 makes each batch when it is asked for
    total_steps: none is made beyond the run's last
    An error of reading is raised where its step asks, as without.
    """

    def __init__(self, loader: Loader, *, workers: int, total_steps: int) -> None:
        self._loader, self._workers, self._total_steps = loader, workers, total_steps
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="batches") if workers else None
        self._coming: dict[tuple[int, int], Future[list[Batch]]] = {}

    def step_batches(self, step: int, first_sample: int) -> list[Batch]:
        """This rank's microbatches of optimizer step `step`, which begins with this sample of the run."""
        if self._pool is None:
            return self._loader.step_batches(step, first_sample=first_sample)
        batch = self._loader.global_batch
        for later in range(min(self._workers, self._total_steps - 1 - step) + 1):
            key = (step + later, first_sample + later * batch)
            if key not in self._coming:
                self._coming[key] = self._pool.submit(self._loader.step_batches, key[0], first_sample=key[1])
        return self._coming.pop((step, first_sample)).result()

    def __enter__(self) -> Ahead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
