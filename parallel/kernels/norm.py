"""RMS norm (Zhang and Sennrich 2019) over the last dimension.

Shapes: D normalised features, N everything before them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function


def widened(dtype: torch.dtype) -> torch.dtype:
    """What sums of such values are kept in: fp32 for 16 bits."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


class _RMSNorm(Function):
    """y = w · x / rms(x), keeping x and one number a row; on CPUs faster than `F.rms_norm`, its plain twin."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
        dtype = widened(input.dtype)
        input_ND = input.reshape(-1, input.shape[-1])
        norm_N1: Tensor = torch.linalg.vector_norm(input_ND, dim=-1, keepdim=True, dtype=dtype)
        inverse_N1 = norm_N1.square_().div_(input.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(input, weight_D, inverse_N1)
        return (input_ND * inverse_N1).mul_(weight_D).to(input.dtype).view(input.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        input, weight_D, inverse_N1 = ctx.saved_tensors
        return *_gradients(grads[0], input, inverse_N1, weight_D), None


def _gradients(grad: Tensor, input: Tensor, inverse_N1: Tensor, weight_D: Tensor) -> tuple[Tensor, Tensor]:
    """dx = (g·w - x̂ · mean(g·w·x̂)) / rms, with x̂ = x / rms."""
    size = input.shape[-1]
    scaled_ND = input.reshape(-1, size) * inverse_N1
    grad_ND = grad.reshape(-1, size)
    product_ND = grad_ND * scaled_ND
    grad_weight_D = product_ND.sum(0)
    mean_N1 = torch.mv(product_ND, weight_D.to(product_ND.dtype)).div_(size).unsqueeze(-1)
    grad_input_ND = torch.mul(grad_ND, weight_D, out=product_ND)
    grad_input_ND.addcmul_(scaled_ND, mean_N1, value=-1).mul_(inverse_N1)
    return grad_input_ND.to(input.dtype).view(input.shape), grad_weight_D.to(weight_D.dtype)


def rms_norm(input: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """RMS norm for CPUs; statistics in float32 for half precisions."""
    return _RMSNorm.apply(input, weight_D, epsilon)  # type: ignore[no-any-return, no-untyped-call]


def plain_rms_norm(input: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """PyTorch's own, the plain twin of both."""
    return F.rms_norm(input, (input.shape[-1],), weight_D, epsilon)


_OPERATORS = torch.library.Library("triaxis", "FRAGMENT")
_OPERATORS.define("rms_norm(Tensor input, Tensor weight, float epsilon) -> (Tensor, Tensor)")
_OPERATORS.define(
    "rms_norm_backward(Tensor grad, Tensor input, Tensor inverse, Tensor weight) -> (Tensor, Tensor)"
)


def _fused(input: Tensor, weight_D: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = torch.ops.aten._fused_rms_norm(input, [input.shape[-1]], weight_D, epsilon)
    return found


def _fused_backward(grad: Tensor, input: Tensor, inverse: Tensor, weight_D: Tensor) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = torch.ops.aten._fused_rms_norm_backward(
        grad, input, [input.shape[-1]], inverse, weight_D, [True, True]
    )
    return found


def _composed_backward(
    grad: Tensor, input: Tensor, inverse: Tensor, weight_D: Tensor
) -> tuple[Tensor, Tensor]:
    """PyTorch has none on CPUs."""
    return _gradients(grad, input, inverse.view(-1, 1), weight_D)


def _shapes(input: Tensor, weight_D: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    dtype = widened(input.dtype)
    return torch.empty_like(input), input.new_empty((*input.shape[:-1], 1), dtype=dtype)


def _shapes_backward(grad: Tensor, input: Tensor, inverse: Tensor, weight_D: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(input), torch.empty_like(weight_D)


# An operator of its own, so that a trace without a GPU sees one kernel: on CPUs PyTorch composes it of ten.
_OPERATORS.impl("rms_norm", _shapes, "Meta")
_OPERATORS.impl("rms_norm_backward", _shapes_backward, "Meta")
_OPERATORS.impl("rms_norm", _fused, "CompositeExplicitAutograd")
_OPERATORS.impl("rms_norm_backward", _fused_backward, "CUDA")
_OPERATORS.impl("rms_norm_backward", _composed_backward, "CPU")


class _FusedRMSNorm(Function):
    """One kernel each way, keeping x and one number a row."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
        output, inverse = torch.ops.triaxis.rms_norm(input, weight_D, epsilon)
        ctx.save_for_backward(input, weight_D, inverse)
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        input, weight_D, inverse = ctx.saved_tensors
        grad_input, grad_weight_D = torch.ops.triaxis.rms_norm_backward(
            grads[0].contiguous(), input, inverse, weight_D
        )
        return grad_input, grad_weight_D, None


def fused_rms_norm(input: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """RMS norm for GPUs."""
    return _FusedRMSNorm.apply(input, weight_D, epsilon)  # type: ignore[no-any-return, no-untyped-call]
