"""Which ranks of a run still live: each holds a lock on a file of its own, which only its death releases. No torch."""

from __future__ import annotations

import os
import re
import socket
from contextlib import suppress
from pathlib import Path

from triaxis.engine.faults.locks import Locked, lock

PREFIX = ".alive-"
SIGN = re.compile(r"\.?rank-\d+")


class Presence:
    """This rank's sign of life in `directory/.alive-<run>`, and a look at those of others.

    Locks tell the truth on one machine only, so that a rank elsewhere is never called dead.
    """

    def __init__(self, directory: Path, run: str, rank: int, size: int) -> None:
        self.folder = directory / f"{PREFIX}{run}"
        self.rank, self.size = rank, size
        self.folder.mkdir(parents=True, exist_ok=True)
        draft = self.folder / f".rank-{rank}"
        self._file = draft.open("w", encoding="utf-8")
        if lock(self._file) is Locked.HELD:  # without locks a rank names no machine, and is never called dead
            self._file.write(socket.gethostname())
            self._file.flush()
        self._path = self.folder / f"rank-{rank}"
        draft.replace(self._path)  # locked before anyone can see it

    def neighbour_died(self) -> bool:
        """Whether the next rank is gone; every rank watching one is enough, and is cheap with thousands."""
        return self.size > 1 and is_dead(self.folder, (self.rank + 1) % self.size)

    def close(self) -> None:
        """Leaves in peace."""
        self._path.unlink(missing_ok=True)
        self._file.close()
        with suppress(OSError):  # the last one to leave takes the folder away
            self.folder.rmdir()


def is_dead(folder: Path, rank: int) -> bool:
    """Whether the rank showed itself on this machine and ended without leaving."""
    try:
        with (folder / f"rank-{rank}").open(encoding="utf-8") as file:
            if file.read() != socket.gethostname():
                return False
            free = lock(file, shared=True) is Locked.HELD
            return free and os.fstat(file.fileno()).st_nlink > 0  # else it left in peace just now
    except OSError:  # it never came, or has left in peace
        return False


def dead_ranks(directory: Path, run: str, size: int) -> list[int]:
    """All ranks that are gone without leaving, as far as this machine can tell."""
    folder = directory / f"{PREFIX}{run}"
    return [rank for rank in range(size) if is_dead(folder, rank)]


def clear_presence(directory: Path) -> None:
    """Removes what earlier runs left; for the one process that holds the directory, before the ranks meet."""
    for folder in directory.glob(f"{PREFIX}*"):
        if folder.is_symlink() or not folder.is_dir():
            continue
        for sign in folder.iterdir():
            if SIGN.fullmatch(sign.name):
                sign.unlink(missing_ok=True)
        with suppress(OSError):  # something in it is not ours: it stays
            folder.rmdir()


def process_name() -> str:
    """This process as a person finds it: `process 1234 on node7`."""
    return f"process {os.getpid()} on {socket.gethostname()}"
