"""A run's checkpoints: saving, finding, loading and pruning them. All ranks together."""

from __future__ import annotations

from pathlib import Path

from triaxis.engine.checkpoint.manifest import (
    CheckpointError,
    RunState,
    SaveError,
    complete_checkpoints,
)
from triaxis.engine.step import TrainingStep

__all__ = ["CheckpointError", "CheckpointStore", "RunState", "SaveError", "complete_checkpoints"]


class CheckpointStore:
    """The checkpoints of one run under `directory/checkpoints`. Making it is collective, over the world."""

    def __init__(self, directory: Path, step: TrainingStep) -> None:
        raise NotImplementedError

    def latest(self) -> Path | None:
        """The newest complete checkpoint, as rank 0 sees it. Collective."""
        raise NotImplementedError

    def save(self, state: RunState, *, asynchronous: bool = False, best: bool = False) -> None:
        """Writes a checkpoint of this moment; asynchronously, returns once the states are copied. Collective.

        Ends the save under way first. Raises SaveError on all ranks: for this save, or for the one under way (then
        this one is done, or on its way, all the same).
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Waits for an asynchronous save and commits it. Collective; raises SaveError on all ranks."""
        raise NotImplementedError

    def poll(self) -> bool:
        """Whether this rank has no write under way; does not communicate."""
        raise NotImplementedError

    def commit_if_ready(self) -> bool:
        """Commits an asynchronous save that every rank has written; whether it did. Collective, one small message.

        Nothing, and no message, while no save is under way. Raises SaveError on all ranks.
        """
        raise NotImplementedError

    def load(self, path: Path) -> RunState:
        """Fills parameters, masters, moments and the optimizer's step from a checkpoint. Collective.

        Raises CheckpointError on all ranks, before anything is changed if a file is damaged or a tensor missing.
        """
        raise NotImplementedError

    def prune(self, keep: int | None) -> None:
        """Rank 0 deletes the oldest complete ones until `keep` are left; None keeps all. Does not communicate.

        The newest, the best and those being read are never deleted.
        """
        raise NotImplementedError
