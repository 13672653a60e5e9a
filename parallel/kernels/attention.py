"""Causal attention of rows, or of the documents packed into them.

Shapes: B rows, L tokens of a row, H query heads and K key/value heads held here, D elements of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def packed_mask(documents_BL: Tensor) -> Tensor:
    """mask_B1LL: a token sees its own document up to itself. Documents 0 0 1 give rows 100, 110 and 001."""
    length = documents_BL.shape[1]
    causal_LL = torch.ones(length, length, dtype=torch.bool, device=documents_BL.device).tril_()
    return (documents_BL[:, None, :, None] == documents_BL[:, None, None, :]).logical_and_(causal_LL)


def attend(query_BHLD: Tensor, key_BKLD: Tensor, value_BKLD: Tensor, mask_B1LL: Tensor | None) -> Tensor:
    """softmax(q·kᵀ/√d)·v; each key/value head serves H/K consecutive query heads. → [B, H, L, D]"""
    return F.scaled_dot_product_attention(
        query_BHLD,
        key_BKLD,
        value_BKLD,
        attn_mask=mask_B1LL,
        is_causal=mask_B1LL is None,
        enable_gqa=query_BHLD.shape[1] != key_BKLD.shape[1],
    )


def attend_on_cuda(
    query_BHLD: Tensor, key_BKLD: Tensor, value_BKLD: Tensor, mask_B1LL: Tensor | None
) -> Tensor:
    """`attend`; masked kernels of CUDA know no groups, so key and value heads are copied for them."""
    if mask_B1LL is not None:
        copies = query_BHLD.shape[1] // key_BKLD.shape[1]
        key_BKLD, value_BKLD = (x.repeat_interleave(copies, dim=1) for x in (key_BKLD, value_BKLD))
    return attend(query_BHLD, key_BKLD, value_BKLD, mask_B1LL)
