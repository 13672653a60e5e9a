"""A manifest may come from anywhere: whatever it says, a message names what is wrong, and nothing is touched."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.agreement import Layout
from tests.checkpointing import forge, on_ranks, save_steps, state_at
from triaxis.engine.checkpoint.assignment import DTYPES
from triaxis.engine.checkpoint.folder import FOLDER, MANIFEST, complete_checkpoints
from triaxis.engine.checkpoint.manifest import CheckpointError, read_manifest
from triaxis.engine.checkpoint.schema import ITEM_BYTES
from triaxis.engine.checkpoint.stored import StoredTensors
from triaxis.engine.config import RunConfig
from triaxis.engine.run.resume import find_start
from triaxis.launch.checkpoint import main
from triaxis.launch.directory import LOCK_NAME, claim_directory, hold_directory
from triaxis.parallel.places.rectangles import covers_once, cut_rectangles

NORM = "exp_avg/model.norm.weight"
SHARD = "shard-00000.safetensors"
Body = dict[str, Any]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    save_steps(folder, 1, 2)
    return folder


@pytest.fixture
def spoiled(sound: Path, tmp_path: Path) -> Path:
    """A run of two checkpoints, of which the newest may be spoiled."""
    shutil.copytree(sound, tmp_path / "run")
    return tmp_path / "run"


def moved(name: str) -> Callable[[Body], object]:
    """A chunk file of another name, in `files` and in the chunks."""

    def change(body: Body) -> None:
        body["files"][name] = body["files"].pop(SHARD)
        for tensor in body["tensors"].values():
            for chunk in tensor["chunks"]:
                chunk[2] = name if chunk[2] == SHARD else chunk[2]

    return change


def put(*path: str | int, value: object) -> Callable[[Body], object]:
    def change(body: Body) -> None:
        place: Any = body
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return change


def without(*path: str) -> Callable[[Body], object]:
    def change(body: Body) -> None:
        place: Any = body
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]

    return change


def empty_moments(body: Body) -> None:
    for kind in ("exp_avg", "exp_avg_sq"):
        body["tensors"][f"{kind}/model.norm.weight"]["chunks"] = []


def chunk(*change: Any) -> Callable[[Body], object]:
    """One chunk of the norm's moment in place of what was there."""
    return put("tensors", NORM, "chunks", value=[list(change)])


def twice(body: Body) -> None:
    body["tensors"][NORM]["chunks"] *= 2


def shared_bytes(body: Body) -> None:
    """A tensor that costs nothing: the bytes of another."""
    body["tensors"]["master/more"] = body["tensors"][NORM]


