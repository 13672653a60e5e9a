"""Which functions do the arithmetic of layers: chosen here, once, by device and precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from triaxis.parallel.kernels.activation import gelu, swiglu, swiglu_keeping_sigmoid
from triaxis.parallel.kernels.attention import Attend, attend_by_document, attend_on_cpu, attend_on_cuda
from triaxis.parallel.kernels.norm import fused_rms_norm, rms_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The functions that layers call.

    attend: causal attention within documents; rms_norm: (input, weight, epsilon) → normed
    swiglu: gate and up side by side → their product; gelu: of each element
    """

    attend: Attend
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    swiglu: Callable[[Tensor], Tensor]
    gelu: Callable[[Tensor], Tensor] = gelu


def kernels_for(device: torch.device, dtype: torch.dtype) -> Kernels:
    """The fastest known for a device and a precision."""
    wide = dtype in (torch.float32, torch.float64)
    if device.type == "cuda":
        attend = attend_by_document if wide else attend_on_cuda
        return Kernels(attend=attend, rms_norm=fused_rms_norm, swiglu=swiglu)
    return Kernels(attend=attend_on_cpu, rms_norm=rms_norm, swiglu=swiglu_keeping_sigmoid if wide else swiglu)
