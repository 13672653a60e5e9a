"""A published run, as a row of text, turned into a layout and what was measured. Standard library only.

Columns are those of data/runs.csv. What a row leaves open is read from its own text (network, software) or from what
its model is publicly known to be; nothing depends on which source it comes from.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from triaxis.launch.hardware.hardware import Hardware, Link, load_hardware
from triaxis.launch.hardware.nearly import REACHED
from triaxis.launch.published.layout import (
    BRIDGE,
    FSDP,
    FSDP_BF16,
    FSDP_COMPILED,
    FSDP_COMPILED_LOSS,
    INTERNEVO,
    INTERNEVO_FSDP,
    JAX,
    MEGATRON,
    MEGATRON_2021,
    MEGATRON_DEEPSPEED,
    MEGATRON_DEEPSPEED_BF16,
    MEGATRON_OFFLOAD,
    MEGATRON_TE,
    NEMO,
    Recipe,
    Recompute,
    Software,
)
from triaxis.launch.published.memory import memory
from triaxis.launch.published.shapes import Latent, Shape
from triaxis.models.reading import read_small_file

ROUTERS_IMBALANCE: Final = 1.2
GPUS: Final = (  # how the gpu column begins, and the preset
    ("A100-SXM-40GB", "a100-40g"),
    ("A100-PCIe", "a100-pcie-80g"),
    ("A800", "a800-80g"),
    ("A100", "a100-80g"),
    ("H100-96GB", "h100-96g"),
    ("H100", "h100-80g"),
    ("H800", "h800-80g"),
    ("H200", "h200"),
    ("GB200", "gb200"),
    ("GB300", "gb300"),
    ("B200", "b200"),
    ("B300", "b300"),
    ("MI250", "mi250x"),
    ("MI300X", "mi300x"),
    ("MI325X", "mi325x"),
    ("MI355X", "mi355x"),
    ("V100-16GB", "v100-16g"),
    ("V100", "v100-32g"),
    ("L40S", "l40s"),
)
_DEEPSEEK_V2: Final = Latent(q_rank=1536, kv_rank=512, plain=128, rotary=64, value=128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a family's public configurations hold beyond a row's columns; ffn column = the experts' width if routed."""

    head_size: int | None = None
    expert_ffn: int | None = None
    shared_ffn: int = 0
    dense_layers: int = 0
    latent: Latent | None = None


FAMILIES: Final = (
    (r"deepseek-?v2", Family(expert_ffn=1536, shared_ffn=3072, dense_layers=1, latent=_DEEPSEEK_V2)),
    (r"deepseek-?v3", Family(expert_ffn=2048, shared_ffn=2048, dense_layers=3, latent=_DEEPSEEK_V2)),
    (r"kimi", Family(expert_ffn=2048, shared_ffn=2048, dense_layers=1, latent=_DEEPSEEK_V2)),
    (r"qwen3", Family(head_size=128)),
    (r"gpt.?oss", Family(head_size=64)),
)
REQUIRED: Final = (
    "layers",
    "hidden",
    "ffn",
    "heads",
    "seq_len",
    "gpus",
    "micro_batch",
    "global_batch",
    "gpu",
)


class Reading(StrEnum):
    """What a published memory figure counts: tensors, what the allocator holds, or all that the device has given."""

    ALLOCATED = "allocated"
    RESERVED = "reserved"
    DEVICE = "device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One published run. measured_*: None where not published; memory in bytes; complete: enough was published."""

    source: str
    name: str
    layout: Recipe
    measured_tokens_per_s_per_gpu: float | None
    measured_memory_bytes: float | None
    memory_reading: Reading
    complete_throughput: bool
    complete_memory: bool
    dense: bool
    sixteen_bit: bool


MOST_COUNT = 10**12
ONE_OR_MORE = {
    "gpus",
    "heads",
    "hidden",
    "layers",
    "kv_heads",
    "tp",
    "pp",
    "dp",
    "cp",
    "ep",
    "micro_batch",
    "seq_len",
    "vocab",
    "global_batch",
}


def read_runs(path: Path) -> tuple[tuple[Run, ...], tuple[str, ...]]:
    """The runs of a CSV file that say enough to be predicted, and why each other row was left out."""
    try:
        reader = csv.DictReader(io.StringIO(read_small_file(path, "file"), newline=""))
        rows = list(reader)
        columns = set(reader.fieldnames or ())
    except (ValueError, csv.Error) as error:
        raise ValueError(f"`file` must be a readable CSV file, but {path} is not: {error}") from error
    missing = sorted({*REQUIRED, "source_title", "model"} - columns)
    if missing:
        raise ValueError(
            f"`file` must have the columns of runs.csv, but {path} lacks {', '.join(missing)}; add them"
        )
    runs: list[Run] = []
    left: list[str] = []
    for number, row in enumerate(rows, start=2):
        try:
            runs.append(run_of(row))
        except ValueError as error:
            left.append(f"line {number}: {error}")
    return tuple(runs), tuple(left)


