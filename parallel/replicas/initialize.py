"""Initial values as a function of (seed, parameter name, element index) only.

Any topology starts from the same model, and no rank ever holds a whole one. Elements are numbered with the cut
dimension outermost, so that a shard is a contiguous range of the counter-based stream (Philox, Salmon et al. 2011).
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor, nn

from triaxis.parallel.places.layout import Init, ParameterLayout, layouts_of

CHUNK_ELEMENTS = 1 << 20
WORDS_PER_COUNT = 4


def normal_elements(seed: int, name: str, first: int, count: int) -> Tensor:
    """Standard normal float64 values of elements [first, first + count) of a parameter."""
    key = np.frombuffer(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], dtype=np.uint64)
    stream = np.random.Philox(key=key)
    stream.advance(first // WORDS_PER_COUNT)
    skipped = first % WORDS_PER_COUNT
    words = np.asarray(stream.random_raw(count + skipped))[skipped:]
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    values: Tensor = torch.special.ndtri(torch.from_numpy(uniform))
    return values


def _fill_normal(piece: Tensor, layout: ParameterLayout, seed: int) -> None:
    dim = layout.dim or 0
    start, stop = (layout.start, layout.stop) if layout.dim is not None else (0, layout.shape[0])
    outermost = piece.movedim(dim, 0)
    outermost[stop - start :].zero_()
    inner = outermost[0].numel() if len(outermost) else 1
    rows_per_chunk = max(1, CHUNK_ELEMENTS // inner)
    for row in range(0, stop - start, rows_per_chunk):
        rows = outermost[row : min(row + rows_per_chunk, stop - start)]
        values = normal_elements(seed, layout.name, (start + row) * inner, len(rows) * inner)
        rows.copy_(values.mul_(layout.std).view(rows.shape))


@torch.no_grad()
def initialize_parameter(parameter: nn.Parameter, seed: int) -> None:
    """Fills a parameter from its layouts."""
    offset = 0
    for layout in layouts_of(parameter):
        piece = parameter.data.view(-1)[offset : offset + layout.elements].view(layout.local_shape)
        offset += layout.elements
        if layout.init is Init.NORMAL:
            _fill_normal(piece, layout, seed)
        else:
            piece.fill_(1.0 if layout.init is Init.ONES else 0.0)


def initialize(module: nn.Module, seed: int) -> None:
    """Fills all parameters of a module."""
    for parameter in module.parameters():
        initialize_parameter(parameter, seed)
