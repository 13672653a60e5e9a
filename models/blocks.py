"""A transformer layer: pre-norm attention and MLP, each added to the residual stream.

Shapes: T tokens (T/tp under sequence parallelism), D hidden.
"""

from __future__ import annotations

from torch import Tensor, nn

from triaxis.models.batch import SequenceContext
from triaxis.models.config import ModelConfig
from triaxis.models.kinds import ActivationKind, Dense, Layer
from triaxis.models.norm import hidden_norm
from triaxis.models.parts import build_part
from triaxis.parallel.layers.build import Build
from triaxis.parallel.layers.linear import ColumnParallelLinear, Part, RowParallelLinear

_INPUTS = {ActivationKind.SWIGLU: ("gate_proj", "up_proj"), ActivationKind.GELU: ("up_proj",)}


class MLP(nn.Module):
    """down(activation(fused gate and up)), its inner features cut over tp."""

    def __init__(self, kind: Dense, model: ModelConfig, build: Build, name: str) -> None:
        super().__init__()
        kernels = build.kernels
        self.activation = {ActivationKind.SWIGLU: kernels.swiglu, ActivationKind.GELU: kernels.gelu}[
            kind.activation
        ]
        self.up = ColumnParallelLinear(
            build,
            [Part(f"{name}.{part}", kind.ffn_size) for part in _INPUTS[kind.activation]],
            model.hidden_size,
            bias=kind.bias,
            std=model.init_std,
        )
        self.down = RowParallelLinear(
            build,
            f"{name}.down_proj",
            kind.ffn_size,
            model.hidden_size,
            bias=kind.bias,
            std=model.output_std(),
        )

    def forward(self, hidden_TD: Tensor, context: SequenceContext) -> Tensor:
        """The same for each token; `context` is for feed-forward layers that look further."""
        output: Tensor = self.down(self.activation(self.up(hidden_TD)))
        return output


class Block(nn.Module):
    """One layer; [T, D] → [T, D]."""

    def __init__(self, kind: Layer, model: ModelConfig, build: Build, name: str) -> None:
        super().__init__()
        self.attention_norm = hidden_norm(model, build, f"{name}.input_layernorm")
        self.mlp_norm = hidden_norm(model, build, f"{name}.post_attention_layernorm")
        self.attention = build_part(kind.attention, model, build, f"{name}.self_attn")
        self.mlp = build_part(kind.feed_forward, model, build, f"{name}.mlp")

    def forward(self, hidden_TD: Tensor, context: SequenceContext) -> Tensor | tuple[Tensor, Tensor]:
        hidden_TD = hidden_TD + self.attention(self.attention_norm(hidden_TD), context)
        added = self.mlp(self.mlp_norm(hidden_TD), context)
        if isinstance(added, tuple):  # a feed-forward layer with a loss of its own
            return hidden_TD + added[0], added[1]
        output: Tensor = hidden_TD + added
        return output
