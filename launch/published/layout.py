"""How other engines train: model, topology, batch and software on given hardware. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from triaxis.launch.hardware.device import FRAGMENTED
from triaxis.launch.hardware.hardware import Hardware
from triaxis.launch.published.shapes import Shape
from triaxis.parallel.places.partition import partition_layers


class Recompute(StrEnum):
    """What backward computes again: nothing, the attention's core, the MLP too, or whole layers."""

    NONE = "none"
    SELECTIVE = "selective"
    MLP = "mlp"
    FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """What an engine does of what can be done; facts of its documentation, nothing fitted.

    order: axes from the innermost; fused: norms, activations and softmax are one kernel each
    overlaps_gradients: gradients are reduced while backward runs; overlaps_tensor: tensor-parallel messages hide
    behind products; overlaps_pipeline: messages between stages hide under interleaved schedules
    gradient_bytes: of an accumulated gradient; reduce_bytes: of a gradient in messages; state_bytes: fp32 master,
    first and second moment; attention_kernel: speed of its fused attention over the best on Hopper and
    later (FlashAttention-3's paper: its predecessor, written for Ampere, is 1.5 to 2 times slower there)
    selective: share of a layer's forward that selective recompute repeats, selective_kept: share of its activations
    that it keeps; eager: norms and activations keep the intermediates that unfused kernels keep
    attention_outputs: copies of the attention's output that are kept (2 where a transpose copies it)
    logit_bytes: for each logit at the loss's peak
    keeps_quantized: inputs of 8-bit products are kept in 8 bits
    spare_gradients: bytes for each weight of one layer and the head that gradients pass through
    update_bytes: for each parameter that a rank updates, taken during the update only: fp32 copies of gradients that
    are held in 16 bits, and what an optimizer that is not one kernel keeps between its operators
    layer_launches: operators that the host dispatches for a layer's forward and backward, 0 with CUDA graphs or a
    compiler; loss_bytes: moved for each logit by the loss, both passes
    dispatches_once: a token goes to a node once, however many of its experts are there
    fragmented: of what tensors take, held by the allocator besides; more of that where microbatches overlap
    (fragmented_by_pipeline) and where gathered parameters come and go (fragmented_by_gathering)
    libraries_bytes: of libraries beyond the device's context; bucket_bytes: of buckets that are there as soon as
    anything is reduced
    """

    name: str
    order: tuple[str, ...] = ("tp", "cp", "dp", "pp")
    fused: bool = True
    overlaps_gradients: bool = True
    overlaps_tensor: bool = False
    overlaps_pipeline: bool = True
    weight_bytes: int = 2
    gradient_bytes: int = 4
    reduce_bytes: int = 4
    state_bytes: int = 12
    attention_kernel: float = 1.0
    selective: float = 0.0
    selective_kept: float = 1.0
    eager: bool = False
    attention_outputs: int = 1
    logit_bytes: float = 2.0
    keeps_quantized: bool = True
    spare_gradients: float = 0.0
    update_bytes: float = 0.0
    layer_launches: tuple[int, int] = (100, 180)
    loss_bytes: float = 12.0
    dispatches_once: bool = False
    fragmented: float = FRAGMENTED
    fragmented_by_pipeline: float = 0.0
    fragmented_by_gathering: float = 0.0
    libraries_bytes: float = 0.0
    bucket_bytes: float = 0.0


