"""Loads the checkpoint that a run goes on from, and checks that it is what was saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from triaxis.engine.checkpoint.manifest import CheckpointError, RunState
from triaxis.engine.config import ResolvedRun, RunConfig
from triaxis.engine.faults.replicas import check_replicas
from triaxis.engine.run.inputs import RunInputs, changed_inputs, check_same_inputs
from triaxis.engine.run.resume import check_same_run, named_checkpoint, told_changes
from triaxis.engine.run.stored_row import Row, check_replay, replay, rounding
from triaxis.engine.step import TrainingStep

if TYPE_CHECKING:
    from triaxis.engine.checkpoint.store import CheckpointStore


def restore(
    config: RunConfig,
    resolved: ResolvedRun,
    training: TrainingStep,
    inputs: RunInputs,
    open_store: Callable[[], CheckpointStore],
    say: Callable[[str], None],
) -> RunState | None:
    """The state that the run goes on from, its tensors loaded; None for a fresh start. Collective.

    `auto` passes over checkpoints that cannot be read. Raises CheckpointError if none is left, or the loaded model
    does not give the saved loss; ConfigError if it is another run's.
    """
    if config.resume in (None, "never"):
        return None
    store = open_store()
    path = store.latest() if config.resume == "auto" else named_checkpoint(str(config.resume))
    if path is None:
        say("no checkpoint yet: starting at step 0")
        return None
    while True:
        try:
            state = store.load(path)
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
    here = rounding(config, resolved, training.mesh.world)
    check_replay(state, replay(training, stored_row(state)), here, config.dtype)
    loaded = (
        f"resumed at step {state.step} from {path}: all {store.tensors} tensors, and the stored row's loss"
    )
    for line in (loaded, *told_changes(state, config), *changed_inputs(state, inputs)):
        say(line)
    return state


def stored_row(state: RunState) -> Row:
    """The row of data kept for the replay."""
    return cast(Row, state.extra["replayed_row"])
