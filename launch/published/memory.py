"""The memory of the fullest rank of other engines in closed form, by category. No torch.

Model states follow the software's own accounts (layout.Software); activations are what the layers keep for backward,
part by part, times what the schedule holds at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from triaxis.launch.hardware.device import context_bytes
from triaxis.launch.planner.price import Memory
from triaxis.launch.published.layout import (
    ELEMENT_BYTES,
    MEGATRON,
    QUANTIZED,
    Recipe,
    Recompute,
    Software,
)

BUCKETS_UNDER_WAY: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A rank's bytes at its peak besides model states."""

    activations: float
    logits: float
    buffers: float
    temporaries: float

    @property
    def total(self) -> float:
        return self.activations + self.logits + self.buffers + self.temporaries


def memory(layout: Recipe) -> Memory:
    """The memory of the fullest pipeline stage's ranks."""
    counts = layout.stage_layers()
    candidates = sorted({0, min(1, layout.pp - 1), layout.pp - 1})
    return max((stage_memory(layout, stage, counts[stage]) for stage in candidates), key=lambda it: it.total)


def stage_memory(layout: Recipe, stage: int, layers: int) -> Memory:
    """The memory of a rank of pipeline stage `stage`, which holds `layers` layers."""
    software = layout.software
    states, besides = _stage(layout, stage, layers)
    allocated = sum(states) + besides.total
    groups = layout.tp, layout.pp, layout.replicas, layout.ep
    return Memory(
        parameters=states[0],
        gradients=states[1],
        optimizer=states[2],
        activations=besides.activations,
        logits=besides.logits,
        buffers=besides.buffers,
        temporaries=besides.temporaries,
        fragments=_fragmented(layout) * allocated,
        context=context_bytes(groups)
        + software.libraries_bytes
        + (layout.replicas > 1) * software.bucket_bytes,
        stage=stage,
    )


def _kept_by_layer(layout: Recipe, stage: int, layers: int) -> float:
    """Bytes of one microbatch that a layer of the stage keeps for backward, without recompute."""
    return layer_activations(layout, _routed(layout, stage, layers) / layers)


def _held(layout: Recipe, stage: int, layers: int) -> float:
    """Bytes of one microbatch between a layer's forward and backward."""
    inputs = ELEMENT_BYTES[layout.dtype] * layout.tokens * layout.shape.hidden / _outer(layout)
    if layout.recompute in (Recompute.SELECTIVE, Recompute.MLP) and layout.flash_attention:
        return max(_kept_by_layer(layout, stage, layers) * layout.software.selective_kept, inputs)
    return inputs if layout.recompute == Recompute.FULL else _kept_by_layer(layout, stage, layers)


def _stage(layout: Recipe, stage: int, layers: int) -> tuple[tuple[float, float, float], _Held]:
    """Model states and what another engine holds besides."""
    shape, software = layout.shape, layout.software
    routed = _routed(layout, stage, layers)
    last = stage == layout.pp - 1
    ends = int(stage == 0) + int(last)
    if shape.tied and layout.pp == 1:
        ends = 1
    plain_layer = shape.dense_parameters(routed=False) / layout.tp
    routed_layer = shape.dense_parameters(routed=True) / layout.tp
    expert_layer = shape.expert_parameters() / layout.ep
    dense_layer = routed_layer if routed else plain_layer
    dense = (layers - routed) * plain_layer + routed * routed_layer
    dense += ends * shape.embedding_parameters() / layout.tp
    if stage == 0:
        dense += shape.bound_rows * shape.hidden
    expert = routed * expert_layer
    states = _states(layout, dense, expert)
    held = _held(layout, stage, layers)
    working = _layer_temporaries(layout)
    if layout.recompute == Recompute.FULL:
        working += _kept_by_layer(layout, stage, layers)
    in_flight = layers_in_flight(layout, stage, layers)
    activations = in_flight * held * (1 - layout.offloaded)
    if layout.offloaded:  # the chunk in use is here all the same
        activations += min(in_flight, layers / layout.virtual_stages) * held * layout.offloaded
    spare = software.spare_gradients * dense_layer
    logits = _logits(layout) if last else 0.0
    head_spare = software.spare_gradients * shape.embedding_parameters() / layout.tp if last else 0.0
    buffers = _buffers(layout, dense_layer + (expert_layer if routed else 0.0))
    temporaries = spare + (max(working - logits, head_spare) if last else working)
    updated = software.update_bytes * states[2] / software.state_bytes
    temporaries = max(temporaries, updated - activations - logits - buffers)
    return states, _Held(activations=activations, logits=logits, buffers=buffers, temporaries=temporaries)


def _fragmented(layout: Recipe) -> float:
    """Share of what tensors take that the allocator holds besides."""
    software = layout.software
    gathers = layout.zero == 3 and layout.shards > 1
    return (
        software.fragmented
        + (layout.pp > 1) * software.fragmented_by_pipeline
        + gathers * software.fragmented_by_gathering
    )


def _outer(layout: Recipe) -> int:
    """Over how many ranks tokens are cut between tensor-parallel parts."""
    return layout.tp if layout.sequence_parallel else 1


def _routed(layout: Recipe, stage: int, layers: int) -> int:
    """How many of a stage's layers have experts: all but the model's first few."""
    shape = layout.shape
    if not shape.experts:
        return 0
    if layout.virtual_stages > 1:  # the first few are in the first chunks of the first ranks
        first = layers // layout.virtual_stages
        plain = max(0, min(first, shape.dense_layers - stage * first))
    else:
        plain = max(0, min(layers, shape.dense_layers - stage * layers))
    return layers - plain


