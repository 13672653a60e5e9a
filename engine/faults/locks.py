"""Locks on files, on file systems that may have none: Lustre without `flock`, some network mounts. No torch."""

from __future__ import annotations

import errno
import fcntl
from enum import Enum, auto
from typing import IO, Any

WITHOUT = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK)


class Locked(Enum):
    """What came of asking: the lock is held, somebody else has it, or there are none here."""

    HELD = auto()
    TAKEN = auto()
    NOWHERE = auto()


def lock(file: IO[Any], *, shared: bool = False, wait: bool = False) -> Locked:
    """Holds the file until it is closed or this process is gone."""
    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(file, how if wait else how | fcntl.LOCK_NB)
    except BlockingIOError:
        return Locked.TAKEN
    except OSError as error:
        if error.errno in WITHOUT:
            return Locked.NOWHERE
        raise
    return Locked.HELD