ELEMENT_BYTES: Final = {"bf16": 2, "fp16": 2, "fp8": 2, "fp4": 2, "fp32": 4, "fp64": 8}
"""Of activations and weights, by the dtype of the products."""
QUANTIZED: Final = ("fp8", "fp4")
MEGATRON = Software(name="Megatron-LM", spare_gradients=2.0)
MEGATRON_TE = Software(
    name="Megatron Core with Transformer Engine", overlaps_tensor=True, spare_gradients=2.0
)
NEMO = replace(MEGATRON_TE, name="NeMo", gradient_bytes=2, reduce_bytes=2, update_bytes=4.0)
BRIDGE = replace(NEMO, name="Megatron Bridge", dispatches_once=True)
MEGATRON_OFFLOAD = Software(
    name="Megatron with activations on the host",
    overlaps_tensor=True,
    selective=0.02,
    selective_kept=0.6,
    attention_outputs=2,
)
MEGATRON_2021 = Software(
    name="Megatron-LM before 2023",
    overlaps_gradients=False,
    reduce_bytes=2,
    logit_bytes=6.0,
    attention_kernel=0.6,
    layer_launches=(160, 320),
    loss_bytes=90.0,
)
MEGATRON_DEEPSPEED = Software(
    name="Megatron-DeepSpeed",
    overlaps_gradients=False,
    reduce_bytes=2,
    gradient_bytes=2,
    state_bytes=16,
    logit_bytes=10.0,
    layer_launches=(160, 320),
    loss_bytes=90.0,
    fragmented_by_pipeline=0.1,  # no expandable segments yet
    libraries_bytes=3e9,
    bucket_bytes=2e9,  # 5e8 elements for reducing, as many for gathering
)
MEGATRON_DEEPSPEED_BF16 = replace(
    MEGATRON_DEEPSPEED, name="Megatron-DeepSpeed with its bf16 optimizer", gradient_bytes=6, state_bytes=12
)
# v0.2.1 sums 16-bit gradients by all-reduce, as many bytes as a reduce-scatter of 32 bits. Its update takes a flat copy
# of the gradients, the same in fp32, and the root and the quotient of AdamW as torch 1.13 computes it.
INTERNEVO = Software(
    name="InternEvo", gradient_bytes=2, reduce_bytes=4, spare_gradients=2.0, update_bytes=2.0 + 4.0 + 8.0
)
DEEPSPEED = Software(name="DeepSpeed", gradient_bytes=2, reduce_bytes=2, logit_bytes=10.0)
# Selective recompute keeps a layer's input, the attention's output and every second product (query, value, gate, down):
# 15.5 of the 51 bytes a token and feature of an eager Llama layer; a compiler also leaves out the last, which nothing
# reads: 13.5 of 34. The loss holds log-probabilities and two gradients in fp32.
FSDP = Software(
    name="FSDP",
    fused=False,
    weight_bytes=4,
    state_bytes=8,
    attention_kernel=0.6,
    selective=0.5,
    selective_kept=0.304,
    eager=True,
    attention_outputs=2,
    logit_bytes=12.0,
    keeps_quantized=False,
    loss_bytes=30.0,
    fragmented_by_gathering=0.075,
)
FSDP_BF16 = replace(
    FSDP, name="FSDP in pure bf16", weight_bytes=2, reduce_bytes=2, gradient_bytes=2, state_bytes=4
)
FSDP_COMPILED = replace(
    FSDP,
    name="FSDP, compiled",
    fused=True,
    eager=False,
    attention_outputs=1,
    layer_launches=(0, 0),
    selective_kept=0.397,
    loss_bytes=12.0,
)
FSDP_COMPILED_LOSS = replace(  # 16-bit logits and their gradient
    FSDP_COMPILED, name="FSDP, compiled with its loss", logit_bytes=4.0
)
INTERNEVO_FSDP = replace(
    INTERNEVO,
    name="InternEvo with FSDP",
    reduce_bytes=2,
    update_bytes=4.0 + 8.0,  # fp32 gradients, the root and the sum of torch 2.0's AdamW
    fragmented_by_gathering=FSDP.fragmented_by_gathering,
)
JAX = replace(
    FSDP_COMPILED,
    name="JAX",
    attention_kernel=1.0,
    selective=0.0,
    selective_kept=0.4,
    logit_bytes=6.0,
    keeps_quantized=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One way to train `shape` on `hardware`.

    dp × tp × pp × cp accelerators; ep ranks hold a layer's experts, out of dp × cp × tp
    zero: 0 to 3; shard_ranks: over how many of dp × cp it shards (None: all of them)
    microbatch, global_batch: sequences of `sequence` tokens; schedule: "gpipe", "1f1b" or "interleaved", and
    virtual_stages, its chunks of layers per pipeline rank
    dtype: of the products, a key of the hardware's peaks; trains_weights: False if only adapters are trained
    imbalance: tokens of the busiest rank's experts over the mean
    offloaded: share of the activations that waits in the host's memory
    states_on_host: weights, gradients and optimizer states are there, a unit at a time on the accelerator
    """

    shape: Shape
    hardware: Hardware
    dp: int
    microbatch: int
    global_batch: int
    sequence: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 1
    shard_ranks: int | None = None
    schedule: str = "1f1b"
    virtual_stages: int = 1
    recompute: Recompute = Recompute.NONE
    sequence_parallel: bool = True
    flash_attention: bool = True
    dtype: str = "bf16"
    trains_weights: bool = True
    imbalance: float = 1.0
    offloaded: float = 0.0
    states_on_host: bool = False
    software: Software = MEGATRON

    @property
    def kind(self) -> str:
        """Which kind of run it is, for its error: "experts", "low_precision" or "dense"."""
        if self.shape.experts:
            return "experts"
        return "low_precision" if self.dtype in QUANTIZED else "dense"

    @property
    def gpus(self) -> int:
        """Accelerators."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def microbatches(self) -> float:
        """Of one step on each rank."""
        return max(self.global_batch / (self.dp * self.microbatch), 1.0)

    @property
    def tokens(self) -> float:
        """Of one microbatch on a rank: its part of the sequence under context parallelism."""
        return self.microbatch * self.sequence / self.cp

    @property
    def replicas(self) -> int:
        """Ranks over which gradients of dense parameters are summed."""
        return self.dp * self.cp

    @property
    def shards(self) -> int:
        """Ranks over which ZeRO shards dense parameters' states."""
        return min(self.shard_ranks or self.replicas, self.replicas)

    @property
    def expert_replicas(self) -> int:
        """Ranks over which gradients of one expert are summed."""
        return max(self.dp * self.cp * self.tp // self.ep, 1)

    def stage_layers(self) -> tuple[int, ...]:
        """Layers of each pipeline rank, its chunks together; ValueError if there are fewer layers than parts."""
        parts = self.pp * self.virtual_stages
        layers = self.shape.layers
        if layers % parts == 0:
            return (layers // self.pp,) * self.pp
        cuts = partition_layers(layers, min(parts, layers), first_extra=1.0, last_extra=1.0)
        counts = [len(cut) for cut in cuts]
        return tuple(sum(counts[rank :: self.pp]) for rank in range(self.pp))

    def group(self, axis: str, size: int | None = None) -> range:
        """The ranks of rank 0's group on `axis`, or the first `size` of it ("ep": neighbours; "dp": with cp)."""
        if axis == "ep":
            return range(self.ep)
        sizes = {"tp": self.tp, "cp": self.cp, "pp": self.pp, "dp": self.dp}
        stride = 1
        for before in self.software.order:
            if before == axis or (axis == "dp" and before == "cp"):
                break
            stride *= sizes[before]
        count = size or (self.replicas if axis == "dp" else sizes[axis])
        return range(0, count * stride, stride)