def run_of(row: Mapping[str, str]) -> Run:
    """The run of one row; ValueError naming the column that keeps it from being predicted."""
    for column in REQUIRED:
        if not row.get(column):
            raise ValueError(f"`{column}` must be given, but is empty")
    for column, text in row.items():
        if isinstance(text, str) and not text.isprintable():
            raise ValueError(f"`{column}` must be printable text, but is {text[:40]!r}")
    shape = _shape(row)
    layout = _layout(row, shape)
    precision = row.get("precision_class") or "fp16/bf16"
    return Run(
        source=row["source_title"],
        name=_name(row),
        layout=layout,
        measured_tokens_per_s_per_gpu=_throughput(row, layout),
        measured_memory_bytes=_memory(row),
        memory_reading=_reading(row),
        complete_throughput=row.get("complete_throughput", "1") == "1",
        complete_memory=row.get("complete_memory", "1") == "1",
        dense=row.get("is_moe") != "1",
        sixteen_bit=precision == "fp16/bf16",
    )


def _name(row: Mapping[str, str]) -> str:
    sizes = " ".join(
        f"{axis}{row[axis]}" for axis in ("dp", "tp", "pp", "cp", "ep") if row.get(axis, "") not in ("", "1")
    )
    gpu = re.split("[- ]", row["gpu"])[0]
    precision = row.get("precision_class", "")
    return f"{row['model']} {row['gpus']}×{gpu} {sizes} mbs{row['micro_batch']} {precision}".strip()


def _integer(row: Mapping[str, str], column: str, otherwise: int) -> int:
    text = row.get(column, "")
    if not text:
        return otherwise
    try:
        value = float(text)
    except ValueError as error:
        raise ValueError(f"`{column}` must be a number, but is {text[:40]!r}") from error
    if not 0 <= value <= MOST_COUNT or (column in ONE_OR_MORE and value < 1):
        least = 1 if column in ONE_OR_MORE else 0
        raise ValueError(f"`{column}` must be from {least} to {MOST_COUNT:,}, but is {text[:40]!r}")
    return int(value)


def _real(row: Mapping[str, str], column: str) -> float | None:
    text = row.get(column, "")
    try:
        value = float(text) if text else None
    except ValueError as error:
        raise ValueError(f"`{column}` must be a number, but is {text[:40]!r}") from error
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"`{column}` must be finite and more than 0, but is {text[:40]!r}")
    return value


def _shape(row: Mapping[str, str]) -> Shape:
    family = next(
        (known for pattern, known in FAMILIES if re.search(pattern, row["model"].lower())), Family()
    )
    hidden, heads = _integer(row, "hidden", 0), _integer(row, "heads", 0)
    layers, ffn = _integer(row, "layers", 0), _integer(row, "ffn", 0)
    experts = _integer(row, "experts", 0)
    dense_layers = family.dense_layers if layers > 8 else min(family.dense_layers, 1)
    shape = Shape(
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        kv_heads=_integer(row, "kv_heads", heads),
        head_size=family.head_size or hidden // heads,
        vocab=_integer(row, "vocab", 51200),
        experts=experts,
        chosen=_integer(row, "topk", 0),
        expert_ffn=(family.expert_ffn or ffn) if experts else 0,
        shared_ffn=family.shared_ffn if experts else 0,
        dense_layers=dense_layers if experts else 0,
        latent=family.latent if experts else None,
    )
    said = _real(row, "params_b")
    variants = [replace(shape, gated=gated, tied=tied) for gated in (True, False) for tied in (False, True)]
    if said:
        best = min(variants, key=lambda variant: abs(variant.parameters() / said / 1e9 - 1))
        if abs(best.parameters() / said / 1e9 - 1) < 0.1:
            return best
    return replace(shape, gated=bool(experts) or ffn != 4 * hidden)


