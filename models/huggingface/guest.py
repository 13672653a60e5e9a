"""A guest: a model of `transformers` itself, of a family that the engine does not build, described by its config.json.

The engine trains a guest whole, as `transformers` wrote it: over data parallelism, with ZeRO or fsdp, and never cut
over tp or pp. Standard library only, but for the counts, which need the module. guest_stage.py is its stage.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

from triaxis.models.config import ModelConfig
from triaxis.models.huggingface.fields import Fields
from triaxis.models.kinds import Kind
from triaxis.models.positions import Learned

UNTOLD = ("transformers_version", "torch_dtype", "dtype", "_name_or_path", "use_cache")
"""What a config.json says of the file, and not of the model."""
SIZES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "positions": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"),
}
"""What families call them."""
UNLIMITED = 10**8
"""Positions of a model that has no table of them."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
SEVERAL_INPUTS = ("text_config", "vision_config", "audio_config", "thinker_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestLayer(Kind):
    """A layer of a guest, which is made with the whole of it."""

    module: ClassVar[str] = "triaxis.models.huggingface.guest_stage:GuestStage"

    def parameters(self, model: ModelConfig) -> int:
        """An equal share of all that is not in an embedding."""
        ends = model.embedding_parameters() * (1 if model.tied else 2)
        return (model.parameters() - ends) // model.layers

    def matmul_parameters(self, model: ModelConfig) -> int:
        return self.parameters(model)

    def attention_products(self, model: ModelConfig, length: int) -> int:
        """As if every layer attended to all that came before, with heads as wide as the hidden state together."""
        return model.hidden_size * length


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestModel(ModelConfig):
    """A model that `transformers` builds. config: its config.json in one line, without what only the file is about."""

    stage: ClassVar[str] = "triaxis.models.huggingface.guest_stage:GuestStage"
    own_attention: ClassVar[bool] = False

    model_type: str
    config: str

    def values(self) -> dict[str, Any]:
        """The fields of its config.json."""
        found: dict[str, Any] = json.loads(self.config)
        return found

    def mixes(self) -> bool:
        """As config.json tells by a number of experts; the engine itself has no word in them (`experts` is empty)."""
        return any(name in self.values() for name in EXPERTS)

    def parameters(self) -> int:
        """All parameters, counted on its module; a tied embedding counts once."""
        count: int = import_module("triaxis.models.huggingface.guest_module").count_parameters(self)
        return count


def guest_of(values: Mapping[str, Any], origin: str) -> GuestModel:
    """The guest that a config.json describes. ValueError names what cannot be trained so."""
    fields = Fields(values, origin)
    for name in SEVERAL_INPUTS:
        if name in values:
            raise fields.refuse(name, "a model of more than text; give the config.json of its text model")
    if fields.flag("is_encoder_decoder"):
        raise fields.refuse("is_encoder_decoder", "the engine trains decoders, which continue one text")
    if values.get("quantization_config") is not None:
        raise fields.refuse(
            "quantization_config", "quantized weights are not trained; give what it was made of"
        )
    if fields.flag("output_router_logits"):
        raise fields.refuse("output_router_logits", "the loss is that of tokens alone; set it to false")
    told = {name: value for name, value in sorted(values.items()) if name not in UNTOLD}
    sizes = {what: _size(fields, what, names) for what, names in SIZES.items()}
    return GuestModel(
        name=str(values["model_type"]),
        vocab_size=fields.whole("vocab_size"),
        hidden_size=sizes["hidden_size"],
        layers=sizes["layers"],
        max_positions=sizes["positions"],
        repeating=(GuestLayer(),),
        positions=Learned(),
        tied=fields.flag("tie_word_embeddings", True),
        model_type=str(values["model_type"]),
        config=json.dumps(told, separators=(",", ":")),
    )


def refuse_guest(model: ModelConfig, what: str) -> None:
    """Raises ValueError for a guest, which only training, export and generation take."""
    if isinstance(model, GuestModel):
        raise ValueError(
            f"`model` must be one that the engine builds itself to be {what}, but {model.name} is built by "
            "transformers; for an estimate describe a dense model of its sizes in a file (--model sizes.toml, see "
            "docs/planning.md), and to see this one run: triaxis train --threads --dp 4 --zero 3 --steps 2"
        )


def _size(fields: Fields, what: str, names: tuple[str, ...]) -> int:
    """A size, by the first of its names that the file has."""
    for name in names:
        if fields.get(name) is not None:
            return fields.whole(name)
    return fields.whole(names[0], UNLIMITED if what == "positions" else None)


def dropouts(values: Mapping[str, Any]) -> dict[str, float]:
    """The chances of dropout that a config.json asks for, by field; the engine has none."""
    return {
        name: float(value)
        for name, value in values.items()
        if ("dropout" in name or "pdrop" in name or "layerdrop" in name)
        and isinstance(value, (int, float))
        and value
        and not name.startswith("classifier")
    }
