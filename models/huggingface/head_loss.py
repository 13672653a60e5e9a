"""The loss of a guest, by chunks of tokens: its own head makes a chunk's logits, and whole logits never exist.

Shapes: T tokens of the microbatch, C of a chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from triaxis.parallel.layers.gradient import slot_of
from triaxis.parallel.layers.loss_chunks import chunk_tokens
from triaxis.parallel.layers.vocabulary import IGNORED_LABEL


def _chunk_loss(head: nn.Module, hidden_CD: Tensor, labels_C: Tensor) -> Tensor:
    """The sum of a chunk's losses, in fp32 at least."""
    logits_CV = head(hidden_CD)
    if logits_CV.dtype in (torch.bfloat16, torch.float16):
        logits_CV = logits_CV.float()
    return F.cross_entropy(logits_CV, labels_C, ignore_index=IGNORED_LABEL, reduction="sum")


class _HeadLoss(Function):
    """Backward runs the head again for each chunk; what it gives to the head's weights goes straight into their slots,
    so that 16-bit weights too are summed in the precision of the buckets."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden_TD: Tensor,
        labels_T: Tensor,
        scale: Tensor,
        head: nn.Module,
        chunk: int,
        *weights: nn.Parameter,  # of the head: edges of the graph, by which backward comes to them
    ) -> Tensor:
        ctx.save_for_backward(hidden_TD, labels_T, scale)
        ctx.head, ctx.chunk, ctx.weights = head, chunk, weights
        losses = [
            _chunk_loss(head, hidden_CD, labels_C)
            for hidden_CD, labels_C in zip(hidden_TD.split(chunk), labels_T.split(chunk), strict=True)
        ]
        total = torch.stack(losses).sum()
        return total * scale.to(total.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        hidden_TD, labels_T, scale = ctx.saved_tensors
        weights: Sequence[nn.Parameter] = ctx.weights
        grad_TD = torch.empty_like(hidden_TD)
        sums: list[Tensor | None] = [None] * len(weights)
        for hidden_CD, labels_C, place_CD in zip(
            hidden_TD.split(ctx.chunk), labels_T.split(ctx.chunk), grad_TD.split(ctx.chunk), strict=True
        ):
            with torch.enable_grad():
                leaf_CD = hidden_CD.detach().requires_grad_()
                loss = _chunk_loss(ctx.head, leaf_CD, labels_C)
                found = torch.autograd.grad(
                    loss, (leaf_CD, *weights), (grads[0] * scale).to(loss.dtype), allow_unused=True
                )
            place_CD.copy_(found[0])
            for at, (weight, grad) in enumerate(zip(weights, found[1:], strict=True)):
                sums[at] = _added(weight, grad, sums[at])
        return grad_TD, None, None, None, None, *sums


def _added(weight: nn.Parameter, grad: Tensor | None, before: Tensor | None) -> Tensor | None:
    """Puts a gradient into the weight's slot; without one, what is summed so far."""
    slot = slot_of(weight)
    if grad is None or slot is None:
        return grad if before is None else before if grad is None else before + grad
    slot.take(slot.add, grad)
    return None


def head_loss(head: nn.Module, hidden_TD: Tensor, labels_T: Tensor, scale: Tensor, vocabulary: int) -> Tensor:
    """The sum of the trained tokens' losses times `scale` (a scalar tensor). head: hidden [C, D] → logits [C, V]."""
    chunk = chunk_tokens(vocabulary, target=hidden_TD.device.type)
    return _HeadLoss.apply(  # type: ignore[no-any-return, no-untyped-call]
        hidden_TD, labels_T, scale, head, chunk, *head.parameters()
    )
