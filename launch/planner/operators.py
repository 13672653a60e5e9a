"""This engine's step operator by operator, in closed form: what the trace of the engine itself prices in full.

An operator takes as long as its products or its memory traffic, whichever is longer, and its launch; a message that
is waited for where it is issued adds its whole time. The lists follow models/ and parallel/ as they run on tensors of
a device, and a test holds them to the simulation.

Sizes: T tokens of a microbatch, O features of the fused q, k and v here, F of the MLP here, V rows of the vocabulary
here; `outer`, tokens between tensor-parallel parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from triaxis.launch.planner.collectives import collective_seconds
from triaxis.launch.planner.layout import LOGIT_CHUNK, LOGIT_ROWS, Layout, Recompute

ELEMENT_BYTES: Final = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
HEAD_SMALL: Final = (24, 6)  # launches of the loss that depend on no size, forward and backward
UPDATE_SMALL: Final = 30  # launches of the norm, the clip and the update beside those for each bucket
UPDATE_BYTES: Final = 44  # for each parameter that a rank updates: norm, clip, AdamW; and 8 for a 16-bit copy
BUCKET_ELEMENTS: Final = 1 << 25

Operator = tuple[float, float]
"""FLOPs, bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Seconds of a part of the model for one microbatch: computing, and waiting for tensor-parallel messages."""

    forward: float = 0.0
    backward: float = 0.0
    forward_messages: float = 0.0
    backward_messages: float = 0.0


class Operators:
    """The prices of one layout's parts."""

    def __init__(self, layout: Layout) -> None:
        shape, tensor = layout.shape, layout.tp
        self.layout, self.shape, self.hardware = layout, shape, layout.hardware
        self.element = ELEMENT_BYTES[layout.dtype]
        self.wide = max(self.element, 4)
        self.tokens = layout.tokens
        self.outer = layout.tokens / (tensor if layout.sequence_parallel else 1)
        self.query = shape.heads * shape.head_size / tensor
        self.keys = max(shape.kv_heads / tensor, 1.0) * shape.head_size
        self.fused = self.query + 2 * self.keys
        self.width = shape.ffn / tensor
        self.inner = (shape.mlp_matrices - 1) * self.width
        self.vocabulary = shape.vocab / tensor

    def seconds(self, operators: Iterable[Operator], small: int = 0) -> float:
        """Of operators one after another, and of `small` ones that cost their launch only."""
        hardware, total = self.hardware, small * self.hardware.launch_overhead_s
        for flops, nbytes in operators:
            longest = hardware.memory_seconds(nbytes)
            if flops:
                longest = max(longest, hardware.matmul_seconds(flops, self.layout.dtype))
            total += longest + hardware.launch_overhead_s
        return total

    def product(self, rows: float, inputs: float, outputs: float) -> Operator:
        """(rows × inputs) · (inputs × outputs)."""
        nbytes = self.element * (rows * inputs + inputs * outputs + rows * outputs)
        return 2 * rows * inputs * outputs, nbytes

    def traffic(self, elements: float, *counts: float) -> list[Operator]:
        """Operators that move count × elements of the layout's dtype."""
        return [(0.0, self.element * elements * count) for count in counts]

    def message(self, operation: str, nbytes: float) -> float:
        """Seconds of a collective over tp."""
        return collective_seconds(operation, nbytes, self.layout.group("tp"), self.hardware)

    def _into_bucket(self, weights: float) -> list[Operator]:
        """A 16-bit gradient goes into its fp32 place; wider ones are multiplied into it."""
        return [(0.0, 10 * weights)] if self.element == 2 else []

    def _linear_backward(self, inputs: float, outputs: float) -> tuple[list[Operator], list[Operator]]:
        """The products for the input's gradient, and those for the weight's."""
        weight = [self.product(inputs, self.tokens, outputs), *self._into_bucket(inputs * outputs)]
        return [self.product(self.tokens, outputs, inputs)], weight

    # Norms: RMS norms are many operators, layer norms one.

    def _norm(self) -> float:
        size = self.outer * self.shape.hidden
        if not self.shape.rms:
            return self.seconds(self.traffic(size, 2))
        e, w = self.element, self.wide
        traffic = [(0.0, size * each) for each in (e, e + w, 2 * w, *((w + e,) if w > e else ()))]
        return self.seconds(traffic, small=4)

    def _norm_backward(self) -> float:
        size = self.outer * self.shape.hidden
        if not self.shape.rms:
            return self.seconds(self.traffic(size, 3), small=2)
        e, w = self.element, self.wide
        sizes = [e + w, e + 2 * w, w, w, e + w, 3 * w, 2 * w, *((w + e,) if w > e else ())]
        return self.seconds([(0.0, size * each) for each in sizes], small=4 if w > e else 2)

    # A block: attention and MLP, forward and backward.

    def _rotary(self) -> list[Operator]:
        half = self.tokens * (self.query + self.keys) / 2
        return self.traffic(half, 2.1, 3.1, 2.1, 3.1, 3) if self.shape.rotary else []

    def _attention(self, products: int, nbytes: float) -> Operator:
        pairs = self.tokens * self.layout.sequence / 2
        return 2 * products * pairs * self.query, nbytes

    def _bias(self, elements: float, present: bool) -> list[Operator]:
        return self.traffic(elements, 2) if present else []

    def block(self) -> Part:
        """One layer."""
        shape, tokens, outer, hidden = self.shape, self.tokens, self.outer, self.shape.hidden
        gated = shape.gated
        lse = 4 * tokens * shape.heads / self.layout.tp
        forward = self.seconds(
            [
                self.product(tokens, hidden, self.fused),
                *self._rotary(),
                self._attention(2, self.element * tokens * (self.fused + self.query) + lse),
                self.product(tokens, self.query, hidden),
                *self._bias(outer * hidden, shape.biased),
                *self.traffic(outer * hidden, 3),
                self.product(tokens, hidden, self.inner),
                *self.traffic(tokens * self.width, *((2, 3) if gated else (2,))),
                self.product(tokens, self.width, hidden),
                *self._bias(outer * hidden, shape.biased),
                *self.traffic(outer * hidden, 3),
            ]
        )
        down_input, down_weight = self._linear_backward(self.width, hidden)
        up_input, up_weight = self._linear_backward(hidden, self.inner)
        out_input, out_weight = self._linear_backward(self.query, hidden)
        fused_input, fused_weight = self._linear_backward(hidden, self.fused)
        activation = self.traffic(tokens * self.width, *((2, 3, 3, 4) if gated else (3,)))
        heads = [
            self._attention(5, self.element * tokens * (2 * self.fused + 2 * self.query) + lse),
            *self.traffic(tokens * self.fused, 2),
            *self._rotary(),
        ]
        sums = [
            *self._bias_sum(outer * hidden),
            *self._bias_sum(outer * hidden),
            *self._bias_sum(tokens * self.inner),
            *self._bias_sum(tokens * self.fused),
        ]
        residual = self.traffic(outer * hidden, 3, 3)
        backward = self.seconds(
            [
                *down_input, *down_weight, *activation, *up_input, *up_weight,
                *out_input, *out_weight, *heads, *fused_input, *fused_weight, *sums, *residual,
            ],
            small=2 + (4 if shape.biased else 0),
        )  # fmt: skip
        hidden_from = [self.seconds(up_input), self.seconds(fused_input)]
        hidden_by = [self.seconds(up_weight), self.seconds(fused_weight)]
        return Part(
            forward=forward + 2 * self._norm(),
            backward=backward + 2 * self._norm_backward(),
            forward_messages=2 * self._around(),
            backward_messages=sum(
                self._backward_messages(*pair) for pair in zip(hidden_from, hidden_by, strict=True)
            ),
        )

    def _bias_sum(self, elements: float) -> list[Operator]:
        return self.traffic(elements, 1) if self.shape.biased else []

    def _around(self) -> float:
        """Messages around a column- and a row-parallel product in forward."""
        nbytes = self.element * self.tokens * self.shape.hidden
        if self.layout.sequence_parallel:
            return self.message("all_gather", nbytes) + self.message("reduce_scatter", nbytes)
        return self.message("all_reduce", nbytes)

    def _backward_messages(self, input_gradient: float, weight_gradient: float) -> float:
        """What shows of them in backward: inputs are gathered again, and gradients summed, behind products."""
        nbytes = self.element * self.tokens * self.shape.hidden
        if not self.layout.sequence_parallel:
            return max(0.0, self.message("all_reduce", nbytes) - weight_gradient)
        gather, scatter = self.message("all_gather", nbytes), self.message("reduce_scatter", nbytes)
        return gather + max(0.0, gather - input_gradient) + max(0.0, scatter - weight_gradient)

    # The ends.

    def embedding(self) -> Part:
        """Rows of the table, and their gradients."""
        size = self.tokens * self.shape.hidden
        table = self.shape.embedding_parameters() / self.layout.tp
        positions = self.traffic(self.outer * self.shape.hidden, 2, 3) if self.shape.bound_rows else []
        added = self.shape.bound_rows * self.shape.hidden
        position_gradient = (
            [(0.0, self.element * (self.outer * self.shape.hidden + added)), *self._into_bucket(added)]
            if added
            else []
        )
        nbytes = self.element * size
        sums = "reduce_scatter" if self.layout.sequence_parallel else "all_reduce"
        zeroed = [(0.0, 2 * self.wide * table / self.layout.microbatches)]
        gather = self.message("all_gather", nbytes) if self.layout.sequence_parallel else 0.0
        widened = [(0.0, size * (self.element + self.wide))] if self.element < self.wide else []
        return Part(
            forward=self.seconds([*self.traffic(size, 2, 2), *positions], small=7),
            backward=self.seconds(
                [*self.traffic(size, 2), *zeroed, *widened, (0.0, 4 * self.wide * size), *position_gradient]
            ),
            forward_messages=self.message(sums, nbytes) if self.layout.tp > 1 else 0.0,
            backward_messages=gather,
        )

    def head(self) -> Part:
        """The last norm and the loss, whose logits come in chunks."""
        hidden, vocabulary = self.shape.hidden, self.vocabulary
        rows = max(1.0, min(self.tokens, max(LOGIT_ROWS, LOGIT_CHUNK // vocabulary)))
        chunks = math.ceil(self.tokens / rows)
        rows = self.tokens / chunks
        logits, e, w = rows * vocabulary, self.element, self.wide
        widened = [(0.0, logits * (e + w))] if w > e else []
        forward = [
            self.product(rows, hidden, vocabulary),
            *widened,
            *((0.0, logits * w * count) for count in (1, 2, 2, 1)),
        ]
        backward = [
            self.product(rows, hidden, vocabulary),
            *widened,
            *((0.0, logits * w * count) for count in (2, 2, 2, 2)),
            *widened,
            self.product(rows, vocabulary, hidden),
            self.product(vocabulary, rows, hidden),
            *(self._into_bucket(vocabulary * hidden) or [(0.0, 3 * w * vocabulary * hidden)]),
        ]
        nbytes = self.element * self.tokens * hidden
        parallel = self.layout.sequence_parallel
        gather = self.message("all_gather", nbytes) if parallel else 0.0
        small = self.message("all_reduce", 4 * self.tokens) + self.message("all_reduce", 8 * self.tokens)
        sums = self.message("reduce_scatter" if parallel else "all_reduce", nbytes)
        return Part(
            forward=chunks * self.seconds(forward, small=2) + self._norm() + self.seconds((), HEAD_SMALL[0]),
            backward=chunks * self.seconds(backward)
            + self._norm_backward()
            + self.seconds((), HEAD_SMALL[1]),
            forward_messages=gather + (small if self.layout.tp > 1 else 0.0),
            backward_messages=gather + (sums if self.layout.tp > 1 else 0.0),
        )

    def update(self, parameters: float) -> float:
        """Norm, clip, AdamW and the copy to 16 bits, of `parameters` that a rank owns."""
        buckets = max(1, round(parameters * self._shards() / BUCKET_ELEMENTS))
        copied = 8 if self.element < self.wide else 0
        nbytes = parameters * (UPDATE_BYTES * self.wide / 4 + copied)
        return self.seconds([(0.0, nbytes)], small=UPDATE_SMALL + 8 * buckets)

    def _shards(self) -> int:
        return self.layout.shards if self.layout.zero else 1


def again(layout: Layout, block: Part) -> Part:
    """What full recompute adds to a block's backward."""
    if layout.recompute != Recompute.FULL:
        return Part()
    return Part(backward=block.forward, backward_messages=block.forward_messages)
