"""A run's checkpoints as folders: which are complete, and how one comes and goes in one rename. No torch.

    checkpoints/step-00000020/shard-00000.safetensors   chunks of tensors, whoever wrote them
                              shard-00001.safetensors
                              manifest.json             what they are; written last
                              best                      it had the best evaluation loss so far
    checkpoints/.tmp-step-00000030-5f1c2a77/            a save under way, or what is left of one that died
                step-00000020.replaced-5f1c2a77/        the one of the same step before, until the new one has its name

A checkpoint is complete if it has its name and its manifest. Nothing that no run has made is ever deleted: a folder is
taken away only if its name and everything in it are a run's own; what is in the way of a name is set aside, and said.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from triaxis.engine.faults.locks import Locked, lock
from triaxis.engine.plain_files import kind_of, read_plain

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
BEST = "best"
NAME = re.compile(r"step-(\d{8,18})(\.replaced-[0-9a-f]{8})?", re.ASCII)
TEMPORARY = re.compile(r"\.tmp-(removed-)?step-\d{8,18}(\.replaced-[0-9a-f]{8})?-[0-9a-f]{8}", re.ASCII)
OWN_FILE = re.compile(r"shard-\d{5,}\.safetensors|manifest\.json|best", re.ASCII)
LOOKS_LIKE_ONE = re.compile(r"\.?(tmp-)?step[-_]?\d+.*", re.ASCII)


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def _age(path: Path) -> tuple[int, bool] | None:
    """What orders checkpoints: the step, and of two of one step the one that replaces the other."""
    match = NAME.fullmatch(path.name)
    if match is None or checkpoint_name(int(match[1])) != f"step-{match[1]}":
        return None
    return int(match[1]), match[2] is None


def step_of(path: Path) -> int | None:
    """The step in a checkpoint's name; None for a folder of another name."""
    age = _age(path)
    return age[0] if age else None


def _complete_in(folder: Path) -> list[Path]:
    found = [(age, path) for path in folder.glob("step-*") if (age := _age(path))]
    return [path for _, path in sorted(found) if (path / MANIFEST).is_file()]


def complete_checkpoints(directory: Path) -> list[Path]:
    """The complete checkpoints of the run in `directory`, the newest last; what dead saves left is not among them."""
    return _complete_in(directory / FOLDER)


def checkpoints_at(path: Path) -> list[Path]:
    """The complete checkpoints that a path means: one, or all of a run's folder or its `checkpoints`, newest last."""
    if (path / MANIFEST).is_file():
        return [path]
    return _complete_in(path / FOLDER if (path / FOLDER).is_dir() else path)


def leftovers_at(path: Path) -> list[tuple[Path, str]]:
    """What looks like a checkpoint of a run and is none, in its folder or its `checkpoints`, and why, by name."""
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    if not folder.is_dir() or (path / MANIFEST).is_file():
        return []
    complete = _complete_in(folder)
    found = sorted(other for other in folder.iterdir() if LOOKS_LIKE_ONE.fullmatch(other.name))
    return [(other, _shortfall(other)) for other in found if other not in complete]


def _shortfall(path: Path) -> str:
    """Why a path is no complete checkpoint."""
    if TEMPORARY.fullmatch(path.name):
        return "a save that did not end"
    if _age(path) is None:
        return "not a checkpoint's name"
    return f"{kind_of(path) or 'a file'}, not a folder" if not path.is_dir() else f"it has no {MANIFEST}"


def previous_checkpoint(path: Path) -> Path | None:
    """The complete checkpoint before this one in the same folder."""
    age = _age(path)
    before = [other for other in _complete_in(path.parent) if age is None or (_age(other) or age) < age]
    return before[-1] if before else None


