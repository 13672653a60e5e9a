"""Kernels of other packages, and of torch's compiler, as layers call them. Each is imported when it is made."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from triaxis.parallel.kernels.activation import plain_swiglu
from triaxis.parallel.kernels.attention import Attend, Documents
from triaxis.parallel.kernels.norm import plain_rms_norm
from triaxis.parallel.kernels.rotary import rotate_

Norm = Callable[[Tensor, Tensor, float], Tensor]
Activation = Callable[[Tensor], Tensor]
Rotate = Callable[..., Tensor]
"""As `rotary.rotate_`."""


def compiled_norm() -> Norm:
    norm: Norm = torch.compile(plain_rms_norm, dynamic=False)
    return norm


def compiled_swiglu() -> Activation:
    activation: Activation = torch.compile(plain_swiglu, dynamic=False)
    return activation


def compile_block(block: nn.Module) -> None:
    """Compiles a layer's forward; hooks around it, which gather parameters, stay outside."""
    block.forward = torch.compile(block.forward, dynamic=False)


def uncompiled_rotate() -> Rotate:
    """For compiled layers: torch 2.13's compiler gets what is turned in place wrong (losses 3e-3 apart)."""
    rotate: Rotate = torch.compiler.disable(rotate_)
    return rotate


def liger_norm() -> Norm:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    def norm(input: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
        # Statistics in fp32 and a product in the model's dtype; backward must not write over the gradient.
        made: Tensor = LigerRMSNormFunction.apply(input.contiguous(), weight_D, epsilon, 0.0, "llama", False)
        return made

    return norm


def liger_swiglu() -> Activation:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def activation(gate_up_T2F: Tensor) -> Tensor:
        gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
        made: Tensor = LigerSiLUMulFunction.apply(gate_TF.contiguous(), up_TF.contiguous())
        return made

    return activation


def apex_norm() -> Norm:
    from apex.normalization.fused_layer_norm import fused_rms_norm_affine

    def norm(input: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
        made: Tensor = fused_rms_norm_affine(input, weight_D, weight_D.shape, epsilon)
        return made

    return norm


def megatron_swiglu() -> Activation:
    from megatron.core.fusions.fused_bias_swiglu import SwiGLUFunction

    return functools.partial(_apply_three, SwiGLUFunction.apply)


def _apply_three(apply: Callable[..., Tensor], gate_up_T2F: Tensor) -> Tensor:
    """Neither of its options: an input kept in fp8, and one kept on the host."""
    return apply(gate_up_T2F, False, False)


def flash_attend() -> Attend:
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    def attend(
        query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rows: int, documents: Documents | None
    ) -> Tensor:
        parts = (query_THD, key_TKD, value_TKD)
        made: Tensor
        if documents is None:
            made = flash_attn_func(*(part.unflatten(0, (rows, -1)) for part in parts), causal=True)
            return made.flatten(0, 1)
        assert documents.starts is not None, "the documents' borders must have been moved to the device"
        longest = documents.longest()
        made = flash_attn_varlen_func(
            *parts, documents.starts, documents.starts, longest, longest, causal=True
        )
        return made

    return attend
