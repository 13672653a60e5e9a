"""Losses of single layers, whichever stage they are on."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function


class _WithAuxiliary(Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return hidden_TD.view_as(hidden_TD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grads[0], loss.new_ones(())


def with_auxiliary(hidden_TD: Tensor, loss: Tensor) -> Tensor:
    """The hidden state as it is; in backward the loss gets its gradient of one when the hidden state gets its own.

    So a loss of an inner stage is trained without travelling to the last one. `loss` is a scalar, already multiplied
    by the scale of what it sums (`Inputs.token_scale` or `row_scale`).
    """
    return _WithAuxiliary.apply(hidden_TD, loss)  # type: ignore[no-any-return, no-untyped-call]