def begin_folder(folder: Path, step: int) -> Path:
    """A new temporary folder for a save; what dead saves of runs left is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        replaced = NAME.fullmatch(path.name)
        stale = replaced is not None and replaced[2] and (folder / f"step-{replaced[1]}" / MANIFEST).is_file()
        if (stale or TEMPORARY.fullmatch(path.name)) and foreign_in(path) is None:
            _remove(path)
    temporary = folder / f".tmp-{checkpoint_name(step)}-{secrets.token_hex(4)}"
    temporary.mkdir()
    return temporary


def place_folder(temporary: Path, step: int) -> tuple[Path, str | None]:
    """Gives a written checkpoint its name; and says what was in the way of it and had to make room.

    A complete one of the same step counts until then and is removed after. Raises OSError only where the checkpoint
    does not have its name.
    """
    path = temporary.parent / checkpoint_name(step)
    replaced: Path | None = None
    note: str | None = None
    if os.path.lexists(path):
        if (path / MANIFEST).is_file() and foreign_in(path) is None:
            replaced = path.with_name(f"{path.name}.replaced-{secrets.token_hex(4)}")
            path.rename(replaced)
        else:
            aside = set_aside(path)
            note = f"{path} was there, and no run has made it as it is: it is now {aside.name}"
    temporary.rename(path)
    sync_folder(path.parent)
    if replaced is not None:
        with suppress(OSError):  # the next save tries again
            _remove(replaced)
    return path, note


def set_aside(path: Path) -> Path:
    """Gives what is at a path another name, under which no run looks for it or deletes it; returns the new path."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"aside-{number}-{path.name}")):
        number += 1
    path.rename(aside)
    return aside


def prune_folders(folder: Path, keep: int, current: Path | None = None) -> list[str]:
    """Removes the complete checkpoints that are older than the `keep` newest; says which it had to leave, and why.

    Beside them stay the newest that was best, those being read and the current one. (The current one is older than the
    newest where a run went on from the one before a damaged one.)
    """
    complete = _complete_in(folder)
    kept = [path for path in complete if (path / BEST).exists()][-1:]
    kept += [path for path in complete if current is not None and path.name == current.name]
    notes = []
    for path in complete[: -max(keep, 1)]:
        if path in kept:
            continue
        foreign = foreign_in(path)
        if foreign is None:
            _remove_unread(path)
        else:
            why = "it is a link" if path.is_symlink() else f"{foreign} is in it, which no run has made"
            notes.append(f"{path} is beyond --save_total_limit, but stays: {why}")
    return notes


def foreign_in(path: Path) -> str | None:
    """The name of something that no run has made, in a folder that one may have made; None if all is a run's own."""
    if path.is_symlink() or not path.is_dir():
        return path.name
    others = (
        entry for entry in path.iterdir() if not OWN_FILE.fullmatch(entry.name) or kind_of(entry) is not None
    )
    return next((entry.name for entry in others), None)


def _remove_unread(path: Path) -> bool:
    with read_plain(path / MANIFEST) as file:
        if lock(file) is Locked.TAKEN:
            return False
        _remove(path)
    return True


def _remove(path: Path) -> None:
    """Not a checkpoint from one moment to the next, though its files go one by one, and only a run's own."""
    doomed = path
    if not TEMPORARY.fullmatch(path.name):
        doomed = path.with_name(f".tmp-removed-{path.name}-{secrets.token_hex(4)}")
        path.rename(doomed)
    discard_folder(doomed)


def discard_folder(path: Path) -> None:
    """Takes away a run's own files in a folder, and the folder if it is empty then; what cannot go, stays."""
    with suppress(OSError):
        for entry in path.iterdir():
            if OWN_FILE.fullmatch(entry.name):
                entry.unlink(missing_ok=True)
        path.rmdir()


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Marks a checkpoint as being read: it is not pruned meanwhile."""
    with read_plain(path / MANIFEST) as file:
        lock(file, shared=True, wait=True)
        yield


def sync_folder(folder: Path) -> None:
    """Makes the folder's entries survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
