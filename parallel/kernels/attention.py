"""Causal attention of rows, or of the documents packed into them.

Shapes: B rows, L tokens of a row, T = B·L tokens, H query heads and K key/value heads held here, D elements of a head;
l tokens of a document.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Where the documents of a microbatch begin, its rows one behind the other; a row's start is always a border.

    borders: ascending, from 0 to the number of tokens; known to the host, so that no kernel waits for the device
    starts: the same as int32 on a GPU, for the kernels that read them there
    Example: two rows of 4 tokens, the first with documents of 1 and 3 tokens: borders 0 1 4 8.
    """

    borders: tuple[int, ...]
    starts: Tensor | None = None

    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(stop - start for start, stop in pairwise(self.borders))

    def runs(self) -> Iterator[tuple[slice, int]]:
        """Documents of one length behind each other: their tokens together, and how many they are.

        Example: borders 0 2 4 7 are runs of two documents, [0, 4), and of one, [4, 7).
        """
        start = 0
        for length, alike in groupby(stop - start for start, stop in pairwise(self.borders)):
            count = len(list(alike))
            yield slice(start, start + length * count), count
            start += length * count

    def to(self, device: torch.device) -> Documents:
        if device.type != "cuda":
            return self
        starts = torch.tensor(self.borders, dtype=torch.int32).to(device, non_blocking=True)
        return Documents(borders=self.borders, starts=starts)


def documents_of(documents_BL: Tensor) -> Documents:
    """The borders between tokens whose document numbers differ. Numbers 0 0 1 | 0 0 0 give borders 0 2 3 6."""
    rows, length = documents_BL.shape
    begins_BL = torch.ones_like(documents_BL, dtype=torch.bool)
    begins_BL[:, 1:] = documents_BL[:, 1:] != documents_BL[:, :-1]
    return Documents(borders=(*begins_BL.view(-1).nonzero()[:, 0].tolist(), rows * length))


Attend = Callable[[Tensor, Tensor, Tensor, int, Documents | None], Tensor]
"""(query_THD, key_TKD, value_TKD, rows, documents) → mixed_THD = softmax(q·kᵀ/√d)·v.

A token sees its own document up to itself (its whole row, if documents is None); each key/value head serves H/K query
heads in a row.
"""


def attend_rows(query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rows: int) -> Tensor:
    """One call of PyTorch's own for all rows."""
    query_BHLD, key_BKLD, value_BKLD = (
        part.unflatten(0, (rows, -1)).transpose(1, 2) for part in (query_THD, key_TKD, value_TKD)
    )
    mixed_BHLD = F.scaled_dot_product_attention(
        query_BHLD, key_BKLD, value_BKLD, is_causal=True, enable_gqa=query_THD.shape[1] != key_TKD.shape[1]
    )
    return mixed_BHLD.transpose(1, 2).flatten(0, 1)


def attend_masked(
    query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rows: int, documents: Documents | None
) -> Tensor:
    """The plain twin of the others: one product under a mask of [B, L, L]."""
    if documents is None:
        return attend_rows(query_THD, key_TKD, value_TKD, rows)
    lengths = [stop - start for start, stop in pairwise(documents.borders)]
    number_T = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(query_THD.device)
    number_BL = number_T.view(rows, -1)
    mask_B1LL = (number_BL[:, None, :, None] == number_BL[:, None, None, :]).tril()
    query_BHLD, key_BKLD, value_BKLD = (
        part.unflatten(0, (rows, -1)).transpose(1, 2) for part in (query_THD, key_TKD, value_TKD)
    )
    copies = query_THD.shape[1] // key_TKD.shape[1]
    key_BHLD, value_BHLD = (part.repeat_interleave(copies, dim=1) for part in (key_BKLD, value_BKLD))
    mixed_BHLD = F.scaled_dot_product_attention(query_BHLD, key_BHLD, value_BHLD, attn_mask=mask_B1LL)
    return mixed_BHLD.transpose(1, 2).flatten(0, 1)


def _heads_first(part_THD: Tensor, run: tuple[slice, int]) -> Tensor:
    """[T, H, D] → [documents, H, l, D], a run of documents as kernels read it; a view."""
    tokens, documents = run
    of_each = part_THD[tokens]
    return of_each.view(documents, -1, *of_each.shape[1:]).transpose(1, 2)


class _DocumentsOnCpu(Function):
    """A call of PyTorch's flash attention for each run of documents of one length, written into one output.

    `F.scaled_dot_product_attention` on slices would keep each document's output beside the whole one, and add a
    gradient as large as the whole for each.
    """

    @staticmethod
    def forward(
        ctx: Any, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, documents: Documents
    ) -> Tensor:
        mixed_THD = torch.empty_like(query_THD, memory_format=torch.contiguous_format)
        sums = []
        for run in documents.runs():
            parts = (_heads_first(part, run) for part in (query_THD, key_TKD, value_TKD))
            mixed, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*parts, 0.0, True)
            _heads_first(mixed_THD, run).copy_(mixed)
            sums.append(lse)
        ctx.save_for_backward(query_THD, key_TKD, value_TKD, mixed_THD, *sums)
        ctx.documents = documents
        return mixed_THD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query_THD, key_TKD, value_TKD, mixed_THD, *sums = ctx.saved_tensors
        made = [
            torch.empty_like(part, memory_format=torch.contiguous_format)
            for part in (query_THD, key_TKD, value_TKD)
        ]
        for run, lse in zip(ctx.documents.runs(), sums, strict=True):
            parts = (_heads_first(part, run) for part in (grads[0], query_THD, key_TKD, value_TKD, mixed_THD))
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *parts, lse, 0.0, True
            )
            for whole, part in zip(made, found, strict=True):
                _heads_first(whole, run).copy_(part)
        return (*made, None)


