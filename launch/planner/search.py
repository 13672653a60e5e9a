"""Every legal topology × ZeRO stage × microbatch × recompute × schedule, priced by the engine's own parts.

What can be said without pricing is not priced: sequence parallelism is on wherever tp is (it only saves memory), and
GPipe is left out (1F1B takes the same time and holds fewer microbatches).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from triaxis.engine.config import ConfigError, RunConfig
from triaxis.engine.plan import Precision, Recompute, StepPlan
from triaxis.engine.rules import resolve
from triaxis.launch.hardware.hardware import Hardware
from triaxis.launch.planner.accuracy import memory_band, time_band
from triaxis.launch.planner.cost import step_time
from triaxis.launch.planner.held import memory
from triaxis.launch.planner.layout import Layout
from triaxis.launch.planner.price import Memory, StepTime
from triaxis.models.config import ModelConfig
from triaxis.parallel.pipeline.schedule import ScheduleName
from triaxis.parallel.places.legal_values import counted, divisors
from triaxis.parallel.places.topology import Topology

EQUAL = 0.02
"""Times closer than this are told apart by nothing here; then the simpler layout is chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked: train `model` on `gpus` of `hardware`.

    name: the model as --model takes it; seq: tokens a sequence; global_batch: sequences a step
    document_tokens: of a document on average; None: a sequence is one
    """

    model: ModelConfig
    name: str
    hardware: Hardware
    gpus: int
    seq: int
    global_batch: int
    dtype: Precision = Precision.BF16
    document_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What is tried on each topology."""

    zeros: Sequence[int] = (0, 1, 2, 3)
    microbatches: Sequence[int] = range(1, 17)
    recomputes: Sequence[Recompute] = (Recompute.NONE, Recompute.FULL)
    virtual_stages: Sequence[int] = (1, 2, 3, 4, 5, 8)


EVERYTHING = Space()
LIGHTEST = Space(zeros=(3,), microbatches=(1,), recomputes=(Recompute.FULL,), virtual_stages=(1,))


@dataclass(frozen=True)
class Candidate:
    """A layout and its price: memory of the fullest rank, time of a step."""

    layout: Layout
    memory: Memory

    @cached_property
    def time(self) -> StepTime:
        return step_time(self.layout)

    @property
    def memory_bytes(self) -> float:
        return self.memory.total

    @property
    def seconds(self) -> float:
        return self.time.seconds

    @property
    def margin_bytes(self) -> float:
        """Of the accelerator's memory, what is left; negative where it does not fit."""
        return self.layout.hardware.memory_bytes - self.memory.total

    @property
    def fits(self) -> bool:
        return self.margin_bytes >= 0

    @property
    def fits_surely(self) -> bool:
        """Fits even at the upper end of its range."""
        return self.memory_range[1] <= self.layout.hardware.memory_bytes

    @property
    def memory_range(self) -> tuple[float, float]:
        """Bytes between which nine of ten published runs of such a prediction lay (docs/accuracy.md)."""
        band = memory_band()
        return band.low * self.memory_bytes, band.high * self.memory_bytes

    @property
    def seconds_range(self) -> tuple[float, float]:
        """The same of the step's time."""
        band = time_band("dense")
        return band.low * self.seconds, band.high * self.seconds

    @property
    def crosses_nodes(self) -> bool:
        """Tensor parallelism across nodes, which no published run does, so that nothing vouches for its price."""
        return self.layout.tp > self.layout.hardware.gpus_per_node

    @property
    def topology(self) -> tuple[int, int, int]:
        """(dp, tp, pp)."""
        return self.layout.dp, self.layout.tp, self.layout.pp

    def __str__(self) -> str:
        layout = self.layout
        chunks = f" interleaved {layout.virtual_stages}" if layout.virtual_stages > 1 else ""
        again = " recompute" if layout.recomputes else ""
        sizes = f"dp{layout.dp} tp{layout.tp} pp{layout.pp}{chunks}"
        return f"{sizes} ZeRO-{layout.zero} microbatch {layout.microbatch}{again}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a search found. candidates: all that were priced; fitting: those that fit, the best first;
    pareto: those of them that no other beats in both memory and time, the fastest first; tp crosses nodes in none,
    unless in the best."""

    request: Request
    candidates: tuple[Candidate, ...]
    fitting: tuple[Candidate, ...]
    pareto: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate | None:
        """The simplest of those as fast as the fastest to within 2%, which prices cannot tell apart; of these, one that
        nothing else beats in both memory and time."""
        if not self.fitting:
            return None
        first = self.fitting[0]
        equals = [one for one in self.pareto if _as_good(one, first)] or [first]
        return min(equals, key=simplicity)


def search(request: Request) -> Plan:
    """Prices every legal layout; ConfigError if there is none."""
    every = tuple(topologies(request))
    found = tuple(candidates(request, [one for one in every if inside_node(request, one)]))
    if not any(one.fits for one in found):
        found += tuple(candidates(request, [one for one in every if not inside_node(request, one)]))
    if not found:
        raise ConfigError(_no_topology(request))
    fitting = tuple(sorted((one for one in found if one.fits), key=by_preference))
    front = pareto(one for one in fitting if one.crosses_nodes == fitting[0].crosses_nodes)
    return Plan(request=request, candidates=found, fitting=fitting, pareto=front)


def simplicity(candidate: Candidate) -> tuple[int, int, bool, int, float]:
    """Less model parallelism, less sharding, no recompute, fewer chunks; then time."""
    layout = candidate.layout
    return (
        layout.tp * layout.pp,
        layout.zero,
        layout.recomputes,
        layout.virtual_stages,
        candidate.seconds,
    )


def by_preference(candidate: Candidate) -> tuple[bool, bool, float, int, bool, int]:
    """Tensor parallelism inside a node; surely fitting before perhaps; then time; then the simpler one."""
    layout = candidate.layout
    return (
        candidate.crosses_nodes,
        not candidate.fits_surely,
        candidate.seconds,
        layout.zero,
        layout.recomputes,
        layout.tp * layout.pp,
    )


def _as_good(candidate: Candidate, first: Candidate) -> bool:
    return (
        by_preference(candidate)[:2] == by_preference(first)[:2]
        and candidate.seconds <= (1 + EQUAL) * first.seconds
    )


def pareto(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Those that no other beats in memory and time at once, the fastest first."""
    kept: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda one: (one.seconds, one.memory_bytes)):
        if not kept or candidate.memory_bytes < kept[-1].memory_bytes:
            kept.append(candidate)
    return tuple(kept)


