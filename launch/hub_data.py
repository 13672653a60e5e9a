"""Where the data of a name on the hub lies on this machine: its training split, fetched once."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from triaxis.engine.data.files import CACHE, kind_of_file
from triaxis.engine.data.sets import with_places
from triaxis.engine.plain_files import locked

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
CARD = "README.md"


def local_data(data: str, cache: Path | None = None) -> str:
    """`data` with a folder in place of each set that is a name on the hub. See `triaxis.engine.data.sets`.

    A name is looked for among what was fetched before, in the hub's local cache, and on the hub itself; processes of
    one machine that come at once wait for the first. Raises ValueError with the command that fetches it.
    """
    cache = cache or CACHE.expanduser() / "hub"
    return with_places(data, lambda place: str(_folder_of(place, cache)) if _is_name(place) else place)


def _is_name(place: str) -> bool:
    """Neither a file nor a folder, nor what looks like one that is missing."""
    known = any(os.path.exists(place + suffix) for suffix in ("", ".bin", ".idx"))
    return not known and NAME.fullmatch(place) is not None and kind_of_file(Path(place)) is None


def _folder_of(name: str, cache: Path) -> Path:
    cache.mkdir(parents=True, exist_ok=True)
    place = cache / name.replace("/", "--")
    with locked(place.with_name(f"{place.name}.lock")):
        if place.is_dir():
            return place
        try:
            snapshot, wanted = _fetched(name, place)
        except Exception as error:  # the libraries' own kinds, which have changed between versions
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(
                f"`data` must be files, a folder, a prefix of .bin and .idx files, or a data set in the hub's cache or "
                f"on the hub, but {name} is not to be had ({reason}); check the path, or where there is a network: "
                f"hf download --repo-type dataset {name}"
            ) from error
        _link(snapshot, wanted, place)
    return place


def _fetched(name: str, place: Path) -> tuple[Path, list[str]]:
    """(snapshot in the hub's cache, files of the training split in it), all of them there."""
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download  # imports requests: half a second

    noted = place.with_name(f"{place.name}.json")  # of a download that may have been interrupted
    try:
        found = Path(snapshot_download(name, repo_type="dataset", local_files_only=True))
        inside = [str(path.relative_to(found)) for path in found.rglob("*") if path.is_file()]
        wanted = json.loads(noted.read_text()) if noted.exists() else _training_files(inside, found)
        if wanted and all((found / file).is_file() for file in wanted):
            return found, wanted
    except Exception:  # noqa: BLE001  (its own kinds, which have changed between versions)
        pass  # not here yet
    # Without a network this fails at once; the library's other ways of listing try for half a minute.
    files = [file.rfilename for file in HfApi().dataset_info(name, timeout=5).siblings or ()]
    card = None
    if CARD in files:
        card = Path(hf_hub_download(name, CARD, repo_type="dataset", etag_timeout=5)).parent
    wanted = _training_files(files, card)
    noted.write_text(json.dumps(wanted))
    return Path(snapshot_download(name, repo_type="dataset", allow_patterns=wanted)), wanted


def _training_files(files: Sequence[str], card: Path | None) -> list[str]:
    """Which of a data set's files are its training split, as `datasets` understands their names and the card.

    They need not be there: empty ones of the same names tell as much. Raises ValueError where there is none to read.
    """
    from datasets import load_dataset_builder  # slow to import

    known = [file for file in files if kind_of_file(Path(file)) and not file.startswith(".")]
    with tempfile.TemporaryDirectory(prefix="triaxis-") as folder:
        for file in known:
            path = Path(folder, file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        if card is not None and (card / CARD).is_file():
            shutil.copy(card / CARD, Path(folder, CARD))
        found = load_dataset_builder(folder).config.data_files or {} if known else {}
        splits = {str(split): paths for split, paths in found.items()}
        training = [os.path.relpath(path, folder) for path in splits.get("train", ())]
    if not training:
        there = f"its splits are {', '.join(splits)}" if splits else "it holds none"
        raise ValueError(
            f"it must have a training split of .jsonl, .json, .txt or .parquet files, but {there}"
        )
    return sorted(training)


def _link(snapshot: Path, wanted: Sequence[str], place: Path) -> None:
    """A folder of links to the wanted files, under the names that they have there; appears when it is whole."""
    draft = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
    for file in wanted:
        link = draft / file
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to((snapshot / file).resolve())
    draft.replace(place)
