"""A folder with a Hugging Face model: config.json, safetensors, tokenizer. Read as our model, and written from ours."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from triaxis.models.config import ModelConfig
from triaxis.models.huggingface.families import CONFIG, config_json, family_of, more_layers, read_config
from triaxis.models.huggingface.family import Family
from triaxis.models.huggingface.guest import GuestModel
from triaxis.models.huggingface.places import Places, Shape, place_tensors
from triaxis.models.huggingface.reader import HubWeights, SafetensorsFolder
from triaxis.models.huggingface.writer import FILE_BYTES, Read, write_tensors
from triaxis.models.weights import Weights, whole_shapes

SETTINGS = ("generation_config.json",)
TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
    "*.model",
)
"""What is carried along unread from the folder that a model, or its tokenizer, came from."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
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
        # saved from the model without its head
        places = _renamed(places, lambda name: name.removeprefix(family.prefix))
    embedding = places.of[EMBEDDING].name
    tied = (family.head, embedding) if model.tied else None
    if (
        tied is not None and embedding not in there and family.head in there
    ):  # one weight, under its other name
        places, tied = _renamed(places, lambda name: family.head if name == embedding else name), None
    return HubWeights(
        folder,
        places,
        ignored=(*family.ignored, *_more_layers(values, model)),
        tied=tied,
        copies=_copies(model, embedding, embedding if model.tied else family.head),
    )


def _more_layers(values: Mapping[str, Any], model: ModelConfig) -> list[str]:
    """Patterns of the layers behind the model's, for extra prediction depths that it does not have."""
    return [f"model.layers.{model.layers + number}.*" for number in range(model.depths, more_layers(values))]


def _copies(model: ModelConfig, embedding: str, head: str) -> dict[str, str]:
    """What files have of the embedding and the head once more in each extra prediction depth, and of which it is."""
    names = [f"model.layers.{model.layers + depth}." for depth in range(model.depths)]
    return {
        name + copy: whole
        for name in names
        for copy, whole in (("embed_tokens.weight", embedding), ("shared_head.head.weight", head))
    }


def _written(family: Family, model: ModelConfig) -> tuple[Places, dict[str, Shape]]:
    """Where a model's tensors go in an export, the hub's way, and their shapes by our names."""
    names = [f"model.layers.{model.layers + depth}." for depth in range(model.depths)]
    left_out = () if family.depths else tuple(names)
    shapes = {name: shape for name, shape in whole_shapes(model).items() if not name.startswith(left_out)}
    places = place_tensors((*family.rows(model), *family.tables[0]), shapes)
    if not family.depths:
        return places, shapes
    copies = _copies(model, places.of[EMBEDDING].name, places.of[EMBEDDING if model.tied else HEAD].name)
    return Places(
        of=places.of,
        shapes={**places.shapes, **{copy: places.shapes[whole] for copy, whole in copies.items()}},
        parts={**places.parts, **{copy: places.parts[whole] for copy, whole in copies.items()}},
    ), shapes


def _renamed(places: Places, rename: Callable[[str], str]) -> Places:
    """The same places under other names of theirs."""
    return Places(
        of={ours: replace(place, name=rename(place.name)) for ours, place in places.of.items()},
        shapes={rename(name): shape for name, shape in places.shapes.items()},
        parts={rename(name): parts for name, parts in places.parts.items()},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written. architecture: of config.json; size_bytes: of all tensors; carried: files beside them.

    depths_left_out: extra prediction depths that the family's files have no place for
    """

    folder: Path
    architecture: str
    size_bytes: int
    carried: tuple[str, ...]
    depths_left_out: int = 0


class Export:
    """A model on its way into a Hugging Face folder: `begin` once, `write` on any number of ranks, `finish` once.

    source: the Hugging Face folder that the model came from: its config.json, tokenizer and chat template go along
    tokenizer: a tokenizer.json or a folder of one that it was trained with instead
    """

    def __init__(
        self,
        folder: Path,
        model: ModelConfig,
        *,
        dtype: torch.dtype,
        source: Path | None = None,
        tokenizer: Path | None = None,
    ) -> None:
        known = source is not None and (source / CONFIG).is_file()
        original = read_config(source / CONFIG) if known and source is not None else None
        self._folder, self._model, self._dtype = folder, model, dtype
        self._source, self._tokenizer = source, tokenizer
        self._config = (
            None if isinstance(model, GuestModel) else config_json(model, DTYPE_NAMES[dtype], original)
        )

    def begin(self) -> None:
        """Makes the folder, which must not exist or be empty."""
        if self._folder.exists() and (not self._folder.is_dir() or any(self._folder.iterdir())):
            raise ValueError(
                f"`{self._folder}` must be a new or an empty folder, but holds something; name another"
            )
        self._folder.mkdir(parents=True, exist_ok=True)

    def write(self, read: Read, share: tuple[int, int] = (0, 1), file_bytes: int = FILE_BYTES) -> int:
        """Writes this rank's files, of (rank, ranks); returns the bytes of all tensors."""
        if isinstance(self._model, GuestModel):
            from triaxis.models.huggingface.guest_weights import write_guest

            if share[0]:
                return 0  # `transformers` writes on one process
            (self._folder / DRAFT).mkdir()
            return write_guest(self._folder / DRAFT, self._model, read, self._dtype)
        assert self._config is not None
        family = family_of(self._config, str(self._folder / CONFIG))
        places, shapes = _written(family, self._model)
        return write_tensors(self._folder, places, shapes, read, self._dtype, family.fp32, file_bytes, share)

    def finish(self, size_bytes: int) -> Exported:
        """Adds what belongs to the model besides its weights, and config.json.

        That comes last, so that a folder that was left half written is not taken for a model.
        """
        carried = _carry(self._folder, self._source, self._tokenizer)
        config = self._config
        if config is None:
            config = read_config(self._folder / DRAFT / CONFIG)
            for path in (self._folder / DRAFT).iterdir():
                if path.name in (*carried, CONFIG):  # settings that the source has are the source's
                    path.unlink()
                else:
                    path.rename(self._folder / path.name)
            (self._folder / DRAFT).rmdir()
        (self._folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        return Exported(
            folder=self._folder,
            architecture=config["architectures"][0],
            size_bytes=size_bytes,
            carried=tuple(carried),
            depths_left_out=0 if "num_nextn_predict_layers" in config else self._model.depths,
        )


def export(
    folder: Path,
    model: ModelConfig,
    read: Read,
    *,
    dtype: torch.dtype,
    source: Path | None = None,
    file_bytes: int = FILE_BYTES,
) -> Exported:
    """Writes a model as a Hugging Face folder, which must not exist or be empty. source: as `Export` says."""
    to = Export(folder, model, dtype=dtype, source=source)
    to.begin()
    return to.finish(to.write(read, file_bytes=file_bytes))


def _carry(folder: Path, source: Path | None, tokenizer: Path | None) -> list[str]:
    """Copies what belongs to a model besides its weights; the tokenizer is that of training, if that was another."""
    found = {}
    for place, patterns in (
        (source, SETTINGS if tokenizer is not None else (*SETTINGS, *TOKENIZER)),
        (tokenizer, TOKENIZER),
    ):
        if place is not None and place.is_file():
            found["tokenizer.json"] = place
        elif place is not None:
            paths = (path for pattern in patterns for path in place.glob(pattern) if path.is_file())
            found |= {path.name: path for path in paths}
    for name, path in found.items():
        shutil.copyfile(path, folder / name)
    return sorted(found)