def state_bytes(
    parameters: float, *, zero: int, shards: int, software: Software = MEGATRON, dtype: str = "bf16"
) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer states of one rank that holds `parameters` before sharding.

    In fp32 and fp64 the weights are their own master copy.
    """
    weight, gradient, state = software.weight_bytes, software.gradient_bytes, software.state_bytes
    if dtype in ("fp32", "fp64"):
        weight = gradient = ELEMENT_BYTES[dtype]
        state = 2 * weight
    return (
        weight * parameters / (shards if zero >= 3 else 1),
        gradient * parameters / (shards if zero >= 2 else 1),
        state * parameters / (shards if zero >= 1 else 1),
    )


def _states(layout: Recipe, dense: float, expert: float) -> tuple[float, float, float]:
    if layout.states_on_host:
        return 0.0, 0.0, 0.0
    parts = [
        state_bytes(held, zero=layout.zero, shards=shards, software=layout.software, dtype=layout.dtype)
        for held, shards in ((dense, layout.shards), (expert, min(layout.shards, layout.expert_replicas)))
    ]
    weights, gradients, optimizer = (sum(kind) for kind in zip(*parts, strict=True))
    return (weights, gradients, optimizer) if layout.trains_weights else (weights, 0.0, 0.0)


def layers_in_flight(layout: Recipe, stage: int, layers: int) -> float:
    """Layers × microbatches whose activations a rank of `stage` holds at its peak."""
    count, stages, chunks = layout.microbatches, layout.pp, layout.virtual_stages
    if layout.schedule == "gpipe":
        return layers * count
    if chunks == 1:
        return layers * min(count, stages - stage)
    return layers / chunks * min(count * chunks, (chunks - 1) * stages + 2 * (stages - stage - 1) + 1)


def layer_activations(layout: Recipe, share: float = 0.0) -> float:
    """Bytes that a layer keeps for backward of one microbatch on one rank, without recompute.

    share: of the layers, those with experts; the result is their mean
    """
    plain = _kept(layout, routed=False) if share < 1 else 0.0
    return (1 - share) * plain + (share * _kept(layout, routed=True) if share else 0.0)


def _kept(layout: Recipe, *, routed: bool) -> float:
    shape, tensor, outer = layout.shape, layout.tp, _outer(layout)
    element = ELEMENT_BYTES[layout.dtype]
    eager = layout.software.eager
    scores, values = shape.attention_sizes
    heads, kv_heads = shape.heads / tensor, max(shape.kv_heads / tensor, 1.0)
    # inputs of products are kept as these take them
    product = 1 if layout.dtype in QUANTIZED and layout.software.keeps_quantized else element
    core_again = layout.recompute in (Recompute.SELECTIVE, Recompute.MLP)
    norms = (12 + 4) * element / 2 if eager else 2 * element + 2 * product  # inputs and outputs of both
    per_token = norms * shape.hidden / outer
    if shape.latent is None:
        per_token += element * (heads * scores + kv_heads * (scores + values))
    else:
        low = shape.latent
        per_token += element * heads * (2 * scores + values) + 2 * element * (low.q_rank + low.kv_rank)
    outputs = product if core_again and product < element else element * layout.software.attention_outputs
    per_token += outputs * heads * values
    if layout.flash_attention:
        per_token += 4 * heads
    else:  # two dropout masks of the hidden state; scores after softmax and dropout, and their mask
        per_token += 2 * shape.hidden / outer
        if not core_again:
            per_token += (2 * element + 1) * heads * layout.sequence
    if routed:
        extra = 4 * shape.hidden + 2 * shape.chosen * element * shape.hidden
        experts = (2 if not shape.gated else 3) * element * shape.chosen * shape.expert_ffn
        shared = shape.mlp_matrices * element * shape.shared_ffn
        per_token += (extra + experts + shared) / tensor
    elif layout.recompute != Recompute.MLP:
        inner = element * (shape.mlp_matrices - 1 + (1 if eager and shape.gated else 0)) + product
        per_token += inner * shape.ffn / tensor
    return per_token * layout.tokens


def _layer_temporaries(layout: Recipe) -> float:
    """Gradients of one layer's widest part in backward, and the tokens it gathers over tp."""
    shape = layout.shape
    element = ELEMENT_BYTES[layout.dtype]
    width = max(shape.ffn if shape.expert_layers < shape.layers else 0, shape.chosen * shape.expert_ffn)
    gradients = shape.mlp_matrices * width / layout.tp + 2 * shape.hidden / _outer(layout)
    gathered = shape.hidden if layout.sequence_parallel and layout.tp > 1 else 0
    return element * layout.tokens * (gradients + gathered)


def _logits(layout: Recipe) -> float:
    """Bytes of logits and their gradients at the loss's peak."""
    logits = layout.tokens * layout.shape.vocab / layout.tp
    return layout.software.logit_bytes * logits


def _buffers(layout: Recipe, layer: float) -> float:
    """Gathered parameters and unreduced gradients of ZeRO 2 and 3, and the pipeline's messages. layer: parameters"""
    shape, software = layout.shape, layout.software
    element = ELEMENT_BYTES[layout.dtype]
    message = element * layout.tokens * shape.hidden / _outer(layout)
    messages = 4 * message if layout.pp > 1 else 0.0
    unit = max(layer, shape.embedding_parameters() / layout.tp)
    if layout.shards == 1 or layout.zero < 2:
        return messages
    if layout.zero == 2:
        return messages + BUCKETS_UNDER_WAY * software.gradient_bytes * unit / 2
    return messages + 2 * element * unit + software.reduce_bytes * unit
