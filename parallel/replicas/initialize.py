"""Initial values as a function of (seed, parameter name, element index) only.

Any topology starts from the same model, and no rank ever holds a whole one. A value is that of its element's number
in a counter-based stream (Philox, Salmon et al. 2011), which can be entered anywhere. Elements are numbered with the
layout's `outermost` dimension outermost, so that a part cut along it is one run of the stream.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import product
from math import prod

import numpy as np
import torch
from torch import Tensor, nn

from triaxis.parallel.layers.declare import declared, pieces
from triaxis.parallel.places.layout import Init, ParameterLayout
from triaxis.parallel.places.rectangles import cut_rectangles

CHUNK_ELEMENTS = 1 << 18
WORDS_PER_COUNT = 4

Fill = Callable[[ParameterLayout, Tensor, int], None]
"""Gives a run of a piece's elements their values, in place: (its layout, a flat view of the run, its first element).

A rank fills only the elements that are its own: the piece as a whole may lie nowhere.
"""

FillRectangle = Callable[[ParameterLayout, Tensor, tuple[int, ...]], None]
"""The same for a rectangle of what the whole parameter has there: (layout, a view, its offsets in the whole)."""


def by_rectangles(fill: FillRectangle) -> Fill:
    """Cuts a run into rectangles of the whole parameter; what is padding becomes zero."""

    @torch.no_grad()
    def fill_run(layout: ParameterLayout, run: Tensor, first: int) -> None:
        for part in cut_rectangles(layout.local_shape, first, first + run.numel()):
            view = run[part.first : part.first + part.elements].view(part.sizes)
            kept = tuple(
                max(0, min(size, held - low))
                for size, held, low in zip(part.sizes, layout.sizes, part.offsets, strict=True)
            )
            if kept != part.sizes:
                view.zero_()
            if all(kept):
                offsets = tuple(a + b for a, b in zip(layout.offsets, part.offsets, strict=True))
                fill(layout, view[tuple(slice(size) for size in kept)], offsets)

    return fill_run


@lru_cache(maxsize=16)
def _key(seed: int, name: str) -> bytes:
    """A parameter may be filled in many short runs."""
    return hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16]


def normal_elements(seed: int, name: str, first: int, count: int) -> Tensor:
    """Standard normal float64 values of elements [first, first + count) of a parameter."""
    stream = np.random.Philox(key=np.frombuffer(_key(seed, name), dtype=np.uint64))
    stream.advance(first // WORDS_PER_COUNT)
    skipped = first % WORDS_PER_COUNT
    words = np.asarray(stream.random_raw(count + skipped))[skipped:]
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    values: Tensor = torch.special.ndtri(torch.from_numpy(uniform))
    return values


def runs_of_rectangle(
    shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], limit: int
) -> Iterator[tuple[tuple[slice, ...], int]]:
    """A rectangle of a row-major tensor as contiguous runs: each one's place in the rectangle, its first element.

    A run has at most `limit` elements, or one slice of the outermost dimension that is not whole behind it.
    Example: rows 1 and 2, columns 2 and 3 of a (4, 6) tensor: elements 8 and 14, two each.
    """
    # the dimensions behind `dim` are whole, so indices along `dim` follow each other
    dim = len(shape) - 1
    while dim > 0 and sizes[dim] == shape[dim]:
        dim -= 1
    inner = prod(shape[dim + 1 :])
    step = max(1, limit // max(inner, 1))
    strides = [prod(shape[axis + 1 :]) for axis in range(dim)]
    for outer in product(*(range(size) for size in sizes[:dim])):
        first = sum((offsets[axis] + index) * strides[axis] for axis, index in enumerate(outer))
        for low in range(0, sizes[dim], step):
            part = slice(low, min(low + step, sizes[dim]))
            yield (*(slice(index, index + 1) for index in outer), part), first + (offsets[dim] + low) * inner


def _fill_normal(layout: ParameterLayout, view: Tensor, offsets: tuple[int, ...], seed: int) -> None:
    order = [layout.outermost, *(dim for dim in range(view.dim()) if dim != layout.outermost)]
    shape, firsts, sizes = (
        tuple(whole[dim] for dim in order) for whole in (layout.shape, offsets, view.shape)
    )
    numbered = view.permute(order)
    for place, first in runs_of_rectangle(shape, firsts, sizes, CHUNK_ELEMENTS):
        run = numbered[place]
        run.copy_(normal_elements(seed, layout.name, first, run.numel()).mul_(layout.std).view(run.shape))


def random_values(seed: int) -> Fill:
    """The initial values that layouts declare."""

    def fill(layout: ParameterLayout, view: Tensor, offsets: tuple[int, ...]) -> None:
        if layout.init is Init.NORMAL:
            _fill_normal(layout, view, offsets, seed)
        else:
            view.fill_(1.0 if layout.init is Init.ONES else 0.0)

    return by_rectangles(fill)


def fill_module(module: nn.Module, fill: Fill) -> None:
    """Fills all parameters of a module."""
    for parameter, layouts in declared(module).items():
        for layout, piece in pieces(parameter.data, layouts):
            fill(layout, piece.view(-1), 0)


def initialize(module: nn.Module, seed: int) -> None:
    """Gives all parameters of a module their initial values."""
    fill_module(module, random_values(seed))
