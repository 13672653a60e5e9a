"""A model out of flat fields, as a TOML or JSON file holds them, and back. Standard library only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from enum import StrEnum
from typing import Any

from triaxis.models.config import ModelConfig, NormKind
from triaxis.models.huggingface.guest import GuestModel
from triaxis.models.kinds import ActivationKind, Dense, GroupedAttention, Layer
from triaxis.models.positions import SCALINGS, Learned, Positions, Rope, Scaling


class PositionKind(StrEnum):
    ROPE = "rope"
    LEARNED = "learned"


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseFields:
    """A model whose layers are all alike: grouped attention and a dense MLP.

    kv_heads: key/value heads; each serves heads / kv_heads query heads
    head_dim: size of one head; None = hidden_size / heads
    activation: "swiglu" (gate, up and down) or "gelu" (tanh form; up and down)
    attention_bias: biases on q, k and v; output_bias: on the attention's output; mlp_bias: on the MLP
    qk_norm: an RMS norm over each head of q and k
    tied: the head is the input embedding
    init_std: standard deviation of the initial weights
    rope_fraction: the part of each head that is turned
    rope_scaling: `rope_type` (linear, llama3, yarn) and the fields of that scaling (models/positions.py)
    """

    name: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    ffn_size: int
    max_positions: int
    head_dim: int | None = None
    norm: NormKind = NormKind.RMSNORM
    norm_eps: float = 1e-5
    positions: PositionKind = PositionKind.ROPE
    rope_theta: float = 10000.0
    activation: ActivationKind = ActivationKind.SWIGLU
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    init_std: float = 0.02
    rope_fraction: float = 1.0
    rope_scaling: Mapping[str, Any] | None = None

    def composed(self) -> ModelConfig:
        """The model that these fields mean."""
        attention = GroupedAttention(
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_size=self._head_size(),
            bias=self.attention_bias,
            output_bias=self.output_bias,
            qk_norm=self.qk_norm,
        )
        feed_forward = Dense(ffn_size=self.ffn_size, activation=self.activation, bias=self.mlp_bias)
        return ModelConfig(
            name=self.name,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            layers=self.layers,
            max_positions=self.max_positions,
            repeating=(Layer(attention=attention, feed_forward=feed_forward),),
            norm=self.norm,
            norm_eps=self.norm_eps,
            positions=self._positions(),
            tied=self.tied,
            init_std=self.init_std,
        )

    def _head_size(self) -> int:
        if self.head_dim is not None:
            if self.head_dim < 1:
                raise ValueError(f"model `head_dim` must be even and positive, but is {self.head_dim}")
            return self.head_dim
        if self.heads < 1:
            raise ValueError(f"model `heads` must be at least 1, but is {self.heads}")
        if self.hidden_size % self.heads:
            legal = [str(part) for part in range(1, self.hidden_size + 1) if self.hidden_size % part == 0]
            raise ValueError(
                f"model `heads` must divide `hidden_size` ({self.hidden_size}) where `head_dim` is not set, "
                f"but is {self.heads}; set `head_dim`, or choose heads out of {', '.join(legal)}"
            )
        return self.hidden_size // self.heads

    def _positions(self) -> Positions:
        if self.positions == PositionKind.LEARNED:
            return Learned()
        scaling = None if self.rope_scaling is None else scaling_of(self.rope_scaling)
        return Rope(theta=self.rope_theta, fraction=self.rope_fraction, scaling=scaling)


def dense_model(**values: Any) -> ModelConfig:  # noqa: ANN401 - the fields of DenseFields, each of its type
    """A model of `DenseFields`."""
    return DenseFields(**values).composed()


def fields_of(model: ModelConfig) -> DenseFields:
    """The flat fields of a model whose layers are all grouped attention and dense MLPs, all alike."""
    (layer,) = model.kinds() if len(model.kinds()) == 1 else (None,)
    attention = feed_forward = None
    if type(layer) is Layer:
        attention, feed_forward = layer.attention, layer.feed_forward
    if not (isinstance(attention, GroupedAttention) and isinstance(feed_forward, Dense)):
        raise ValueError(
            f"{model.name} must be a dense model of layers all alike to be written as fields, but is not"
        )
    rope = model.positions if isinstance(model.positions, Rope) else None
    inferred = model.hidden_size == attention.head_size * attention.heads
    return DenseFields(
        name=model.name,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        layers=model.layers,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        ffn_size=feed_forward.ffn_size,
        max_positions=model.max_positions,
        head_dim=None if inferred else attention.head_size,
        norm=model.norm,
        norm_eps=model.norm_eps,
        positions=PositionKind.LEARNED if rope is None else PositionKind.ROPE,
        rope_theta=10000.0 if rope is None else rope.theta,
        activation=feed_forward.activation,
        attention_bias=attention.bias,
        output_bias=attention.output_bias,
        mlp_bias=feed_forward.bias,
        qk_norm=attention.qk_norm,
        tied=model.tied,
        init_std=model.init_std,
        rope_fraction=1.0 if rope is None else rope.fraction,
        rope_scaling=None if rope is None or rope.scaling is None else scaling_fields(rope.scaling),
    )


def with_fields(model: ModelConfig, **changes: Any) -> ModelConfig:  # noqa: ANN401 - the fields of DenseFields
    """The model with some of its flat fields changed."""
    return dataclasses.replace(fields_of(model), **changes).composed()


def model_facts(model: ModelConfig) -> dict[str, Any]:
    """Everything that makes a model what it is, but its name, as plain values: flat fields where they can say it."""
    if isinstance(model, GuestModel):
        return model.values()
    try:
        found = dataclasses.asdict(fields_of(model))
    except ValueError:
        found = dataclasses.asdict(model) | {
            "kinds": [f"{count} × {kind.module}" for kind, count in model.kinds().items()]
        }
    # Fields that came later are told where they are used: checkpoints without them stay what they were.
    later = {"rope_fraction": 1.0, "rope_scaling": None, "depths": 0}
    found["depths"] = model.depths
    return {k: v for k, v in found.items() if k != "name" and not (k in later and v == later[k])}


def scaling_of(values: Mapping[str, Any]) -> Scaling:
    """The scaling that the flat field `rope_scaling` means."""
    values = dict(values)
    name = values.pop("rope_type", None)
    if name not in SCALINGS:
        raise ValueError(
            f"`rope_scaling` must have a `rope_type` out of {', '.join(SCALINGS)}, but has {name!r}"
        )
    try:
        return SCALINGS[name](**values)
    except TypeError as error:
        raise ValueError(f"`rope_scaling` must have the fields of {name}, but: {error}") from error


def scaling_fields(scaling: Scaling) -> dict[str, Any]:
    """The same, back."""
    name = next(name for name, kind in SCALINGS.items() if kind is type(scaling))
    return {"rope_type": name, **dataclasses.asdict(scaling)}


_KINDS: dict[str, type[StrEnum]] = {
    "norm": NormKind,
    "positions": PositionKind,
    "activation": ActivationKind,
}
MOST, MOST_LAYERS = 10**9, 10**5
"""Beyond any model that there is."""

_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (float, int),
    "bool": (bool,),
    "int | None": (int, type(None)),
    "Mapping[str, Any] | None": (dict, type(None)),
}


def config_from_fields(values: Mapping[str, Any], origin: str) -> ModelConfig:
    """A config out of plain values, as a TOML or JSON file holds them; `origin` is named in errors."""
    known = {field.name: field for field in dataclasses.fields(DenseFields)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(
            f"{origin}: `{unknown[0]}` must be a model field, but is none; allowed: {', '.join(known)}"
        )
    missing = [name for name, field in known.items() if field.default is MISSING and name not in values]
    if missing:
        raise ValueError(
            f"{origin}: a model must have {', '.join(f'`{name}`' for name in missing)}; add them"
        )
    checked = {name: _value(name, str(known[name].type), values[name], origin) for name in values}
    try:
        return DenseFields(**checked).composed()
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from error


def _value(name: str, annotation: str, value: object, origin: str) -> Any:  # noqa: ANN401 - any field's type
    kind = _KINDS.get(name)
    if kind is not None:
        allowed = [member.value for member in kind]
        if value not in allowed:
            raise ValueError(f"{origin}: `{name}` must be one of {', '.join(allowed)}, but is {value!r}")
        return kind(str(value))
    types = _TYPES[annotation]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise ValueError(f"{origin}: `{name}` must be of type {annotation}, but is {value!r}")
    if (
        name == "name"
        and isinstance(value, str)
        and (not value.isprintable() or {*"[]"} & {*value} or not value)
    ):
        raise ValueError(f"{origin}: `name` must be printable text without [ and ], but is {value[:40]!r}")
    if isinstance(value, (int, float)) and not -MOST <= value <= MOST:  # which is false for nan, too
        raise ValueError(
            f"{origin}: `{name}` must be a finite number of at most {MOST:,}, but is {str(value)[:40]}"
        )
    if name == "layers" and isinstance(value, int) and value > MOST_LAYERS:
        raise ValueError(f"{origin}: `{name}` must be at most {MOST_LAYERS:,}, but is {value}")
    return float(value) if float in types and isinstance(value, int) else value
