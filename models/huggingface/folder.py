"""A folder with a Hugging Face model: config.json, safetensors, tokenizer. Read as our model, and written from ours."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from triaxis.models.config import ModelConfig
from triaxis.models.huggingface.families import CONFIG, config_json, family_of, more_layers, read_config
from triaxis.models.huggingface.guest import GuestModel
from triaxis.models.huggingface.places import Places, place_tensors
from triaxis.models.huggingface.reader import HubWeights, SafetensorsFolder
from triaxis.models.huggingface.writer import FILE_BYTES, Read, write_tensors
from triaxis.models.weights import Weights, whole_shapes

BESIDE = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "vocab.*",
    "merges.txt",
    "*.model",
)
"""What is carried along unread from the folder that a model came from."""
DRAFT = "unfinished"
"""The folder within an export that files are moved out of when all are there."""
DTYPE_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float64",
}


def open_weights(folder: Path, model: ModelConfig) -> Weights:
    """The weights of a Hugging Face folder, by our names. ImportRefused lists everything that does not fit."""
    if isinstance(model, GuestModel):
        from triaxis.models.huggingface.guest_weights import GuestFolder

        return GuestFolder(folder, model)
    values = read_config(folder / CONFIG)
    family = family_of(values, str(folder / CONFIG))
    there, shapes = SafetensorsFolder(folder).file_of, whole_shapes(model)
    own = family.rows(model)
    tables = [place_tensors((*own, *rows), shapes) for rows in family.tables]
    places = max(tables, key=lambda table: len(table.shapes.keys() & there))  # as these files were written
    if family.prefix and not any(name.startswith(family.prefix) for name in there):
        places = _without_prefix(places, family.prefix)  # saved from the model without its head
    tied = (family.head, places.of["model.embed_tokens.weight"].name) if model.tied else None
    return HubWeights(folder, places, ignored=(*family.ignored, *_more_layers(values, model)), tied=tied)


def _more_layers(values: Mapping[str, Any], model: ModelConfig) -> list[str]:
    """Patterns of the layers behind the model's, for extra prediction depths."""
    return [f"model.layers.{model.layers + number}.*" for number in range(more_layers(values))]


def _without_prefix(places: Places, prefix: str) -> Places:
    return Places(
        of={ours: replace(place, name=place.name.removeprefix(prefix)) for ours, place in places.of.items()},
        shapes={name.removeprefix(prefix): shape for name, shape in places.shapes.items()},
        parts={name.removeprefix(prefix): parts for name, parts in places.parts.items()},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written. architecture: of config.json; size_bytes: of all tensors; carried: files beside them."""

    folder: Path
    architecture: str
    size_bytes: int
    carried: tuple[str, ...]


def export(
    folder: Path,
    model: ModelConfig,
    read: Read,
    *,
    dtype: torch.dtype,
    source: Path | None = None,
    file_bytes: int = FILE_BYTES,
) -> Exported:
    """Writes a model as a Hugging Face folder, which must not exist or be empty.

    source: the Hugging Face folder that the model came from: its config.json, tokenizer and chat template go along
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"`{folder}` must be a new or an empty folder, but holds something; name another")
    known = source is not None and (source / CONFIG).is_file()
    original = read_config(source / CONFIG) if known and source is not None else None
    if isinstance(model, GuestModel):
        return _export_guest(folder, model, read, dtype, source)
    config = config_json(model, DTYPE_NAMES[dtype], original)
    family = family_of(config, str(folder / CONFIG))
    shapes = whole_shapes(model)
    places = place_tensors((*family.rows(model), *family.tables[0]), shapes)
    folder.mkdir(parents=True, exist_ok=True)
    carried = _carry(source, folder) if source is not None else ()
    size = write_tensors(folder, places, shapes, read, dtype, family.fp32, file_bytes)
    # Last, so that a folder that was left half written is not taken for a model.
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return Exported(
        folder=folder, architecture=config["architectures"][0], size_bytes=size, carried=tuple(carried)
    )


def _export_guest(
    folder: Path, model: GuestModel, read: Read, dtype: torch.dtype, source: Path | None
) -> Exported:
    """The same by the model's own `save_pretrained`, as `transformers` names and shards."""
    from triaxis.models.huggingface.guest_weights import write_guest

    draft = folder / DRAFT
    draft.mkdir(parents=True)
    architecture, size = write_guest(draft, model, read, dtype)
    carried = _carry(source, folder) if source is not None else []
    for path in sorted(draft.iterdir(), key=lambda path: path.name == CONFIG):  # last, as above
        if path.name in carried:  # settings that the source has are the source's
            path.unlink()
        else:
            path.rename(folder / path.name)
    draft.rmdir()
    return Exported(folder=folder, architecture=architecture, size_bytes=size, carried=tuple(carried))


def _carry(source: Path, folder: Path) -> list[str]:
    """Copies what belongs to a model besides its weights."""
    found = sorted({path for pattern in BESIDE for path in source.glob(pattern) if path.is_file()})
    for path in found:
        shutil.copyfile(path, folder / path.name)
    return [path.name for path in found]
