"""What a rank's process holds on a CPU besides tensors of the step: what it and its neighbours give each other.

Ranks of one machine read each other's arenas (parallel/worlds/shared_memory.py), whose regions are kept: a process has
in memory what it gave and what it has read, of the largest collectives that can be under way at once. Besides, what a
step holds at most is the larger of its beginning of backward (held.py) and of the moments when buckets are reduced.
Pages that nobody has written take nothing, so a new buffer of gradients does not count at the beginning of backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from triaxis.engine.plan import Recompute
from triaxis.launch.planner.chunks import PIECES, Bucket, Chunk, unit_of
from triaxis.launch.planner.layout import Layout
from triaxis.launch.planner.pool import SETTLED
from triaxis.launch.planner.profiles import Profile, apart, profile
from triaxis.parallel.replicas.cut import Sharding
from triaxis.parallel.replicas.limits import REDUCTIONS_UNDER_WAY
from triaxis.parallel.replicas.reductions import ReductionQueue
from triaxis.parallel.worlds.communicators import UNDER_WAY

OWN_MAPPING_BYTES: Final = 1 << 20
"""Tensors from here on are given back when they are freed (engine/run/peak.py); smaller ones stay in the heap."""
COMPILER_BYTES: Final = 75e6
"""torch.utils.checkpoint, which runs a block's forward again, loads torch's compiler (torch 2.13)."""
KEPT_REGIONS: Final = 2
"""Of one size in a group whose members wait for each other: one is read while the next is written."""


def process_bytes(
    layout: Layout, stage: int, chunks: Sequence[Chunk], *, states: float, allocated: float
) -> float:
    """What a rank's process holds on a CPU besides the `allocated` bytes of tensors: its context, arenas, sums."""
    context = layout.hardware.context_bytes
    assert context is not None, "measured by doctor, on CPUs"
    plan = layout.plan
    context += COMPILER_BYTES if plan.recompute is not Recompute.NONE else 0.0
    prices = profile(apart(plan, layout.pp), layout.tp, layout.hardware)
    # products of 16 bits are made in fp32: the head's gradient is the largest
    narrow = plan.dtype.element_bytes == 2 and stage == layout.pp - 1
    wide = 4 * plan.model.embedding_parameters() / layout.tp if narrow else 0.0
    staged = states + _staged_bytes(layout, chunks, prices) - allocated
    return context + max(wide, staged) + _arena_bytes(layout, chunks, prices)


def _arena_bytes(layout: Layout, chunks: Sequence[Chunk], prices: Profile) -> float:
    """Regions that this rank has written to, and those of others that it has read."""
    plan, shards = layout.plan, layout.dp
    passed = KEPT_REGIONS * layout.tp * prices.hidden_bytes if layout.tp > 1 else 0.0
    if shards == 1:
        return passed
    sharding = Sharding.of(layout.zero, shards)
    elements = [bucket.elements for chunk in chunks for bucket in chunk.completions]
    most = sum(sorted(elements)[-UNDER_WAY - 1 :])
    reduced = plan.summed.element_bytes * most * (2 * (shards - 1) / shards if sharding.states else shards)
    gathered = plan.dtype.element_bytes * most if sharding.states else 0.0
    return passed + (max(reduced, gathered) if shards == 2 else reduced + gathered)


def _staged_bytes(layout: Layout, chunks: Sequence[Chunk], prices: Profile) -> float:
    """Bytes besides model states at the highest moment of the reductions; 0 where nothing is copied."""
    shards = layout.dp
    sharding = Sharding.of(layout.zero, shards)
    if shards == 1 or not sharding.states:
        return 0.0
    held = [(bucket, chunk) for chunk in chunks for bucket in chunk.completions]
    sizes = [float(layout.plan.summed.element_bytes * bucket.elements) for bucket, _ in held]
    left = [_beside(layout, bucket, chunk, prices) for bucket, chunk in held]
    if not sharding.gradients:
        return left[-1] + sum(sizes) / shards  # the shares of all, when the last one is over
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
    held: dict[int, float] = {}  # by bucket: a later microbatch's share before it is added

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
            held[index] = size / layout.dp if number else 0.0
            highest = max(highest, here + made + sum(held.values()))
            for earlier in queue.issue(index):
                finish(earlier, here)
    for index in queue.drain():
        finish(index, beside[-1])
    return highest
