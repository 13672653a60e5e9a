"""When a run is saved, what is saved beside its tensors, and what happens if that fails."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from triaxis.engine.checkpoint.folder import FOLDER
from triaxis.engine.checkpoint.manifest import RunState, SaveError
from triaxis.engine.config import ResolvedRun, RunConfig, SaveStrategy, run_directory, source_of
from triaxis.engine.faults.replicas import check_replicas
from triaxis.engine.faults.supervision import Watch
from triaxis.engine.plain_files import open_plain
from triaxis.engine.run.counters import Counters
from triaxis.engine.run.inputs import RunInputs
from triaxis.engine.run.resume import facts_of
from triaxis.engine.run.stored_row import Row, choose_row, replay, rounding
from triaxis.engine.step import TrainingStep
from triaxis.parallel.kernels.table import chosen_kernels
from triaxis.parallel.places.legal_values import first_of
from triaxis.parallel.worlds.agreement import gather_json
from triaxis.parallel.worlds.mesh import Mesh

if TYPE_CHECKING:
    from triaxis.engine.checkpoint.store import CheckpointStore

DEFAULT_SAVE_STEPS = 500
DEFAULT_SAVE_MINUTES = 30.0
CHECKPOINTS_AT_ONCE = 2
MEGA = 1e6
AFTER_STEP = (
    "Nothing was saved of them: --resume auto goes on from the newest checkpoint, whose copies were equal. If it "
    "happens again, a device is faulty or a gradient is not summed"
)


def check_writable(mesh: Mesh, folder: Path) -> None:
    """Every rank makes a file in the folder of checkpoints, and takes it away: no surprise hours later. Collective."""
    for makes in (mesh.world.rank == 0, True):  # rank 0 makes the folder that the others then find
        failure: str | None = None
        probe = folder / f".probe-{mesh.world.rank}-{secrets.token_hex(4)}"
        try:
            if makes:
                folder.mkdir(parents=True, exist_ok=True)
                os.close(open_plain(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
                probe.unlink()
        except OSError as error:
            failure = f"rank {mesh.world.rank} on {socket.gethostname()}: {error.strerror}"
        told = [answer for answer in gather_json(mesh.everyone, failure, mesh.world.device) if answer]
        if told:
            failed = first_of([str(answer) for answer in told], 1, separator=", ", noun="rank")
            raise ValueError(
                f"checkpoints must be written to {folder}, but that cannot be, by {failed}; see to its "
                "permissions, or name another folder with --output-dir"
            )


class Saver:
    """Saves the run after the steps that ask for it. Every method is collective.

    open_store: makes the store, once, when it is first needed; say: shows a line to people
    row: the batch that is replayed after a load; None chooses one
    """

    def __init__(
        self,
        config: RunConfig,
        resolved: ResolvedRun,
        training: TrainingStep,
        inputs: RunInputs,
        open_store: Callable[[], CheckpointStore],
        *,
        row: Row | None,
        watch: Watch,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._resolved = config, resolved
        self._training, self._inputs = training, inputs
        self._open_store, self._opened = open_store, False
        self._watch, self._say = watch, say
        self._row = choose_row(inputs.training) if row is None else row
        self._rounding = rounding(config, resolved, training.mesh.world)
        self._facts = facts_of(config, resolved)
        self._saved_seconds = time.monotonic()
        self._said: set[str] = set()

    def start(self, directory: Path) -> None:
        """Warns where the disk has no room for two checkpoints: one is written beside the other. Collective.

        Raises ValueError on all ranks where one of them cannot write there.
        """
        if self._resolved.save_strategy == SaveStrategy.NO:
            return
        check_writable(self._training.mesh, directory / FOLDER)
        if self._resolved.save_strategy == SaveStrategy.SIGNAL:
            return
        store, self._opened = self._open_store(), True
        if self._training.mesh.world.rank == 0:
            free = shutil.disk_usage(directory).free
            if free < CHECKPOINTS_AT_ONCE * store.size_bytes:
                self._say(
                    f"warning: a checkpoint takes {store.size_bytes / MEGA:,.0f} MB, and {directory} has only "
                    f"{free / MEGA:,.0f} MB free for old and new; free some, or choose another --output-dir"
                )

    def time_due(self) -> bool:
        """Whether this rank's clock asks for a save; the trainer makes it one answer."""
        minutes = self._config.save_minutes or DEFAULT_SAVE_MINUTES
        timed = self._resolved.save_strategy == SaveStrategy.TIME
        return timed and time.monotonic() - self._saved_seconds >= 60 * minutes

    def after_step(
        self, counters: Counters, eval_loss: float | None, *, time_due: bool, asked: bool, last: bool
    ) -> bool:
        """Saves if the step, the clock, a signal (`asked`), the end or the best evaluation so far wants it.

        Returns whether it did anything that took time. Raises SaveError where the run must not go on without, and
        ReplicaError where replicas differ.
        """
        must = asked or (last and self._resolved.save_strategy != SaveStrategy.SIGNAL)
        best = eval_loss is not None and eval_loss < (counters.best_eval_loss or float("inf"))
        due = must or self._due(counters, time_due) or (best and self._config.save_best)
        due = due and self._resolved.save_strategy != SaveStrategy.NO
        if due or last:
            self._watch.at(counters.step, "comparing copies")
            check_replicas(self._training, f"after step {counters.step}", way_out=AFTER_STEP)
        if not due:
            return self._commit()
        self._watch.at(counters.step, "saving")
        try:
            if best:
                counters.best_eval_loss = eval_loss
            state = self._state(counters, eval_loss)
            asynchronous = self._config.async_save and not must
            store, self._opened = self._open_store(), True
            store.save(state, asynchronous=asynchronous, best=best)
            self._prune(store)
            self._copy(counters.step)
        except SaveError as error:
            self._bear(error, must=must)
        else:
            self._saved_seconds = time.monotonic()
        return True

    def keep_finished(self, counters: Counters) -> None:
        """A run with no step left that goes on in a new folder leaves its checkpoint there too."""
        if self._resolved.save_strategy != SaveStrategy.NO and self._open_store().latest() is None:
            self.after_step(counters, None, time_due=False, asked=True, last=True)

    def finish(self) -> None:
        """Waits for the save under way."""
        if self._opened:
            self._open_store().finish()

    def _commit(self) -> bool:
        if not self._opened:
            return False
        store = self._open_store()
        try:
            committed = store.commit_if_ready()
            if committed:
                self._prune(store)
        except SaveError as error:
            self._bear(error, must=False)
            return True
        return committed

    def _copy(self, step: int) -> None:
        """The checkpoint of this step as a Hugging Face folder, if the run keeps such ones. Raises SaveError."""
        if not self._config.save_hf_checkpoints:
            return
        from triaxis.engine.run.hub_copies import prune_copies, write_copy

        directory = run_directory(self._config)
        try:
            told = write_copy(
                self._training.mesh,
                directory,
                step,
                source=source_of(self._config),
                still=lambda: self._watch.at(step, "writing a Hugging Face folder"),
            )
        except ValueError as error:
            raise SaveError(
                f"the Hugging Face folder of step {step} was not written: {error}", step
            ) from error
        if self._training.mesh.world.rank == 0:
            prune_copies(directory)
            self._say(told)

    def _prune(self, store: CheckpointStore) -> None:
        """Says each thing that had to be set aside or left once."""
        for note in store.prune(self._config.save_total_limit):
            if note not in self._said:
                self._said.add(note)
                self._say(note)

    def _bear(self, error: SaveError, *, must: bool) -> None:
        if must or self._config.on_save_error == "stop":
            raise error
        self._saved_seconds = time.monotonic()
        self._say(f"{error}; training goes on (--on_save_error continue)")

    def _due(self, counters: Counters, time_due: bool) -> bool:
        strategy = self._resolved.save_strategy
        if strategy == SaveStrategy.STEPS:
            return counters.step % (self._config.save_steps or DEFAULT_SAVE_STEPS) == 0
        if strategy == SaveStrategy.EPOCH:
            rows, batch = len(self._inputs.training.source), self._resolved.global_batch
            return counters.samples // rows > (counters.samples - batch) // rows
        return time_due

    def _state(self, counters: Counters, eval_loss: float | None) -> RunState:
        return RunState(
            step=counters.step,
            tokens=counters.tokens,
            config=asdict(self._config),
            sampler={
                "seed": self._config.seed,
                "samples": counters.samples,
                "rows": len(self._inputs.training.source),
                **self._inputs.mix.saved(counters.samples),
            },
            eval_loss=replay(self._training, self._row),
            extra={
                "counters": asdict(counters),
                "facts": self._facts,
                "fingerprints": dict(self._inputs.fingerprints),
                "rounding": self._rounding,
                "replayed_row": self._row,
                "held_out_loss": eval_loss,
                "kernels": {str(name): made for name, made in chosen_kernels(self._config.kernels).items()},
            },
        )
