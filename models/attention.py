"""Causal self-attention with grouped key/value heads, its heads cut over tp.

Shapes: B rows, L tokens of a row, T = B·L tokens, H query heads and K key/value heads held here, D hidden,
E half of a head, O = (H + 2K) · head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triaxis.models.config import ModelConfig, NormKind
from triaxis.models.norm import Norm
from triaxis.models.rotary import rotate_
from triaxis.parallel.layers.linear import ColumnParallelLinear, Part, RowParallelLinear
from triaxis.parallel.worlds.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceContext:
    """What every block of a stage needs to know of a microbatch, made once.

    cos_T1E, sin_T1E: the tokens' rotary tables, None for learned positions
    mask_B1LL: True where a query may see a key; None = plain causal
    """

    batch: int
    length: int
    cos_T1E: Tensor | None
    sin_T1E: Tensor | None
    mask_B1LL: Tensor | None


def packed_mask(documents_BL: Tensor) -> Tensor:
    """mask_B1LL: a token sees its own document up to itself. Documents 0 0 1 give rows 100, 110 and 001."""
    length = documents_BL.shape[1]
    causal_LL = torch.ones(length, length, dtype=torch.bool, device=documents_BL.device).tril_()
    return (documents_BL[:, None, :, None] == documents_BL[:, None, None, :]).logical_and_(causal_LL)


def attend(query_BHLD: Tensor, key_BKLD: Tensor, value_BKLD: Tensor, mask_B1LL: Tensor | None) -> Tensor:
    """softmax(q·kᵀ/√d)·v; each key/value head serves H/K consecutive query heads. → [B, H, L, D]"""
    grouped = query_BHLD.shape[1] != key_BKLD.shape[1]
    if grouped and mask_B1LL is not None and query_BHLD.is_cuda:  # its masked kernels know no groups
        copies = query_BHLD.shape[1] // key_BKLD.shape[1]
        key_BKLD, value_BKLD = (x.repeat_interleave(copies, dim=1) for x in (key_BKLD, value_BKLD))
        grouped = False
    return F.scaled_dot_product_attention(
        query_BHLD,
        key_BKLD,
        value_BKLD,
        attn_mask=mask_B1LL,
        is_causal=mask_B1LL is None,
        enable_gqa=grouped,
    )


class Attention(nn.Module):
    """A fused q, k, v product, rotary positions, attention over the local heads, the output projection."""

    def __init__(
        self, config: ModelConfig, mesh: Mesh, name: str, *, sequence_parallel: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        if config.heads % mesh.tp.size:
            raise ValueError(
                f"`tp` must divide the {config.heads} attention heads of {config.name}, but is {mesh.tp.size}"
            )
        self.head_size = config.head_size
        self.qkv = ColumnParallelLinear(
            mesh,
            [
                Part(f"{name}.q_proj", config.heads * self.head_size, config.heads),
                Part(f"{name}.k_proj", config.kv_heads * self.head_size, config.kv_heads),
                Part(f"{name}.v_proj", config.kv_heads * self.head_size, config.kv_heads),
            ],
            config.hidden_size,
            sequence_parallel=sequence_parallel,
            bias=config.attention_bias,
            std=config.init_std,
            dtype=dtype,
        )
        self.output = RowParallelLinear(
            mesh,
            f"{name}.o_proj",
            config.heads * self.head_size,
            config.hidden_size,
            sequence_parallel=sequence_parallel,
            bias=config.output_bias,
            std=config.init_std / math.sqrt(2 * config.layers),
            dtype=dtype,
        )
        self.q_norm, self.k_norm = (
            Norm(
                mesh,
                f"{name}.{part}_norm",
                self.head_size,
                kind=NormKind.RMSNORM,
                epsilon=config.norm_eps,
                partial_gradient=True,
                dtype=dtype,
            )
            if config.qk_norm
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
            fused_TO = rotate_(fused_TO, context.cos_T1E, context.sin_T1E, turned_heads)
        query, key, value = (
            part.view(context.batch, context.length, -1, self.head_size).transpose(1, 2)
            for part in fused_TO.split(rows, dim=-1)
        )
        mixed_BHLD = attend(query, key, value, context.mask_B1LL)
        output: Tensor = self.output(mixed_BHLD.transpose(1, 2).reshape(-1, rows[0]))
        return output

    def _norm_heads(self, part_TO: Tensor, norm: Norm) -> Tensor:
        normed: Tensor = norm(part_TO.unflatten(-1, (-1, self.head_size)))
        return normed.flatten(-2)
