"""Which functions do the arithmetic of layers: chosen here, once, by device, precision and what is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from triaxis.parallel.kernels import joined
from triaxis.parallel.kernels.activation import gelu, plain_swiglu, swiglu, swiglu_keeping_sigmoid
from triaxis.parallel.kernels.attention import (
    Attend,
    attend_by_document,
    attend_masked,
    attend_on_cpu,
    attend_on_cpu_if_short,
    attend_on_cuda,
)
from triaxis.parallel.kernels.norm import fused_rms_norm, plain_rms_norm, rms_norm
from triaxis.parallel.kernels.rotary import rotate_
from triaxis.parallel.kernels.table import DEFAULT, Facts, Operation, choose, missing_packages

Function = TypeVar("Function")
NAMES = {torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The functions that layers call.

    attend: causal attention within documents; rms_norm: (input, weight, epsilon) → normed
    swiglu: gate and up side by side → their product; gelu: of each element
    rotate: rotary positions, in place; prepare: what is done to a layer before its first use
    chosen: the implementation of every operation, of `table.TABLE`
    """

    attend: Attend
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    swiglu: Callable[[Tensor], Tensor]
    gelu: Callable[[Tensor], Tensor] = gelu
    rotate: joined.Rotate = rotate_
    prepare: Callable[[nn.Module], None] = lambda block: None
    chosen: Mapping[Operation, str]


_NORMS: dict[str, Callable[[], joined.Norm]] = {
    "plain": lambda: plain_rms_norm,
    "compile": joined.compiled_norm,
    "liger": joined.liger_norm,
    "apex": joined.apex_norm,
}
_ACTIVATIONS: dict[str, Callable[[], joined.Activation]] = {
    "plain": lambda: plain_swiglu,
    "compile": joined.compiled_swiglu,
    "liger": joined.liger_swiglu,
    "megatron-core": joined.megatron_swiglu,
}
_ATTENTIONS: dict[str, Callable[[], Attend]] = {
    "plain": lambda: attend_masked,
    "short": lambda: attend_on_cpu_if_short,
    "flash": joined.flash_attend,
}
_PREPARATIONS = {DEFAULT: lambda block: None, "compile": joined.compile_block}


def facts_of(device: torch.device, dtype: torch.dtype) -> Facts:
    """What this machine has for such a device."""
    there = device.type == "cuda" and torch.cuda.is_available()
    return Facts(
        device=device.type,
        dtype=NAMES[dtype],
        capability=torch.cuda.get_device_capability() if there else (0, 0),
        missing=missing_packages(device.type),
    )


def kernels_for(
    device: torch.device, dtype: torch.dtype, wishes: Mapping[Operation, str] | None = None
) -> Kernels:
    """torch's, which are the fastest known for a device and a precision, but for what is asked for.

    Raises ValueError where that cannot be used here.
    """
    wide = dtype in (torch.float32, torch.float64)
    asked = {operation: name for operation, name in (wishes or {}).items() if name != DEFAULT}
    # Nothing is looked for on the disk where nothing is asked for.
    chosen = choose(asked, facts_of(device, dtype)) if asked else dict.fromkeys(Operation, DEFAULT)
    attend: Attend = attend_on_cpu
    norm: joined.Norm = rms_norm
    activation: joined.Activation = swiglu_keeping_sigmoid if wide else swiglu
    if device.type == "cuda":
        attend = attend_by_document if wide else attend_on_cuda
        norm, activation = fused_rms_norm, swiglu
    return Kernels(
        attend=_made(_ATTENTIONS, chosen[Operation.ATTENTION], attend),
        rms_norm=_made(_NORMS, chosen[Operation.NORM], norm),
        swiglu=_made(_ACTIVATIONS, chosen[Operation.ACTIVATION], activation),
        rotate=rotate_ if chosen[Operation.BLOCK] == DEFAULT else joined.uncompiled_rotate(),
        prepare=_PREPARATIONS[chosen[Operation.BLOCK]],
        chosen=chosen,
    )


def _made(makers: Mapping[str, Callable[[], Function]], name: str, own: Function) -> Function:
    return own if name == DEFAULT else makers[name]()
