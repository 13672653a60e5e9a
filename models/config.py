"""What a model is: its sizes, its choices, and the exact counts that follow. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from typing import Any


class NormKind(StrEnum):
    RMSNORM = "rmsnorm"
    LAYERNORM = "layernorm"


class PositionKind(StrEnum):
    ROPE = "rope"
    LEARNED = "learned"


class ActivationKind(StrEnum):
    SWIGLU = "swiglu"
    GELU = "gelu"


_POSITIVE = ("vocab_size", "hidden_size", "layers", "heads", "kv_heads", "ffn_size", "max_positions")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A dense decoder-only transformer.

    kv_heads: key/value heads; each serves heads / kv_heads query heads
    head_dim: size of one head; None = hidden_size / heads
    activation: "swiglu" (gate, up and down) or "gelu" (tanh form; up and down)
    attention_bias: biases on q, k and v; output_bias: on the attention's output; mlp_bias: on the MLP
    qk_norm: an RMS norm over each head of q and k
    tied: the head is the input embedding
    init_std: standard deviation of the initial weights
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

    def __post_init__(self) -> None:
        for field in _POSITIVE:
            value = getattr(self, field)
            if value < 1:
                raise ValueError(f"model `{field}` must be at least 1, but is {value}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model `kv_heads` must divide `heads` ({self.heads}), but is {self.kv_heads}; "
                f"these do: {_divisors(self.heads)}"
            )
        if self.head_dim is None and self.hidden_size % self.heads:
            raise ValueError(
                f"model `heads` must divide `hidden_size` ({self.hidden_size}) where `head_dim` is not set, "
                f"but is {self.heads}; set `head_dim`, or choose heads out of {_divisors(self.hidden_size)}"
            )
        if self.head_size < 1 or (self.positions == PositionKind.ROPE and self.head_size % 2):
            raise ValueError(
                f"model `head_dim` must be even and positive for rotary positions, but is {self.head_size}"
            )

    @property
    def head_size(self) -> int:
        """Elements of one head."""
        return self.hidden_size // self.heads if self.head_dim is None else self.head_dim

    def attention_matmul_parameters(self) -> int:
        """Weights of q, k, v and o in one layer: h·d·(2a + 2k)."""
        return self.hidden_size * self.head_size * 2 * (self.heads + self.kv_heads)

    def mlp_matmul_parameters(self) -> int:
        """Weights of the MLP in one layer: g·h·f with g = 3 for SwiGLU and 2 for GELU."""
        matrices = 3 if self.activation == ActivationKind.SWIGLU else 2
        return matrices * self.hidden_size * self.ffn_size

    def norm_parameters(self) -> int:
        """Parameters of one norm over the hidden size."""
        return self.hidden_size * (2 if self.norm == NormKind.LAYERNORM else 1)

    def bias_parameters(self) -> int:
        """Biases of one layer's projections."""
        gate = self.ffn_size if self.activation == ActivationKind.SWIGLU else 0
        return (
            self.attention_bias * self.head_size * (self.heads + 2 * self.kv_heads)
            + self.output_bias * self.hidden_size
            + self.mlp_bias * (gate + self.ffn_size + self.hidden_size)
        )

    def layer_parameters(self) -> int:
        """Parameters of one layer, exact."""
        return (
            self.attention_matmul_parameters()
            + self.mlp_matmul_parameters()
            + self.bias_parameters()
            + 2 * self.norm_parameters()
            + self.qk_norm * 2 * self.head_size
        )

    def embedding_parameters(self) -> int:
        """Parameters of the token embedding, which are also those of an untied head."""
        return self.vocab_size * self.hidden_size

    def position_parameters(self) -> int:
        """Parameters of learned positions; rotary ones have none."""
        return self.max_positions * self.hidden_size if self.positions == PositionKind.LEARNED else 0

    def parameters(self) -> int:
        """Parameters of the whole model, exact; a tied embedding counts once."""
        ends = self.embedding_parameters() * (1 if self.tied else 2)
        return (
            ends + self.position_parameters() + self.layers * self.layer_parameters() + self.norm_parameters()
        )

    def flops_per_token(self, sequence_length: int) -> int:
        """Model FLOPs of forward and backward for one token, causal attention counted by half.

        6·(matmul weights, head included, input embedding not) + 6·a·d·s per layer (docs: Megatron's formula).
        """
        weights = self.attention_matmul_parameters() + self.mlp_matmul_parameters()
        attention = self.heads * self.head_size * sequence_length
        return 6 * (self.layers * (weights + attention) + self.embedding_parameters())


_KINDS: dict[str, type[StrEnum]] = {
    "norm": NormKind,
    "positions": PositionKind,
    "activation": ActivationKind,
}
_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (float, int),
    "bool": (bool,),
    "int | None": (int, type(None)),
}


def config_from_fields(values: Mapping[str, Any], origin: str) -> ModelConfig:
    """A config out of plain values, as a TOML or JSON file holds them; `origin` is named in errors."""
    known = {field.name: field for field in fields(ModelConfig)}
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
    return ModelConfig(**{name: _value(name, str(known[name].type), values[name], origin) for name in values})


def _value(name: str, annotation: str, value: object, origin: str) -> Any:  # any field's type
    kind = _KINDS.get(name)
    if kind is not None:
        allowed = [member.value for member in kind]
        if value not in allowed:
            raise ValueError(f"{origin}: `{name}` must be one of {', '.join(allowed)}, but is {value!r}")
        return kind(str(value))
    types = _TYPES[annotation]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise ValueError(f"{origin}: `{name}` must be of type {annotation}, but is {value!r}")
    return float(value) if float in types and isinstance(value, int) else value


def _divisors(number: int) -> str:
    return ", ".join(str(part) for part in range(1, number + 1) if number % part == 0)
