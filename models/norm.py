"""Normalisation over the last dimension: RMS norm (Zhang and Sennrich 2019) and layer norm.

Shapes: D normalised features, N everything before them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from triaxis.models.config import NormKind
from triaxis.parallel.places.layout import Init, declare, replicated
from triaxis.parallel.worlds.mesh import Mesh


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
    """RMS norm; statistics in float32 for half precisions. CUDA has one fused kernel for it."""
    if input.is_cuda:
        return F.rms_norm(input, (input.shape[-1],), weight_D, epsilon)
    return _RMSNorm.apply(input, weight_D, epsilon)  # type: ignore[no-any-return, no-untyped-call]


class Norm(nn.Module):
    """A norm over the last `size` elements, its parameters replicated over tp.

    partial_gradient: each tensor rank sees other tokens (or other heads), so its gradient is summed over tp
    """

    def __init__(
        self,
        mesh: Mesh,
        name: str,
        size: int,
        *,
        kind: NormKind,
        epsilon: float,
        partial_gradient: bool,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.size, self.epsilon = size, epsilon

        def parameter(suffix: str, init: Init) -> nn.Parameter:
            layout = replicated(
                f"{name}.{suffix}", (size,), mesh.tp, sequence_parallel=partial_gradient, init=init
            )
            return declare(nn.Parameter(torch.empty(size, dtype=dtype, device=mesh.world.device)), layout)

        self.weight = parameter("weight", Init.ONES)
        self.bias = parameter("bias", Init.ZEROS) if kind is NormKind.LAYERNORM else None

    def forward(self, input: Tensor) -> Tensor:
        if self.bias is not None:
            return F.layer_norm(input, (self.size,), self.weight, self.bias, self.epsilon)
        return rms_norm(input, self.weight, self.epsilon)
