"""`python -m triaxis.launch.checkpoint`: what it shows, what it refuses, and its exit codes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.agreement import Layout
from tests.checkpointing import flip_a_byte, load_newest, on_ranks, save_steps
from triaxis.engine.checkpoint.folder import (
    FOLDER,
    complete_checkpoints,
)
from triaxis.engine.checkpoint.manifest import read_manifest
from triaxis.engine.checkpoint.stored import StoredTensors
from triaxis.launch.checkpoint import main


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    save_steps(folder, 1, 2)
    return folder


def test_ls_and_show(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(run_folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["checkpoint", "step-00000001", "step-00000002"]
    assert lines[1].split()[1:4] == ["complete", "1", "128"]
    assert main(["show", str(run_folder)]) == 0
    text = capsys.readouterr().out
    assert "config.learning_rate" in text
    assert "2 (2 updates)" in text
    assert "master/model.layers.0.self_attn.q_proj.weight" in text
    assert "32 × 32" in text


def test_verify_names_the_damaged_file(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(run_folder)]) == 0
    shutil.copytree(run_folder, tmp_path / "copy")
    flip_a_byte(tmp_path / "copy" / FOLDER / "step-00000002" / "shard-00001.safetensors")
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "copy")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("as written")
    assert "step-00000002/shard-00001.safetensors does not match its checksum" in lines[1]


def test_diff_names_what_differs(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = complete_checkpoints(run_folder)
    assert main(["diff", str(first), str(first)]) == 0
    capsys.readouterr()
    assert main(["diff", str(first), str(second)]) == 1
    lines = capsys.readouterr().out.splitlines()
    found = {line.split()[0]: line.split()[-1] for line in lines[1:-1]}
    expected = max(
        float((a - b).abs().max())
        for a, b in [
            [StoredTensors(path).read("master/model.norm.weight", (0,), (32,)) for path in (first, second)]
        ]
    )
    assert float(found["master/model.norm.weight"]) == pytest.approx(expected, rel=1e-3)
    assert lines[-1].split()[-3:] == ["1", "against", "2"]


@pytest.mark.parametrize("files", [1, 3])
def test_a_resharded_checkpoint_is_the_same_and_loads(
    files: int, run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # B76
    assert main(["reshard", str(run_folder), "--out", str(tmp_path), "--files", str(files)]) == 0
    (path,) = complete_checkpoints(tmp_path)
    sizes = [file.size_bytes for file in read_manifest(path).files.values()]
    assert len(sizes) == files
    assert max(sizes) < 1.3 * min(sizes)
    assert main(["verify", str(tmp_path)]) == 0
    assert main(["diff", str(run_folder), str(tmp_path)]) == 0
    assert on_ranks(load_newest, tmp_path, Layout(tp=2)) == [2, 2]
    assert main(["reshard", str(run_folder), "--out", str(tmp_path), "--files", "2"]) == 2
    assert "without checkpoints" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_not_resharded(run_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(run_folder, tmp_path / "copy")
    flip_a_byte(tmp_path / "copy" / FOLDER / "step-00000002" / "shard-00000.safetensors")
    assert main(["reshard", str(tmp_path / "copy"), "--out", str(tmp_path / "out"), "--files", "1"]) == 2
    assert complete_checkpoints(tmp_path / "out") == []


def test_a_folder_without_checkpoints_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("ls", "show", "verify"):
        assert main([command, str(tmp_path)]) == 2
    assert "must hold a complete checkpoint" in capsys.readouterr().err


def test_looking_at_checkpoints_needs_no_torch() -> None:
    names = (
        "engine.checkpoint.folder",
        "engine.checkpoint.manifest",
        "parallel.places.rectangles",
        "launch.checkpoint",
    )
    lines = ["import sys", *(f"import triaxis.{name}" for name in names), "assert 'torch' not in sys.modules"]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)