def _layout(row: Mapping[str, str], shape: Shape) -> Recipe:
    tp, pp, cp = (_integer(row, axis, 1) for axis in ("tp", "pp", "cp"))
    gpus = _integer(row, "gpus", 0)
    dp = _integer(row, "dp", max(gpus // (tp * pp * cp), 1))
    if dp * tp * pp * cp != gpus:
        dp = gpus // (tp * pp * cp)
    if dp < 1 or dp * tp * pp * cp != gpus:
        raise ValueError(f"`gpus` must be a multiple of tp × pp × cp = {tp * pp * cp}, but is {gpus}")
    software = software_of(row)
    zero, shard_ranks = _zero(row, software)
    if software is MEGATRON_OFFLOAD:  # a fork from before optimizer states were sharded over cp too
        shard_ranks = dp
    modern = software in (MEGATRON, MEGATRON_TE, MEGATRON_OFFLOAD, NEMO, BRIDGE)
    precision = row.get("precision_class") or "fp16/bf16"
    hardware = hardware_of(row)
    dtype = {"fp8": "fp8", "fp4": "fp4"}.get(precision, "bf16")
    if dtype not in hardware.peak_flops:
        dtype = "fp8" if dtype == "fp4" and "fp8" in hardware.peak_flops else "fp16"
    stated = row.get("recompute", "")
    recompute = next((kind for kind in Recompute if stated.startswith(kind.value)), None)
    if recompute == Recompute.SELECTIVE and re.search(r"\bmlp\b", stated):
        recompute = Recompute.MLP
    sequence_parallel = row.get("sequence_parallel") or ("1" if modern else "0")
    flash = row.get("flash_attn") or ("1" if row.get("date", "2024") >= "2024" else "0")
    layout = Recipe(
        shape=shape,
        hardware=hardware,
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=_integer(row, "ep", 1),
        zero=zero,
        shard_ranks=shard_ranks,
        microbatch=_integer(row, "micro_batch", 1),
        global_batch=_integer(row, "global_batch", 1),
        sequence=_integer(row, "seq_len", 0),
        virtual_stages=max(_integer(row, "vp", 1), 1),
        recompute=recompute or Recompute.NONE,
        sequence_parallel=sequence_parallel == "1" and tp > 1,
        flash_attention=flash == "1",
        dtype=dtype,
        trains_weights=not re.search("lora|peft", f"{row.get('workload', '')} {row['model']}".lower()),
        imbalance=_imbalance(row) if shape.experts else 1.0,
        offloaded=_offloaded(row.get("notes", "")),
        states_on_host="cpu offload" in row.get("zero_fsdp", "").lower(),
        software=software,
    )
    return layout if recompute else _least_recompute(layout)


def _least_recompute(layout: Recipe) -> Recipe:
    """Where a row does not say what is recomputed: the least with which its tensors come near to fitting.

    Near: within twice the memory. Below that engines recompute single modules, which costs little.
    """
    for kind in (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL):
        layout = replace(layout, recompute=kind)
        if memory(layout).allocated <= 2 * layout.hardware.memory_bytes:
            break
    return layout


def _imbalance(row: Mapping[str, str]) -> float:
    """1 where the text says that routing was forced to be balanced, as microbenchmarks do; else as routers are."""
    balanced = "balanced" in row.get("notes", "") or "benchmark" in row.get("workload", "")
    return 1.0 if balanced else ROUTERS_IMBALANCE


def _offloaded(text: str) -> float:
    """Share of the activations that the text says wait on the host."""
    share = re.search(r"offload (?:ratio )?alpha=([\d.]+\d)", text)
    return float(share[1]) if share else 0.0


def software_of(row: Mapping[str, str]) -> Software:
    """What the row's framework does, by its name and year."""
    framework, text = row.get("framework", "").lower(), row.get("notes", "").lower()
    if "megatron-deepspeed" in framework:
        return MEGATRON_DEEPSPEED_BF16 if "bf16" in row.get("precision", "") else MEGATRON_DEEPSPEED
    if any(name in framework for name in ("jax", "pax")):
        return JAX
    if any(name in framework for name in ("fsdp", "composer")):
        if "pure" in row.get("precision", "").lower():
            return FSDP_BF16
        if "compile" not in framework + text:
            return FSDP
        # torchtitan compiles its loss too since April 2025
        return FSDP_COMPILED_LOSS if row.get("date", "") >= "2025-04" else FSDP_COMPILED
    if "internevo" in framework:
        return INTERNEVO_FSDP if "fsdp" in row.get("zero_fsdp", "").lower() else INTERNEVO
    if "kwai" in framework:
        return MEGATRON_OFFLOAD
    if "megatron-lm" in framework and row.get("date", "") < "2023":
        return MEGATRON_2021
    if "megatron-bridge" in framework:
        return BRIDGE
    if "nemo /" in framework:
        return NEMO
    if any(name in framework for name in ("megatron-core", "+ te", "primus")):
        return MEGATRON_TE
    return MEGATRON


def _zero(row: Mapping[str, str], software: Software) -> tuple[int, int | None]:
    text = row.get("zero_fsdp", "").lower()
    inner = re.search(r"fsdp (\d+) (?:\(.*?\) )?x dp", text)
    if inner:
        return (3, int(inner[1])) if int(inner[1]) > 1 else (0, None)
    if "within 8-gpu" in text:
        return 1, 8
    if "hsdp" in text:
        return 3, _integer(row, "gpus_per_node", 8)
    if "zero-3" in text or (text.startswith("fsdp") or text == "fsdp"):
        return 3, None
    if "zero-2" in text:
        return 2, None
    if "zero-1" in text or "distributed" in text:
        return 1, None
    if text.startswith("none"):
        return 0, None
    return (1, None) if software in (MEGATRON, MEGATRON_TE, MEGATRON_OFFLOAD, NEMO, BRIDGE) else (0, None)


def hardware_of(row: Mapping[str, str]) -> Hardware:
    """The preset of the row's accelerator, with the network that the row's text states, if it does."""
    gpu = row["gpu"]
    preset = next((name for start, name in GPUS if gpu.startswith(start)), None)
    if preset is None:
        raise ValueError(f"`gpu` must be one that the planner knows, but is {gpu!r}")
    hardware = load_hardware(preset)
    per_node = _network(f"{row.get('source_title', '')} {row.get('notes', '')}", hardware.gpus_per_node)
    if per_node is None:
        return hardware
    return replace(
        hardware,
        nics_per_node=hardware.gpus_per_node,
        inter=Link(
            latency_s=hardware.inter.latency_s,
            bytes_per_s=REACHED * per_node / 8 * 1e9 / hardware.gpus_per_node,
        ),
    )


def _network(text: str, gpus_per_node: int) -> float | None:
    """Gb/s of a node as the text states it."""
    cards = re.search(r"(\d)\s*[x×]\s*(\d{2,3})\s*Gb", text)
    if cards:
        return float(cards[1]) * float(cards[2])
    if re.search(r"\bA3\b", text):  # Google Cloud's A3 instances: 4 × 200 Gb/s
        return 800.0
    if re.search(r"4 OmniPath links", text):
        return 400.0
    each = re.search(r"(\d{3,4}) ?Gb(?:/s|ps) per GPU", text)
    if each:
        return float(each[1]) * gpus_per_node
    node = re.search(r"(\d{3,4}) ?(?:Gbps per node|Gbps node-node|\(Gb/s per node\))", text)
    return float(node[1]) if node else None


def _throughput(row: Mapping[str, str], layout: Recipe) -> float | None:
    """Tokens per second and accelerator: as printed, or from the step's time, or from FLOP/s by their convention."""
    printed = _real(row, "tokens_per_s_per_gpu")
    if printed:
        return printed
    seconds = _real(row, "step_time_s")
    if seconds:
        return layout.global_batch * layout.sequence / seconds / layout.gpus
    tflops = _real(row, "tflops_per_gpu")
    share = _real(row, "mfu_percent")
    if not tflops and share:
        tflops = share / 100 * layout.hardware.peak("bf16") / 1e12
    return tflops * 1e12 / flops_per_token(row, layout) if tflops else None


def flops_per_token(row: Mapping[str, str], layout: Recipe) -> float:
    """What the row's source counts for a token: recompute if hardware FLOPs, half the attention if causal."""
    convention = row.get("flops_convention", "").lower()
    causal = "megatron-core counter" in convention or "causal" in convention.replace("non-causal", "")
    flops = layout.shape.flops_per_token(layout.sequence, causal=causal)
    return flops * 4 / 3 if row.get("tflops_kind", "").startswith("hardware") else flops


def _memory(row: Mapping[str, str]) -> float | None:
    value = _real(row, "peak_mem_gb")
    if value is None:
        return None
    unit = row.get("mem_unit", "")
    binary = "GiB" in unit or "node" in unit  # of nodes nvidia-smi was read, which prints MiB
    return value * (2**30 if binary else 1e9)


def _reading(row: Mapping[str, str]) -> Reading:
    """As the unit says; "GB" alone is what monitoring shows, and torchtitan prints what is reserved."""
    unit = row.get("mem_unit", "").lower()
    if "nvidia-smi" in unit or "node" in unit or unit == "gb":
        return Reading.DEVICE
    silent = "allocated" not in unit and "torchtitan" in row.get("framework", "").lower()
    return Reading.RESERVED if silent or "max reserved" in unit else Reading.ALLOCATED
