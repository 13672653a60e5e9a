"""The memory tables that people know, recomputed: model states under DDP, ZeRO and FSDP as four engines hold them, and
how many accelerators a model needs. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from triaxis.engine.plan import Precision, Recompute, StepPlan
from triaxis.launch.hardware.hardware import Hardware
from triaxis.launch.planner.held import memory as own_memory
from triaxis.launch.planner.layout import Layout
from triaxis.launch.planner.price import Memory
from triaxis.launch.planner.search import Candidate, Request, Space, by_preference, candidates, lightest
from triaxis.launch.planner.table import DENSE_671B, QWEN_1_8B
from triaxis.launch.published.layout import DEEPSPEED, FSDP, MEGATRON, Recipe, Software
from triaxis.launch.published.memory import memory
from triaxis.launch.published.shapes import shape_of
from triaxis.models.config import ModelConfig
from triaxis.models.presets import load_config
from triaxis.parallel.places.topology import Topology

MODELS: Final = {
    "1.8B": QWEN_1_8B,
    "7B": load_config("llama2-7b"),
    "13B": load_config("llama2-13b"),
    "70B": load_config("llama2-70b"),
    "671B": DENSE_671B,
}

ENGINES: Final = {"Megatron-LM": MEGATRON, "DeepSpeed": DEEPSPEED, "PyTorch FSDP": FSDP}
OWN: Final = "triaxis"
NAMES: Final = {
    "triaxis": ("ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3"),
    "Megatron-LM": ("DDP", "distributed optimizer", None, None),
    "DeepSpeed": ("stage 0", "stage 1", "stage 2", "stage 3"),
    "PyTorch FSDP": ("DDP / NO_SHARD", None, "SHARD_GRAD_OP", "FULL_SHARD"),
}
"""What each engine calls ZeRO's stages 0 to 3; None where it has none."""


EVERY_COUNT: Final = 64
"""Accelerators up to which every number is tried for the least."""
COMFORTABLE: Final = 0.8
"""Of the memory: estimates below it met no out-of-memory in 454 runs on A100 and H100 (Fujii et al. 2024)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Model states of one rank, in bytes, as one engine holds them at one stage; buffers: gathered and under way."""

    engine: str
    stage: int
    name: str
    parameters: float
    gradients: float
    optimizer: float
    buffers: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.buffers


def model_states(model: ModelConfig, ranks: int, hardware: Hardware) -> Iterator[States]:
    """Every engine and stage, for a model replicated over `ranks` (pure data parallelism)."""
    for engine, names in NAMES.items():
        for stage, name in enumerate(names):
            if name is not None:
                held = (
                    _own(model, ranks, hardware, stage)
                    if engine == OWN
                    else _theirs(model, ranks, hardware, ENGINES[engine], stage)
                )
                yield States(
                    engine=engine,
                    stage=stage,
                    name=name,
                    parameters=held.parameters,
                    gradients=held.gradients,
                    optimizer=held.optimizer,
                    buffers=held.buffers,
                )


def _own(model: ModelConfig, ranks: int, hardware: Hardware, stage: int) -> Memory:
    """This engine's, with one token a sequence."""
    plan = StepPlan(
        model=model,
        microbatch_size=1,
        microbatches=1,
        sequence_length=1,
        zero=stage,
        dtype=Precision.BF16,
    )
    return own_memory(Layout(plan=plan, topology=Topology(dp=ranks), hardware=hardware))


def _theirs(model: ModelConfig, ranks: int, hardware: Hardware, software: Software, stage: int) -> Memory:
    return memory(
        Recipe(
            shape=shape_of(model),
            hardware=hardware,
            dp=ranks,
            microbatch=1,
            global_batch=ranks,
            sequence=1,
            zero=stage,
            software=software,
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Accelerators for a model. least: the fewest that can hold it at all, everything sharded and recomputed;
    recommended: the fewest that train it without recompute and fill at most COMFORTABLE."""

    name: str
    model: ModelConfig
    least: Candidate | None
    recommended: Candidate | None


def needs(hardware: Hardware, seq: int, models: dict[str, ModelConfig] | None = None) -> Iterator[Need]:
    """The counts for each model, sequences of `seq` tokens; None where COUNTS has too few."""
    for name, model in (MODELS if models is None else models).items():
        yield Need(
            name=name,
            model=model,
            least=least_accelerators(model, model.name, hardware, seq),
            recommended=_recommended(model, hardware, seq),
        )


def counts(hardware: Hardware, largest: int = 16384) -> Iterator[int]:
    """1, 2, 4, … up to a node, then whole nodes: 1, 2, 3, 4, 6, 8, 12, 16, … of them."""
    node, count = hardware.gpus_per_node, 1
    while count < node:
        yield count
        count *= 2
    nodes = 1
    while nodes * node <= largest:
        yield nodes * node
        if nodes > 1 and nodes * node * 3 // 2 <= largest:
            yield nodes * node * 3 // 2
        nodes *= 2


def least_accelerators(
    model: ModelConfig, name: str, hardware: Hardware, seq: int, dtype: Precision = Precision.BF16
) -> Candidate | None:
    """The fewest accelerators that hold the model at all, everything sharded and recomputed; None if 16,384 do not."""

    def held_by(count: int) -> Candidate | None:
        found = lightest(_request(model, name, hardware, seq, count, dtype))
        return min((one for one in found if one.fits), key=by_preference, default=None)

    before = 0
    for count in counts(hardware):
        enough = held_by(count)
        if enough is not None:  # of those between, every one, or every whole node where there are many
            step = 1 if count <= EVERY_COUNT else hardware.gpus_per_node
            fewer = (held_by(fewer) for fewer in range(before + step, count, step))
            return next((one for one in fewer if one is not None), enough)
        before = count
    return None


def _recommended(model: ModelConfig, hardware: Hardware, seq: int) -> Candidate | None:
    for count in counts(hardware):
        request = _request(model, model.name, hardware, seq, count, Precision.BF16)
        space = Space(microbatches=(1,), recomputes=(Recompute.NONE,), virtual_stages=(1,))
        found = [
            one
            for one in candidates(request, space=space)
            if one.memory_bytes <= COMFORTABLE * hardware.memory_bytes and not one.crosses_nodes
        ]
        if found:
            return min(found, key=by_preference)
    return None


def _request(
    model: ModelConfig, name: str, hardware: Hardware, seq: int, count: int, dtype: Precision
) -> Request:
    """Four sequences a step for each accelerator, so that any topology has microbatches."""
    longest = replace(model, max_positions=max(seq, model.max_positions))
    return Request(
        model=longest, name=name, hardware=hardware, gpus=count, seq=seq, global_batch=4 * count, dtype=dtype
    )
