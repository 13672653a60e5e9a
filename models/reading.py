"""Small files that a person names (a model, hardware, published runs): read whole, or refused in words. No torch."""

from __future__ import annotations

import os
import stat
from pathlib import Path

MOST_BYTES = 64 << 20


def read_small_file(path: Path, field: str) -> str:
    """The text of a regular file. ValueError, naming the field, for anything else; never waits, as a pipe would."""
    shown = str(path)[:200]
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(
                    f"`{field}` must be a regular file, but {shown} is a folder, a pipe or a device"
                )
            if status.st_size > MOST_BYTES:
                raise ValueError(
                    f"`{field}` must be a file of at most {MOST_BYTES:,} bytes, but {shown} has {status.st_size:,}"
                )
            return file.read().decode("utf-8")
    except OSError as error:
        raise ValueError(
            f"`{field}` must be a file that can be read, but {shown}: {error.strerror}; check the path"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"`{field}` must be a text in UTF-8, but {shown} is not (byte {error.start})"
        ) from error
