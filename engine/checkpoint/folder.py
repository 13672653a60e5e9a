"""A run's checkpoints as folders: which are complete, and how one comes and goes in one rename. No torch.

    checkpoints/step-00000020/shard-00000.safetensors   chunks of tensors, whoever wrote them
                              shard-00001.safetensors
                              manifest.json             what they are; written last
                              best                      it had the best evaluation loss so far
    checkpoints/.tmp-step-00000030-5f1c2a77/            a save under way, or what is left of one that died

A checkpoint is complete if it has its name and its manifest.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from triaxis.engine.plain_files import read_plain

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
BEST = "best"
TEMPORARY = ".tmp-"
REPLACED = ".old"
NAME = re.compile(r"step-(\d+)(\.old)?")


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def _age(path: Path) -> tuple[int, bool] | None:
    """What orders checkpoints: the step, and of two of one step the one that replaces the other."""
    match = NAME.fullmatch(path.name)
    return (int(match[1]), match[2] is None) if match else None


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


def leftovers_at(path: Path) -> list[Path]:
    """What dead saves left in a run's folder, or in its `checkpoints`."""
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    return sorted(folder.glob(f"{TEMPORARY}*"))


def previous_checkpoint(path: Path) -> Path | None:
    """The complete checkpoint before this one in the same folder."""
    age = _age(path)
    before = [other for other in _complete_in(path.parent) if age is None or (_age(other) or age) < age]
    return before[-1] if before else None


def begin_folder(folder: Path, step: int, mark: str) -> Path:
    """A new temporary folder for a save; what dead saves left is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f"step-*{REPLACED}"):
        if (path.with_suffix("") / MANIFEST).is_file():
            _remove(path)
    temporary = folder / f"{TEMPORARY}{checkpoint_name(step)}-{mark}"
    temporary.mkdir()
    return temporary


def place_folder(temporary: Path, step: int) -> Path:
    """Gives a written checkpoint its name; one of the same step counts until then and is removed after."""
    path = temporary.parent / checkpoint_name(step)
    replaced = path.with_name(path.name + REPLACED)
    if path.exists():
        if replaced.exists():
            _remove(replaced)
        path.rename(replaced)
    temporary.rename(path)
    sync_folder(path.parent)
    if replaced.exists():
        _remove(replaced)
    return path


def prune_folders(folder: Path, keep: int, current: Path | None = None) -> list[Path]:
    """Removes the oldest complete checkpoints until `keep` are left, and says which.

    The newest, the newest that was best, those being read and the current one stay. (The current one is older than the
    newest where a run went on from the one before a damaged one.)
    """
    complete = _complete_in(folder)
    kept = [path for path in complete if (path / BEST).exists()][-1:]
    kept += [path for path in complete if current is not None and path.name == current.name]
    removed: list[Path] = []
    for path in complete[:-1]:
        if len(complete) - len(removed) <= keep:
            break
        if path not in kept and _remove_unread(path):
            removed.append(path)
    return removed


def _remove_unread(path: Path) -> bool:
    with read_plain(path / MANIFEST) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        _remove(path)
    return True


def _remove(path: Path) -> None:
    """Not a checkpoint from one moment to the next, though its files go one by one."""
    doomed = path.with_name(f"{TEMPORARY}removed-{path.name}")
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Marks a checkpoint as being read: it is not pruned meanwhile."""
    with read_plain(path / MANIFEST) as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def sync_folder(folder: Path) -> None:
    """Makes the folder's entries survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
