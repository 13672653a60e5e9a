"""Rotary positions (Su et al. 2021), in the half-split form of Hugging Face checkpoints.

Shapes: T tokens, H heads, D elements of a head, E half of its elements that are turned.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function


def _turn(heads_THD: Tensor, cos_T1E: Tensor, sin_T1E: Tensor, direction: int) -> None:
    """In place: (a, b) → (a·cos - b·sin, b·cos + a·sin) for the halves a, b; direction -1 turns back."""
    first_THE, second_THE = heads_THD.chunk(2, dim=-1)
    turned_THE = (first_THE * cos_T1E).addcmul_(second_THE, sin_T1E, value=-direction)
    second_THE.mul_(cos_T1E).addcmul_(first_THE, sin_T1E, value=direction)
    first_THE.copy_(turned_THE)


class _Rotary(Function):
    """Works in place on the first `heads` heads of a fused product; keeps nothing but the tables."""

    @staticmethod
    def forward(
        ctx: Any, fused_TO: Tensor, cos_T1E: Tensor, sin_T1E: Tensor, heads: int, size: int
    ) -> Tensor:
        ctx.mark_dirty(fused_TO)
        ctx.save_for_backward(cos_T1E, sin_T1E)
        ctx.heads, ctx.size = heads, size
        _turn(_turned(fused_TO, heads, size, cos_T1E), cos_T1E, sin_T1E, 1)
        return fused_TO

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos_T1E, sin_T1E = ctx.saved_tensors
        grad_TO = grads[0]
        _turn(_turned(grad_TO, ctx.heads, ctx.size, cos_T1E), cos_T1E, sin_T1E, -1)
        return grad_TO, None, None, None, None


def _turned(fused_TO: Tensor, heads: int, size: int, cos_T1E: Tensor) -> Tensor:
    """What is turned of the first heads: the leading elements of each, as many as the tables have twice."""
    return fused_TO[:, : heads * size].view(-1, heads, size)[..., : 2 * cos_T1E.shape[-1]]


def rotate_(fused_TO: Tensor, cos_T1E: Tensor, sin_T1E: Tensor, heads: int, head_size: int) -> Tensor:
    """Turns the first `heads` heads of each token by its position, in place; backward turns back.

    Read the result through one `split`: its backward makes the fresh gradient that is turned in place.
    """
    return _Rotary.apply(fused_TO, cos_T1E, sin_T1E, heads, head_size)  # type: ignore[no-any-return, no-untyped-call]
