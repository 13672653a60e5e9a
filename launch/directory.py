"""The folder a run writes to: one run at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import TextIO

from triaxis.engine.faults.presence import clear_presence
from triaxis.engine.plain_files import kind_of, open_plain

LOCK_NAME = ".lock"
REQUEUE_NAME = "requeue"
"""There if the last run in the folder saved itself on a signal, for job scripts: torchrun hides the exit code."""


def claim_directory(directory: Path) -> TextIO:
    """Holds a run's folder as `hold_directory` does, and clears what earlier runs left behind."""
    lock = hold_directory(directory)
    for left in directory.glob(".failure-*"):
        if kind_of(left) is None:
            left.unlink(missing_ok=True)
    (directory / REQUEUE_NAME).unlink(missing_ok=True)
    clear_presence(directory)
    return lock


def hold_directory(directory: Path) -> TextIO:
    """Makes the folder and holds it until the file returned is closed, or this process is gone.

    Raises ValueError if another run holds it, or it cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.fdopen(open_plain(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT), "r+", encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"`output_dir` must be a folder that can be written, but {error.filename or directory} cannot: "
            f"{error.strerror}; name another with --output-dir"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        lock.close()
        raise ValueError(
            f"`output_dir` must not be in use, but another run (process {holder}) writes to {directory}; "
            "name another with --output-dir, or end that run"
        ) from error
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock
