"""Products that are added to a gradient's buffer. Shapes: T tokens, I and O in and out features."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)

AddProduct = Callable[[Tensor, Tensor, Tensor, bool], None]
"""(target_OI, grad_TO, input_TI, empty): target += gradᵀ · input; where it is empty, target = gradᵀ · input."""


def add_product(target_OI: Tensor, grad_TO: Tensor, input_TI: Tensor, empty: bool) -> None:
    """In one dtype the product adds into the buffer itself, so that nothing as large as the weight exists beside it.

    Where sums are wider (fp32 of bf16) a product is made first: on CPUs mm writes in its operands' dtype.
    """
    if target_OI.dtype != grad_TO.dtype:
        product_OI = grad_TO.t() @ input_TI
        if empty:
            target_OI.copy_(product_OI)
        else:
            target_OI.add_(product_OI)
    elif empty:
        torch.mm(grad_TO.t(), input_TI, out=target_OI)
    else:
        target_OI.addmm_(grad_TO.t(), input_TI)


def add_product_on_cuda(target_OI: Tensor, grad_TO: Tensor, input_TI: Tensor, empty: bool) -> None:
    """Half precisions are multiplied into an fp32 buffer at once: no rounded copy, and no pass of its own to add it."""
    if target_OI.dtype != torch.float32 or grad_TO.dtype not in HALVES:
        add_product(target_OI, grad_TO, input_TI, empty)
    elif empty:
        torch.mm(grad_TO.t(), input_TI, out_dtype=torch.float32, out=target_OI)
    else:
        torch.addmm(target_OI, grad_TO.t(), input_TI, out_dtype=torch.float32, out=target_OI)


def product_for(target: str) -> AddProduct:
    """The one for a kind of device."""
    return add_product_on_cuda if target == "cuda" else add_product