FORGERIES: list[tuple[Callable[[Body], object], str]] = [
    (moved("../../s.safetensors"), "files in the checkpoint's own folder"),
    (moved("/etc/passwd"), "files in the checkpoint's own folder"),
    (moved("/dev/zero"), "files in the checkpoint's own folder"),
    (moved("sub/shard.safetensors"), "files in the checkpoint's own folder"),
    (moved(".."), "files in the checkpoint's own folder"),
    (moved(""), "files in the checkpoint's own folder"),
    (moved("manifest.json"), "files in the checkpoint's own folder"),
    (moved("a\n.safetensors"), "files in the checkpoint's own folder"),
    (moved("a" * 300 + ".safetensors"), "files in the checkpoint's own folder"),
    (moved("shard-00099.safetensors"), "cannot be read (No such file or directory)"),
    (empty_moments, "must cover every element of shape [32] once, but do not"),
    (twice, "must cover every element"),
    (chunk([0], [31], SHARD, 4096), "must cover every element"),
    (chunk([1], [32], SHARD, 4096), "must cover every element"),
    (chunk([0], [0], SHARD, 4096), "must be a whole number from 1"),
    (chunk([-1], [33], SHARD, 4096), "must be a whole number from 0"),
    (chunk([0, 0], [32, 1], SHARD, 4096), "must be of 1 dimensions"),
    (chunk([0], [32], "shard-00007.safetensors", 4096), "one of the manifest's `files`"),
    (chunk([0], [32], SHARD, 1 << 40), "must end within"),
    (chunk([0], [32], SHARD, -8), "must be a whole number from 8"),
    (chunk([0], [32], SHARD, 4096.0), "must be a whole number from 8"),
    (chunk([0], [32], SHARD), "offsets, sizes, file and first byte"),
    (shared_bytes, "must not share bytes"),
    (put("tensors", NORM, "shape", value=[1 << 70]), "must be a whole number"),
    (put("tensors", NORM, "shape", value=[1 << 40, 1 << 40]), "elements"),
    (put("tensors", NORM, "shape", value=[]), "at least one dimension"),
    (put("tensors", NORM, "shape", value=[1] * 30), "dimensions"),
    (put("tensors", NORM, "dtype", value="I8"), "must be one of F64, F32, BF16"),
    (put("tensors", NORM, "dtype", value=["F32"]), "must be one of F64, F32, BF16"),
    (put("tensors", "\x1b[31mred", value={}), "printable characters"),
    (put("tensors", value=[]), "`tensors` must be an object"),
    (put("files", SHARD, "size_bytes", value=7), "must end within"),
    (put("files", SHARD, "crc32", value=-1), "must be a whole number from 0"),
    (put("files", SHARD, value=None), "must be an object"),
    (put("state", "step", value=-1), "`state.step` must be a whole number from 0"),
    (put("state", "step", value=True), "`state.step` must be a whole number from 0"),
    (put("state", "step", value=9), "is of step 9, not of the step in its folder's name"),
    (put("state", "tokens", value="many"), "`state.tokens` must be a whole number"),
    (put("state", "eval_loss", value="low"), "`state.eval_loss` must be a number or null"),
    (put("state", "config", value=None), "`state.config` must be an object"),
    (put("optimizer_steps", value=None), "`optimizer_steps` must be a whole number"),
    (put("more", value=1), "without further keys"),
    *((without(key), f"must have {key}, but has not") for key in ("state", "optimizer_steps", "files", "tensors")),
    *((without("state", key), f"must have {key}, but has not") for key in ("step", "extra", "eval_loss")),
    *((without("tensors", NORM, key), f"must have {key}, but has not") for key in ("dtype", "shape", "chunks")),
    (without("files", SHARD, "crc32"), "must have crc32, but has not"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(FORGERIES)))
