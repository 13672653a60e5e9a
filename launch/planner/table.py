"""The decision table: from a model and a number of accelerators to a topology by one rule, row by row. No torch.

    tp  doubles until a layer's weights on one rank are at most 2^28 (512 MiB in 16 bits: what ZeRO-3 gathers, what a
        bucket holds, what is recomputed at a time), but stays inside a node, where alone its messages are cheap
    pp  doubles until a stage has at most 50 layers (Megatron Core's guide: pipelines from 50 layers on)
    dp  is what is left

The ZeRO stage is not part of the rule. It is found, with microbatch, recompute and schedule: of what fits, the
fastest, and among equals (2%) the lowest stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from triaxis.launch.hardware.hardware import Hardware
from triaxis.launch.planner.search import EQUAL, Candidate, Request, candidates, search, simplicity
from triaxis.models.config import ModelConfig
from triaxis.models.fields import dense_model
from triaxis.models.presets import load_config

LAYER_PARAMETERS: Final = 1 << 28
STAGE_LAYERS: Final = 50

DENSE_671B: Final = load_config("dense-671b")
"""DeepSeek-V3's size, depth and vocabulary with every parameter dense: what `plan`, without ep, prices of that size."""

QWEN_1_8B: Final = dense_model(
    name="qwen1.5-1.8b",
    vocab_size=151936,
    hidden_size=2048,
    layers=24,
    heads=16,
    kv_heads=16,
    ffn_size=5504,
    max_positions=32768,
    attention_bias=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A row's question: a model by the name people call its size, and accelerators."""

    name: str
    model: ModelConfig
    gpus: int
    note: str = ""


SIZES: Final = (
    Size(name="7B", model=load_config("llama2-7b"), gpus=8),
    Size(name="13B", model=load_config("llama2-13b"), gpus=16),
    Size(name="70B", model=load_config("llama2-70b"), gpus=64),
    Size(
        name="671B",
        model=DENSE_671B,
        gpus=256,
        note="a dense model of DeepSeek-V3's size, depth and vocabulary, since plan searches no ep: "
        "memory as for 671B parameters, but every token computes with all of them",
    ),
)


def topology_by_rule(model: ModelConfig, gpus: int, hardware: Hardware) -> tuple[int, int, int]:
    """(dp, tp, pp) by the rule above. Raises ValueError where the accelerators do not divide.

    llama2-70b, 64 accelerators in nodes of 8: a layer has 856M weights, so tp 4; 80 layers, so pp 2; 64 / 8, so dp 8.
    """
    tp = pp = 1
    while model.layer_parameters() > tp * LAYER_PARAMETERS and 2 * tp <= hardware.gpus_per_node:
        tp *= 2
    while model.layers > pp * STAGE_LAYERS:
        pp *= 2
    if gpus % (tp * pp):
        below = gpus // (tp * pp) * tp * pp
        nearest = " or ".join(str(count) for count in (below, below + tp * pp) if count)
        raise ValueError(
            f"`gpus` must be a multiple of tp {tp} × pp {pp} = {tp * pp}, which the table's rule gives {model.name}, "
            f"but is {gpus}; use {nearest}, or --policy search"
        )
    return gpus // (tp * pp), tp, pp


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The rule's answer, priced, and the planner's own; `candidate` does not fit where no ZeRO stage makes it fit."""

    size: Size
    candidate: Candidate
    best: Candidate | None


def table_row(size: Size, hardware: Hardware, seq: int, global_batch: int) -> Row:
    """One row: the rule's topology with the ZeRO stage found, beside the search's best."""
    request = Request(
        model=size.model,
        name=size.model.name,
        hardware=hardware,
        gpus=size.gpus,
        seq=seq,
        global_batch=global_batch,
    )
    return Row(size=size, candidate=by_rule(request), best=search(request).best)


def by_rule(request: Request) -> Candidate:
    """The rule's topology, and of what fits on it the fastest with the lowest ZeRO stage. Where nothing fits, the one
    that lacks least."""
    topology = topology_by_rule(request.model, request.gpus, request.hardware)
    found = tuple(candidates(request, [topology]))
    if not found:
        raise ValueError(
            f"`global_batch` must be a multiple of dp {topology[0]}, but is {request.global_batch}; "
            f"use {max(1, request.global_batch // topology[0]) * topology[0]}"
        )
    fitting = [one for one in found if one.fits_surely] or [one for one in found if one.fits]
    if not fitting:
        return min(found, key=lambda one: one.memory_bytes)
    fastest = min(one.seconds for one in fitting)
    equals = (one for one in fitting if one.seconds <= (1 + EQUAL) * fastest)
    return min(equals, key=simplicity)


def decision_table(
    hardware: Hardware, seq: int, global_batch: int, sizes: Sequence[Size] = SIZES
) -> tuple[Row, ...]:
    """All rows."""
    return tuple(table_row(size, hardware, seq, global_batch) for size in sizes)
