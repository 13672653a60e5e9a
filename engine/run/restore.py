"""Loads the checkpoint that a run goes on from, and checks that it is what was saved."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from triaxis.engine.checkpoint.folder import complete_checkpoints, leftovers_at, set_aside, step_of
from triaxis.engine.checkpoint.manifest import CheckpointError, RunState
from triaxis.engine.config import ConfigError, ResolvedRun, RunConfig, run_directory
from triaxis.engine.faults.replicas import check_replicas
from triaxis.engine.run.counters import check_run_state
from triaxis.engine.run.inputs import RunInputs
from triaxis.engine.run.resume import check_same_run, in_the_way, named_checkpoint, newer_in, told_changes
from triaxis.engine.run.same_inputs import changed_inputs, check_same_inputs
from triaxis.engine.run.stored_row import Row, check_replay, replay, rounding
from triaxis.engine.step import TrainingStep
from triaxis.parallel.worlds.agreement import send_json
from triaxis.parallel.worlds.mesh import Mesh

if TYPE_CHECKING:
    from triaxis.engine.checkpoint.store import CheckpointStore


def checkpoint_to_load(config: RunConfig, mesh: Mesh) -> Path | None:
    """What the run goes on from, as rank 0 sees it; None for a fresh start. Collective.

    Known before the model is made: its first values are then not worth making. Raises ConfigError on every rank where
    a fresh start would write over an older run's checkpoints.
    """
    if config.resume in (None, "never"):
        fault = in_the_way(config) if mesh.world.rank == 0 else None
        if (told := send_json(mesh.everyone, fault, mesh.world.device)) is not None:
            raise ConfigError((str(told),))
        return None
    if config.resume != "auto":
        return named_checkpoint(str(config.resume))
    found = complete_checkpoints(run_directory(config)) if mesh.world.rank == 0 else []
    newest = send_json(mesh.everyone, str(found[-1]) if found else None, mesh.world.device)
    return None if newest is None else Path(str(newest))


def restore(
    path: Path | None,
    config: RunConfig,
    resolved: ResolvedRun,
    training: TrainingStep,
    inputs: RunInputs,
    open_store: Callable[[], CheckpointStore],
    say: Callable[[str], None],
) -> RunState | None:
    """The state that the run goes on from, its tensors loaded; None for a fresh start. Collective.

    path: the checkpoint; `auto` passes over those that cannot be read. Raises CheckpointError if none is left, or the
    loaded model does not give the saved loss; ConfigError if it is another run's.
    """
    if path is None:
        if config.resume == "auto":
            say("no checkpoint yet: starting at step 0")
        return None
    store = open_store()
    if config.resume == "auto":
        _say_what_is_passed_over(path, say)
    while True:
        try:
            state = store.load(path)
            check_run_state(state, path)
            break
        except CheckpointError as error:
            if config.resume != "auto" or error.previous is None:
                raise
            say(str(error))
            path = error.previous
    check_replicas(
        training,
        f"after {path} was loaded",
        way_out="A device or the memory of a rank is faulty; try again without it",
    )
    check_same_run(state, config, resolved)
    check_same_inputs(state, inputs, resolved.data)
    mixed = inputs.mix.go_on(state)
    here = rounding(config, resolved, training.mesh.world)
    note = check_replay(state, replay(training, stored_row(state)), here, config.dtype, path)
    loaded = (
        f"resumed at step {state.step} from {path}: all {store.tensors} tensors, and the stored row's loss"
    )
    for line in (
        loaded,
        note,
        *told_changes(state, config, resolved),
        *mixed,
        *changed_inputs(state, inputs),
    ):
        if line is not None:
            say(line)
    if training.mesh.world.rank == 0:
        _set_newer_aside(run_directory(config), path, config, say)
    return state


def _say_what_is_passed_over(path: Path, say: Callable[[str], None]) -> None:
    """What would be a newer checkpoint, if it were complete."""
    for other, why in leftovers_at(path.parent):
        step = re.search(r"\d+", other.name)
        if step and int(step[0]) > (step_of(path) or 0):
            say(f"{other} is passed over: {why}")


def _set_newer_aside(directory: Path, path: Path, config: RunConfig, say: Callable[[str], None]) -> None:
    """Where a run goes back to an older checkpoint, those after it are no longer its past: auto must not find them."""
    for newer in newer_in(directory, path) if config.resume != "auto" else ():
        say(f"{newer} is newer than what the run goes on from: it is now {set_aside(newer).name}")


def stored_row(state: RunState) -> Row:
    """The row of data kept for the replay."""
    return cast(Row, state.extra["replayed_row"])
