"""The time of a step of other engines in closed form: what a rank computes, sends and waits for. Standard library only.

Products run at the hardware's measured share of its peak, everything else at its memory's rate; messages cost what
collectives.py says; the pipeline's bubble is (p - 1)/v of a microbatch. This engine's own steps are priced by what
it does (launch/planner/); these forms are held to published runs, and with them the hardware's figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from triaxis.launch.hardware.collectives import collective_seconds, send_seconds
from triaxis.launch.planner.price import StepTime
from triaxis.launch.published.layout import QUANTIZED, Recipe, Recompute

ALIGNED: Final = 8
"""Elements: heads of other sizes begin between 16-byte words, and tensor cores cannot read them."""
FLASH_BACKWARD: Final = 2.5  # backward of a fused attention kernel: five products for forward's two
_WIDE: Final = ("bf16", "fp16", "fp32")
STEP_SECONDS: Final = 0.008  # of a step outside all this: data, norm, logging
OPTIMIZER_BYTES: Final = (
    34  # moved for each parameter that a rank updates: fp32 states in and out, gradient, weight
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passes:
    """Seconds of a part for one microbatch: forward, backward and what is computed again before backward."""

    forward: float = 0.0
    backward: float = 0.0
    again: float = 0.0

    def __add__(self, other: _Passes) -> _Passes:
        return _Passes(
            forward=self.forward + other.forward,
            backward=self.backward + other.backward,
            again=self.again + other.again,
        )

    def times(self, count: float) -> _Passes:
        return _Passes(forward=self.forward * count, backward=self.backward * count, again=self.again * count)

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.again


def step_time(layout: Recipe) -> StepTime:
    """The step's time on the slowest pipeline stage."""
    shape, stages, chunks = layout.shape, layout.pp, layout.virtual_stages
    dense = _layer(layout, routed=False)
    routed = _layer(layout, routed=True) if shape.expert_layers else dense
    share = shape.expert_layers / shape.layers
    layer = dense.times(1 - share) + routed.times(share)
    head = _head(layout)
    counts = layout.stage_layers()
    per_stage, tail = max(
        ((count, head if rank == stages - 1 else _Passes()) for rank, count in enumerate(counts)),
        key=lambda stage: stage[0] * layer.total + stage[1].total,
    )
    longest = layer.times(per_stage) + tail
    mean = layer.times(shape.layers / stages) + head.times(1 / stages)
    tensor = _tensor(layout) * per_stage
    context = _context(layout, layer) * per_stage
    expert = _expert(layout) * per_stage * share
    count = layout.microbatches
    pipeline = _pipeline(layout) * count
    waiting = (stages - 1) / chunks
    bubble = waiting * (mean.total + tensor + context + expert + (_pipeline(layout) if chunks == 1 else 0.0))
    window = (longest.forward, longest.backward + longest.again)
    return StepTime(
        compute=count * (longest.forward + longest.backward),
        recompute=count * longest.again,
        tensor=count * tensor,
        context=count * context,
        expert=count * expert,
        pipeline=pipeline,
        bubble=bubble,
        data=_data(layout, window),
        optimizer=_optimizer(layout) + STEP_SECONDS,
        tokens=layout.global_batch * layout.sequence,
        gpus=layout.gpus,
    )


def _product(layout: Recipe, tokens: float, inputs: float, outputs: float, count: float = 1.0) -> float:
    """Seconds of `count` products (tokens × inputs)·(inputs × outputs): the longer of arithmetic and memory."""
    hardware = layout.hardware
    flops = 2 * tokens * inputs * outputs
    width = max(flops for name, flops in hardware.peak_flops.items() if name in _WIDE)
    # a faster unit needs a longer product to reach the same share of its peak
    share = hardware.matmul_fraction(flops * width / hardware.peak(layout.dtype))
    arithmetic = flops / (hardware.rate(layout.dtype) * share)
    memory = hardware.memory_seconds(2 * (tokens * inputs + inputs * outputs + tokens * outputs))
    return count * max(arithmetic, memory)


