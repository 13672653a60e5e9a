"""Causal attention out of latents (DeepSeek-V2, section 2.1), its heads cut over tp.

The way down to the latents and their norms are replicated over tp: they are small, and under sequence parallelism each
rank takes its tokens through them, so that latents are gathered instead of hidden states.

Shapes: T tokens of the microbatch (T/tp before the heads, under sequence parallelism), D hidden, H heads held here,
C a latent, Q = plain + turned elements of a query and key head, V of a value head, R turned.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triaxis.models.batch import SequenceContext
from triaxis.models.config import ModelConfig, NormKind
from triaxis.models.latent_kind import LatentAttention
from triaxis.models.norm import Norm
from triaxis.models.positions import Rope, YarnScaling
from triaxis.parallel.layers.build import Build
from triaxis.parallel.layers.collectives import shared_by_ranks
from triaxis.parallel.layers.linear import ColumnParallelLinear, Part, ReplicatedLinear, RowParallelLinear


def score_scale(model: ModelConfig) -> float:
    """What scores are multiplied by besides 1/√Q; 1 where positions are not stretched."""
    scaling = model.positions.scaling if isinstance(model.positions, Rope) else None
    return scaling.score_scale() if isinstance(scaling, YarnScaling) else 1.0


class LatentAttentionLayer(nn.Module):
    """Down to the latents, norms, up to the heads, rotary positions, attention, the output projection."""

    def __init__(self, kind: LatentAttention, model: ModelConfig, build: Build, name: str) -> None:
        super().__init__()
        self.kind, self.attend, self.scale = kind, build.kernels.attend, score_scale(model)
        self.rotate = build.kernels.rotate
        self.group, self.sequence_parallel = build.mesh.tp, build.sequence_parallel
        std, hidden = model.init_std, model.hidden_size
        down = [Part(f"{name}.kv_a_proj_with_mqa", kind.latent + kind.turned_size)]
        if kind.query_latent:
            down.append(Part(f"{name}.q_a_proj", kind.query_latent))
        self.down = ReplicatedLinear(build, down, hidden, std=std)
        self.norm = self._norm(build, f"{name}.kv_a_layernorm", kind.latent)
        self.query_norm = None
        if kind.query_latent:
            self.query_norm = self._norm(build, f"{name}.q_a_layernorm", kind.query_latent)
        self.query = ColumnParallelLinear(
            build,
            [Part(f"{name}.{'q_b_proj' if kind.query_latent else 'q_proj'}", *self._rows(kind.head_size))],
            kind.query_latent or hidden,
            std=std,
        )
        self.key_value = ColumnParallelLinear(
            build,
            [Part(f"{name}.kv_b_proj", *self._rows(kind.plain_size + kind.value_size))],
            kind.latent,
            std=std,
        )
        self.output = RowParallelLinear(
            build, f"{name}.o_proj", kind.heads * kind.value_size, hidden, std=model.output_std()
        )

    def _rows(self, size: int) -> tuple[int, int]:
        """Rows and blocks of a weight that makes heads of `size` elements."""
        return self.kind.heads * size, self.kind.heads

    def _norm(self, build: Build, name: str, size: int) -> Norm:
        return Norm(
            build,
            name,
            size,
            kind=NormKind.RMSNORM,
            epsilon=self.kind.norm_eps,
            partial_gradient=build.sequence_parallel,
        )

    def forward(self, hidden_TD: Tensor, context: SequenceContext) -> Tensor:
        kind = self.kind
        latent_TC, turned_TR, query_TC = self.down(hidden_TD).split(
            (kind.latent, kind.turned_size, kind.query_latent), dim=-1
        )
        query_THQ = self._queries(
            hidden_TD if self.query_norm is None else self.query_norm(query_TC), context
        )
        key_THQ, value_THV = self._keys_and_values(latent_TC, turned_TR, context)
        # Kernels without L × L scores want heads of one size: values are filled up with zeros, and cut again.
        value_THQ = F.pad(value_THV, (0, kind.head_size - kind.value_size))
        batch = context.inputs.batch
        mixed_THQ = self.attend(query_THQ, key_THQ, value_THQ, len(batch.tokens_BL), batch.documents)
        output: Tensor = self.output(mixed_THQ[..., : kind.value_size].flatten(1))
        return output

    def _queries(self, source: Tensor, context: SequenceContext) -> Tensor:
        kind = self.kind
        query_TO = self._rotated(self.query(source), context, kind.head_size, kind.plain_size)
        query_THQ: Tensor = query_TO.unflatten(-1, (-1, kind.head_size))
        return query_THQ if self.scale == 1.0 else query_THQ * self.scale

    def _keys_and_values(
        self, latent_TC: Tensor, turned_TR: Tensor, context: SequenceContext
    ) -> tuple[Tensor, Tensor]:
        kind = self.kind
        fused_TO = self.key_value(self.norm(latent_TC))
        plain, value_THV = fused_TO.unflatten(-1, (-1, kind.plain_size + kind.value_size)).split(
            (kind.plain_size, kind.value_size), dim=-1
        )
        # One head for all: every tensor rank's heads read it, and its gradient is summed over them.
        turned_TR = shared_by_ranks(turned_TR, self.group, self.sequence_parallel)
        turned_TR = self._rotated(turned_TR, context, kind.turned_size, 0)
        turned_THR = turned_TR.unsqueeze(1).expand(-1, plain.shape[1], -1)
        return torch.cat((plain, turned_THR), dim=-1), value_THV

    def _rotated(self, heads_TO: Tensor, context: SequenceContext, size: int, first: int) -> Tensor:
        if context.cos_T1E is None or context.sin_T1E is None:
            return heads_TO
        heads = heads_TO.shape[-1] // size
        return self.rotate(heads_TO, context.cos_T1E, context.sin_T1E, heads, size, first)
