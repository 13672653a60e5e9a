"""The folder a run writes to: one run at a time."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TextIO

from triaxis.engine.faults.locks import Locked, lock
from triaxis.engine.faults.presence import clear_presence
from triaxis.engine.plain_files import kind_of, open_plain

LOCK_NAME = ".lock"
WITHOUT_LOCKS = (
    "note: the file system of {} has no locks, so nothing keeps a second run out of this folder, and a rank that is "
    "killed is noticed by --hang-timeout only (Lustre: mount it with flock)"
)
REQUEUE_NAME = "requeue"
"""There if the last run in the folder saved itself on a signal, for job scripts: torchrun hides the exit code."""


def asked_to_requeue(directory: Path) -> bool:
    """Whether the last run in the folder saved itself on a signal, and nothing was started there since."""
    return (directory / REQUEUE_NAME).exists()


def claim_directory(directory: Path) -> TextIO:
    """Holds a run's folder as `hold_directory` does, and clears what earlier runs left behind."""
    held = hold_directory(directory)
    for left in directory.glob(".failure-*"):
        if kind_of(left) is None:
            left.unlink(missing_ok=True)
    (directory / REQUEUE_NAME).unlink(missing_ok=True)
    clear_presence(directory)
    return held


def hold_directory(directory: Path) -> TextIO:
    """Makes the folder and holds it until the file returned is closed, or this process is gone.

    Raises ValueError if another run holds it, or it cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(open_plain(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT), "r+", encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"`output_dir` must be a folder that can be written, but {error.filename or directory} cannot: "
            f"{error.strerror}; name another with --output-dir"
        ) from error
    if (found := lock(file)) is Locked.TAKEN:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise ValueError(
            f"`output_dir` must not be in use, but another run (process {holder}) writes to {directory}; "
            "name another with --output-dir, or end that run"
        )
    if found is Locked.NOWHERE:
        print(WITHOUT_LOCKS.format(directory), file=sys.stderr, flush=True)
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file
