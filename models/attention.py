"""Causal self-attention with grouped key/value heads, its heads cut over tp.

Shapes: T tokens of the microbatch, H query heads and K key/value heads held here, D hidden or of one head,
O = (H + 2K) · head size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from triaxis.models.batch import SequenceContext
from triaxis.models.config import ModelConfig, NormKind
from triaxis.models.kinds import GroupedAttention
from triaxis.models.norm import Norm
from triaxis.parallel.layers.build import Build
from triaxis.parallel.layers.linear import ColumnParallelLinear, Part, RowParallelLinear


class Attention(nn.Module):
    """A fused q, k, v product, rotary positions, attention over the local heads, the output projection."""

    def __init__(self, kind: GroupedAttention, model: ModelConfig, build: Build, name: str) -> None:
        super().__init__()
        self.head_size, self.attend, self.rotate = kind.head_size, build.kernels.attend, build.kernels.rotate
        self.qkv = ColumnParallelLinear(
            build,
            [
                Part(f"{name}.q_proj", kind.heads * kind.head_size, kind.heads),
                Part(f"{name}.k_proj", kind.kv_heads * kind.head_size, kind.kv_heads),
                Part(f"{name}.v_proj", kind.kv_heads * kind.head_size, kind.kv_heads),
            ],
            model.hidden_size,
            bias=kind.bias,
            std=model.init_std,
        )
        self.output = RowParallelLinear(
            build,
            f"{name}.o_proj",
            kind.heads * kind.head_size,
            model.hidden_size,
            bias=kind.output_bias,
            std=model.output_std(),
        )
        self.q_norm, self.k_norm = (
            Norm(
                build,
                f"{name}.{part}_norm",
                kind.head_size,
                kind=NormKind.RMSNORM,
                epsilon=model.norm_eps,
                partial_gradient=True,  # each tensor rank has heads of its own
            )
            if kind.qk_norm
            else None
            for part in "qk"
        )

    def forward(self, hidden_TD: Tensor, context: SequenceContext) -> Tensor:
        fused_TO = self.qkv(hidden_TD)
        rows = self.qkv.local_rows
        if self.q_norm is not None and self.k_norm is not None:
            query, key, value = fused_TO.split(rows, dim=-1)
            query, key = self._norm_heads(query, self.q_norm), self._norm_heads(key, self.k_norm)
            fused_TO = torch.cat((query, key, value), dim=-1)
        if context.cos_T1E is not None and context.sin_T1E is not None:
            turned_heads = (rows[0] + rows[1]) // self.head_size
            fused_TO = self.rotate(fused_TO, context.cos_T1E, context.sin_T1E, turned_heads, self.head_size)
        query, key, value = (
            part.unflatten(-1, (-1, self.head_size)) for part in fused_TO.split(rows, dim=-1)
        )
        batch = context.inputs.batch
        mixed_THD = self.attend(query, key, value, len(batch.tokens_BL), batch.documents)
        output: Tensor = self.output(mixed_THD.flatten(1))
        return output

    def _norm_heads(self, part_TO: Tensor, norm: Norm) -> Tensor:
        normed: Tensor = norm(part_TO.unflatten(-1, (-1, self.head_size)))
        return normed.flatten(-2)
