"""A simulation as plain values: what `simulate --json` prints, and what report and trace are drawn from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triaxis.engine.plan import StepPlan
from triaxis.launch.hardware.device import context_bytes, needed_bytes
from triaxis.launch.hardware.hardware import Hardware
from triaxis.launch.simulator.memory import MemoryUse, memory_use, reserved_bytes
from triaxis.launch.simulator.timeline import Disturbance, Prices, Row, Timeline, simulate
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.programs.program import KINDS, SETUP, Cluster, Communicate, Program
from triaxis.parallel.programs.proof import Proof
from triaxis.parallel.worlds.group import sent_bytes

OBLIGATIONS = ("agreement", "channels", "progress", "one queue", "handles", "gradients", "memory")
CURVE_POINTS = 600
DRAWN_SPANS = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A proved cluster on hardware. timeline is None where the proof failed."""

    plan: StepPlan
    topology: Topology
    hardware: Hardware
    cluster: Cluster
    proof: Proof
    timeline: Timeline | None
    disturbance: Disturbance
    memory: Mapping[int, MemoryUse]
    reserved: Mapping[int, int]

    @property
    def needed_bytes(self) -> int:
        """What the fullest device must have."""
        peak = max(use.peak_bytes for use in self.memory.values())
        return round(needed_bytes(peak, self._group_sizes))

    @property
    def context_bytes(self) -> int:
        """What of it is the device's context and its communicators."""
        return round(context_bytes(self._group_sizes))

    @property
    def _group_sizes(self) -> tuple[int, int, int]:
        return self.topology.tp, self.topology.pp, self.topology.dp

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.hardware.memory_bytes


def price(
    plan: StepPlan,
    topology: Topology,
    cluster: Cluster,
    proof: Proof,
    hardware: Hardware,
    disturbance: Disturbance,
) -> Simulation:
    """Prices every rank's program."""
    timeline = simulate(cluster, Prices(hardware), disturbance) if proof.holds else None
    ranks = [row.rank for row in timeline.rows] if timeline else [cluster.program_of.index(0)]
    uses = {number: memory_use(program) for number, program in enumerate(cluster.programs)}
    reserved = {number: reserved_bytes(program) for number, program in enumerate(cluster.programs)}
    return Simulation(
        plan=plan,
        topology=topology,
        hardware=hardware,
        cluster=cluster,
        proof=proof,
        timeline=timeline,
        disturbance=disturbance,
        memory={rank: uses[cluster.program_of[rank]] for rank in ranks},
        reserved={rank: reserved[cluster.program_of[rank]] for rank in ranks},
    )


