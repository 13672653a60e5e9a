"""A layout to price: model, topology, batch and software on given hardware. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from triaxis.launch.planner.hardware import Hardware
from triaxis.launch.planner.shapes import Shape


class Recompute(StrEnum):
    """What backward computes again: nothing, the attention's core, or whole layers."""

    NONE = "none"
    SELECTIVE = "selective"
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
    selective: share of a layer's forward that selective recompute repeats; captured: launches cost nothing (CUDA graphs or a compiler's)
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
    captured: bool = False


TRIAXIS = Software(name="triaxis", order=("tp", "cp", "pp", "dp"))
MEGATRON = Software(name="Megatron-LM")
MEGATRON_TE = Software(name="Megatron Core with Transformer Engine", overlaps_tensor=True)
MEGATRON_2021 = Software(name="Megatron-LM before 2023", overlaps_gradients=False, reduce_bytes=2)
MEGATRON_DEEPSPEED = Software(name="Megatron-DeepSpeed", overlaps_gradients=False, reduce_bytes=2)
DEEPSPEED = Software(name="DeepSpeed", gradient_bytes=2, reduce_bytes=2, state_bytes=16)
FSDP = Software(
    name="FSDP", fused=False, weight_bytes=4, reduce_bytes=4, state_bytes=8, attention_kernel=0.6, selective=0.5
)
FSDP_BF16 = Software(name="FSDP in pure bf16", fused=False, reduce_bytes=2, gradient_bytes=2, state_bytes=4)
FSDP_COMPILED = Software(
    name="FSDP, compiled",
    weight_bytes=4,
    reduce_bytes=4,
    state_bytes=8,
    attention_kernel=0.6,
    selective=0.5,
    captured=True,
)
JAX = Software(name="JAX", weight_bytes=4, reduce_bytes=4, state_bytes=8, captured=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One way to train `shape` on `hardware`.

    dp × tp × pp × cp accelerators; ep ranks hold a layer's experts, out of dp × cp × tp
    zero: 0 to 3; shard_ranks: over how many of dp × cp it shards (None: all of them)
    microbatch, global_batch: sequences of `sequence` tokens; virtual_stages: chunks of layers per pipeline rank
    dtype: of the products, a key of the hardware's peaks; trains_weights: False if only adapters are trained
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
    virtual_stages: int = 1
    recompute: Recompute = Recompute.NONE
    sequence_parallel: bool = True
    flash_attention: bool = True
    dtype: str = "bf16"
    trains_weights: bool = True
    software: Software = TRIAXIS

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
