"""The one order of summation: member after member, half precision in fp32, rounded once at the end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)
PIECE = 1 << 16


def summed(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of the members' tensors, in member order, as a new tensor of their dtype."""
    dtype = tensors[0].dtype
    total = tensors[0].to(torch.float32 if dtype in HALVES else dtype, copy=True)
    for tensor in tensors[1:]:
        total += tensor
    return total.to(dtype)


def sum_into(out: Tensor, tensors: Sequence[Tensor]) -> None:
    """The same sum, written to `out`, which may be one of them. Flat tensors; by pieces that stay in a cache."""
    if len(tensors) == 2:
        torch.add(*tensors, out=out)  # in half precision too it rounds once
        return
    for start in range(0, out.numel(), PIECE):
        piece = slice(start, start + PIECE)
        out[piece] = summed([tensor[piece] for tensor in tensors])