def as_dict(simulation: Simulation) -> dict[str, Any]:
    """Everything a person or a program may want to know; numbers in bytes, seconds and FLOPs."""
    plan, topology = simulation.plan, simulation.topology
    hardware, proof = simulation.hardware, simulation.proof
    broken = {fault.obligation for fault in proof.faults}
    warned = {fault.obligation for fault in proof.warnings}
    return {
        "run": {
            "model": plan.model.name,
            "parameters": plan.model.parameters(),
            "dtype": str(plan.dtype),
            "zero": plan.zero,
            "schedule": str(plan.schedule),
            "virtual_stages": plan.virtual_stages,
            "microbatches": plan.microbatches,
            "microbatch_size": plan.microbatch_size,
            "global_batch": _global_batch(simulation),
            "sequence_length": plan.sequence_length,
            "document_tokens": plan.document_tokens,
            "documents_a_row": plan.documents_a_row,
            "sp": plan.sequence_parallel,
            "recompute": plan.recompute.repeats_layers,
            "disturbed": {
                "stragglers": simulation.disturbance.slower,
                "links": simulation.disturbance.links,
            },
        },
        "topology": {
            **{axis: topology.size(axis) for axis in ("dp", "tp", "pp")},
            "order": topology.order,
            "world_size": topology.world_size,
            "gpus_per_node": hardware.gpus_per_node,
            "nodes": -(-topology.world_size // hardware.gpus_per_node),
        },
        "hardware": {
            "name": hardware.name,
            "memory_bytes": hardware.memory_bytes,
            "source": hardware.source,
        },
        "proof": {
            "holds": proof.holds,
            "ranks": proof.ranks,
            "classes": proof.classes,
            "communications": proof.communications,
            "obligations": [
                {"name": name, "holds": name not in broken, "warned": name in warned} for name in OBLIGATIONS
            ],
            "faults": [str(fault) for fault in proof.faults],
            "warnings": [str(fault) for fault in proof.warnings],
        },
        "time": _time(simulation),
        "memory": _memory(simulation),
        "traffic": _traffic(simulation),
        "timeline": {"rows": [_row(simulation, row) for row in _rows(simulation)]},
    }


def _global_batch(simulation: Simulation) -> int:
    plan = simulation.plan
    return plan.microbatch_size * plan.microbatches * simulation.topology.dp


def _rows(simulation: Simulation) -> tuple[Row, ...]:
    return simulation.timeline.rows if simulation.timeline else ()


def _time(simulation: Simulation) -> dict[str, Any] | None:
    timeline, plan, topology = simulation.timeline, simulation.plan, simulation.topology
    if timeline is None:
        return None
    world_size = topology.world_size
    tokens = _global_batch(simulation) * plan.sequence_length
    per_token = plan.model.flops_per_token(plan.attended_tokens)
    peak = simulation.hardware.peak_flops.get(plan.dtype, max(simulation.hardware.peak_flops.values()))
    whole = timeline.seconds * world_size * peak
    busiest = max(timeline.rows, key=lambda row: row.busy)
    stages: dict[int, Row] = {}
    for row in timeline.rows:
        stages.setdefault(topology.coordinates(row.rank)["pp"], row)
    lanes = {name: sum(end - start for start, end in lane) for name, lane in busiest.lanes.items()}
    return {
        "step_seconds": timeline.seconds,
        "tokens_per_second": tokens / timeline.seconds,
        "tokens_per_second_per_gpu": tokens / timeline.seconds / world_size,
        "model_flops_per_token": per_token,
        "mfu": per_token * tokens / whole,
        "hfu": timeline.flops / whole,
        "bubble": [
            1 - (stages[stage].busy + sum(stages[stage].exposed.values())) / timeline.seconds
            for stage in sorted(stages)
        ],
        "exposed_seconds": dict(busiest.exposed),
        "busy_seconds": {"compute": busiest.busy, **lanes},
        "critical_path": [{"what": what, "seconds": seconds} for what, seconds in timeline.critical],
    }


def _memory(simulation: Simulation) -> dict[str, Any]:
    ends: dict[int, dict[str, float]] = {
        row.rank: {label: start for start, _, label in reversed(row.compute)} for row in _rows(simulation)
    }
    return {
        "fits": simulation.fits,
        "needed_bytes": simulation.needed_bytes,
        "context_bytes": simulation.context_bytes,
        "ranks": [
            {
                "rank": rank,
                "place": simulation.cluster.places[rank],
                "peak_bytes": use.peak_bytes,
                "reserved_bytes": simulation.reserved[rank],
                "at": use.label,
                "at_seconds": ends.get(rank, {}).get(use.label, 0.0),
                "breakdown": {str(kind): nbytes for kind, nbytes in use.breakdown.items()},
            }
            for rank, use in simulation.memory.items()
        ],
        "curves": [
            _curve(simulation, rank, use, row)
            for row in _rows(simulation)
            for rank, use in ((row.rank, simulation.memory[row.rank]),)
        ],
    }


def _curve(simulation: Simulation, rank: int, use: MemoryUse, row: Row) -> dict[str, Any]:
    """Bytes at the height and at the end of each computation, over time."""
    labels = [step.label for step in simulation.cluster.program(rank).steps]
    times = {label: (start, end) for start, end, label in row.compute}
    held = simulation.cluster.program(rank).held or {}
    points: list[tuple[float, tuple[int, ...]]] = [(0.0, tuple(held.get(kind, 0) for kind in KINDS))]
    for number, (index, levels) in enumerate(use.curve):
        span = times.get(labels[index])
        if span is not None:
            points.append((span[1] if number % 2 else (span[0] + span[1]) / 2, levels))
    points = points[:: max(1, len(points) // CURVE_POINTS)]
    kinds = [place for place in range(len(KINDS)) if any(levels[place] for _, levels in points)]
    return {
        "rank": rank,
        "seconds": [time for time, _ in points],
        "bytes": {str(KINDS[place]): [levels[place] for _, levels in points] for place in kinds},
    }


def _row(simulation: Simulation, row: Row) -> dict[str, Any]:
    return {
        "rank": row.rank,
        "place": simulation.cluster.places[row.rank],
        "ranks": row.ranks,
        "compute": [list(span) for span in row.compute],
        "lanes": {name: _merged(lane, row.end / DRAWN_SPANS) for name, lane in row.lanes.items()},
    }


def _merged(spans: list[tuple[float, float]], gap: float) -> list[list[float]]:
    """Spans closer than `gap` are drawn as one."""
    merged: list[list[float]] = []
    for start, end in spans:
        if merged and start - merged[-1][1] <= gap:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def _traffic(simulation: Simulation) -> dict[str, Any]:
    """Bytes and messages that the busiest rank sends in a step, by group."""
    best: tuple[int, dict[str, int], dict[str, int]] = (-1, {}, {})
    for number, program in enumerate(simulation.cluster.programs):
        rank = simulation.cluster.program_of.index(number)
        sent, messages = _sent_by(program, simulation.cluster, rank)
        best = max(best, (sum(sent.values()), sent, messages), key=lambda found: found[0])
    return {"sent_bytes_per_rank": best[1], "messages_per_rank": best[2]}


def _sent_by(program: Program, cluster: Cluster, rank: int) -> tuple[dict[str, int], dict[str, int]]:
    """(bytes, messages) that a rank sends in a step, by group, as its `Traffic` counts them."""
    sizes = {name: len(cluster.members(name, rank)) for name in cluster.groups}
    counted: dict[int, dict[str, tuple[int, int]]] = {}
    sent: dict[str, int] = {}
    messages: dict[str, int] = {}
    for step in program.steps:
        if step.label == SETUP:
            continue
        key = id(step.segment)
        if key not in counted:
            counted[key] = {}
            for event in step.segment.messages:
                if isinstance(event, Communicate):
                    count, nbytes = counted[key].get(event.group, (0, 0))
                    counted[key][event.group] = (
                        count + 1,
                        nbytes + sent_bytes(event.operation, event.nbytes, sizes[event.group]),
                    )
        for name, (count, nbytes) in counted[key].items():
            sent[name] = sent.get(name, 0) + nbytes
            messages[name] = messages.get(name, 0) + count
    return sent, messages
