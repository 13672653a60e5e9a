"""Where the model of a name lies on this machine: a folder, the hub's local cache, or the hub itself."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from triaxis.engine.config import RunConfig
from triaxis.launch.hub_data import local_data
from triaxis.models.huggingface.families import CONFIG

WANTED = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")
"""What a model is trained and exported with; pickled weights, which can run code, are not fetched."""


def located(config: RunConfig) -> RunConfig:
    """With folders of this machine in place of names on the hub. Raises ValueError."""

    def here(data: str | None) -> str | None:
        return None if data is None else local_data(data)

    model = config.model_name_or_path
    return dataclasses.replace(
        config,
        data=local_data(config.data),
        data_path=here(config.data_path),
        eval_data=here(config.eval_data),
        model_name_or_path=None if model is None else local_model(model),
    )


def local_model(name: str) -> str:
    """The folder of a model: `name` itself, or what the hub calls so, downloaded once a machine.

    Processes of one machine that come at once wait for the first one's download, file by file (huggingface_hub locks
    its cache). What a download that was cut off has left is completed. Raises ValueError with the command that fetches
    it, where it is neither here nor to be had.
    """
    if Path(name).exists() or name.count("/") != 1 or name.startswith((".", "/", "~")):
        if not Path(name).is_dir():
            raise ValueError(
                f"`model_name_or_path` must be a folder with a config.json, or a name on the Hugging Face hub, "
                f"but is {name}, which is neither; check the path"
            )
        return name
    from huggingface_hub import snapshot_download  # imports requests: half a second

    wanted = list(WANTED)
    try:
        here: Path | None = Path(snapshot_download(name, allow_patterns=wanted, local_files_only=True))
    except Exception:  # noqa: BLE001  (its own kinds, which have changed between versions)
        here = None
    if here is not None and _is_whole(here):
        return str(here)
    try:
        here = Path(snapshot_download(name, allow_patterns=wanted, etag_timeout=5))
    except Exception as error:
        raise _absent(name, str(error).partition("\n")[0] or type(error).__name__) from error
    if not _is_whole(here):  # without a network it gives what there is
        raise _absent(name, f"{here} has not all of its safetensors")
    return str(here)


def _absent(name: str, reason: str) -> ValueError:
    return ValueError(
        f"`model_name_or_path` must be a folder, or a model in the hub's cache or on the hub, but {name} is not "
        f"to be had ({reason}); where there is a network: hf download {name}"
    )


def _is_whole(folder: Path) -> bool:
    """Whether all files of weights are there: one, or those that the index names."""
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return all((folder / name).is_file() for name in (CONFIG, *names))
