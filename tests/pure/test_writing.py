"""Files that commands leave behind: aside and renamed; what is there is kept, links are not followed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from triaxis.launch import schedule
from triaxis.launch.writing import check_target, write_text, written_aside


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """As `plan --report` over a report did: the old one was cut before the new one had come."""
    path = tmp_path / "plan.html"
    path.write_text("the old one")
    full = pytest.raises(ValueError, match=r"`--report` must be a place that can be written, .*No space left")
    with full, written_aside(path, "report", overwrite=True) as draft:
        draft.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert path.read_text() == "the old one"
    assert [one.name for one in tmp_path.iterdir()] == ["plan.html"]


def test_what_is_there_is_replaced_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "hardware.toml"
    path.write_text("edited by hand")
    with pytest.raises(
        ValueError, match=r"`--out` must be a new file, but .* exists; give another name, or --overwrite"
    ):
        write_text(path, "new", "out", overwrite=False)
    assert path.read_text() == "edited by hand"
    write_text(path, "new", "out", overwrite=True)
    assert path.read_text() == "new"


def test_links_are_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("kept")
    link = tmp_path / "out.svg"
    link.symlink_to(target)
    with pytest.raises(ValueError, match="exists"):
        write_text(link, "x", "svg", overwrite=False)
    write_text(link, "x", "svg", overwrite=True)
    assert target.read_text() == "kept" and not link.is_symlink()


def test_a_missing_folder_is_made_before_the_work(tmp_path: Path) -> None:
    """One rule for reports, drawings, scripts and measurements, as for --output-dir."""
    path = tmp_path / "a" / "b" / "s.svg"
    assert schedule.main(["--svg", str(path)]) == 0 and path.is_file()
    (tmp_path / "file").touch()
    with pytest.raises(
        ValueError, match=r"`--out` must be a place that can be written, .*(Not a dir|File exists)"
    ):
        check_target(tmp_path / "file" / "deeper" / "x", "out", overwrite=False)


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_only_files_are_replaced(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "there"
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    with pytest.raises(ValueError, match=r"`--out` must be a file, but .* is a folder, a pipe or a device"):
        write_text(path, "x", "out", overwrite=True)


def test_a_command_keeps_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.svg"
    assert schedule.main(["--svg", str(path)]) == 0
    first = path.read_text()
    assert schedule.main(["--svg", str(path), "--pp", "2"]) == 2
    assert "--overwrite" in capsys.readouterr().err and path.read_text() == first
    assert schedule.main(["--svg", str(path), "--pp", "2", "--overwrite"]) == 0
    assert path.read_text() != first
