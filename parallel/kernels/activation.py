"""SwiGLU (Shazeer 2020): silu(gate) · up, of a fused product; GELU.

Shapes: T tokens, F features of the MLP held here, 2F gate and up side by side.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function


class _SwiGLU(Function):
    """Keeps its input; if asked also σ(gate), in place of the silu(gate) that `F.silu(gate) * up` would keep."""

    @staticmethod
    def forward(ctx: Any, gate_up_T2F: Tensor, keeps_sigmoid: bool) -> Tensor:
        gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
        if not keeps_sigmoid:
            ctx.save_for_backward(gate_up_T2F)
            return F.silu(gate_TF).mul_(up_TF)
        sigmoid_TF = torch.sigmoid(gate_TF)
        ctx.save_for_backward(gate_up_T2F, sigmoid_TF)
        return (gate_TF * sigmoid_TF).mul_(up_TF)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        gate_up_T2F, *kept = ctx.saved_tensors
        gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
        grad_T2F = torch.empty_like(gate_up_T2F)
        grad_gate_TF, grad_up_TF = grad_T2F.chunk(2, dim=-1)
        if not kept:
            torch.mul(grads[0], F.silu(gate_TF), out=grad_up_TF)
            torch.ops.aten.silu_backward.grad_input(grads[0] * up_TF, gate_TF, grad_input=grad_gate_TF)
            return grad_T2F, None
        (sigmoid_TF,) = kept  # silu' = σ + silu - silu · σ, that is, from silu towards 1 by σ
        torch.mul(gate_TF, sigmoid_TF, out=grad_up_TF)
        torch.lerp(grad_up_TF, sigmoid_TF.new_ones(()), sigmoid_TF, out=grad_gate_TF)
        grad_gate_TF.mul_(up_TF).mul_(grads[0])
        grad_up_TF.mul_(grads[0])
        return grad_T2F, None


def swiglu(gate_up_T2F: Tensor) -> Tensor:
    """[T, 2F] → [T, F], keeping its input alone: σ(gate) is computed again in backward."""
    return _SwiGLU.apply(gate_up_T2F, False)  # type: ignore[no-any-return, no-untyped-call]


def swiglu_keeping_sigmoid(gate_up_T2F: Tensor) -> Tensor:
    """[T, 2F] → [T, F]. On CPUs an exponential takes longer than reading it back: a quarter of both passes' time."""
    return _SwiGLU.apply(gate_up_T2F, True)  # type: ignore[no-any-return, no-untyped-call]


def plain_swiglu(gate_up_T2F: Tensor) -> Tensor:
    """The plain twin of both."""
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    return F.silu(gate_TF) * up_TF


def gelu(input: Tensor) -> Tensor:
    """GELU's tanh form, as in GPT-2."""
    return F.gelu(input, approximate="tanh")