class _ShortRows(Function):
    """Attention of short rows in bf16, with all of a row's weights at once: on CPUs in half of flash attention's time.

    Scores and their softmax are fp32. Shapes: G query heads of a key/value head.
    """

    @staticmethod
    def forward(
        ctx: Any, query_BKGLD: Tensor, key_BK1LD: Tensor, value_BK1LD: Tensor, scale: float
    ) -> Tensor:
        length = query_BKGLD.shape[-2]
        score_BKGLL = torch.matmul(query_BKGLD.float(), key_BK1LD.float().mT).mul_(scale)
        score_BKGLL += score_BKGLL.new_full((length, length), -math.inf).triu_(1)
        weight_BKGLL = torch.softmax(score_BKGLL, -1).to(query_BKGLD.dtype)
        ctx.save_for_backward(query_BKGLD, key_BK1LD, value_BK1LD, weight_BKGLL)
        ctx.scale = scale
        return torch.matmul(weight_BKGLL, value_BK1LD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query_BKGLD, key_BK1LD, value_BK1LD, weight_BKGLL = ctx.saved_tensors
        grad_BKGLD, wide_BKGLL = grads[0], weight_BKGLL.float()
        grad_BKGLL = torch.matmul(grad_BKGLD.float(), value_BK1LD.float().mT)
        grad_BKGLL -= (grad_BKGLL * wide_BKGLL).sum(-1, keepdim=True)
        grad_score_BKGLL = grad_BKGLL.mul_(wide_BKGLL).mul_(ctx.scale).to(query_BKGLD.dtype)
        return (
            torch.matmul(grad_score_BKGLL, key_BK1LD),
            torch.matmul(grad_score_BKGLL.mT, query_BKGLD).sum(2, keepdim=True),
            torch.matmul(weight_BKGLL.mT, grad_BKGLD).sum(2, keepdim=True),
            None,
        )


def attend_short_rows(query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rows: int) -> Tensor:
    """As `attend_rows`, where `is_short` says that it is faster."""
    heads, size = key_TKD.shape[1], query_THD.shape[2]
    query_BKGLD, key_BK1LD, value_BK1LD = (
        part.view(rows, -1, heads, part.shape[1] // heads, part.shape[2]).permute(0, 2, 3, 1, 4)
        for part in (query_THD, key_TKD, value_TKD)
    )
    mixed_BKGLD: Tensor = _ShortRows.apply(query_BKGLD, key_BK1LD, value_BK1LD, size**-0.5)  # type: ignore[no-untyped-call]
    return mixed_BKGLD.permute(0, 3, 1, 2, 4).reshape(query_THD.shape[0], -1, value_TKD.shape[2])


def is_short(query_THD: Tensor, rows: int) -> bool:
    """Whether rows of this length are faster with all weights at once. Measured on one core with AMX, bf16, both
    passes, flash attention's time over this one's: length 128, heads of 64, 128, 256: 1.7, 2.1, 2.1; 256 and 64: 0.9;
    256 and 128: 1.5; 512 and 64: 0.7.
    """
    length = query_THD.shape[0] // rows
    return query_THD.dtype == torch.bfloat16 and length <= min(256, max(128, 2 * query_THD.shape[2]))


def attend_on_cpu(
    query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rows: int, documents: Documents | None
) -> Tensor:
    """Time grows with the sum of the documents' squared lengths."""
    if documents is None:
        return attend_rows(query_THD, key_TKD, value_TKD, rows)
    if len(list(documents.runs())) == 1:  # nothing to put together: no copy
        return attend_rows(query_THD, key_TKD, value_TKD, len(documents.borders) - 1)
    return _DocumentsOnCpu.apply(  # type: ignore[no-any-return, no-untyped-call]
        query_THD, key_TKD, value_TKD, documents
    )


def attend_on_cpu_if_short(
    query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rows: int, documents: Documents | None
) -> Tensor:
    """As `attend_on_cpu`, and with all weights at once where rows or documents of one length are short."""
    if documents is not None and len(list(documents.runs())) == 1:
        rows, documents = len(documents.borders) - 1, None
    if documents is None and is_short(query_THD, rows):
        return attend_short_rows(query_THD, key_TKD, value_TKD, rows)
    return attend_on_cpu(query_THD, key_TKD, value_TKD, rows, documents)


def attend_by_document(
    query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rows: int, documents: Documents | None
) -> Tensor:
    """With PyTorch's public function alone: on a GPU for precisions that its variable-length kernel has not."""
    if documents is None:
        return attend_rows(query_THD, key_TKD, value_TKD, rows)
    lengths = [stop - start for start, stop in pairwise(documents.borders)]
    parts = zip(*(part.split(lengths) for part in (query_THD, key_TKD, value_TKD)), strict=True)
    return torch.cat([attend_rows(query, key, value, 1) for query, key, value in parts])


def attend_on_cuda(
    query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rows: int, documents: Documents | None
) -> Tensor:
    """PyTorch's variable-length flash attention, for half precisions."""
    if documents is None:
        return attend_rows(query_THD, key_TKD, value_TKD, rows)
    from torch.nn.attention.varlen import varlen_attn

    assert documents.starts is not None, "the documents' borders must have been moved to the device"
    longest = documents.longest()
    mixed_THD = varlen_attn(
        query_THD,
        key_TKD,
        value_TKD,
        documents.starts,
        documents.starts,
        longest,
        longest,
        window_size=(-1, 0),  # whatever came before, nothing that comes after
        enable_gqa=query_THD.shape[1] != key_TKD.shape[1],
    )
    assert isinstance(mixed_THD, Tensor), "nothing else was asked for"
    return mixed_THD
