"""This engine's step operator by operator, in closed form: what the trace of the engine itself prices in full.

An operator takes as long as its products or its memory traffic, whichever is longer, and its launch; a message that
is waited for where it is issued adds its whole time. The lists follow models/ and parallel/ as they run on tensors of
a device, and a test holds them to the simulation.

Sizes: T tokens of a microbatch, O features of the fused q, k and v here, F of the MLP here, V rows of the vocabulary
here; `outer`, tokens between tensor-parallel parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from triaxis.launch.hardware.collectives import collective_seconds
from triaxis.launch.planner.layout import ELEMENT_BYTES, Layout, logit_rows

HEAD_SMALL: Final = (23, 5)  # launches of the loss that depend on no size, forward and backward
START_SMALL: Final = 12  # launches of a step before its first microbatch, and of clipping
NORM_SMALL: Final = 10  # of the norm

Operator = tuple[float, float]
"""FLOPs, bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Seconds of a part of the model for one microbatch: computing, and waiting for tensor-parallel messages.

    steps: of backward with its messages, up to each parameter's gradient (buckets.py)
    again: of forward, what recompute repeats: all up to the last tensor that is kept
    """

    forward: float
    backward: float
    forward_messages: float
    steps: tuple[float, ...]
    again: float = 0.0


class Operators:
    """The prices of one layout's parts."""

    def __init__(self, layout: Layout) -> None:
        shape, tensor = layout.shape, layout.tp
        self.layout, self.shape, self.hardware = layout, shape, layout.hardware
        self.element = ELEMENT_BYTES[layout.dtype]
        self.wide = max(self.element, 4)
        self.tokens = layout.tokens
        self.outer = layout.tokens / (tensor if layout.sequence_parallel else 1)
        self.query, self.keys = shape.attention_features(tensor)
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

    def _input_gradient(self, inputs: float, outputs: float) -> list[Operator]:
        return [self.product(self.tokens, outputs, inputs)]

    def _weight_gradient(self, inputs: float, outputs: float) -> list[Operator]:
        return [self.product(inputs, self.tokens, outputs), *self._into_bucket(inputs * outputs)]

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
            ]
        )
        added = [*self._bias(outer * hidden, shape.biased), *self.traffic(outer * hidden, 3)]
        activation = self.traffic(tokens * self.width, *((2, 3, 3, 4) if gated else (3,)))
        heads = [
            self._attention(5, self.element * tokens * (2 * self.fused + 2 * self.query) + lse),
            *self.traffic(tokens * self.fused, 2),
            *self._rotary(),
        ]
        norm = self._norm_backward() + self.seconds(self.traffic(outer * hidden, 3))
        small = 1 if shape.biased else 0
        down = self._row_backward(self.width)
        up, up_messages = self._column_backward(self.inner)
        output = self._row_backward(self.query)
        fused, fused_messages = self._column_backward(self.fused)
        gather = self._gathered()
        computing = (
            down + self.seconds((), small),
            up + self.seconds(activation, small),
            norm,
            output + self.seconds((), small),
            fused + self.seconds(heads, small),
            norm,
        )
        messages = (gather, up_messages, 0.0, gather, fused_messages, 0.0)
        return Part(
            forward=forward + 2 * self._norm() + self.seconds(added),
            again=forward + 2 * self._norm(),
            backward=sum(computing),
            forward_messages=2 * self._around(),
            steps=tuple(map(sum, zip(computing, messages, strict=True))),
        )

    def _row_backward(self, inputs: float) -> float:
        """Of a row-parallel layer, its gradient gathered."""
        hidden = self.shape.hidden
        products = [*self._input_gradient(inputs, hidden), *self._weight_gradient(inputs, hidden)]
        return self.seconds([*self._bias_sum(self.outer * hidden), *products])

    def _column_backward(self, outputs: float) -> tuple[float, float]:
        """Of a column-parallel layer: computing, and what shows of messages that run behind its products: the input
        is gathered again, and its gradient summed."""
        hidden = self.shape.hidden
        first = self.seconds(self._input_gradient(hidden, outputs))
        second = self.seconds(self._weight_gradient(hidden, outputs))
        computing = first + second + self.seconds(self._bias_sum(self.tokens * outputs))
        nbytes = self.element * self.tokens * hidden
        if not self.layout.sequence_parallel:
            return computing, max(0.0, self.message("all_reduce", nbytes) - second)
        gather, scatter = self._gathered(), self.message("reduce_scatter", nbytes)
        return computing, max(0.0, gather - first) + max(0.0, scatter - second)

    def _gathered(self) -> float:
        """Seconds to gather a microbatch's tokens over tp, where they are cut."""
        if not self.layout.sequence_parallel:
            return 0.0
        return self.message("all_gather", self.element * self.tokens * self.shape.hidden)

    def _bias_sum(self, elements: float) -> list[Operator]:
        return self.traffic(elements, 1) if self.shape.biased else []

    def _around(self) -> float:
        """Messages around a column- and a row-parallel product in forward."""
        nbytes = self.element * self.tokens * self.shape.hidden
        if self.layout.sequence_parallel:
            return self.message("all_gather", nbytes) + self.message("reduce_scatter", nbytes)
        return self.message("all_reduce", nbytes)

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
        sums = "reduce_scatter" if self.layout.sequence_parallel else "all_reduce"
        often = 1 if self.layout.zero >= 2 and self.layout.shards > 1 else self.layout.microbatches
        zeroed = self.hardware.memory_seconds(2 * self.wide * table) / often  # where sums begin anew
        widened = [(0.0, size * (self.element + self.wide))] if self.element < self.wide else []
        computing = (
            self.seconds(position_gradient),
            zeroed + self.seconds([*self.traffic(size, 2), *widened, (0.0, 2 * self.wide * size)]),
        )
        gather = self._gathered()
        return Part(
            forward=self.seconds([*self.traffic(size, 2, 2), *positions], small=5),
            backward=sum(computing),
            forward_messages=self.message(sums, self.element * size),
            steps=(computing[0], computing[1] + gather),
        )

    def head(self) -> Part:
        """The last norm and the loss, whose logits come in chunks."""
        hidden, vocabulary = self.shape.hidden, self.vocabulary
        rows = logit_rows(self.tokens, vocabulary)
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
        gather = self._gathered()
        small = self.message("all_reduce", 4 * self.tokens) + self.message("all_reduce", 8 * self.tokens)
        sums = self.message("reduce_scatter" if self.layout.sequence_parallel else "all_reduce", nbytes)
        computing = (
            chunks * self.seconds(backward) + self.seconds((), HEAD_SMALL[1]),
            self._norm_backward(),
        )
        return Part(
            forward=chunks * self.seconds(forward, small=2) + self._norm() + self.seconds((), HEAD_SMALL[0]),
            backward=sum(computing),
            forward_messages=gather + small,
            steps=(computing[0] + gather + sums, computing[1]),
        )

    # The step around the microbatches.

    def start(self, microbatches: int, ranks: int) -> float:
        """Before the first microbatch: the tokens are counted, and all ranks agree on the scale and on the norm."""
        agreed = [collective_seconds("all_reduce", nbytes, range(ranks), self.hardware) for nbytes in (8, 16)]
        return self.seconds((), START_SMALL + 2 * microbatches) + sum(agreed)

    def summed(self, elements: float, ranks: Sequence[int]) -> float:
        """Gradients gathered in one tensor, summed over further ranks, and put back."""
        if not elements:
            return 0.0
        nbytes = self.wide * elements
        message = collective_seconds("all_reduce", nbytes, ranks, self.hardware)
        return message + self.seconds([(0.0, 2 * nbytes), (0.0, 3 * nbytes)])

    def norm(self, elements: float) -> float:
        """This rank's part of the gradients' norm."""
        return self.seconds([(0.0, self.wide * elements)], small=NORM_SMALL)

    def update(self, parameters: float, buckets: int) -> tuple[float, float]:
        """Clip and AdamW of what a rank owns in so many buckets, and their copies to 16 bits."""
        launch = self.hardware.launch_overhead_s
        update = self.hardware.memory_seconds(10 * self.wide * parameters) + 5 * buckets * launch
        if self.element == self.wide:
            return update, 0.0
        return update, self.hardware.memory_seconds(8 * parameters) + buckets * launch
