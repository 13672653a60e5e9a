"""`make set-up` finds a torch on any fresh machine: a CPU build where there is one, else PyPI's."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = """#!/bin/sh
# Stands for the environment's python: answers each `pip install` as this machine would, and notes it.
case "$*" in *pip*install*) ;; *) exit 0;; esac
echo "$*" >> {log}
case "$*" in {refused}) echo "pip: nothing like that" >&2; exit 1;; esac
"""


def installed(folder: Path, refused: str, *arguments: str) -> tuple[int, list[str], str]:
    """Exit code, the calls of pip, and what `make set-up` prints, where pip refuses calls like `refused`."""
    (folder / "bin").mkdir()
    python = folder / "bin" / "python"
    log = folder / "calls"
    python.write_text(PYTHON.format(log=log, refused=refused))
    python.chmod(0o755)
    shutil.copy(ROOT / "Makefile", folder)
    for name in ("setup.py", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    told = subprocess.run(
        ["make", "set-up", f"VENV={folder}", *arguments], cwd=folder, capture_output=True, text=True
    )
    return told.returncode, log.read_text().splitlines(), told.stdout + told.stderr


@pytest.mark.parametrize(
    ("refused", "calls", "words"),
    [
        ("nothing", ["torch==2.13.0+cpu"], ""),
        ("*txt?torch*+cpu*", ["torch==2.13.0+cpu", "--index-url"], "PyTorch's own index"),
        ("*+cpu*", ["torch==2.13.0+cpu", "--index-url", "torch==2.13.0"], "some gigabytes"),
    ],
)
def test_torch_is_found_where_it_is(tmp_path: Path, refused: str, calls: list[str], words: str) -> None:
    code, made, told = installed(tmp_path, refused)
    assert code == 0, told
    assert len(made) == len(calls) + 1 and made[-1].endswith("-e .[dev]")
    assert all(word in call for word, call in zip(calls, made, strict=False))
    assert made[-2].endswith("torch==2.13.0" if words == "some gigabytes" else "torch==2.13.0+cpu")
    assert words in told


def test_a_torch_that_was_asked_for_is_taken_or_refused(tmp_path: Path) -> None:
    code, made, told = installed(tmp_path, "*torch*", "TORCH=torch==2.13.0")
    assert code != 0 and len(made) == 1
    assert "nothing like that" in told
