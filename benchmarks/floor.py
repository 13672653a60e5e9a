"""The floor under a step: its own matrix products alone, at their shapes, layouts, dtype and number."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm")

Shape = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes and strides."""


@dataclass(frozen=True, slots=True)
class Product:
    """One product's operands: what it is added to if it is, left and right."""

    name: str
    operands: tuple[Shape, ...]
    dtype: torch.dtype


class Products(TorchDispatchMode):
    """Counts the products that are made while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Product] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # torch's own signature, untyped
        name = function._schema.name
        if name in PRODUCTS:
            tensors = [arg for arg in args if isinstance(arg, Tensor)]
            shapes = tuple((tuple(tensor.shape), tensor.stride()) for tensor in tensors)
            self.found[Product(name, shapes, tensors[-1].dtype)] += 1
        return function(*args, **(kwargs or {}))


def products_of(run: Callable[[], object]) -> Counter[Product]:
    with Products() as products:
        run()
    return products.found


def seconds_of(products: Counter[Product], rounds: int) -> list[float]:
    """CPU seconds of all of them, one kind behind the other, of each round."""
    prepared = [(_call(product), count) for product, count in products.items()]
    found = []
    for _ in range(rounds):
        start = time.process_time()
        for call, count in prepared:
            for _ in range(count):
                call()
        found.append(time.process_time() - start)
    return found


def _call(product: Product) -> Callable[[], object]:
    operands = [_like(sizes, strides, product.dtype) for sizes, strides in product.operands]
    *added, left, right = operands
    out = added[0] if added else torch.matmul(left, right)
    if added:
        return lambda: (
            out.addmm_(left, right, beta=0.5) if out.dim() == 2 else out.baddbmm_(left, right, beta=0.5)
        )
    return lambda: torch.matmul(left, right, out=out)


def _like(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    made = torch.empty_strided(sizes, strides, dtype=dtype)
    return made.fill_(0.01)
