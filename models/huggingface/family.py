"""What a family of models on the Hugging Face hub says of itself. Standard library only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from triaxis.models.config import ModelConfig
from triaxis.models.fields import DenseFields, fields_of
from triaxis.models.huggingface.fields import Fields
from triaxis.models.huggingface.places import Row

BLOCK = 128
"""Rows and columns of a tensor that share one scale, where a file holds it in 8 bits (DeepSeek-V3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model_type. ignored: tensors that carry nothing; head, embedding: their names, if tied.

    read: our model out of a config.json; write: the fields of a config.json, or None for a model that it cannot say
    tables: where tensors lie; several, where versions of transformers wrote them differently, the hub's way first
    rows: rows that depend on the model's sizes, in every table
    prefix: what some files leave out before every name; fp32: tensors that stay fp32 in a 16-bit export
    depths: whether its files may have extra prediction depths (`num_nextn_predict_layers`)
    """

    model_type: str
    architecture: str
    read: Callable[[Fields], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any] | None]
    tables: tuple[tuple[Row, ...], ...] = ((),)
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
    head: str = "lm_head.weight"
    embedding: str = "model.embed_tokens.weight"
    prefix: str = ""
    fp32: tuple[str, ...] = ()
    depths: bool = False
    rows: Callable[[ModelConfig], tuple[Row, ...]] = lambda model: ()


def dense(read: Callable[[Fields], DenseFields]) -> Callable[[Fields], ModelConfig]:
    """Reads a family whose layers are all alike."""
    return lambda fields: read(fields).composed()


def flat(
    write: Callable[[DenseFields], dict[str, Any] | None],
) -> Callable[[ModelConfig], dict[str, Any] | None]:
    """Writes such a family; None for any other model."""

    def written(model: ModelConfig) -> dict[str, Any] | None:
        try:
            fields = fields_of(model)
        except ValueError:
            return None
        return write(fields)

    return written
