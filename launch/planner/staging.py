"""What Gloo's messages hold on CPUs besides tensors of the step: copies of gradient buckets whose sums are under way.

The process world composes two collectives of what Gloo has: an all-reduce of two ranks receives the other's
tensor beside its own, a reduce-scatter the others' shares beside the whole, and adds them to a new shard when it is
over. They come when a layer's gradients are whole, as activations go: what a step holds at most is the larger of its
beginning of backward (held.py) and of the moments when buckets are reduced. Pages that nobody has written take
nothing, so a new buffer of gradients does not count at the beginning of backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from triaxis.launch.planner.chunks import PIECES, Bucket, Chunk, unit_of
from triaxis.launch.planner.layout import Layout
from triaxis.launch.planner.pool import SETTLED
from triaxis.launch.planner.profiles import Profile, apart, profile
from triaxis.parallel.replicas.cut import Sharding
from triaxis.parallel.replicas.limits import REDUCTIONS_UNDER_WAY
from triaxis.parallel.replicas.reductions import ReductionQueue

EXCHANGING_RANKS: Final = 2
"""Groups whose all-reduce is an exchange; Gloo's own, of more ranks, works in pieces."""
OWN_MAPPING_BYTES: Final = 1 << 20
"""Tensors from here on are given back when they are freed (engine/run/peak.py); smaller ones stay in the heap."""


def process_bytes(
    layout: Layout, stage: int, chunks: Sequence[Chunk], *, states: float, allocated: float
) -> float:
    """What a rank's process holds on a CPU besides the `allocated` bytes of tensors: its context and Gloo's copies."""
    context = layout.hardware.context_bytes
    assert context is not None, "measured by doctor, on CPUs"
    plan = layout.plan
    prices = profile(apart(plan, layout.pp), layout.tp, layout.hardware)
    # products of 16 bits are made in fp32: the head's gradient is the largest
    narrow = plan.dtype.element_bytes == 2 and stage == layout.pp - 1
    wide = 4 * plan.model.embedding_parameters() / layout.tp if narrow else 0.0
    return context + max(wide, states + _staged_bytes(layout, chunks, prices) - allocated)


def _staged_bytes(layout: Layout, chunks: Sequence[Chunk], prices: Profile) -> float:
    """Bytes besides model states at the highest moment of the reductions; 0 where nothing is copied."""
    shards = layout.dp
    sharding = Sharding.of(layout.zero, shards)
    if shards == 1 or (not sharding.states and shards > EXCHANGING_RANKS):
        return 0.0
    held = [(bucket, chunk) for chunk in chunks for bucket in chunk.completions]
    sizes = [float(layout.plan.summed.element_bytes * bucket.elements) for bucket, _ in held]
    left = [_beside(layout, bucket, chunk, prices) for bucket, chunk in held]
    if not sharding.gradients:
        going = max(before + here for before, here in zip(accumulate(sizes), left, strict=True))
        over = [sum(sizes[number:]) + size / shards for number, size in enumerate(sizes)]  # one by one
        return max(going, left[-1] + max(over)) if sharding.states else going
    gathered = [0.0] * len(held)
    if sharding.parameters:  # a unit's parameters, and those of the one before it, which comes next
        weight = layout.plan.dtype.element_bytes
        gathered = [weight * chunk.gathered(bucket.whole // PIECES, bucket.whole) for bucket, chunk in held]
    return _sharded(layout, sizes, [one + other for one, other in zip(left, gathered, strict=True)])


def _beside(layout: Layout, bucket: Bucket, chunk: Chunk, prices: Profile) -> float:
    """Activations of one microbatch that are there when a bucket is whole. They go layer by layer, unless they are so
    small that they stay in the heap."""
    plan = layout.plan
    place = bucket.whole // PIECES
    layers = [unit_of(prices, name).forward for name in chunk.units if name in prices.layers]
    stays = max((layer.height for layer in layers), default=0.0) < OWN_MAPPING_BYTES
    kept = sum(layer.growth for layer in layers)
    if stays or not layers:
        return kept
    gone = min(len(layers), place + (0 if chunk.last else 1))
    return kept * max(0.0, 1 - gone / len(layers)) if plan.microbatches else kept


def _sharded(layout: Layout, sizes: Sequence[float], beside: Sequence[float]) -> float:
    """ZeRO 2 and 3: buffers of a pool, and copies of those under way. beside: what else is there at each reduction."""
    highest = made = 0.0
    free = Counter[float]()
    queue = ReductionQueue[int](REDUCTIONS_UNDER_WAY)
    held: dict[int, float] = {}  # by bucket: its copy, and a later microbatch's share before it is added

    def finish(index: int, here: float) -> None:  # the sum is a new share before it is added
        nonlocal highest
        highest = max(highest, here + made + sum(held.values()) + sizes[index] / layout.dp)
        del held[index]
        free[sizes[index]] += 1

    for number in range(min(layout.microbatches, SETTLED)):
        for index, (size, here) in enumerate(zip(sizes, beside, strict=True)):
            if free[size]:
                free[size] -= 1
            else:
                made += size
            if index in queue:
                finish(index, here)
            held[index] = size + (size / layout.dp if number else 0.0)
            highest = max(highest, here + made + sum(held.values()))
            for earlier in queue.issue(index):
                finish(earlier, here)
    for index in queue.drain():
        finish(index, beside[-1])
    return highest
