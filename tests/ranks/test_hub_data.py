"""Data by its name on the hub: from what was fetched, from the local cache, from the hub, or refused."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from triaxis.engine.config import RunConfig
from triaxis.engine.data.source import open_source
from triaxis.launch.hub import located
from triaxis.launch.hub_data import local_data

CARD = (
    "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: parts/*.jsonl\n---\n"
)


def fill(folder: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


def text(*texts: str) -> str:
    return "".join(json.dumps({"text": one}) + "\n" for one in texts)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's local cache, without a network."""
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def put(hub: Path, name: str, files: dict[str, str]) -> Path:
    snapshot = hub / f"datasets--{name.replace('/', '--')}" / "snapshots" / "abc"
    fill(snapshot, files)
    fill(snapshot.parents[1], {"refs/main": "abc"})
    return snapshot


def lines_of(data: str) -> str:
    return "".join(sorted(path.read_text() for path in Path(data).rglob("*.jsonl")))


@pytest.mark.parametrize(
    "files",
    [
        {"train.jsonl": text("a"), "test.jsonl": text("no")},
        {"data/train-00000-of-00002.jsonl": text("a"), "data/validation-00000-of-00001.jsonl": text("no")},
        {"README.md": CARD, "parts/x.jsonl": text("a"), "other/train.jsonl": text("no")},
        {"some.jsonl": text("a"), "README.md": "no card"},
    ],
    ids=["names", "parts", "card", "all"],
)
def test_the_training_split_is_found_in_the_cache(hub: Path, tmp_path: Path, files: dict[str, str]) -> None:
    put(hub, "some/set", files)
    assert lines_of(local_data("some/set", tmp_path / "links")) == text("a")


def test_sets_of_the_hub_are_mixed_and_trained_on_like_others(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(hub, "some/set", {"train.jsonl": text("of the hub")})
    monkeypatch.setenv("HOME", str(tmp_path))
    own = tmp_path / "own.jsonl"
    own.write_text(text("own"))
    config = located(RunConfig(data=f"some/set:0.25,{own}:0.75", eval_data="some/set", model="tiny"))
    folder = tmp_path / ".cache/triaxis/data/hub/some--set"
    assert config.data == f"{folder}:0.25,{own}:0.75" and config.eval_data == str(folder)
    assert open_source(str(folder), split="train", sequence_length=8).describe(0, 0).endswith("train.jsonl:1")


def test_what_is_no_name_is_left_alone(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fill(tmp_path, {"some/prefix.bin": "", "some/prefix.idx": "", "some/folder/x.jsonl": text("a")})
    for data in (
        "stdlib",
        "some/prefix",
        "some/folder",
        "some/missing.jsonl",
        "/some/set",
        "./some/set",
        "a/b/c",
    ):
        assert local_data(data, tmp_path / "links") == data


def test_what_is_nowhere_is_refused_with_the_command_that_fetches_it(hub: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"some/set is not to be had .*hf download --repo-type dataset some/set"
    ):
        local_data("some/set", tmp_path / "links")
    put(hub, "some/pictures", {"train.png": "x"})
    with pytest.raises(ValueError, match="some/pictures is not to be had"):
        local_data("some/pictures", tmp_path / "links")


def test_it_is_downloaded_once_and_only_the_training_split(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted download is finished by the next start; ranks that come at once wait for one."""
    there = {
        "README.md": CARD,
        "parts/a.jsonl": text("a"),
        "parts/b.jsonl": text("b"),
        "big.jsonl": text("no"),
    }
    asked: list[Any] = []

    def download(name: str, **options: Any) -> str:
        if options.get("local_files_only"):
            snapshot = hub / "datasets--some--set" / "snapshots" / "abc"
            if not snapshot.exists():
                raise FileNotFoundError(name)
            return str(snapshot)
        asked.append(options["allow_patterns"])
        if len(asked) == 1:
            put(hub, name, {"parts/a.jsonl": there["parts/a.jsonl"]})
            raise ConnectionError("cut off")
        return str(put(hub, name, {file: there[file] for file in options["allow_patterns"]}))

    def card(name: str, file: str, **_: Any) -> str:
        return str(put(hub, name, {file: there[file]}) / file)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", card)
    listing = SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in there])
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: listing)
    with pytest.raises(ValueError, match="cut off"):
        local_data("some/set", tmp_path / "links")
    found: list[str] = []
    ranks = [
        threading.Thread(target=lambda: found.append(local_data("some/set", tmp_path / "links")))
        for _ in range(4)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert asked == [["parts/a.jsonl", "parts/b.jsonl"]] * 2 and len(set(found)) == 1 and len(found) == 4
    assert lines_of(found[0]) == text("a") + text("b")
