"""What a model is to the closed forms: sizes alone, dense or with experts. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from triaxis.models.config import ModelConfig
from triaxis.models.kinds import ActivationKind, Dense, GroupedAttention, Layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2): low-rank sizes of q and kv, head sizes of its parts."""

    q_rank: int
    kv_rank: int
    plain: int
    rotary: int
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder-only transformer's sizes.

    gated: three MLP matrices, not two; experts: routed ones in each of the last layers - dense_layers layers,
    chosen of them for a token, expert_ffn wide, besides a shared MLP of shared_ffn; bound_rows: embeddings that
    are not the vocabulary's (learned positions)
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    gated: bool = True
    tied: bool = False
    bound_rows: int = 0
    experts: int = 0
    chosen: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    latent: Latent | None = None

    @property
    def mlp_matrices(self) -> int:
        """Matrices of an MLP: gate, up and down, or up and down."""
        return 3 if self.gated else 2

    @property
    def expert_layers(self) -> int:
        """Layers whose MLP is routed."""
        return self.layers - self.dense_layers if self.experts else 0

    def attention_matmuls(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of one layer's projections."""
        if self.latent is None:
            return (
                (self.hidden, self.head_size * (self.heads + 2 * self.kv_heads)),
                (self.head_size * self.heads, self.hidden),
            )
        low, heads = self.latent, self.heads
        return (
            (self.hidden, low.q_rank + low.kv_rank + low.rotary),
            (low.q_rank, heads * (low.plain + low.rotary)),
            (low.kv_rank, heads * (low.plain + low.value)),
            (heads * low.value, self.hidden),
        )

    def mlp_matmuls(self, width: int) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of an MLP `width` wide."""
        return ((self.hidden, (self.mlp_matrices - 1) * width), (width, self.hidden)) if width else ()

    @property
    def attention_sizes(self) -> tuple[int, int]:
        """Elements of one head in the product of q and k, and in that of scores and v."""
        if self.latent is None:
            return self.head_size, self.head_size
        return self.latent.plain + self.latent.rotary, self.latent.value

    def attention_parameters(self) -> int:
        """Weights of one layer's attention."""
        return _weights(self.attention_matmuls())

    def expert_parameters(self) -> int:
        """Weights of one layer's routed experts."""
        return self.experts * _weights(self.mlp_matmuls(self.expert_ffn))

    def dense_parameters(self, *, routed: bool) -> int:
        """Weights of one layer without its routed experts: attention, MLP or shared MLP and router (biased), norms."""
        if routed:
            mlp = _weights(self.mlp_matmuls(self.shared_ffn)) + (self.hidden + 1) * self.experts
        else:
            mlp = _weights(self.mlp_matmuls(self.ffn))
        inner_norms = self.latent.q_rank + self.latent.kv_rank if self.latent else 0
        return self.attention_parameters() + mlp + 2 * self.hidden + inner_norms

    def embedding_parameters(self) -> int:
        """Weights of the token embedding."""
        return self.vocab * self.hidden

    def parameters(self) -> int:
        """Of the whole model (norms as RMS norms, no biases)."""
        routed = self.expert_layers
        layers = (
            (self.layers - routed) * self.dense_parameters(routed=False)
            + routed * (self.dense_parameters(routed=True) + self.expert_parameters())
            + self.hidden
        )
        ends = self.embedding_parameters() * (1 if self.tied else 2) + self.bound_rows * self.hidden
        return layers + ends

    def flops_per_token(self, sequence: int, *, causal: bool = True) -> float:
        """Model FLOPs of forward and backward for one token, the head included."""
        active = 0
        routed = self.expert_layers
        active += self.layers * self.attention_parameters()
        active += (self.layers - routed) * _weights(self.mlp_matmuls(self.ffn))
        active += routed * (
            self.chosen * _weights(self.mlp_matmuls(self.expert_ffn))
            + _weights(self.mlp_matmuls(self.shared_ffn))
            + self.hidden * self.experts
        )
        active += self.embedding_parameters()
        scores, values = self.attention_sizes
        share = 0.5 if causal else 1.0
        attention = self.layers * self.heads * (scores + values) * sequence * share
        return 6.0 * (active + attention)


def shape_of(model: ModelConfig) -> Shape:
    """The sizes of one of this engine's dense models, as other engines would train it."""
    layer = model.kind(0)
    if not (
        len(model.kinds()) == 1
        and isinstance(layer, Layer)
        and isinstance(attention := layer.attention, GroupedAttention)
        and isinstance(feed_forward := layer.feed_forward, Dense)
    ):
        raise ValueError(
            f"a model of other engines must have grouped attention and dense MLPs in all layers; {model.name} has not"
        )
    return Shape(
        layers=model.layers,
        hidden=model.hidden_size,
        ffn=feed_forward.ffn_size,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_size=attention.head_size,
        vocab=model.vocab_size,
        gated=feed_forward.activation is ActivationKind.SWIGLU,
        tied=model.tied,
        bound_rows=model.position_parameters() // model.hidden_size,
    )


def _weights(matmuls: tuple[tuple[int, int], ...]) -> int:
    return sum(inputs * outputs for inputs, outputs in matmuls)
