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
        ctx: Any, fused_TO: Tensor, cos_T1E: Tensor, sin_T1E: Tensor, heads: int, size: int, first: int
    ) -> Tensor:
        ctx.mark_dirty(fused_TO)
        ctx.save_for_backward(cos_T1E, sin_T1E)
        ctx.place = heads, size, first
        _turn(_turned(fused_TO, cos_T1E, *ctx.place), cos_T1E, sin_T1E, 1)
        return fused_TO

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos_T1E, sin_T1E = ctx.saved_tensors
        grad_TO = grads[0]
        _turn(_turned(grad_TO, cos_T1E, *ctx.place), cos_T1E, sin_T1E, -1)
        return grad_TO, None, None, None, None, None


def _turned(fused_TO: Tensor, cos_T1E: Tensor, heads: int, size: int, first: int) -> Tensor:
    """What is turned of the first heads: the elements of each from `first` on, as many as the tables have twice."""
    heads_THD = fused_TO[:, : heads * size].view(-1, heads, size)
    return heads_THD[..., first : first + 2 * cos_T1E.shape[-1]]


def rotate_(
    fused_TO: Tensor, cos_T1E: Tensor, sin_T1E: Tensor, heads: int, head_size: int, first: int = 0
) -> Tensor:
    """Turns the first `heads` heads of each token by its position, in place; backward turns back.

    first: where in each head the turned elements begin
    Read the result through one `split`: its backward makes the fresh gradient that is turned in place.
    """
    return _Rotary.apply(  # type: ignore[no-any-return, no-untyped-call]
        fused_TO, cos_T1E, sin_T1E, heads, head_size, first
    )
