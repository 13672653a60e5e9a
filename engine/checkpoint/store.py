"""A run's checkpoints: saving, finding, loading and pruning them. All ranks together.

A save: rank 0 makes a temporary folder, every rank writes its share there (in a thread if asynchronous), and once
all say that theirs is on disk, rank 0 writes the manifest and gives the folder its name. Threads never communicate.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from triaxis.engine.checkpoint.assignment import (
    StateLoadPlanner,
    StatePlanner,
    mismatches,
    plan_from_json,
    plan_to_json,
)
from triaxis.engine.checkpoint.failures import save_failure, together, told_cause
from triaxis.engine.checkpoint.folder import (
    BEST,
    FOLDER,
    begin_folder,
    complete_checkpoints,
    discard_folder,
    place_folder,
    prune_folders,
    reading,
)
from triaxis.engine.checkpoint.manifest import (
    CheckpointError,
    FileRecord,
    Manifest,
    RunState,
    SaveError,
    check_files,
)
from triaxis.engine.checkpoint.states import held_layer_states, held_states
from triaxis.engine.checkpoint.storage import ShardReader, ShardWriter, results_of
from triaxis.engine.step import TrainingStep
from triaxis.parallel.worlds.agreement import gather_json, send_json

__all__ = ["CheckpointError", "CheckpointStore", "RunState", "SaveError", "complete_checkpoints"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Save:
    """A save under way. written: done when this rank's share is on disk, or could not be put there."""

    state: RunState
    optimizer_steps: int
    temporary: Path
    best: bool
    written: Future[None]


