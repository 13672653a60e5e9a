"""Closed forms against the simulation of the engine itself: memory and step time of random layouts."""

from __future__ import annotations

import os
import random
import statistics
from dataclasses import dataclass, replace
from typing import Any

import pytest

from triaxis.engine.plan import Recompute as StepRecompute
from triaxis.engine.plan import StepPlan
from triaxis.engine.run.peak import OWN_MAPPING_BYTES
from triaxis.engine.trace.cluster import trace_cluster
from triaxis.launch.hardware.hardware import load_hardware
from triaxis.launch.planner.cost import step_time
from triaxis.launch.planner.engine import staging, step
from triaxis.launch.planner.engine.buckets import BUCKET_ELEMENTS
from triaxis.launch.planner.engine.pipeline import compiled
from triaxis.launch.planner.layout import LOGIT_CHUNK, LOGIT_ROWS, Layout, Recompute
from triaxis.launch.planner.memory import memory
from triaxis.launch.planner.shapes import shape_of
from triaxis.launch.simulator.memory import memory_use
from triaxis.launch.simulator.timeline import Prices, simulate
from triaxis.models.config import ModelConfig, NormKind
from triaxis.models.fields import PositionKind, dense_model
from triaxis.models.kinds import ActivationKind
from triaxis.models.presets import load_config
from triaxis.parallel.layers.vocabulary import CHUNK_LOGITS, CHUNK_TOKENS
from triaxis.parallel.pipeline.schedule import Action, Compute, Kind, Receive, lower, make_schedule
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.replicas.zero import DEFAULT_BUCKET_ELEMENTS

