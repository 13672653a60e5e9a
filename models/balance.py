"""Losses that keep experts evenly loaded, independent of layout, microbatches and recomputation.

Both are sums over sequences or tokens; the caller scales them by those of the global batch, so that no mean of means
depends on how the batch is cut.

Shapes: T tokens routed here, E experts, K chosen for a token, B rows of the microbatch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triaxis.parallel.worlds.group import Group


def balance_loss(
    scores_TE: Tensor, ids_TK: Tensor, *, rows: int, length: int, first: int, sharing: Group | None
) -> Tensor:
    """Σ_rows E / (K · L²) · Σ_e c_e · Σ_t p_te: 1 for each row whose experts are evenly loaded (DeepSeek-V3, eq. 17).

    c_e: tokens of the row that chose e, whole numbers without a gradient; p: scores divided by their sum
    first: the first token's place among the microbatch's; sharing: ranks that hold other tokens of the same rows
    Only the counts are summed over `sharing` (int64): the gradient of p needs nothing else of other ranks.
    """
    experts, chosen = scores_TE.shape[1], ids_TK.shape[1]
    row_T = torch.arange(first, first + ids_TK.shape[0], device=ids_TK.device) // length
    counts_BE = torch.zeros(rows * experts, dtype=torch.int64, device=ids_TK.device)
    places_TK = row_T[:, None] * experts + ids_TK
    counts_BE.scatter_add_(0, places_TK.flatten(), torch.ones_like(places_TK).flatten())
    if sharing is not None:
        sharing.all_reduce(counts_BE, label="tokens of a sequence for each expert")
    shares_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
    weight_TE = counts_BE.view(rows, experts).to(scores_TE.dtype)[row_T]
    return (shares_TE * weight_TE).sum() * (experts / (chosen * length**2))


def z_loss(logits_TE: Tensor) -> Tensor:
    """Σ_t logsumexp(logits)² (Zoph et al. 2022): keeps a router's logits small."""
    return logits_TE.logsumexp(-1).square().sum()