def _wide(layout: Recipe) -> str:
    """The dtype of what is not quantized: the layout's own, or 16 bits."""
    if layout.dtype not in QUANTIZED:
        return layout.dtype
    return "bf16" if "bf16" in layout.hardware.peak_flops else "fp16"


def _linear(layout: Recipe, tokens: float, inputs: float, outputs: float, count: float = 1.0) -> _Passes:
    """A weight's product, and in backward those for its input and its own gradient, accumulated in place."""
    forward = _product(layout, tokens, inputs, outputs, count)
    backward = _product(layout, tokens, outputs, inputs, count)
    if layout.trains_weights:
        accumulate = layout.hardware.memory_seconds(
            2 * layout.software.gradient_bytes * inputs * outputs * count
        )
        backward += _product(layout, inputs, tokens, outputs, count) + (
            accumulate if layout.microbatches > 1 else accumulate / 2
        )
    return _Passes(forward=forward, backward=backward)


def _layer(layout: Recipe, *, routed: bool) -> _Passes:
    """One layer of one microbatch on one rank, messages left out."""
    shape, tokens, tensor = layout.shape, layout.tokens, layout.tp
    products = _Passes()
    for index, (inputs, outputs) in enumerate(shape.attention_matmuls()):
        last = index == len(shape.attention_matmuls()) - 1
        low = shape.latent is not None and index == 0
        cut = 1 if low else tensor
        products += _linear(
            layout, tokens, inputs / cut if last else inputs, outputs if last else outputs / cut
        )
    mlp = _Passes()
    for inputs, outputs in shape.mlp_matmuls(shape.shared_ffn if routed else shape.ffn):
        wide = inputs == shape.hidden
        mlp += _linear(
            layout, tokens, inputs if wide else inputs / tensor, outputs / tensor if wide else outputs
        )
    products += mlp
    if routed:
        held = shape.experts / layout.ep
        rows = tokens * shape.chosen / tensor / held * layout.imbalance
        for inputs, outputs in shape.mlp_matmuls(shape.expert_ffn):
            products += _linear(layout, rows, inputs, outputs, held)
        products += _linear(layout, tokens / tensor, shape.hidden, shape.experts)
    attention = _attention(layout)
    elementwise = _elementwise(layout, routed=routed)
    whole = products + attention + elementwise
    host = [launches * layout.hardware.launch_overhead_s for launches in layout.software.layer_launches]
    whole = _Passes(forward=max(whole.forward, host[0]), backward=max(whole.backward, host[1]))
    core = layout.software.selective * whole.forward if layout.flash_attention else attention.forward
    again = {
        Recompute.NONE: 0.0,
        Recompute.SELECTIVE: core,
        Recompute.MLP: core + mlp.forward,
        Recompute.FULL: whole.forward,
    }[layout.recompute]
    return _Passes(forward=whole.forward, backward=whole.backward, again=again)


def _attention(layout: Recipe) -> _Passes:
    """Scores, softmax and values."""
    shape, hardware = layout.shape, layout.hardware
    scores, values = shape.attention_sizes
    pairs = layout.tokens * layout.sequence * shape.heads / layout.tp
    flops = 2 * pairs * (scores + values)
    wide = _wide(layout)
    if layout.flash_attention:
        reached = hardware.constants.attention_fraction
        if hardware.generation not in ("volta", "ampere"):
            reached *= layout.software.attention_kernel
        forward = 0.5 * flops / (hardware.rate(wide) * reached)
        return _Passes(forward=forward, backward=FLASH_BACKWARD * forward)
    on_ordinary_cores = (scores % ALIGNED or values % ALIGNED) and "fp32" in hardware.peak_flops
    rate = hardware.rate("fp32" if on_ordinary_cores else wide)
    arithmetic = flops / (rate * hardware.matmul_fraction(flops / 2))
    # two products write and read 2-byte scores; softmax and dropout read and write them and keep a mask
    forward = max(arithmetic, hardware.memory_seconds(4 * pairs)) + hardware.memory_seconds(9 * pairs)
    return _Passes(forward=forward, backward=2 * forward)


