"""A folder of checkpoints with other things in it: nothing is deleted that no run has made, and all is said."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.test_checkpoint_folders import made_checkpoints
from tests.runs import names, run, step, ten_steps
from triaxis.engine.checkpoint.failures import save_failure, told_cause
from triaxis.engine.checkpoint.folder import (
    BEST,
    FOLDER,
    MANIFEST,
    begin_folder,
    complete_checkpoints,
    prune_folders,
)
from triaxis.engine.checkpoint.manifest import SaveError
from triaxis.engine.run import saving
from triaxis.launch.checkpoint import main

pytestmark = pytest.mark.usefixtures("no_picture")


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return ten_steps(tmp_path_factory.mktemp("run"))


def a_file(path: Path) -> None:
    path.write_text("mine")


def a_folder(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("mine")


def a_link(path: Path) -> None:
    target = path.parents[1] / "elsewhere"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    path.symlink_to(target)


def a_dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize("stranger", [a_file, a_folder, a_link, a_dangling_link])
def test_what_is_at_a_steps_name_makes_room_and_is_kept(
    stranger: Callable[[Path], None],
    flags: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir(parents=True)
    stranger(folder / step(4))
    run({**flags, "output_dir": str(tmp_path), "steps": 6})
    assert [path.name for path in complete_checkpoints(tmp_path)] == [step(2), step(4), step(6)]
    assert names(tmp_path) == sorted([f"aside-1-{step(4)}", step(2), step(4), step(6)])
    aside = folder / f"aside-1-{step(4)}"
    assert aside.is_symlink() or (aside if aside.is_file() else aside / "notes.txt").read_text() == "mine"
    told = capsys.readouterr().err
    assert f"{step(4)} was there, and no run has made it as it is: it is now aside-1-{step(4)}" in told
    assert "was not saved" not in told


STRANGERS = (
    ".tmp-x",
    ".tmp-step-notes",
    f"{step(2)}.old",
    f"{step(2)}.bak",
    "step-7",
    "step-0000002",
    "notes",
)


def test_folders_of_people_stay(flags: dict[str, Any], tmp_path: Path) -> None:
    """Also a copy of a checkpoint, which is one by all but its name."""
    common = {**flags, "output_dir": str(tmp_path)}
    run({**common, "steps": 4})
    for name in STRANGERS:
        if name.startswith(step(2)):
            shutil.copytree(tmp_path / FOLDER / step(2), tmp_path / FOLDER / name)
        else:
            a_folder(tmp_path / FOLDER / name)
    run({**common, "resume": "auto", "save_total_limit": 1})
    assert names(tmp_path) == sorted([*STRANGERS, step(10)])
    assert all(len(list((tmp_path / FOLDER / name).iterdir())) for name in STRANGERS)


def test_a_dead_saves_folder_with_something_else_in_it_stays(tmp_path: Path) -> None:
    """What died goes; a file that somebody put there keeps it."""
    folder = tmp_path / FOLDER
    for mark in ("00000001", "00000002"):
        (folder / f".tmp-{step(9)}-{mark}").mkdir(parents=True)
        (folder / f".tmp-{step(9)}-{mark}" / "shard-00000.safetensors").write_bytes(b"half")
    (folder / f".tmp-{step(9)}-00000002" / "analysis.ipynb").write_text("mine")
    fresh = begin_folder(folder, 10)
    assert names(tmp_path) == sorted([f".tmp-{step(9)}-00000002", fresh.name])
    assert len(list((folder / f".tmp-{step(9)}-00000002").iterdir())) == 2


def test_a_checkpoint_with_something_else_in_it_is_not_pruned(
    flags: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = {**flags, "output_dir": str(tmp_path)}
    run({**common, "steps": 4})
    a_folder(tmp_path / FOLDER / step(2) / "exported")
    run({**common, "resume": "auto", "save_total_limit": 2})
    assert names(tmp_path) == [step(2), step(8), step(10)]
    told = capsys.readouterr().err
    words = f"{step(2)} is beyond --save_total_limit, but stays: exported is in it, which no run has made"
    assert told.count(words) == 1


def test_a_linked_checkpoint_is_read_but_never_deleted(tmp_path: Path) -> None:
    made_checkpoints(tmp_path / "other" / FOLDER, 10)
    made_checkpoints(tmp_path / FOLDER, 20, 30)
    (tmp_path / FOLDER / step(10)).symlink_to(tmp_path / "other" / FOLDER / step(10))
    notes = prune_folders(tmp_path / FOLDER, 1)
    assert names(tmp_path) == [step(10), step(30)]
    assert (tmp_path / "other" / FOLDER / step(10) / MANIFEST).exists()
    assert len(notes) == 1 and "is a link" in notes[0]


def test_the_limit_is_what_the_help_says(tmp_path: Path) -> None:
    """Three, and the best one elsewhere."""
    made_checkpoints(tmp_path / FOLDER, 10, 20, 30, 40, 50, best=(10,))
    prune_folders(tmp_path / FOLDER, 3)
    assert names(tmp_path) == [step(number) for number in (10, 30, 40, 50)]


def test_what_is_not_complete_is_said_by_ls_and_at_a_resume(
    flags: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = {**flags, "output_dir": str(tmp_path)}
    run({**common, "steps": 8})
    (tmp_path / FOLDER / step(8) / MANIFEST).unlink()
    (tmp_path / FOLDER / f".tmp-{step(10)}-00000001").mkdir()
    a_file(tmp_path / FOLDER / step(12))
    (tmp_path / FOLDER / step(3)).mkdir()  # older than what is resumed: of no matter
    assert main(["ls", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert f"{step(8)}: it has no manifest.json" in shown
    assert f".tmp-{step(10)}-00000001: a save that did not end" in shown
    assert f"{step(12)}: a file, not a folder" in shown
    assert run({**common, "resume": "auto"}).steps == 10
    told = capsys.readouterr().err
    assert f"{step(8)} is passed over: it has no manifest.json" in told
    assert f"{step(10)}-00000001 is passed over: a save that did not end" in told
    assert f"{step(12)} is passed over: a file, not a folder" in told
    assert f"{step(3)} is passed over" not in told


CAUSES = {
    errno.ENOSPC: "Free space there",
    errno.EDQUOT: "a quota is used up",
    errno.EACCES: "Let this account write there",
    errno.EROFS: "Mount it so that it can be written",
    errno.ENOENT: "that all nodes share",
    errno.EIO: "See to it",
}


@pytest.mark.parametrize("number", CAUSES)
def test_the_advice_fits_the_cause(number: int) -> None:
    error = save_failure(4, *told_cause("rank 1 on node7", OSError(number, os.strerror(number), "there")))
    assert isinstance(error, SaveError)
    assert CAUSES[number] in str(error)


def test_a_failure_after_the_rename_is_no_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same step again: the older one cannot be taken away, but the new one has its name."""
    made_checkpoints(tmp_path / FOLDER, 2)
    rename = Path.rename

    def refuses(self: Path, target: Path) -> Path:
        if ".tmp-removed" in str(target):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuses)
        made_checkpoints(tmp_path / FOLDER, 2, best=(2,))
    assert (tmp_path / FOLDER / step(2) / BEST).exists()
    assert len(names(tmp_path)) == 2
    begin_folder(tmp_path / FOLDER, 4).rmdir()
    assert names(tmp_path) == [step(2)]


def test_an_unwritable_folder_is_found_at_the_start(
    flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in its place; and, for one rank alone, no right to write."""
    a_file(tmp_path / FOLDER)
    monkeypatch.setattr("triaxis.engine.step.TrainingStep.train", lambda *_: pytest.fail("a step was begun"))
    with pytest.raises(ValueError, match=r"must be written to .*checkpoints, but that cannot be, by rank 0"):
        run({**flags, "output_dir": str(tmp_path)})
    opened = saving.open_plain

    def refuses(path: Path, flags: int) -> int:
        if path.name.startswith(".probe-1-"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, flags)

    monkeypatch.setattr(saving, "open_plain", refuses)
    for strategy in ({}, {"save_steps": None}):  # also where only a signal would save
        with pytest.raises(ValueError, match=r"cannot be, by rank 1 on .*: Permission denied; see to its"):
            run({**flags, "dp": 2, "output_dir": str(tmp_path / "other"), **strategy})
        assert list((tmp_path / "other" / FOLDER).iterdir()) == []
