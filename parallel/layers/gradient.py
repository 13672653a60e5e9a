"""Where a parameter's gradient goes: straight into its place in a bucket, if it has one.

Layers call `weight_gradient` and its kin in their backward. With a `GradientSlot` the product is added to the
bucket's buffer and nothing is returned; without one (an unwrapped module) the gradient is returned to autograd.

It is the one door for gradients of weights, and so where a backward pass can be split: while a slot puts off, what
would be added, and the word that it is complete, go to a list that is carried out later, in the same order.
(Qi et al. 2023, "Zero Bubble Pipeline Parallelism".)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from triaxis.parallel.kernels.products import AddProduct, add_product

Deferred = list[Callable[[], None]]
"""What a backward pass for the gradients of inputs alone has left to do, in order."""


class GradientSlot:
    """One parameter's gradient in its bucket's buffer.

    The first addition of an optimizer step (or of a microbatch, where gradients are sharded) overwrites, so
    buffers are never zeroed first. `find_buffer` returns the parameter's part of the buffer, in its shape.
    on_complete: called when a backward pass has added all that it has; later: where additions go that are put off
    """

    __slots__ = ("_add_product", "_find_buffer", "complete", "empty", "later", "on_complete")

    def __init__(self, find_buffer: Callable[[], Tensor], product: AddProduct = add_product) -> None:
        self._find_buffer, self._add_product = find_buffer, product
        self.empty = True
        self.complete = False
        self.later: Deferred | None = None
        self.on_complete: Callable[[], None] = _nothing

    def take(self, do: Callable[..., None], *given: object) -> None:
        """Does it with what is given, now or later."""
        if self.later is None:
            do(*given)
            return
        # detached: a saved tensor would keep the whole graph that made it
        kept = [item.detach() if isinstance(item, Tensor) else item for item in given]
        self.later.append(partial(do, *kept))

    def finish(self) -> None:
        """The backward pass has added all that it has, now or later."""
        self.take(self._tell)

    def _tell(self) -> None:
        self.on_complete()

    def add_product(self, grad_TO: Tensor, input_TI: Tensor, rows: int | None = None) -> None:
        """Adds grad_TOᵀ · input_TI to the first `rows` rows (all, if None)."""
        buffer = self._find_buffer()
        target_OI = buffer if rows is None else buffer[:rows]
        self._add_product(target_OI, grad_TO, input_TI, self.empty)
        if self.empty and rows is not None:
            buffer[
                rows:
            ].zero_()  # padding of the vocabulary, which still holds the last step's or another bucket's
        self.empty = False

    def add_grouped_products(self, grad_SO: Tensor, input_SI: Tensor, counts: Sequence[int]) -> None:
        """Adds grad_SOᵀ · input_SI of each expert's rows to that expert's part; one without rows keeps what it had."""
        buffer_EOI = self._find_buffer().view(len(counts), -1, input_SI.shape[1])
        start = 0
        for target_OI, count in zip(buffer_EOI, counts, strict=True):
            grad_RO, input_RI = grad_SO[start : start + count], input_SI[start : start + count]
            start += count
            if not count:
                if self.empty:  # the buffer still holds the last step's gradient
                    target_OI.zero_()
            else:
                self._add_product(target_OI, grad_RO, input_RI, self.empty)
        self.empty = False

    def add_rows(self, rows_T: Tensor, grad_TD: Tensor) -> None:
        """Adds grad_TD[t] to row rows_T[t]."""
        buffer = self._find_buffer()
        if self.empty:
            buffer.zero_()  # most rows are not looked up, and a row may be several times
        buffer.index_add_(0, rows_T, grad_TD.to(buffer.dtype))
        self.empty = False

    def add(self, grad: Tensor) -> None:
        """Adds a gradient in the parameter's shape."""
        buffer = self._find_buffer()
        if self.empty:
            buffer.copy_(grad)
        else:
            buffer.add_(grad)
        self.empty = False

    def fill_if_empty(self) -> None:
        """A parameter that took no part has a gradient of zero."""
        if self.empty:  # what the buffer holds is left from before
            self._find_buffer().zero_()
            self.empty = False


def _nothing() -> None:
    """A slot outside any bucket tells nobody."""


class _Placed(Protocol):
    gradient_slot: GradientSlot


def give_slot(parameter: nn.Parameter, slot: GradientSlot) -> None:
    """From now on the parameter's gradient goes into the slot."""
    cast(_Placed, parameter).gradient_slot = slot


def slot_of(parameter: nn.Parameter) -> GradientSlot | None:
    return getattr(parameter, "gradient_slot", None)


def is_put_off(weight: nn.Parameter) -> bool:
    """Whether the weight's gradient comes later, so that what it alone needs need not be there now."""
    slot = slot_of(weight)
    return slot is not None and slot.later is not None


def put_off(weight: nn.Parameter, do: Callable[..., None], *given: object) -> None:
    """Does it later with what is given; it ends with `weight_gradient`."""
    slot = slot_of(weight)
    assert slot is not None
    slot.take(do, *given)


def weight_gradient(
    weight: nn.Parameter, grad_TO: Tensor, input_TI: Tensor, rows: int | None = None
) -> Tensor | None:
    """The gradient of a weight [O, I] used as input_TI · weightᵀ; only the first `rows` rows were used."""
    slot = slot_of(weight)
    if slot is not None:
        slot.take(slot.add_product, grad_TO, input_TI, rows)
        return None
    product_OI = grad_TO.t() @ input_TI
    if rows is None or rows == weight.shape[0]:
        return product_OI
    padded = torch.zeros_like(weight)
    padded[:rows] = product_OI
    return padded


def rows_gradient(weight: nn.Parameter, rows_T: Tensor, grad_TD: Tensor) -> Tensor | None:
    """The gradient of a weight whose rows rows_T were looked up."""
    slot = slot_of(weight)
    if slot is not None:
        slot.take(slot.add_rows, rows_T, grad_TD)
        return None
    return torch.zeros_like(weight).index_add_(0, rows_T, grad_TD)


def grouped_weight_gradient(
    weight: nn.Parameter, grad_SO: Tensor, input_SI: Tensor, counts: Sequence[int]
) -> Tensor | None:
    """The gradient of experts' weights [experts · O, I], of which each multiplied `counts` rows of its own."""
    slot = slot_of(weight)
    if slot is not None:
        slot.take(slot.add_grouped_products, grad_SO, input_SI, counts)
        return None
    runs = zip(grad_SO.split(list(counts)), input_SI.split(list(counts)), strict=True)
    return torch.cat([grad_RO.t() @ input_RI for grad_RO, input_RI in runs])
