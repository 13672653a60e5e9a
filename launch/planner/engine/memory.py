"""The bytes that a rank of this engine holds at its peak: backward followed step by step.

What lives while a layer's gradients are computed is read off models/ and parallel/. The peak lies in backward, at the
height of one step of one unit (buckets.py); or, for a small model with a tied table, where the gradients of its
two copies are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul
from typing import Final

from triaxis.launch.planner.engine.buckets import STEPS, Chunk, chunk_of, rank_chunks
from triaxis.launch.planner.engine.pool import NOTHING, Pooled, heaviest_passes, pooled
from triaxis.launch.planner.layout import ELEMENT_BYTES, Layout, Recompute, logit_rows
from triaxis.launch.planner.shapes import Shape

ROW_BYTES: Final = 9  # kept for each row that the embedding looked up
SHOWN: Final = 8  # layers that show all that happens under ZeRO 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A rank's bytes at its peak besides model states."""

    activations: float = 0.0
    logits: float = 0.0
    buffers: float = 0.0
    temporaries: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return self.activations + self.logits + self.buffers + self.temporaries


def own_parameters(layout: Layout, stage: int) -> float:
    """Parameters of a rank of pipeline stage `stage`, before ZeRO shards them."""
    return sum(chunk.elements for chunk in held_chunks(layout, stage))


def own_memory(layout: Layout, stage: int) -> Held:
    """What a rank of pipeline stage `stage` holds at its peak."""
    zero, whole = _zero(layout), held_chunks(layout, stage)
    sizes = sizes_of(
        layout.shape,
        ELEMENT_BYTES[layout.dtype],
        tokens=layout.tokens,
        tensor=layout.tp,
        cut=layout.sequence_parallel and layout.tp > 1,
        recomputes=layout.recompute == Recompute.FULL,
    )
    chunks = tuple(_shown(layout, chunk) for chunk in whole) if zero == 3 else whole
    kept = [sizes.kept_by(chunk, chunk.layers) for chunk in whole]
    course = _Course(sizes, zero, layout.shards)
    best = Held(temporaries=_summed_ties(layout, stage, sizes))
    layers = tuple(chunk.layers for chunk in whole)
    for heavy in heaviest_passes(layout.schedule, layout.pp, stage, round(layout.microbatches), layers):
        others = sum(map(mul, heavy.flying, kept)) - kept[heavy.chunk]
        pool = pooled(chunks, heavy.runs) if zero >= 2 else NOTHING
        messages = (heavy.sent + 1) * sizes.state if layout.pp > 1 else 0.0  # one is awaited
        held = course.height(chunks[heavy.chunk], layers[heavy.chunk], others, messages, pool)
        best = max(best, held, key=lambda one: one.total)
    return best


def _zero(layout: Layout) -> int:
    return layout.zero if layout.shards > 1 and layout.trains_weights else 0


def held_chunks(layout: Layout, stage: int) -> tuple[Chunk, ...]:
    """The chunks of a rank of pipeline stage `stage`, in the buckets of the layout's ZeRO stage."""
    whole_units = _zero(layout) == 3
    return rank_chunks(layout.shape, layout.tp, layout.pp, layout.virtual_stages, whole_units)[stage]


def _shown(layout: Layout, chunk: Chunk) -> Chunk:
    """The chunk under ZeRO 3, where layers are alike: at most SHOWN of them have all that happens."""
    shape, layers = layout.shape, min(chunk.layers, SHOWN)
    return chunk_of(shape, layout.tp, layers, first=chunk.first, last=chunk.last, whole_units=True)