def _start(work: Callable[[], None], *, asynchronous: bool) -> Future[None]:
    """Does the work, here or in a thread."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  (raised, or agreed on, by who waits)
            future.set_exception(error)
        else:
            future.set_result(None)

    if asynchronous:
        threading.Thread(target=run, name="checkpoint", daemon=True).start()
    else:
        run()
    return future


class CheckpointStore:
    """The checkpoints of one run under `directory/checkpoints`. Making it is collective, over the world.

    tensors, size_bytes: of a checkpoint, over all ranks
    """

    def __init__(self, directory: Path, step: TrainingStep) -> None:
        self._directory, self._step = directory, step
        self._group, self._device = step.mesh.everyone, step.mesh.world.device
        self._own_name = f"rank {self._group.rank} on {socket.gethostname()}"
        self._held = held_states(step.data_parallel.buckets, step.optimizer) | held_layer_states(step.stages)
        self._planner, self._writer = StatePlanner(), ShardWriter()
        self._planner.set_up_planner(self._held)
        own = plan_to_json(self._planner.create_local_plan())
        plans = [plan_from_json(plan) for plan in gather_json(self._group, own, self._device)]
        plans, self._metadata = self._planner.create_global_plan(plans)
        plans = self._writer.prepare_global_plan(plans)
        self._plan = plans[self._group.rank]
        self._results = [results_of(plan) for plan in plans]
        self.tensors = len(self._metadata.state_dict_metadata)
        self.size_bytes = sum(result.size_in_bytes for share in self._results for result in share)
        self._save: _Save | None = None
        self._current: Path | None = None
        self._notes: list[str] = []

    def latest(self) -> Path | None:
        """The newest complete checkpoint, as rank 0 sees it. Collective."""
        found = complete_checkpoints(self._directory) if self._group.rank == 0 else []
        newest = send_json(self._group, found[-1].name if found else None, self._device)
        return None if newest is None else self._directory / FOLDER / str(newest)

    # Saving.

    def save(self, state: RunState, *, asynchronous: bool = False, best: bool = False) -> None:
        """Writes a checkpoint of this moment; asynchronously, returns once the states are copied. Collective.

        Ends the save under way first. Raises SaveError on all ranks: for this save, or for the one under way (then
        this one is done, or on its way, all the same).
        """
        earlier = self._commit()
        temporary = self._begin(state.step)
        if asynchronous:
            self._planner.stage(self._plan)
        self._writer.reset(temporary)

        def write() -> None:
            self._writer.write_data(self._plan, self._planner)

        self._save = _Save(
            state=state,
            optimizer_steps=self._step.optimizer.steps,
            temporary=temporary,
            best=best,
            written=_start(write, asynchronous=asynchronous),
        )
        failure = earlier if asynchronous else self._commit() or earlier
        if failure is not None:
            raise failure

    def finish(self) -> None:
        """Waits for an asynchronous save and commits it. Collective; raises SaveError on all ranks."""
        failure = self._commit()
        if failure is not None:
            raise failure

    def poll(self) -> bool:
        """Whether this rank has no write under way; does not communicate."""
        return self._save is None or self._save.written.done()

    def commit_if_ready(self) -> bool:
        """Commits an asynchronous save that every rank has written; whether it did. Collective, one small message.

        Nothing, and no message, while no save is under way. Raises SaveError on all ranks.
        """
        if self._save is None:
            return False
        writing = torch.tensor([int(not self.poll())], device=self._device)
        self._group.all_reduce(writing)
        if int(writing):
            return False
        self.finish()
        return True

    def _begin(self, step: int) -> Path:
        """The temporary folder of a save, made by rank 0. Raises SaveError on all ranks."""
        answer: dict[str, object] = {}
        if self._group.rank == 0:
            try:
                answer = {"name": begin_folder(self._directory / FOLDER, step).name}
            except OSError as error:
                answer = {"failure": told_cause(self._own_name, error)}
        told: Any = send_json(self._group, answer, self._device)
        if "failure" in told:
            raise save_failure(step, *told["failure"])
        return self._directory / FOLDER / str(told["name"])

    def _commit(self) -> SaveError | None:
        """Ends the save under way, if there is one: its checkpoint is complete, or gone and this says why."""
        save, self._save = self._save, None
        if save is None:
            return None
        error = save.written.exception()
        self._step.mesh.world.wait_for_all("checkpoint written")
        self._planner.unstage()
        if error is not None and not isinstance(error, OSError):
            raise error
        files = {name: (file.size_bytes, file.crc32) for name, file in self._writer.files.items()}
        own = {"failure": None if error is None else told_cause(self._own_name, error), "files": files}
        reports: list[Any] = gather_json(self._group, own, self._device)
        failed = [report["failure"] for report in reports if report["failure"]]
        if not failed and self._group.rank == 0:
            failed = self._place(save, reports)
        told: Any = send_json(self._group, failed[:1], self._device)
        if not told:
            return None
        if self._group.rank == 0:
            discard_folder(save.temporary)
        return save_failure(save.state.step, *told[0])

    def _place(self, save: _Save, reports: list[Any]) -> list[tuple[str, str, int]]:
        """Rank 0 writes the manifest and names the folder; what failed, or nothing."""
        files = {
            name: FileRecord(size_bytes=size_bytes, crc32=crc32)
            for report in reports
            for name, (size_bytes, crc32) in report["files"].items()
        }
        facts = (save.state, save.optimizer_steps)
        try:
            if save.best:
                (save.temporary / BEST).touch()
            self._writer.finish(
                replace(self._metadata, planner_data=facts, storage_data=files), self._results
            )
            self._current, note = place_folder(save.temporary, save.state.step)
        except OSError as error:
            return [told_cause(self._own_name, error)]
        self._notes += [note] if note else []
        return []

    # Loading.

    def load(self, path: Path) -> RunState:
        """Fills parameters, masters, moments and the optimizer's step from a checkpoint. Collective.

        Raises CheckpointError on all ranks, before anything is changed if a file is damaged or a tensor missing.
        """
        self.finish()
        planner, reader = StateLoadPlanner(), ShardReader(path)
        with ExitStack() as stack:

            def prepare() -> Manifest:
                stack.enter_context(reading(path))
                metadata = reader.read_metadata()
                faults = mismatches(self._metadata.state_dict_metadata, metadata.state_dict_metadata)
                if faults:
                    raise CheckpointError(
                        f"{path} must hold this run's model and optimizer, but " + "; ".join(faults)
                    )
                manifest: Manifest = metadata.planner_data
                check_files(path, self._own_share(manifest.files))
                reader.set_up_storage_reader(metadata, self._group.rank == 0)
                planner.set_up_planner(self._held, metadata)
                return manifest

            def read() -> None:
                reader.read_data(reader.prepare_local_plan(planner.create_local_plan()), planner)
                for tensor in self._held.values():
                    tensor.fill_copies()

            manifest = together(self._step.mesh, self._own_name, prepare, path)
            together(self._step.mesh, self._own_name, read, path)
        self._step.optimizer.resume_at(manifest.optimizer_steps)
        self._step.data_parallel.publish()
        self._current = path
        return manifest.state

    def _own_share(self, files: dict[str, FileRecord]) -> dict[str, FileRecord]:
        """The files whose checksum this rank checks."""
        return {name: files[name] for name in sorted(files)[self._group.rank :: self._group.size]}

    def prune(self, keep: int | None) -> list[str]:
        """Rank 0 deletes all but the `keep` newest complete ones; None keeps all. Does not communicate.

        The best, those being read and the one that this store saved or loaded last are never deleted, nor is what no
        run has made; what cannot be deleted waits for the next time. Returns what a save had to set aside and what
        had to stay since the last call, a line each.
        """
        notes, self._notes = self._notes, []
        if keep is not None and self._group.rank == 0:
            with suppress(OSError):
                notes += prune_folders(self._directory / FOLDER, keep, self._current)
        return notes
