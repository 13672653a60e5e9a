"""Hugging Face folders of a run: at its end, and with each checkpoint. All ranks write them together.

    hf/step-00000020/config.json, model.safetensors (or several), tokenizer, …    beside checkpoints/step-00000020
    hf/.tmp-step-00000030/                                                        one under way, or what is left of it

A copy goes when its checkpoint goes (--save_total_limit); only what a run has written there is ever deleted.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from triaxis.engine.checkpoint.folder import FOLDER, MANIFEST, checkpoint_name
from triaxis.engine.run.export import exported_text, opened_export
from triaxis.engine.run.on_all_ranks import on_all_ranks
from triaxis.models.huggingface.families import CONFIG
from triaxis.models.huggingface.folder import DRAFT, SETTINGS, TOKENIZER, Export
from triaxis.parallel.worlds.mesh import Mesh

COPIES = "hf"
NAME = re.compile(r"(\.tmp-)?step-\d{8,18}", re.ASCII)
OWN_FILES = (*SETTINGS, *TOKENIZER, CONFIG, "model*.safetensors", "model.safetensors.index.json")


def export_together(
    mesh: Mesh,
    checkpoint: Path,
    folder: Path,
    *,
    source: Path | None = None,
    dtype: str | None = None,
    still: Callable[[], None],
) -> str:
    """Writes a checkpoint as a Hugging Face folder, each rank its share of the files; says so in a line. Collective.

    still: called now and then meanwhile. Raises ValueError, on all ranks alike.
    """
    share = mesh.everyone.rank, mesh.everyone.size
    to: list[Export] = []  # made in another thread, in which reading may take its time

    def begin() -> None:
        export, _ = opened_export(checkpoint, folder, dtype=dtype, source=source)
        to.append(export)
        if share[0] == 0:
            export.begin()

    def write() -> int:
        export, read = opened_export(checkpoint, folder, dtype=dtype, source=source)
        return export.write(read, share)

    on_all_ranks(mesh, begin, still)
    size_bytes = on_all_ranks(mesh, write, still)
    done = on_all_ranks(mesh, lambda: to[0].finish(size_bytes) if share[0] == 0 else None, still)
    return "" if done is None else exported_text(done)


def write_copy(
    mesh: Mesh, directory: Path, step: int, *, source: Path | None, still: Callable[[], None]
) -> str:
    """The copy of a complete checkpoint of the run in `directory`; says so in a line. Collective."""
    name = checkpoint_name(step)
    draft = directory / COPIES / f".tmp-{name}"
    if mesh.everyone.rank == 0:
        remove_copy(draft)
    told = export_together(mesh, directory / FOLDER / name, draft, source=source, still=still)

    def place() -> None:
        if mesh.everyone.rank == 0:
            remove_copy(draft.with_name(name))
            draft.rename(draft.with_name(name))

    on_all_ranks(mesh, place, still)
    return told.replace(str(draft), str(draft.with_name(name)))


def prune_copies(directory: Path) -> None:
    """Removes the copies whose checkpoints are gone. Does not communicate."""
    for path in (directory / COPIES).glob("step-*"):
        if not (directory / FOLDER / path.name / MANIFEST).is_file():
            remove_copy(path)


def remove_copy(path: Path) -> None:
    """Takes a run's own files in a copy away, and the folder if it is empty then; what cannot go, stays."""
    if not NAME.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
        return
    with suppress(OSError):
        for folder in (path / DRAFT, path):
            for entry in folder.iterdir() if folder.is_dir() else ():
                own = any(fnmatchcase(entry.name, pattern) for pattern in OWN_FILES)
                if own and entry.is_file() and not entry.is_symlink():
                    entry.unlink()
            if folder.is_dir():
                folder.rmdir()
