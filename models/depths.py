"""Extra prediction depths: each predicts one token further than the one before it (DeepSeek-V3, section 2.2).

What happens for the first depth at position i of "a b c d", where the trunk has seen a and b (i = 1):

    trunk, before its final norm   h(b) ── norm ─┐
                                                 ├─ product ─ a layer more ─ norm ─ the model's head ─ says d
    the model's embedding          e(c) ── norm ─┘

A depth k reads what depth k-1 made, so the chain stays causal. Embedding and head are the model's own.

Shapes: B rows, L tokens of a row, T tokens (T/tp under sequence parallelism), D hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triaxis.models.batch import IGNORED, Batch
from triaxis.models.config import ModelConfig
from triaxis.models.norm import hidden_norm
from triaxis.models.parts import build_part
from triaxis.parallel.layers.build import Build
from triaxis.parallel.layers.linear import Part, ReplicatedLinear


class DepthInput(nn.Module):
    """What a depth's layer reads: the next token's embedding and the hidden state, each on its norm, multiplied down.

    Replicated over tp, as it is small beside the layer. The embedding's columns come first, as in published weights.
    """

    def __init__(self, model: ModelConfig, build: Build, name: str) -> None:
        super().__init__()
        self.token_norm = hidden_norm(model, build, f"{name}.enorm")
        self.hidden_norm = hidden_norm(model, build, f"{name}.hnorm")
        size = model.hidden_size
        self.down = ReplicatedLinear(build, [Part(f"{name}.eh_proj", size)], 2 * size, std=model.init_std)

    def forward(self, token_TD: Tensor, hidden_TD: Tensor) -> Tensor:
        joined: Tensor = self.down(
            torch.cat((self.token_norm(token_TD), self.hidden_norm(hidden_TD)), dim=-1)
        )
        return joined


class Depth(nn.Module):
    """The parts of one depth; the stage calls them in turn, with its own embedding and head."""

    def __init__(self, model: ModelConfig, build: Build, layer: int) -> None:
        super().__init__()
        name = f"model.layers.{layer}"
        self.input = DepthInput(model, build, name)
        self.block = build_part(model.kind(layer), model, build, name)
        build.kernels.prepare(self.block)
        self.norm = hidden_norm(model, build, f"{name}.shared_head.norm")


def later(batch: Batch, depth: int) -> tuple[Tensor, Tensor]:
    """Ids and labels [T] that lie `depth` positions behind each one, within its document.

    Where the document ends before, there is no label, and the id is the position's own, so that nothing of another
    document is seen. The row is whole on every rank: nobody is asked.
    Example: "a b c | d e" with labels b c - e - has at depth 1 the ids b c c e e and the labels c - - - -.
    """
    depth = min(depth, batch.tokens_BL.shape[1])

    def moved(values_BL: Tensor) -> Tensor:
        return F.pad(values_BL[:, depth:], (0, depth))

    # Positions count up by one within a document and begin anew with the next.
    ahead_BL = moved(batch.positions_BL + 1) - (batch.positions_BL + 1)
    inside_BL = ahead_BL == depth
    ids_BL = torch.where(inside_BL, moved(batch.tokens_BL), batch.tokens_BL)
    labels_BL = moved(batch.labels_BL).masked_fill(~inside_BL, IGNORED)
    return ids_BL.reshape(-1), labels_BL.reshape(-1)