def _summed_ties(layout: Layout, stage: int, sizes: Sizes) -> float:
    """Where the first and the last stage have the table: its gradient, copied to be summed."""
    if not layout.shape.tied or layout.pp == 1 or stage not in (0, layout.pp - 1):
        return 0.0
    table = layout.shape.embedding_parameters() / layout.tp
    return sizes.wide * table / (layout.shards if _zero(layout) else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of a microbatch on one rank.

    element, wide: of an element of tensors and of gradients; state: a hidden state as it is between tensor-parallel
    parts; kept: what a layer keeps for backward; tables, rows: what a chunk and the embedding keep
    head, block, embedding: at the height of each step of a unit's backward, what lives besides what is kept
    logits: the loss's share of the head's first step
    """

    element: int
    wide: int
    state: float
    kept: float
    tables: float
    rows: float
    head: tuple[float, ...]
    block: tuple[float, ...]
    embedding: tuple[float, ...]
    logits: float

    def beside(self, chunk: Chunk) -> float:
        """What a chunk keeps besides its layers and the head's two hidden states."""
        return self.tables + (self.rows if chunk.first else 0.0)

    def kept_by(self, chunk: Chunk, layers: int) -> float:
        """What a chunk of so many layers keeps between forward and backward."""
        return self.beside(chunk) + layers * self.kept + (2 * self.state if chunk.last else 0.0)


@lru_cache(maxsize=4096)
def sizes_of(shape: Shape, element: int, *, tokens: float, tensor: int, cut: bool, recomputes: bool) -> Sizes:
    """cut: tokens are, between tensor-parallel parts; recomputes: a layer keeps its input only.

    Letters: h a hidden state, w the whole one; q, f, i, d the attention's output, the fused q, k and v, the MLP's
    inner features before and after the activation.
    """
    wide = max(element, 4)
    narrow = wide > element
    whole = tokens * shape.hidden
    outside = whole / (tensor if cut else 1)
    h, w = element * outside, element * whole
    query, keys = shape.attention_features(tensor)
    fused = query + 2 * keys
    width = shape.ffn / tensor
    inner = (shape.mlp_matrices - 1) * width
    q, f, i, d = (element * tokens * features for features in (query, fused, inner, width))
    gathered, scattered = (w, h) if cut else (0.0, 0.0)
    normed = h + (2 * wide * outside if shape.rms else 0.0)  # while a norm goes backward
    product = element * shape.hidden if narrow else 0.0  # for each feature, of a weight's gradient on its way
    column = gathered + w + scattered
    attention, mlp = f + q + 4 * tokens * shape.heads / tensor, i + d + 2 * h
    layer = 2 * h + attention + mlp
    block = (
        h + gathered + d + product * width,
        max(h + i + (d if shape.gated else 0.0), h - d + column + product * inner),
        h + normed - i - d,
        h + gathered + q + product * query - mlp,
        max(h + q + f - mlp, h + f + column + product * fused - mlp - attention),
        2 * h + normed - mlp - attention,
    )
    logits = _logits(shape, element, wide, tokens, tensor)
    return Sizes(
        element=element,
        wide=wide,
        state=h,
        kept=h if recomputes else layer,
        tables=element * tokens * shape.head_size if shape.rotary else 0.0,
        rows=ROW_BYTES * tokens,
        head=(gathered + w + logits, normed),
        block=tuple(level + layer - h for level in block) if recomputes else block,
        embedding=(
            h + element * shape.bound_rows * shape.hidden,
            h + gathered + w + (wide * whole if narrow else 0.0),
        ),
        logits=logits,
    )


def _logits(shape: Shape, element: int, wide: int, tokens: float, tensor: int) -> float:
    """Of a chunk of tokens at the height of the loss's backward, and the head's gradient from one chunk."""
    vocabulary = -(-shape.vocab // tensor)
    rows = logit_rows(tokens, vocabulary)
    narrow = wide > element
    each = vocabulary * (wide + (element if narrow else 0))
    following = min(rows, tokens - rows)  # the next chunk's are made before this one's go
    return each * rows + max(each * following, element * vocabulary * shape.hidden if narrow else 0.0)


@dataclass(frozen=True, slots=True)
class _Course:
    """A layout's backward passes."""

    sizes: Sizes
    zero: int
    shards: int

    def height(
        self, chunk: Chunk, layers: int, others: float, messages: float, pool: Sequence[Pooled]
    ) -> Held:
        """The most that is held in a backward pass.

        chunk: what is shown of it; layers: that it has; others: bytes kept for other passes; messages: of the
        pipeline's; pool: the course of the gradients' buffers
        """
        sizes, best, most, place = self.sizes, Held(), 0.0, 0
        hidden = layers - chunk.layers  # in the middle
        others += sizes.beside(chunk)
        for unit in self._units(chunk):
            left = min(chunk.layers, max(0, chunk.layers + 1 - unit))  # layers that keep something
            kept = others + (left + (hidden if 2 * left > chunk.layers else 0)) * sizes.kept
            kept += 2 * sizes.state if unit == 0 else 0.0
            levels = sizes.head if unit == 0 else sizes.block if unit <= chunk.layers else sizes.embedding
            first = unit * STEPS
            if place + 1 == len(pool) or pool[place + 1][0] >= first + STEPS:
                levels = (max(levels),)  # no buffer comes or goes meanwhile
            for moment, level in enumerate(levels, first):
                while place + 1 < len(pool) and pool[place + 1][0] <= moment:
                    place += 1
                _, made, reduced = pool[place]
                buffers = messages + sizes.wide * (made + reduced / self.shards)
                if self.zero == 3:
                    buffers += sizes.element * chunk.gathered(unit, moment)
                if kept + level + buffers > most:
                    most = kept + level + buffers
                    logits = sizes.logits if moment == 0 else 0.0
                    best = Held(
                        activations=kept + min(level, 0.0),
                        logits=logits,
                        buffers=buffers,
                        temporaries=max(level - logits, 0.0),
                    )
        return best

    def _units(self, chunk: Chunk) -> tuple[int, ...]:
        """Those in which the height may be: of layers the first, unless buffers come later."""
        if self.zero >= 2:
            return chunk.units
        return tuple(unit for unit in (0, 1, chunk.layers + 1) if unit in chunk.units)
