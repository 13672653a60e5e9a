"""Files that a command leaves behind: written aside and renamed, never through a link, never over another's unasked."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from triaxis.launch.command_line import Claim, Parser


def add_overwrite(parser: Parser) -> None:
    parser.add_argument("--overwrite", action=Claim, help="replace files that are there already")


def check_target(path: Path, flag: str, *, overwrite: bool) -> None:
    """Makes the folder of a file to come, before any work is done. Raises ValueError where it cannot be written.

    So it does where something is there already, or stands in its way.
    """
    shown = str(path)[:200]
    try:
        path.parent.mkdir(
            parents=True, exist_ok=True
        )  # before the work: what cannot be written is known at once
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unwritable(flag, path, error) from error
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        raise ValueError(
            f"`--{flag}` must be a file, but {shown} is a folder, a pipe or a device; give another name"
        )
    if not overwrite:
        raise ValueError(
            f"`--{flag}` must be a new file, but {shown} exists; give another name, or --overwrite"
        )


@contextmanager
def written_aside(path: Path, flag: str, *, overwrite: bool) -> Iterator[Path]:
    """A draft beside the target to write to, which takes its name when all is on the disk. Raises ValueError.

    A full disk leaves what was there before; a link is replaced, not followed.
    """
    try:
        check_target(path, flag, overwrite=overwrite)
        draft = path.with_name(f".part-{os.getpid()}-{path.name[:100]}")
        try:
            os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            yield draft
            with draft.open("rb") as file:
                os.fsync(file.fileno())
            draft.replace(path)
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(flag, path, error) from error


def write_text(path: Path, text: str, flag: str, *, overwrite: bool) -> None:
    """The text as a file, all of it or none."""
    with written_aside(path, flag, overwrite=overwrite) as draft:
        draft.write_text(text, encoding="utf-8")


def _unwritable(flag: str, path: Path, error: OSError) -> ValueError:
    return ValueError(
        f"`--{flag}` must be a place that can be written, but {str(path)[:200]} is not: {error.strerror}; give another"
    )
