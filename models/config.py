"""What a model is: its sizes, its layers, and the exact counts that follow. Standard library only."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from triaxis.models.kinds import Cut, Kind
from triaxis.models.positions import Positions, Rope


class NormKind(StrEnum):
    RMSNORM = "rmsnorm"
    LAYERNORM = "layernorm"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer: an embedding, layers of any kinds, a norm, a head.

    layers: how many; `leading` are the first of them, and the kinds in `repeating` take turns from there on
    depths: extra prediction depths behind them (models/depths.py), each with a layer of the kind whose turn it is
    norm, norm_eps: of the norms over the hidden size
    tied: the head is the input embedding
    init_std: standard deviation of the initial weights
    Example: 61 layers with leading = (dense, dense, dense) and repeating = (routed,) are 3 dense and 58 routed ones.
    """

    stage: ClassVar[str] = "triaxis.models.builder:build_model"
    """What builds a part of it: "package.module:name", called with (model, build, layers=, first=, last=)."""
    own_attention: ClassVar[bool] = True
    """Whether its attention is the engine's, which keeps the documents of a row apart."""

    name: str
    vocab_size: int
    hidden_size: int
    layers: int
    max_positions: int
    repeating: tuple[Kind, ...]
    leading: tuple[Kind, ...] = ()
    norm: NormKind = NormKind.RMSNORM
    norm_eps: float = 1e-5
    positions: Positions = field(default_factory=Rope)
    tied: bool = False
    init_std: float = 0.02
    depths: int = 0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "layers", "max_positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"model `{name}` must be at least 1, but is {getattr(self, name)}")
        if self.depths < 0:
            raise ValueError(f"model `depths` must be at least 0, but is {self.depths}")
        if not self.repeating:
            raise ValueError("model `repeating` must have at least one kind of layer, but is empty")
        size = self.rotary_size()
        if isinstance(self.positions, Rope) and (size < 1 or size % 2):
            raise ValueError(
                f"model `head_dim` must be even and positive for rotary positions, but is {size}"
            )

    def kind(self, layer: int) -> Kind:
        """The kind of a layer."""
        if layer < len(self.leading):
            return self.leading[layer]
        return self.repeating[(layer - len(self.leading)) % len(self.repeating)]

    def kinds(self) -> Counter[Kind]:
        """How many layers there are of each kind, the first one first."""
        return Counter(self.kind(layer) for layer in range(self.layers))

    def depth_kinds(self) -> tuple[Kind, ...]:
        """The kind of the layer in each extra prediction depth."""
        return tuple(self.kind(self.layers + depth) for depth in range(self.depths))

    def all_kinds(self) -> Counter[Kind]:
        """How many layers there are of each kind, those in extra prediction depths among them."""
        return self.kinds() + Counter(self.depth_kinds())

    def has_losses(self) -> bool:
        """Whether some layer has a loss of its own."""
        return any(kind.has_loss for kind in self.all_kinds())

    def cuts(self) -> tuple[Cut, ...]:
        """What tp must divide in some layer."""
        return tuple(dict.fromkeys(cut for kind in self.all_kinds() for cut in kind.cuts()))

    def expert_cuts(self) -> tuple[Cut, ...]:
        """What tp must divide besides where ep is 1."""
        return tuple(dict.fromkeys(cut for kind in self.all_kinds() for cut in kind.expert_cuts()))

    def experts(self) -> tuple[int, ...]:
        """How many experts layers have, each number once; empty for a dense model."""
        return tuple(sorted({kind.experts for kind in self.all_kinds() if kind.experts}))

    def has_choosing_bias(self) -> bool:
        """Whether some layer's experts are chosen with a bias that moves by their load."""
        return any(kind.has_choosing_bias for kind in self.all_kinds())

    def mixes(self) -> bool:
        """Whether some layer has experts, so that a token's sums depend on which tokens are beside it."""
        return bool(self.experts())

    def active_parameters(self) -> int:
        """Parameters that a token has to do with, embedding and head among them."""
        idle = sum(
            count * (kind.parameters(self) - kind.active_parameters(self))
            for kind, count in self.all_kinds().items()
        )
        return self.parameters() - idle

    def rotary_size(self) -> int:
        """Elements of a head that rotary positions turn, the same in all layers; without such positions 0."""
        if not isinstance(self.positions, Rope):
            return 0
        sizes = sorted({size for kind in self.all_kinds() for size in kind.head_sizes()})
        if len(sizes) > 1:
            raise ValueError(f"model heads must have one size in all layers, but have {sizes}")
        return self.positions.turned(sizes[0]) if sizes else 0

    def output_std(self) -> float:
        """Standard deviation of the initial weights that write into the residual stream, as in GPT-2."""
        return self.init_std / math.sqrt(2 * self.layers)

    def norm_parameters(self) -> int:
        """Parameters of one norm over the hidden size."""
        return self.hidden_size * (2 if self.norm == NormKind.LAYERNORM else 1)

    def layer_parameters(self, layer: int = 0) -> int:
        """Parameters of a layer, exact."""
        return self.kind(layer).parameters(self)

    def embedding_parameters(self) -> int:
        """Parameters of the token embedding, which are also those of an untied head."""
        return self.vocab_size * self.hidden_size

    def position_parameters(self) -> int:
        """Parameters of learned positions; rotary ones have none."""
        return 0 if isinstance(self.positions, Rope) else self.max_positions * self.hidden_size

    def parameters(self) -> int:
        """Parameters of the whole model, exact; a tied embedding counts once."""
        ends = self.embedding_parameters() * (1 if self.tied else 2)
        layers = sum(count * kind.parameters(self) for kind, count in self.kinds().items())
        depths = sum(map(self.depth_parameters, range(self.depths)))
        return ends + self.position_parameters() + layers + self.norm_parameters() + depths

    def depth_parameters(self, depth: int = 0) -> int:
        """Parameters of an extra prediction depth; embedding and head are the model's own."""
        layer = self.kind(self.layers + depth).parameters(self)
        return layer + 2 * self.hidden_size**2 + 3 * self.norm_parameters()

    def flops_per_token(self, sequence_length: int) -> int:
        """Model FLOPs of forward and backward for one token, causal attention counted by half.

        6·(matmul weights, head included, input embedding not) + 6·a·d·s per layer (docs: Megatron's formula).
        An extra prediction depth counts with its layer, its product and the head once more.
        """
        products = sum(
            count * (kind.matmul_parameters(self) + kind.attention_products(self, sequence_length))
            for kind, count in self.all_kinds().items()
        )
        heads = (1 + self.depths) * self.embedding_parameters()
        return 6 * (products + heads + 2 * self.depths * self.hidden_size**2)