def test_a_forged_manifest_is_named_everywhere_and_passed_over(
    number: int, spoiled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, words = FORGERIES[number]
    first, newest = complete_checkpoints(spoiled)
    forge(newest, change)
    refused_everywhere(spoiled, newest, words, tmp_path, capsys)
    start = find_start(RunConfig(output_dir=str(spoiled), resume="auto"), restarted=False)
    assert start.path == first


def refused_everywhere(
    run: Path, newest: Path, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By whatever reads a checkpoint: one message, and nothing is made."""
    with pytest.raises(CheckpointError) as raised:
        read_manifest(newest)
    assert words in str(raised.value)
    assert raised.value.previous is not None
    assert main(["ls", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == [newest.name, "damaged"]
    assert words in lines[-1]
    assert main(["verify", str(run)]) == 1
    assert words in capsys.readouterr().out
    out = tmp_path / "out"
    for command in (["show", str(newest)], ["reshard", str(newest), "--out", str(out), "--files", "1"]):
        assert main(command) == 2
        assert words in capsys.readouterr().err
    assert not out.exists()
    with pytest.raises(CheckpointError):
        StoredTensors(newest)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link_out(path: Path) -> None:
    """The same bytes, elsewhere."""
    target = path.parents[3] / path.name
    path.rename(target)
    path.symlink_to(target)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def bound_socket(path: Path) -> None:
    path.unlink()
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path may not be long
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [(fifo, "a FIFO"), (link_out, "a link"), (folder, "a folder"), (bound_socket, "a socket")],
)
def test_only_regular_files_are_read(
    spoil: Callable[[Path], None],
    words: str,
    spoiled: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A FIFO would be waited for without an end; a link leads out of the folder."""
    _, newest = complete_checkpoints(spoiled)
    spoil(newest / SHARD)
    refused_everywhere(spoiled, newest, words, tmp_path, capsys)
    with pytest.raises(CheckpointError, match=words):
        on_ranks(lambda step, store: store.load(newest), spoiled)


def test_a_manifest_that_is_a_link_is_not_followed(
    spoiled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, newest = complete_checkpoints(spoiled)
    link_out(newest / MANIFEST)
    refused_everywhere(spoiled, newest, "a link, not a file", tmp_path, capsys)


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"null", b'{"crc32": 1}', b'{"crc32": 1, "manifest": 3}', b"[" * 100_000, b"\xff\xfe\x00",
     b'{"crc32": 1, "manifest": {"format": ' + b"9" * 5000 + b"}}"],
    ids=range(8),
)  # fmt: skip
def test_what_is_no_manifest_is_said_to_be_none(text: bytes, spoiled: Path) -> None:
    first, newest = complete_checkpoints(spoiled)
    (newest / MANIFEST).write_bytes(text)
    with pytest.raises(CheckpointError, match="is not a manifest"):
        read_manifest(newest)
    assert find_start(RunConfig(output_dir=str(spoiled), resume="auto"), restarted=False).path == first


def test_another_version_is_said_before_its_keys(spoiled: Path) -> None:
    _, newest = complete_checkpoints(spoiled)
    forge(newest, lambda body: body.update(version=99, added={}))
    with pytest.raises(
        CheckpointError, match="must have `format` triaxis-checkpoint and `version` 1, but has"
    ):
        read_manifest(newest)


def test_a_run_in_a_folder_is_not_resharded_into(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with hold_directory(tmp_path):
        assert main(["reshard", str(sound), "--out", str(tmp_path), "--files", "1"]) == 2
    assert "must not be in use, but another run" in capsys.readouterr().err
    assert not (tmp_path / FOLDER).exists()


def test_a_disk_that_fills_up_leaves_nothing_of_a_reshard(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from triaxis.engine.checkpoint import storage

    def full(self: object, block: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage._SummedFile, "write", full)
    assert main(["reshard", str(sound), "--out", str(tmp_path), "--files", "2"]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert list((tmp_path / FOLDER).iterdir()) == []


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 2)])
def test_covering_once_is_told_from_every_other_way(shape: tuple[int, ...]) -> None:
    """Against counting each element, over cuts that are whole and cuts with a box left out, doubled or moved."""
    total = 1
    for size in shape:
        total *= size
    for border in range(total + 1):
        parts = [*cut_rectangles(shape, 0, border), *cut_rectangles(shape, border, total)]
        boxes = [(part.offsets, part.sizes) for part in parts]
        for number in range(len(boxes)):
            low, sizes = boxes[number]
            shifted = (low[0] + 1, *low[1:]), sizes
            for changed in (boxes, boxes[:number] + boxes[number + 1 :], [*boxes, boxes[number]],
                            [*boxes[:number], shifted, *boxes[number + 1 :]]):  # fmt: skip
                held: dict[tuple[int, ...], int] = {}
                for offsets, lengths in changed:
                    for place in product(*(range(o, o + n) for o, n in zip(offsets, lengths, strict=True))):
                        held[place] = held.get(place, 0) + 1
                whole = dict.fromkeys(product(*(range(size) for size in shape)), 1)
                assert covers_once(shape, changed) == (held == whole), changed


def test_the_types_are_those_that_are_written() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == ITEM_BYTES


def test_what_is_written_is_valid_with_shards_that_end_within_rows(tmp_path: Path) -> None:
    layout = Layout(tp=2, dp=2, zero=1, bucket_elements=500)
    on_ranks(lambda step, store: store.save(state_at(1)), tmp_path, layout)
    (path,) = complete_checkpoints(tmp_path)
    assert max(len(tensor.chunks) for tensor in read_manifest(path).tensors.values()) > 4


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK_NAME).symlink_to(precious)
    with pytest.raises(ValueError, match=r"\.lock cannot: a link, not a file"):
        claim_directory(tmp_path / "run")
    assert precious.read_text() == "mine"
    (tmp_path / "run" / LOCK_NAME).unlink()
    os.mkfifo(tmp_path / "run" / LOCK_NAME)
    with pytest.raises(ValueError, match=r"\.lock cannot: a FIFO, not a file"):
        claim_directory(tmp_path / "run")


def test_claiming_a_folder_takes_away_only_what_runs_leave(tmp_path: Path) -> None:
    """Folders and files of people that look a little like a run's own."""
    mine = [tmp_path / ".alive-and-well" / "notes.txt", tmp_path / ".failure-analysis" / "notes.txt"]
    left = [tmp_path / ".alive-4711" / "rank-3", tmp_path / ".failure-4711", tmp_path / "requeue"]
    for path in (*mine, *left):
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    (tmp_path / ".alive-elsewhere").symlink_to(mine[0].parent)
    claim_directory(tmp_path).close()
    assert all(path.exists() for path in mine)
    assert not any(path.exists() for path in left)
    assert not left[0].parent.exists()