def _elementwise(layout: Recipe, *, routed: bool) -> _Passes:
    """Norms, residual additions, activations, rotary positions: memory traffic in bytes per token."""
    shape, tensor = layout.shape, layout.tp
    outer = shape.hidden / (tensor if layout.sequence_parallel else 1)
    traffic = (2 * 4 + 2 * 6) if layout.software.fused else (2 * 14 + 2 * 6)
    scores, values = shape.attention_sizes
    heads = (shape.heads * scores + shape.kv_heads * (scores + values)) / tensor
    width = shape.ffn if not routed else shape.shared_ffn + shape.chosen * shape.expert_ffn
    active = 2 * shape.mlp_matrices * width / tensor * (1.0 if layout.software.fused else 1.7)
    total = traffic * outer + 4 * heads + active
    if layout.dtype in QUANTIZED:  # casts of inputs and gradients, both ways round
        total += 4 * (2 * outer + heads + width / tensor)
    if routed:  # permutation, router and weighted sum
        total += (4 * 2 * shape.chosen + 8) * shape.hidden / tensor
    forward = layout.hardware.memory_seconds(total * layout.tokens)
    return _Passes(forward=forward, backward=2 * forward)


def _head(layout: Recipe) -> _Passes:
    """Last norm, logits and loss of the last stage."""
    shape = layout.shape
    logits = layout.tokens * shape.vocab / layout.tp
    product = _linear(layout, layout.tokens, shape.hidden, shape.vocab / layout.tp)
    loss = layout.hardware.memory_seconds(logits * layout.software.loss_bytes)
    return product + _Passes(forward=loss / 2, backward=loss / 2)


def _tensor(layout: Recipe) -> float:
    """Exposed seconds of one layer's messages over tp for one microbatch."""
    if layout.tp == 1:
        return 0.0
    nbytes = 2 * layout.tokens * layout.shape.hidden
    ranks, hardware = layout.group("tp"), layout.hardware
    passes = 2 if layout.recompute != Recompute.FULL else 3
    if layout.sequence_parallel:
        once = collective_seconds("all_gather", nbytes, ranks, hardware) + collective_seconds(
            "reduce_scatter", nbytes, ranks, hardware
        )
    else:
        once = collective_seconds("all_reduce", nbytes, ranks, hardware)
    shown = hardware.constants.exposed_fraction if layout.software.overlaps_tensor else 1.0
    return 2 * passes * once * shown


def _context(layout: Recipe, layer: _Passes) -> float:
    """Exposed seconds of one layer's ring of keys and values over cp."""
    if layout.cp == 1:
        return 0.0
    scores, values = layout.shape.attention_sizes
    local = 2 * layout.tokens * layout.shape.kv_heads * (scores + values) / layout.tp
    ranks = layout.group("cp")
    hop = send_seconds(local, ranks[0], ranks[-1], layout.hardware)
    whole = 3 * (layout.cp - 1) * hop
    attention = _attention(layout).total
    shown = layout.hardware.constants.exposed_fraction
    return max(0.0, whole - attention) + shown * min(whole, attention)


