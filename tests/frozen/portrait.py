"""What a layout does, as plain values: its programs, numbers, bytes and checkpoint.

All that the record needs of the engine is imported and called here. Names and forms that may change (call sites, group
names, free text, how ranks are classed) are left out, so that a difference is one in what is done.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.agreement import Piece, assemble
from tests.frozen.rows import MODEL, Row
from triaxis.engine.checkpoint.manifest import read_manifest
from triaxis.engine.checkpoint.store import CheckpointStore, RunState
from triaxis.engine.plan import Precision, Recompute, StepPlan, UpdateRule
from triaxis.engine.step import TrainingStep
from triaxis.engine.trace.cluster import trace_cluster
from triaxis.models.batch import IGNORED, Batch
from triaxis.models.fields import config_from_fields
from triaxis.parallel.kernels.attention import documents_of
from triaxis.parallel.pipeline.schedule import ScheduleName
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.programs.program import SETUP, Cluster, Communicate, Compute, Program, Wait
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.thread import run_threads

Portrait = dict[str, Any]
LENGTH, STEPS, LEARNING_RATE = 16, 20, 1e-3
PLANNED: dict[str, Any] = {"schedule": ScheduleName, "recompute": Recompute, "accumulate_dtype": Precision}
COMPUTE_SPACES = 5  # in the line of an operation; that of a wait has fewer, that of a communication more


def short(*parts: bytes | str) -> str:
    """The first 32 bits of a hash."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
    return digest.hexdigest()[:8]


def plan_of(row: Row, dtype: str) -> StepPlan:
    return StepPlan(
        model=config_from_fields(MODEL | {"name": "frozen"} | dict(row.model), row.name),
        microbatch_size=row.microbatch_size,
        microbatches=row.microbatches,
        sequence_length=LENGTH,
        dtype=Precision(dtype),
        rule=UpdateRule(**row.rule),
        document_tokens=LENGTH // 2 if row.documents else None,
        **{name: PLANNED[name](value) if name in PLANNED else value for name, value in row.plan.items()},
    )


def topology_of(row: Row) -> Topology:
    return Topology(tp=row.tp, pp=row.pp, dp=row.dp, order=row.order)


# The program.


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """What one rank does in a step: a line for each event, and how the bytes that it holds change."""

    lines: tuple[str, ...]
    memory: tuple[str, ...]
    peak_bytes: int

    def messages(self) -> list[str]:
        """The communications and waits alone."""
        return [line + "\n" for line in self.lines if line.count(" ") != COMPUTE_SPACES]

    def digest(self) -> str:
        """How often it communicates what; how many other operations there are, and their FLOPs."""
        counts = Counter(
            " ".join(line.split()[1:3]) for line in self.lines if line.count(" ") > COMPUTE_SPACES
        )
        other = [line.split() for line in self.lines if line.count(" ") == COMPUTE_SPACES]
        told = [f"{count} {what}" for what, count in sorted(counts.items())]
        return ", ".join(
            [*told, f"{len(other)} operations", f"{sum(int(words[3]) for words in other)} FLOPs"]
        )


def rank_program(cluster: Cluster, rank: int) -> RankProgram:
    """The rank's program with its own sizes. A group is named by its ranks; a sum of nothing is no event."""
    program: Program = cluster.program(rank)
    lines: list[str] = []
    memory = [f"{kind} {held}" for kind, held in sorted((program.held or {}).items()) if held]
    peak = total = sum((program.held or {}).values())
    for step in program.steps:
        label = step.label if step.acts else "-"
        empty = False
        for event in step.segment.events if step.label != SETUP else ():
            if isinstance(event, Compute):
                bytes_ = f"{event.read_bytes} {event.written_bytes}"
                lines.append(f"{label} {event.operation} {event.dtype} {event.flops} {bytes_}")
            elif isinstance(event, Wait):
                if not empty:
                    lines.append(
                        f"{label} wait {operation(event)} {ranks(cluster, event.group, rank)} {event.age}"
                    )
                empty = False
            elif isinstance(event, Communicate):
                varies = event.varying >= 0
                elements = cluster.sizes[rank][event.varying] if varies else event.elements
                empty = varies and not elements
                group = ranks(cluster, event.group, rank)
                size = "" if varies else event.nbytes
                if not empty:
                    lines.append(
                        f"{label} {operation(event)} {event.dtype} {elements} {size} {group} {event.peer}"
                    )
        curve = step.segment.memory
        for place, kind, delta in zip(curve.places, curve.kinds, curve.deltas, strict=True):
            memory.append(f"{label} {place} {kind} {delta}")
            total += delta
            peak = max(peak, total)
    return RankProgram(lines=tuple(lines), memory=tuple(memory), peak_bytes=peak)


def operation(event: Communicate | Wait) -> str:
    return str(event.operation).replace(" ", "_")


def ranks(cluster: Cluster, group: str, rank: int) -> str:
    return ".".join(str(member) for member in cluster.members(group, rank))


def programs_of(row: Row) -> list[RankProgram]:
    topology = topology_of(row)
    cluster = trace_cluster(plan_of(row, row.dtypes[0]), topology)
    return [rank_program(cluster, rank) for rank in range(topology.world_size)]


# The numbers.


