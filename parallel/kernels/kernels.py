"""Which functions do the arithmetic of layers: chosen here, once, by device and precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from triaxis.parallel.kernels.activation import gelu, swiglu, swiglu_keeping_sigmoid
from triaxis.parallel.kernels.attention import attend, attend_on_cuda
from triaxis.parallel.kernels.norm import fused_rms_norm, rms_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The functions that layers call.

    attend: (query, key, value, mask) → mixed values; rms_norm: (input, weight, epsilon) → normed
    swiglu: gate and up side by side → their product; gelu: of each element
    """

    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    swiglu: Callable[[Tensor], Tensor]
    gelu: Callable[[Tensor], Tensor] = gelu


def kernels_for(device: torch.device, dtype: torch.dtype) -> Kernels:
    """The fastest known for a device and a precision."""
    if device.type == "cuda":
        return Kernels(attend=attend_on_cuda, rms_norm=fused_rms_norm, swiglu=swiglu)
    wide = dtype in (torch.float32, torch.float64)
    return Kernels(attend=attend, rms_norm=rms_norm, swiglu=swiglu_keeping_sigmoid if wide else swiglu)