def _expert(layout: Recipe) -> float:
    """Seconds of one routed layer's four exchanges of tokens over ep."""
    shape = layout.shape
    if not shape.experts or layout.ep == 1:
        return 0.0
    tokens = 2 * layout.tokens / layout.tp * shape.hidden
    ranks, per_node = layout.group("ep"), layout.hardware.gpus_per_node
    nodes = -(-layout.ep // per_node)
    copies = float(shape.chosen)
    if layout.software.dispatches_once and nodes > 1:
        # one copy to each other node that any chosen expert is on, spread from there over the fast links
        reached = (nodes - 1) * (1 - (1 - 1 / nodes) ** shape.chosen)
        spread = layout.hardware.inter.bytes_per_s / layout.hardware.intra.bytes_per_s
        copies = max(reached * nodes / (nodes - 1), shape.chosen * spread)
    once = collective_seconds("all_to_all", tokens * copies * layout.imbalance, ranks, layout.hardware)
    return (4 if layout.recompute != Recompute.FULL else 6) * once


def _pipeline(layout: Recipe) -> float:
    """Exposed seconds of one microbatch's messages between stages."""
    if layout.pp == 1:
        return 0.0
    nbytes = 2 * layout.tokens * layout.shape.hidden / layout.tp  # each rank of tp sends its part
    ranks = layout.group("pp")
    boundary = layout.hardware.gpus_per_node
    crossing = next((rank for rank in ranks if rank >= boundary), ranks[1])
    once = send_seconds(nbytes, 0, crossing, layout.hardware)
    if not layout.sequence_parallel and layout.tp > 1:
        once += collective_seconds("all_gather", nbytes * layout.tp, layout.group("tp"), layout.hardware)
    if layout.virtual_stages > 1 and layout.software.overlaps_pipeline:
        return 2 * layout.virtual_stages * once * layout.hardware.constants.exposed_fraction
    return 2 * layout.virtual_stages * once


def _held(layout: Recipe) -> tuple[float, float]:
    """Parameters of the fullest stage on one rank: those shared by all replicas, and its experts."""
    shape = layout.shape
    routed = shape.expert_layers / layout.pp
    plain = (shape.layers - shape.expert_layers) / layout.pp
    dense = plain * shape.dense_parameters(routed=False) + routed * shape.dense_parameters(routed=True)
    ends = shape.embedding_parameters() * (2 if layout.pp == 1 and not shape.tied else 1)
    experts = routed * shape.expert_parameters() / layout.ep
    return (dense + ends) / layout.tp, experts


def _data(layout: Recipe, window: tuple[float, float]) -> float:
    """Exposed seconds of summing gradients and gathering parameters over dp.

    window: seconds of one microbatch's forward and backward, behind which they may hide
    """
    dense, experts = _held(layout)
    if not layout.trains_weights:
        return 0.0
    hardware = layout.hardware
    forward, backward = window
    shown = hardware.constants.exposed_fraction

    def exposed(communication: float, computation: float) -> float:
        if not layout.software.overlaps_gradients:
            return communication
        return max(0.0, communication - computation) + shown * min(communication, computation)

    def over(operation: str, bytes_each: float) -> float:
        total = 0.0
        for parameters, replicas, shards in (
            (dense, layout.replicas, layout.shards),
            (experts, layout.expert_replicas, min(layout.shards, layout.expert_replicas)),
        ):
            if parameters and replicas > 1:
                size = parameters * bytes_each
                ranks = layout.group("dp", shards)
                total += collective_seconds(operation, size, ranks, hardware)
                if operation == "reduce_scatter" and shards < replicas:
                    across = layout.group("dp", replicas)[::shards]
                    total += collective_seconds("all_reduce", size / shards, across, hardware)
        return total

    weights, gradients = 2.0, float(layout.software.reduce_bytes)
    count = layout.microbatches
    if layout.zero == 0:
        whole = 0.0
        for parameters, replicas in ((dense, layout.replicas), (experts, layout.expert_replicas)):
            if parameters and replicas > 1:
                ranks = layout.group("dp", replicas)
                whole += collective_seconds("all_reduce", parameters * gradients, ranks, hardware)
        return exposed(whole, backward)
    if layout.zero < 3:
        rounds = count if layout.zero == 2 and layout.pp == 1 else 1
        return rounds * exposed(over("reduce_scatter", gradients), backward) + exposed(
            over("all_gather", weights), forward
        )
    gather = over("all_gather", weights)
    reduce = over("reduce_scatter", gradients)
    return count * (exposed(gather, forward) + exposed(gather + reduce, backward))


def _optimizer(layout: Recipe) -> float:
    """Seconds of the update of what a rank owns, memory-bound."""
    dense, experts = _held(layout)
    if not layout.trains_weights:
        return 0.0
    if layout.zero:
        dense /= layout.shards
        experts /= min(layout.shards, layout.expert_replicas)
    return layout.hardware.memory_seconds(OPTIMIZER_BYTES * (dense + experts))
