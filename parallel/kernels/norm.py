"""RMS norm (Zhang and Sennrich 2019) over the last dimension.

Shapes: D normalised features, N everything before them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


class _RMSNorm(Function):
    """y = w · x / rms(x), keeping x and one number a row; on CPUs faster than `F.rms_norm`, its plain twin."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
        dtype = _statistics_dtype(input.dtype)
        input_ND = input.reshape(-1, input.shape[-1])
        norm_N1: Tensor = torch.linalg.vector_norm(input_ND, dim=-1, keepdim=True, dtype=dtype)
        inverse_N1 = norm_N1.square_().div_(input.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(input, weight_D, inverse_N1)
        return (input_ND * inverse_N1).mul_(weight_D).to(input.dtype).view(input.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """dx = (g·w - x̂ · mean(g·w·x̂)) / rms, with x̂ = x / rms."""
        input, weight_D, inverse_N1 = ctx.saved_tensors
        size = input.shape[-1]
        scaled_ND = input.reshape(-1, size) * inverse_N1
        grad_ND = grads[0].reshape(-1, size)
        product_ND = grad_ND * scaled_ND
        grad_weight_D = product_ND.sum(0)
        mean_N1 = torch.mv(product_ND, weight_D.to(product_ND.dtype)).div_(size).unsqueeze(-1)
        grad_input_ND = torch.mul(grad_ND, weight_D, out=product_ND)
        grad_input_ND.addcmul_(scaled_ND, mean_N1, value=-1).mul_(inverse_N1)
        return grad_input_ND.to(input.dtype).view(input.shape), grad_weight_D.to(weight_D.dtype), None


def rms_norm(input: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """RMS norm for CPUs; statistics in float32 for half precisions."""
    return _RMSNorm.apply(input, weight_D, epsilon)  # type: ignore[no-any-return, no-untyped-call]


def fused_rms_norm(input: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """PyTorch's own: one kernel on CUDA, the plain twin of `rms_norm` elsewhere."""
    return F.rms_norm(input, (input.shape[-1],), weight_D, epsilon)
