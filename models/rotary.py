"""Rotary positions (Su et al. 2021), in the half-split form of Hugging Face checkpoints.

Shapes: T tokens, H heads, E half of a head's elements, P positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def rotary_tables(
    positions: int, head_size: int, theta: float, *, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos_PE and sin_PE of position · theta^(-2e / head_size), computed in float64."""
    exponents_E = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
    angles_PE = torch.arange(positions, dtype=torch.float64)[:, None] * theta**-exponents_E
    return angles_PE.cos().to(device, dtype), angles_PE.sin().to(device, dtype)


def _turn(heads_THD: Tensor, cos_T1E: Tensor, sin_T1E: Tensor, direction: int) -> None:
    """In place: (a, b) → (a·cos - b·sin, b·cos + a·sin) for the halves a, b; direction -1 turns back."""
    first_THE, second_THE = heads_THD.chunk(2, dim=-1)
    turned_THE = (first_THE * cos_T1E).addcmul_(second_THE, sin_T1E, value=-direction)
    second_THE.mul_(cos_T1E).addcmul_(first_THE, sin_T1E, value=direction)
    first_THE.copy_(turned_THE)


class _Rotary(Function):
    """Works in place on the first `heads` heads of a fused product; keeps nothing but the tables."""

    @staticmethod
    def forward(ctx: Any, fused_TO: Tensor, cos_T1E: Tensor, sin_T1E: Tensor, heads: int) -> Tensor:
        ctx.mark_dirty(fused_TO)
        ctx.save_for_backward(cos_T1E, sin_T1E)
        ctx.heads = heads
        _turn(_leading_heads(fused_TO, heads, cos_T1E), cos_T1E, sin_T1E, 1)
        return fused_TO

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos_T1E, sin_T1E = ctx.saved_tensors
        grad_TO = grads[0]
        _turn(_leading_heads(grad_TO, ctx.heads, cos_T1E), cos_T1E, sin_T1E, -1)
        return grad_TO, None, None, None


def _leading_heads(fused_TO: Tensor, heads: int, cos_T1E: Tensor) -> Tensor:
    head_size = 2 * cos_T1E.shape[-1]
    return fused_TO[:, : heads * head_size].view(-1, heads, head_size)


def rotate_(fused_TO: Tensor, cos_T1E: Tensor, sin_T1E: Tensor, heads: int) -> Tensor:
    """Turns the first `heads` heads of each token by its position, in place; backward turns back.

    Read the result through one `split`: its backward makes the fresh gradient that is turned in place.
    """
    return _Rotary.apply(fused_TO, cos_T1E, sin_T1E, heads)  # type: ignore[no-any-return, no-untyped-call]
