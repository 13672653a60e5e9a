"""The stacks that are measured: for each, the program, how a case is asked of it, and how its answer is read.

All measure the same way: wall and process CPU seconds around an optimizer step between barriers, and the peak
resident memory of the process. Standard library only.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cases import Case

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One run. Seconds: medians over steps, CPU summed over ranks; sent_bytes: over ranks, of a step.

    product_seconds: CPU seconds of a step's matrix products alone, over ranks
    """

    step_seconds: float
    cpu_seconds: float
    peak_rss_bytes: int
    first_loss: float
    last_loss: float
    sent_bytes: dict[str, int] | None = None
    product_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A program under torchrun.

    script: relative to this folder for ours, to the peers' folder for theirs
    module: what its interpreter must be able to import
    adapter: a script of this folder that starts the peer's script, given as its first argument
    arguments: the flags that ask for a case and have the answer written to a path
    refusal: why it cannot run a case, or None
    """

    name: str
    script: str
    module: str
    arguments: Callable[[Case, Path], list[str]]
    read: Callable[[Path], Measurement]
    refusal: Callable[[Case], str | None]
    adapter: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, python: str, peers: Path, case: Case, answer: Path) -> list[str]:
        start = [python, "-m", "torch.distributed.run", "--standalone"]
        start += ["--nproc-per-node", str(case.layout.ranks)]
        script = str((HERE if self.name == OURS else peers) / self.script)
        programs = (
            [script] if self.adapter is None else [str(HERE / self.adapter), script, str(case.size.ffn)]
        )
        return [*start, *programs, *self.arguments(case, answer)]


def _flags(values: Mapping[str, object]) -> list[str]:
    return [text for name, value in values.items() for text in (f"--{name}", str(value))]


def _sizes(case: Case) -> dict[str, object]:
    size = case.size
    return {
        "layers": size.layers,
        "hidden": size.hidden,
        "heads": size.heads,
        "vocab": size.vocab,
        "seq": size.sequence_length,
    }


def _axes(case: Case, *names: str) -> dict[str, object]:
    return {name: getattr(case.layout, name) for name in names}


def _any(case: Case) -> str | None:
    return None


def _ours(case: Case, answer: Path) -> list[str]:
    size = case.size
    values = _sizes(case) | _axes(case, "tp", "pp", "dp")
    values |= {"ffn": size.ffn, "mbs": size.microbatch_size, "microbatches": size.microbatches}
    values |= {"steps": case.steps, "warmup": case.warmup_steps, "zero": case.zero, "json": answer}
    values["dtype"] = case.dtype
    return _flags(values) + (["--sp"] if case.sequence_parallel else [])


def _read_ours(answer: Path) -> Measurement:
    result = json.loads(answer.read_text().splitlines()[-1])
    return Measurement(
        step_seconds=statistics.median(result["step_seconds"]),
        cpu_seconds=statistics.median(result["cpu_seconds"]),
        peak_rss_bytes=max(result["peak_rss_bytes"]),
        first_loss=result["losses"][0],
        last_loss=result["losses"][-1],
        sent_bytes=result["sent_bytes_per_step"],
        product_seconds=statistics.median(result["product_seconds"]),
    )


def _native(case: Case, answer: Path) -> list[str]:
    size = case.size
    values = _sizes(case) | _axes(case, "tp", "pp", "dp")
    values |= {"ffn": size.ffn, "mbs": size.microbatch_size, "microbatches": size.microbatches}
    values |= {"steps": case.steps, "warmup": case.warmup_steps, "json": answer, "clip": 1.0}
    return _flags(values) + (["--dtype", "bfloat16"] if case.dtype == "bf16" else [])


def _read_native(answer: Path) -> Measurement:
    result = json.loads(answer.read_text().splitlines()[-1])
    return Measurement(
        step_seconds=result["median_s"],
        cpu_seconds=result["cpu_s_sum"],
        peak_rss_bytes=int(result["rss_peak_max"] * 2**20),
        first_loss=result["first_loss"],
        last_loss=result["last_loss"],
    )


def _megatron(case: Case, answer: Path) -> list[str]:
    size = case.size
    values = _sizes(case) | _axes(case, "tp", "pp")
    values |= {"micro": size.microbatch_size, "num-micro": size.microbatches}
    values |= {"steps": case.steps + case.warmup_steps, "out": answer, "dtype": case.dtype}
    return [*_flags(values), "--swiglu", *(["--no-dist-opt"] if case.zero == 0 else [])]


def _read_megatron(answer: Path) -> Measurement:
    result = json.loads(answer.read_text())
    return Measurement(
        step_seconds=result["median_ms"] / 1e3,
        cpu_seconds=result["cpu_s_per_step_sum"],
        peak_rss_bytes=max(rank[1] for rank in result["rss_mib"]) * 2**20,
        first_loss=result["losses"][0],
        last_loss=result["losses"][-1],
    )


def _deepspeed(case: Case, answer: Path) -> list[str]:
    size = case.size
    values = _sizes(case) | {"mbs": size.microbatch_size, "accum": size.microbatches, "stage": case.zero}
    values |= {"steps": case.steps + case.warmup_steps, "out": answer, "clip": 1.0}
    values["dtype"] = case.dtype
    values |= {"mode": "pipe", "pp": case.layout.pp} if case.layout.pp > 1 else {"mode": "zero"}
    return [*_flags(values), "--no-jit"]


def _read_deepspeed(answer: Path) -> Measurement:
    ranks = [json.loads(line) for line in answer.read_text().splitlines()]
    return Measurement(
        step_seconds=max(rank["median_step_s"] for rank in ranks),
        cpu_seconds=sum(rank["median_step_cpu_s"] for rank in ranks),
        peak_rss_bytes=int(max(rank["peak_rss_mb"] for rank in ranks) * 2**20),
        first_loss=ranks[0]["losses"][0],
        last_loss=ranks[0]["losses"][-1],
    )


def _no_tensor_parallelism(case: Case) -> str | None:
    return "it has no tensor parallelism of its own" if case.layout.tp > 1 else None


OURS = "ours"
STACKS = (
    Stack(
        name=OURS,
        script="ours.py",
        module="triaxis.engine",
        arguments=_ours,
        read=_read_ours,
        refusal=_any,
    ),
    Stack(
        name="native",
        script="native_cpu.py",
        module="torch",
        arguments=_native,
        read=_read_native,
        refusal=_any,
    ),
    Stack(
        name="megatron",
        script="megatron_cpu.py",
        module="megatron.core",
        arguments=_megatron,
        read=_read_megatron,
        refusal=_any,
        adapter="megatron_peer.py",
    ),
    Stack(
        name="deepspeed",
        script="deepspeed_cpu.py",
        module="deepspeed",
        arguments=_deepspeed,
        read=_read_deepspeed,
        refusal=_no_tensor_parallelism,
        environment={"DS_ACCELERATOR": "cpu"},
    ),
)
