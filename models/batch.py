"""One microbatch: what the model reads and what it is trained to say.

Shape suffixes: B rows of the microbatch, L tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100  # the label of a position that is not trained; cross_entropy's default ignore_index


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A microbatch of one data-parallel rank.

    tokens_BL: token ids
    labels_BL: the target at each position (already shifted), or IGNORED
    positions_BL: position within its document, from the row's start where the document began earlier
    documents_BL: number of the document within its row, ascending; None where no row has two documents,
        so that plain causal attention is right
    Example: documents "ab" and "cde" in one row of length 5 give documents 0 0 1 1 1, positions 0 1 0 1 2
    and labels b IGNORED d e IGNORED.
    """

    tokens_BL: Tensor
    labels_BL: Tensor
    positions_BL: Tensor
    documents_BL: Tensor | None

    def trained_tokens(self) -> int:
        """The positions that have a loss."""
        return int((self.labels_BL != IGNORED).sum().item())

    def to(self, device: torch.device) -> Batch:
        documents_BL = self.documents_BL
        return Batch(
            tokens_BL=self.tokens_BL.to(device, non_blocking=True),
            labels_BL=self.labels_BL.to(device, non_blocking=True),
            positions_BL=self.positions_BL.to(device, non_blocking=True),
            documents_BL=None if documents_BL is None else documents_BL.to(device, non_blocking=True),
        )
