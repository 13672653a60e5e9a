"""What Gloo's messages hold on CPUs besides tensors of the step: copies of gradient buckets whose sums are under way.

`parallel/process_group.py` composes two collectives of what Gloo has: an all-reduce of two ranks receives the other's
tensor beside its own, a reduce-scatter the others' shares beside the whole, and adds them to a new shard when it is
over. They come when a layer's gradients are whole, as activations go: what a step holds at most is the larger of its
beginning of backward (memory.py) and of the moments when buckets are reduced. Pages that nobody has written take
nothing, so a new buffer of gradients does not count at the beginning of backward.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from triaxis.launch.planner.buckets import PASSES, UNDER_WAY, Bucket, Parameter, fill
from triaxis.launch.planner.layout import Layout
from triaxis.launch.planner.operators import ELEMENT_BYTES

EXCHANGING_RANKS: Final = 2
"""Groups whose all-reduce is an exchange; Gloo's own, of more ranks, works in pieces."""


def staged_bytes(
    layout: Layout, stage: int, layers: int, *, gradient_bytes: int, activations: float
) -> float:
    """Bytes besides model states at the highest moment of the reductions; 0 where nothing is copied.

    activations: of one microbatch through the stage's layers, which go layer by layer
    """
    shards = layout.shards
    if shards == 1 or not layout.trains_weights or (layout.zero == 0 and shards > EXCHANGING_RANKS):
        return 0.0
    buckets = sorted(_buckets(layout, stage, layers), key=lambda bucket: bucket.last)
    sizes = [gradient_bytes * bucket.elements for bucket in buckets]
    left = [activations * min(1.0, max(0.0, 1 - bucket.last / layers)) for bucket in buckets]
    if layout.zero < 2:
        copies = list(accumulate(sizes))
        adding = sizes[0] / shards if layout.zero else 0.0
        return max(*(held + here for held, here in zip(copies, left, strict=True)), copies[-1] + adding)
    return _sharded(layout, buckets, sizes, left)


def _sharded(
    layout: Layout, buckets: Sequence[Bucket], sizes: Sequence[float], beside: Sequence[float]
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

    def finish(index: int) -> None:
        nonlocal highest
        highest = max(highest, here + made + sum(held.values()) + sizes[index] / layout.shards)
        del held[index]
        free[sizes[index]] += 1

    for number in range(int(min(layout.microbatches, PASSES))):
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
    return highest


def _buckets(layout: Layout, stage: int, layers: int) -> list[Bucket]:
    """A stage's buckets in the order of its parameters: times in layers since its backward began."""
    shape, tensor = layout.shape, layout.tp
    first, last = stage == 0, stage == layout.pp - 1
    table = shape.embedding_parameters() / tensor
    inputs = [inside * outside / tensor for inside, outside in shape.attention_matmuls()]
    inputs += [inside * outside / tensor for inside, outside in shape.mlp_matmuls(shape.ffn)]
    units = [[Parameter(elements=shape.hidden, time=0)]] if last else []
    if first:
        units.append([Parameter(elements=table, time=layers, until=layers)])
    units += [
        [Parameter(elements=size, time=layers - layer) for size in (shape.hidden, shape.hidden, *inputs)]
        for layer in range(layers)
    ]
    if last and not (shape.tied and first):
        units.append([Parameter(elements=table, time=0)])
    if layout.zero == 3:
        return [bucket for unit in units for bucket in fill(unit)]
    return fill([parameter for unit in units for parameter in unit])


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
    gradient = max(layout.software.gradient_bytes, ELEMENT_BYTES[layout.dtype])
    staged = staged_bytes(layout, stage, layers, gradient_bytes=gradient, activations=layers * held)
    return context + max(0.0, sum(states) + staged - allocated)