def inside_node(request: Request, topology: tuple[int, int, int]) -> bool:
    """Whether tensor parallelism stays inside a node. No published run has it wider, so it is priced only where nothing
    else fits, or where it is asked for."""
    return topology[1] <= request.hardware.gpus_per_node


def topologies(request: Request) -> Iterator[tuple[int, int, int]]:
    """Every (dp, tp, pp) that the engine would start, by its own rules."""
    for tp in divisors(request.gpus):
        if any(tp > (cut.serving or cut.blocks) for cut in request.model.cuts()):
            break
        for pp in divisors(request.gpus // tp):
            if pp <= request.model.layers and not faults(request, tp=tp, pp=pp):
                yield request.gpus // (tp * pp), tp, pp


def run_config(
    request: Request, *, tp: int, pp: int, dp: int | None, microbatch: int, virtual_stages: int
) -> RunConfig:
    """The flags of such a run, as the engine's rules read them."""
    return RunConfig(
        model=request.name,
        seq=request.seq,
        tp=tp,
        pp=pp,
        dp=dp,
        sp=cuts_sequences(request, tp, microbatch),
        global_batch=request.global_batch,
        per_device_train_batch_size=microbatch,
        schedule=ScheduleName.INTERLEAVED if virtual_stages > 1 else ScheduleName.ONE_F_ONE_B,
        virtual_stages=virtual_stages if virtual_stages > 1 else None,
    )


def cuts_sequences(request: Request, tp: int, microbatch: int) -> bool:
    """Whether sequence parallelism is used: wherever it can be."""
    return tp > 1 and (request.seq * microbatch) % tp == 0


def faults(
    request: Request, *, tp: int, pp: int, microbatch: int = 1, virtual_stages: int = 1, dp: int | None = None
) -> tuple[str, ...]:
    """What the engine says against a layout; nothing if it would start."""
    config = run_config(request, tp=tp, pp=pp, dp=dp, microbatch=microbatch, virtual_stages=virtual_stages)
    try:
        resolve(config, request.gpus, request.model)
    except ConfigError as error:
        return error.faults
    return ()


def candidates(
    request: Request, only: Iterable[tuple[int, int, int]] | None = None, space: Space = EVERYTHING
) -> Iterator[Candidate]:
    """Every legal layout, priced; `only` some topologies. What is larger than one that does not fit is left out."""
    for dp, tp, pp in topologies(request) if only is None else only:
        each, rest = divmod(request.global_batch, dp)
        if rest:
            continue
        topology = Topology(dp=dp, tp=tp, pp=pp)
        ways = itertools.product(space.virtual_stages, space.zeros if dp > 1 else (0,), space.recomputes)
        for chunks, zero, recompute in ways:
            for microbatch in (size for size in space.microbatches if each % size == 0):
                if chunks > 1 and not _interleaves(request, pp, chunks, each // microbatch):
                    continue
                plan = StepPlan(
                    model=request.model,
                    microbatch_size=microbatch,
                    microbatches=each // microbatch,
                    sequence_length=request.seq,
                    schedule=ScheduleName.INTERLEAVED if chunks > 1 else ScheduleName.ONE_F_ONE_B,
                    virtual_stages=chunks,
                    sequence_parallel=cuts_sequences(request, tp, microbatch),
                    recompute=recompute,
                    zero=zero,
                    dtype=request.dtype,
                    document_tokens=request.document_tokens,
                )
                layout = Layout(plan=plan, topology=topology, hardware=request.hardware)
                candidate = Candidate(layout=layout, memory=memory(layout))
                yield candidate
                if not candidate.fits:
                    break


def _interleaves(request: Request, pp: int, chunks: int, microbatches: int) -> bool:
    """Whether the interleaved schedule makes sense: groups of pp microbatches are its unit."""
    return pp > 1 and microbatches % pp == 0 and pp * chunks <= request.model.layers


def lightest(request: Request) -> tuple[Candidate, ...]:
    """The legal layouts that need least: everything sharded and recomputed, one sequence at a time; lightest first."""
    inside = [one for one in topologies(request) if inside_node(request, one)]
    return tuple(sorted(candidates(request, inside, LIGHTEST), key=lambda one: one.memory_bytes))


def _no_topology(request: Request) -> tuple[str, ...]:
    """Why not even one topology is legal: what the engine says about the plainest one."""
    return faults(request, tp=1, pp=1) or (
        f"no topology of {counted(request.gpus, 'rank')} suits {request.name}",
    )