COUNT, BATCH = 100 if os.environ.get("TRIAXIS_FULL") else 20, 10
MEMORY_TOLERANCE, TIME_TOLERANCE, MEAN_TOLERANCE = 0.03, 0.05, 0.005
LLAMA = dense_model(
    name="llama-like",
    vocab_size=32000,
    hidden_size=1024,
    layers=8,
    heads=16,
    kv_heads=4,
    ffn_size=2816,
    max_positions=2048,
)
GPT = dense_model(
    name="gpt-like",
    vocab_size=20000,
    hidden_size=768,
    layers=8,
    heads=12,
    kv_heads=12,
    ffn_size=3072,
    max_positions=1024,
    norm=NormKind.LAYERNORM,
    positions=PositionKind.LEARNED,
    activation=ActivationKind.GELU,
    attention_bias=True,
    output_bias=True,
    mlp_bias=True,
    tied=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Closed form over simulation, less one."""

    layout: Layout
    memory: float
    time: float


def draw(rng: random.Random) -> tuple[ModelConfig, Layout]:
    model = rng.choice((LLAMA, GPT))
    tp, pp, dp = rng.choice((1, 2, 4)), rng.choice((1, 2, 4)), rng.choice((1, 2, 4, 8))
    chunks = 2 if pp > 1 and rng.random() < 0.3 else 1
    microbatch = rng.choice((1, 2))
    layout = Layout(
        shape=shape_of(model),
        hardware=load_hardware(rng.choice(("a100-80g", "h100-80g"))),
        dp=dp,
        tp=tp,
        pp=pp,
        zero=rng.choice((0, 1, 2, 3)) if dp > 1 else 0,
        microbatch=microbatch,
        global_batch=dp * microbatch * rng.choice((8, 12)),
        sequence=1024,
        schedule="interleaved" if chunks > 1 else "1f1b",
        virtual_stages=chunks,
        recompute=rng.choice((Recompute.NONE, Recompute.FULL)),
        sequence_parallel=tp > 1 and rng.random() < 0.7,
    )
    return model, layout


def compare(model: ModelConfig, layout: Layout) -> Compared:
    plan = StepPlan(
        model=model,
        microbatch_size=layout.microbatch,
        microbatches=int(layout.microbatches),
        sequence_length=layout.sequence,
        schedule=layout.schedule,
        virtual_stages=layout.virtual_stages,
        sequence_parallel=layout.sequence_parallel,
        recompute=StepRecompute(layout.recompute),
        zero=layout.zero,
        dtype="bf16",
    )
    cluster = trace_cluster(plan, Topology(dp=layout.dp, tp=layout.tp, pp=layout.pp))
    peak = max(memory_use(program).peak_bytes for program in cluster.programs)
    seconds = simulate(cluster, Prices(layout.hardware)).seconds
    return Compared(
        layout=layout,
        memory=memory(layout).allocated / peak - 1,
        time=step_time(layout).seconds / seconds - 1,
    )


def described(found: Compared) -> str:
    at = found.layout
    return (
        f"dp{at.dp} tp{at.tp} pp{at.pp} z{at.zero} v{at.virtual_stages} mbs{at.microbatch} {at.recompute} "
        f"sp{at.sequence_parallel} h{at.shape.hidden} {at.hardware.name}: "
        f"memory {found.memory:+.1%}, time {found.time:+.1%}"
    )


@pytest.mark.parametrize("batch", range(COUNT // BATCH))
def test_closed_forms_agree(batch: int) -> None:
    """Memory and step time of every single layout, and on average by far."""
    rng = random.Random(4)
    drawn = [draw(rng) for _ in range(COUNT)]
    found = [compare(*one) for one in drawn[batch * BATCH : (batch + 1) * BATCH]]
    outside = [
        described(one)
        for one in found
        if abs(one.memory) > MEMORY_TOLERANCE or abs(one.time) > TIME_TOLERANCE
    ]
    assert not outside, "\n".join(outside)
    told = "\n".join(map(described, found))
    assert statistics.mean(abs(one.memory) for one in found) < MEAN_TOLERANCE, told
    assert statistics.mean(abs(one.time) for one in found) < MEAN_TOLERANCE, told


LARGE = [
    pytest.param("llama2-7b", {"dp": 4, "tp": 2, "pp": 2, "zero": 1}, id="7b on 16"),
    pytest.param(
        "llama2-7b", {"dp": 8, "zero": 3, "recompute": Recompute.FULL}, id="7b on 8", marks=pytest.mark.full
    ),
    pytest.param(
        "llama2-7b", {"dp": 8, "tp": 2, "pp": 4, "zero": 2, "recompute": Recompute.FULL}, id="7b on 64"
    ),
    pytest.param(
        "llama2-70b",
        {"dp": 4, "tp": 8, "pp": 4, "zero": 1, "recompute": Recompute.FULL},
        id="70b on 128",
        marks=pytest.mark.full,
    ),
    pytest.param(
        "llama2-70b",
        {"dp": 8, "tp": 8, "pp": 4, "zero": 3, "recompute": Recompute.FULL},
        id="70b on 256",
        marks=pytest.mark.full,
    ),
]


@pytest.mark.parametrize(("name", "settings"), LARGE)
def test_large_models_agree(name: str, settings: dict[str, Any]) -> None:
    model = load_config(name)
    layout = Layout(
        shape=shape_of(model),
        hardware=load_hardware("h100-80g"),
        microbatch=1,
        global_batch=16 * settings["dp"],
        sequence=4096,
        sequence_parallel=settings.get("tp", 1) > 1,
        **{"dp": 1, **settings},
    )
    found = compare(model, layout)
    assert abs(found.memory) < MEMORY_TOLERANCE and abs(found.time) < TIME_TOLERANCE, described(found)


SCHEDULES = [("1f1b", pp, count, 1) for pp in (1, 2, 5) for count in (1, 3, 9)]
SCHEDULES += [("gpipe", 3, 4, 1), ("interleaved", 2, 6, 2), ("interleaved", 4, 10, 3)]


@pytest.mark.parametrize(("name", "pp", "count", "chunks"), SCHEDULES)
def test_the_walk_is_the_program_of_the_schedule(name: str, pp: int, count: int, chunks: int) -> None:
    """The same computations in the same order, and receives posted after the same one."""
    schedule = make_schedule(name, pp, count, chunks)
    steps = compiled(name, pp, count, chunks).steps
    for rank, program in enumerate(lower(schedule)):
        computing = [place for place, step in enumerate(steps, 1) if step[0] == rank]
        done: list[int] = []
        posted: dict[Action, int] = {}
        for item in program:
            if isinstance(item, Receive):
                posted[item.action] = done[-1] if done else 0
            elif isinstance(item, Compute):
                place = computing[len(done)]
                _, slot, before, awaited, _ = steps[place - 1]
                assert slot == 2 * item.action.chunk + (item.action.kind is Kind.BACKWARD)
                assert before == (done[-1] if done else 0)
                assert (awaited > 0) == (item.action in posted)
                if awaited:
                    assert steps[awaited - 1][0] == -1
                    assert steps[awaited - 1][3] == posted[item.action]
                done.append(place)
        assert done == computing


@pytest.mark.parametrize("seed", range(12))
def test_few_ranks_and_microbatches_stand_for_many(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    chunks, pp = rng.choice((1, 1, 2)), rng.choice((2, 4, 16))
    layout = Layout(
        shape=shape_of(load_config("llama2-7b")),
        hardware=load_hardware("a100-80g"),
        dp=4,
        tp=2,
        pp=pp,
        zero=rng.choice((0, 1, 2, 3)),
        microbatch=1,
        global_batch=4 * 6 * pp,
        sequence=2048,
        schedule="interleaved" if chunks > 1 else "1f1b",
        virtual_stages=chunks,
        recompute=rng.choice((Recompute.NONE, Recompute.FULL)),
    )
    few = step_time(layout).seconds
    monkeypatch.setattr(step, "RANKS", pp)
    monkeypatch.setattr(step, "walked_microbatches", lambda schedule, ranks, chunks, count: count)
    assert few == pytest.approx(step_time(layout).seconds, rel=0.005)


def test_constants_are_the_engines() -> None:
    assert (LOGIT_CHUNK, LOGIT_ROWS) == (CHUNK_LOGITS, CHUNK_TOKENS)
    assert BUCKET_ELEMENTS == DEFAULT_BUCKET_ELEMENTS
    assert staging.OWN_MAPPING_BYTES == OWN_MAPPING_BYTES


def test_a_large_vocabulary_costs_its_chunks() -> None:
    """Chunks hold 512 tokens at least, so that each reading of the head is used: eight times the words, eight times."""
    layout = replace(draw(random.Random(1))[1], tp=1, pp=1, dp=1, zero=0, recompute=Recompute.NONE)
    shape = layout.shape

    def head(vocabulary: int) -> float:
        found = step_time(replace(layout, shape=replace(shape, vocab=vocabulary)))
        return found.compute - step_time(replace(layout, shape=replace(shape, vocab=16))).compute

    assert 6.5 < head(256_000) / head(32_000) < 8.5
