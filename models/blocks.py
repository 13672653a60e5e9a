"""A transformer layer: pre-norm attention and MLP, each added to the residual stream.

Shapes: T tokens (T/tp under sequence parallelism), D hidden.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triaxis.models.activation import swiglu
from triaxis.models.attention import Attention, SequenceContext
from triaxis.models.config import ActivationKind, ModelConfig
from triaxis.models.norm import Norm
from triaxis.parallel.layers.linear import ColumnParallelLinear, Part, RowParallelLinear
from triaxis.parallel.worlds.mesh import Mesh


def gelu(input: Tensor) -> Tensor:
    """GELU's tanh form, as in GPT-2."""
    return F.gelu(input, approximate="tanh")


_ACTIVATIONS = {
    ActivationKind.SWIGLU: (("gate_proj", "up_proj"), swiglu),
    ActivationKind.GELU: (("up_proj",), gelu),
}


class MLP(nn.Module):
    """down(activation(fused gate and up)), its inner features cut over tp."""

    def __init__(
        self, config: ModelConfig, mesh: Mesh, name: str, *, sequence_parallel: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        inputs, self.activation = _ACTIVATIONS[config.activation]
        self.up = ColumnParallelLinear(
            mesh,
            [Part(f"{name}.{part}", config.ffn_size) for part in inputs],
            config.hidden_size,
            sequence_parallel=sequence_parallel,
            bias=config.mlp_bias,
            std=config.init_std,
            dtype=dtype,
        )
        self.down = RowParallelLinear(
            mesh,
            f"{name}.down_proj",
            config.ffn_size,
            config.hidden_size,
            sequence_parallel=sequence_parallel,
            bias=config.mlp_bias,
            std=config.init_std / math.sqrt(2 * config.layers),
            dtype=dtype,
        )

    def forward(self, hidden_TD: Tensor) -> Tensor:
        output: Tensor = self.down(self.activation(self.up(hidden_TD)))
        return output


class Block(nn.Module):
    """One layer; [T, D] → [T, D]."""

    def __init__(
        self, config: ModelConfig, mesh: Mesh, name: str, *, sequence_parallel: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = (
            Norm(
                mesh,
                f"{name}.{norm}",
                config.hidden_size,
                kind=config.norm,
                epsilon=config.norm_eps,
                partial_gradient=sequence_parallel,
                dtype=dtype,
            )
            for norm in ("input_layernorm", "post_attention_layernorm")
        )
        self.attention = Attention(
            config, mesh, f"{name}.self_attn", sequence_parallel=sequence_parallel, dtype=dtype
        )
        self.mlp = MLP(config, mesh, f"{name}.mlp", sequence_parallel=sequence_parallel, dtype=dtype)

    def forward(self, hidden_TD: Tensor, context: SequenceContext) -> Tensor:
        hidden_TD = hidden_TD + self.attention(self.attention_norm(hidden_TD), context)
        output: Tensor = hidden_TD + self.mlp(self.mlp_norm(hidden_TD))
        return output
