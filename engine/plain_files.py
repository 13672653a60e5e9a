"""Files opened as what they are: regular ones only, never through a link, and never waiting for a writer. No torch."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a device",
    stat.S_IFCHR: "a device",
}


def kind_of(path: Path) -> str | None:
    """What stands at a path instead of a regular file: "a link", "a FIFO"; None for a file. Raises OSError."""
    return KINDS.get(stat.S_IFMT(path.lstat().st_mode))


def open_plain(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file. Raises OSError, whose `strerror` says so, for a link, a FIFO or a folder.

    O_NONBLOCK: to open a FIFO would wait for its other end
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR) and (kind := kind_of(path)):
            raise _not_a_file(error.errno, kind, path) from error
        raise
    kind = KINDS.get(stat.S_IFMT(os.fstat(descriptor).st_mode))
    if kind is not None:
        os.close(descriptor)
        raise _not_a_file(errno.EINVAL, kind, path)
    return descriptor


def read_plain(path: Path) -> BinaryIO:
    """A regular file for reading, unbuffered. Raises OSError as `open_plain` does."""
    return open(open_plain(path), "rb", buffering=0)


def _not_a_file(number: int, kind: str, path: Path) -> OSError:
    return OSError(number, f"{kind}, not a file", str(path))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process, and one thread, at a time."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
