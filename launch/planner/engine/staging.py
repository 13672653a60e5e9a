"""What Gloo's messages hold on CPUs besides tensors of the step: copies of gradient buckets whose sums are under way.

The process world composes two collectives of what Gloo has: an all-reduce of two ranks receives the other's
tensor beside its own, a reduce-scatter the others' shares beside the whole, and adds them to a new shard when it is
over. They come when a layer's gradients are whole, as activations go: what a step holds at most is the larger of its
beginning of backward (memory.py) and of the moments when buckets are reduced. Pages that nobody has written take
nothing, so a new buffer of gradients does not count at the beginning of backward.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from triaxis.launch.planner.engine.buckets import STEPS, UNDER_WAY
from triaxis.launch.planner.engine.memory import held_chunks
from triaxis.launch.planner.engine.pool import SETTLED
from triaxis.launch.planner.layout import ELEMENT_BYTES, Layout, Recompute

EXCHANGING_RANKS: Final = 2
"""Groups whose all-reduce is an exchange; Gloo's own, of more ranks, works in pieces."""
OWN_MAPPING_BYTES: Final = 1 << 20
"""Tensors from here on are given back when they are freed (engine/run/peak.py); smaller ones stay in the heap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket:
    """elements; last: the layers that backward has been through when its last gradient comes."""

    elements: float
    last: int


def process_bytes(
    layout: Layout,
    stage: int,
    layers: int,
    *,
    held: float,
    states: tuple[float, float, float],
    allocated: float,
) -> float:
    """What a rank's process holds on a CPU besides the `allocated` bytes of tensors: its context and Gloo's copies.

    held: activations that a layer keeps of one microbatch
    """
    context = layout.hardware.context_bytes
    assert context is not None, "measured by doctor, on CPUs"
    shape, element = layout.shape, ELEMENT_BYTES[layout.dtype]
    gradient = max(layout.software.gradient_bytes, element)
    # there SwiGLU keeps the gate's sigmoid in fp32 and fp64 (models/activation.py)
    sigmoid = element * layout.tokens * shape.ffn / layout.tp if shape.gated and element > 2 else 0.0
    again = layout.recompute == Recompute.FULL
    kept = sigmoid * (1 if again else layers * min(layout.microbatches, layout.pp - stage))
    activations = layers * (held if again else held + sigmoid)
    staged = staged_bytes(layout, stage, layers, gradient_bytes=gradient, activations=activations)
    # products of 16 bits are made in fp32: the head's gradient is the largest
    wide = 4 * shape.embedding_parameters() / layout.tp if element == 2 and stage == layout.pp - 1 else 0.0
    return context + max(kept + wide, sum(states) + staged - allocated)


def staged_bytes(
    layout: Layout, stage: int, layers: int, *, gradient_bytes: int, activations: float
) -> float:
    """Bytes besides model states at the highest moment of the reductions; 0 where nothing is copied.

    activations: of one microbatch through the stage's layers, which go layer by layer, unless they stay in the heap
    """
    shards = layout.shards
    if shards == 1 or not layout.trains_weights or (layout.zero == 0 and shards > EXCHANGING_RANKS):
        return 0.0
    buckets = sorted(_buckets(layout, stage, layers), key=lambda bucket: bucket.last)
    sizes = [gradient_bytes * bucket.elements for bucket in buckets]
    widest = ELEMENT_BYTES[layout.dtype] * layout.tokens * layout.shape.ffn / layout.tp
    stays = widest < OWN_MAPPING_BYTES
    left = [activations * (1.0 if stays else max(0.0, 1 - bucket.last / layers)) for bucket in buckets]
    if layout.zero < 2:
        going = max(held + here for held, here in zip(accumulate(sizes), left, strict=True))
        over = [
            sum(sizes[number:]) + size / shards for number, size in enumerate(sizes)
        ]  # one after the other
        return max(going, left[-1] + max(over)) if layout.zero else going
    return _sharded(layout, buckets, sizes, left)


def _sharded(
    layout: Layout, buckets: Sequence[_Bucket], sizes: Sequence[float], beside: Sequence[float]
) -> float:
    """ZeRO 2 and 3: buffers of a pool, of which two at most are under way when the next is reduced.

    beside: activations when each bucket is reduced
    """
    highest = made = 0.0
    free = Counter[float]()
    under_way: deque[int] = deque()
    held: dict[int, float] = {}  # by bucket: its copy, and a later microbatch's share before it is added
    gathered = [0.0] * len(sizes)
    if layout.zero == 3:  # a unit's parameters, and those of the one before it, which comes next
        following = [bucket.elements for bucket in buckets[1:]] + [0.0]
        element = ELEMENT_BYTES[layout.dtype]
        gathered = [
            element * (bucket.elements + after) for bucket, after in zip(buckets, following, strict=True)
        ]

    def finish(index: int) -> None:  # the sum is a new share before it is added
        nonlocal highest
        highest = max(highest, here + made + sum(held.values()) + sizes[index] / layout.shards)
        del held[index]
        free[sizes[index]] += 1

    for number in range(int(min(layout.microbatches, SETTLED))):
        for index, size in enumerate(sizes):
            here = beside[index] + gathered[index]
            if free[size]:
                free[size] -= 1
            else:
                made += size
            if index in under_way:
                under_way.remove(index)
                finish(index)
            held[index] = size + (size / layout.shards if number else 0.0)
            under_way.append(index)
            highest = max(highest, here + made + sum(held.values()))
            while len(under_way) > UNDER_WAY:
                finish(under_way.popleft())
    here = beside[-1]
    while under_way:
        finish(under_way.popleft())
    return highest


def _buckets(layout: Layout, stage: int, layers: int) -> list[_Bucket]:
    return [
        _Bucket(elements=bucket.elements, last=min(bucket.last // STEPS, layers))
        for chunk in held_chunks(layout, stage)
        for bucket in chunk.buckets
    ]