def batches_of(row: Row, step: int) -> list[Batch]:
    """All data-parallel ranks' microbatches of a step; the trained tokens of a sequence run from none to all."""
    random = np.random.default_rng(1000 + step)
    microbatches = row.microbatches * row.dp
    count = microbatches * row.microbatch_size
    tokens, labels = random.integers(0, int(MODEL["vocab_size"]), (2, count, LENGTH))  # type: ignore[call-overload]
    borders = random.integers(1, LENGTH, count) if row.documents else np.full(count, LENGTH)
    for index in range(count):
        labels[index, round(LENGTH * index / (count - 1)) :] = IGNORED
    places = np.arange(LENGTH)[None]
    behind = places >= borders[:, None]
    positions = places - behind * borders[:, None]
    whole = [
        torch.from_numpy(values).chunk(microbatches) for values in (tokens, labels, positions, behind * 1)
    ]
    return [
        Batch(tokens_BL=t, labels_BL=y, positions_BL=p, documents=documents_of(d) if row.documents else None)
        for t, y, p, d in zip(*whole, strict=True)
    ]


def pieces(named: Iterator[tuple[Any, Tensor]]) -> list[Piece]:
    return [(segment.layout, tensor.clone()) for segment, tensor in named]


def train_rank(world: World, row: Row, dtype: str, directory: Path) -> Portrait:
    """One rank's run: its numbers, its bytes, its parts of gradients and weights."""
    mesh = build_mesh(world, topology_of(row))
    step = TrainingStep(plan_of(row, dtype), mesh)
    gradients: list[Piece] = []
    synchronize = step.data_parallel.synchronize_gradients

    def keep_first_gradients() -> None:
        synchronize()
        if not gradients:
            gradients.extend(pieces(step.data_parallel.gathered_gradients()))

    step.data_parallel.synchronize_gradients = keep_first_gradients  # type: ignore[method-assign]
    own = slice(mesh.dp.rank * row.microbatches, (mesh.dp.rank + 1) * row.microbatches)
    results = [
        step.train(batches_of(row, number)[own], LEARNING_RATE, row.most_norm) for number in range(STEPS)
    ]
    state = RunState(step=STEPS, tokens=0, config={}, sampler={}, eval_loss=None, extra={})
    store = CheckpointStore(directory, step)
    store.save(state)
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "skipped": [number for number, result in enumerate(results) if result.skipped],
        "tokens": [result.trained_tokens for result in results],
        "evaluation": step.evaluate(batches_of(row, STEPS)[own]),
        "state bytes": step.state_bytes(),
        "gradients": gradients,
        "weights": pieces(step.data_parallel.gathered_masters()),
        "checkpoint": store.latest(),
    }


def content(tensors: dict[str, Tensor]) -> dict[str, str]:
    """A hash of each tensor's bits, by name."""
    return {
        name: short(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        for name, tensor in sorted(tensors.items())
    }


def manifest_of(path: Path) -> dict[str, str]:
    """A hash of each stored tensor's dtype, shape and rectangles."""
    hashes = {}
    for name, record in sorted(read_manifest(path).tensors.items()):
        rectangles = sorted((list(chunk.offsets), list(chunk.sizes)) for chunk in record.chunks)
        hashes[name] = short(repr((record.dtype, list(record.shape), rectangles)))
    return hashes


def numbers_of(row: Row, dtype: str) -> Portrait:
    """The row's run on threads: 20 steps, an evaluation and a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        found = run_threads(
            row.tp * row.pp * row.dp, lambda world: train_rank(world, row, dtype, Path(folder))
        )
        manifest = manifest_of(found[0]["checkpoint"])
    first = found[0]
    gradients, alike = assemble([rank["gradients"] for rank in found])
    weights, same = assemble([rank["weights"] for rank in found])
    loss, tokens = first["evaluation"]
    equal = all(
        rank[key] == first[key] for rank in found for key in ("losses", "norms", "skipped", "evaluation")
    )
    return {
        "first loss": first["losses"][0].hex(),
        "last loss": first["losses"][-1].hex(),
        "evaluation": f"{loss.hex()} of {tokens}",
        "norms": [norm.hex() for norm in first["norms"]],
        "skipped": first["skipped"],
        "tokens": short(repr(first["tokens"])),
        "replicas equal": alike and same and equal,
        "state bytes": [rank["state bytes"] for rank in found],
        "gradients": content(gradients),
        "weights": content(weights),
        "manifest": manifest,
    }


def portrait(row: Row) -> Portrait:
    """Everything that is recorded of a row, flat: `fp32 norms`, `program`, …"""
    programs = programs_of(row)
    hashes = [short(*(line + "\n" for line in program.lines)) for program in programs]
    drawn: Portrait = {
        "program": hashes,
        "messages": [short(*program.messages()) for program in programs],
        "digests": {h: program.digest() for h, program in zip(hashes, programs, strict=True)},
        "memory": [short(*(line + "\n" for line in program.memory)) for program in programs],
        "peak bytes": [program.peak_bytes for program in programs],
    }
    for dtype in row.dtypes:
        drawn |= {f"{dtype} {name}": value for name, value in numbers_of(row, dtype).items()}
    return drawn


def arithmetic() -> str:
    """How this machine rounds: a hash of what torch computes here, whatever the engine does."""
    found: Iterable[Tensor] = (_computed(dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16))
    return short(torch.__version__, *content({str(i): tensor for i, tensor in enumerate(found)}).values())


def _computed(dtype: torch.dtype) -> Tensor:
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 16, 32))).to(dtype)
    y = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    y = torch.nn.functional.gelu(torch.nn.functional.silu(y @ x[0].T) @ x[0], approximate="tanh")
    return torch.cat([y.log_softmax(-1).flatten(), y.square().mean(-1).rsqrt().flatten(), y.norm()[None]])
