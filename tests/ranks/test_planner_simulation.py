"""The planner against the simulation of the engine itself: memory and step time of random layouts of random models."""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.ranks.test_own_block import MIXED, OWN
from triaxis.engine.plan import Precision, Recompute, StepPlan
from triaxis.engine.run.peak import OWN_MAPPING_BYTES
from triaxis.engine.trace.cluster import trace_cluster
from triaxis.launch.hardware.hardware import load_hardware
from triaxis.launch.planner import cost, staging
from triaxis.launch.planner.cost import step_time
from triaxis.launch.planner.held import memory
from triaxis.launch.planner.layout import Layout
from triaxis.launch.planner.profiles import shapes_of
from triaxis.launch.planner.walk import compiled, walk
from triaxis.launch.simulator.memory import memory_use
from triaxis.launch.simulator.timeline import Prices, simulate
from triaxis.models.config import ModelConfig
from triaxis.models.fields import dense_model
from triaxis.models.presets import PRESETS, load_config
from triaxis.parallel.pipeline.orders import make_schedule
from triaxis.parallel.pipeline.schedule import ScheduleName
from triaxis.parallel.pipeline.walk import simulate as simulate_schedule
from triaxis.parallel.places.topology import Topology

COUNT, BATCH = 100 if os.environ.get("TRIAXIS_FULL") else 20, 10
MEMORY_TOLERANCE, TIME_TOLERANCE, MEAN_TOLERANCE = 0.03, 0.05, 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Plan over simulation, less one."""

    layout: Layout
    memory: float
    time: float


def draw_model(rng: random.Random) -> ModelConfig:
    """Over every feature: norms, q/k norms, biases, few key and value heads, tied tables, uneven layers."""
    hidden, heads = rng.choice(((1024, 16), (768, 12), (640, 8)))
    return dense_model(
        name="drawn",
        vocab_size=rng.choice((32000, 20001, 50257)),
        hidden_size=hidden,
        layers=rng.choice((8, 9, 11)),
        heads=heads,
        kv_heads=rng.choice([count for count in (1, 2, 4, heads) if heads % count == 0]),
        ffn_size=rng.choice((2816, 3072, 2048)),
        max_positions=2048,
        norm=rng.choice(("rmsnorm", "layernorm")),
        activation=rng.choice(("swiglu", "gelu")),
        positions=rng.choice(("rope", "learned")),
        attention_bias=rng.random() < 0.4,
        output_bias=rng.random() < 0.3,
        mlp_bias=rng.random() < 0.3,
        qk_norm=rng.random() < 0.3,
        tied=rng.random() < 0.4,
    )


def draw(rng: random.Random) -> Layout:
    """Over all schedules, ZeRO stages, recompute, tp with and without sequence parallelism, both precisions."""
    model = draw_model(rng)
    tp, pp, dp = rng.choice((1, 2, 4)), rng.choice((1, 2, 4)), rng.choice((1, 2, 4, 8))
    chunks = 2 if pp > 1 and rng.random() < 0.3 else 1
    name = (
        ScheduleName.INTERLEAVED if chunks > 1 else rng.choice((ScheduleName.ONE_F_ONE_B, ScheduleName.GPIPE))
    )
    plan = StepPlan(
        model=model,
        microbatch_size=rng.choice((1, 2, 3)),
        microbatches=rng.choice((1, 4, 8, 12)),
        sequence_length=rng.choice((512, 1024)),
        schedule=name,
        virtual_stages=chunks,
        sequence_parallel=tp > 1 and rng.random() < 0.7,
        recompute=rng.choice(list(Recompute)),
        zero=rng.choice((0, 1, 2, 3)) if dp > 1 else 0,
        dtype=rng.choice((Precision.BF16, Precision.BF16, Precision.FP32)),
    )
    hardware = load_hardware(rng.choice(("a100-80g", "h100-80g")))
    return Layout(plan=plan, topology=Topology(dp=dp, tp=tp, pp=pp), hardware=hardware)


def compare(layout: Layout) -> Compared:
    cluster = trace_cluster(layout.plan, layout.topology)
    peak = max(memory_use(program).peak_bytes for program in cluster.programs)
    seconds = simulate(cluster, Prices(layout.hardware)).seconds
    return Compared(
        layout=layout,
        memory=memory(layout).allocated / peak - 1,
        time=step_time(layout).seconds / seconds - 1,
    )


def described(found: Compared) -> str:
    return f"memory {found.memory:+.1%}, time {found.time:+.1%}: {found.layout}"


def check(found: list[Compared]) -> None:
    outside = [
        described(one)
        for one in found
        if abs(one.memory) > MEMORY_TOLERANCE or abs(one.time) > TIME_TOLERANCE
    ]
    assert not outside, "\n".join(outside)
    told = "\n".join(map(described, found))
    assert statistics.mean(abs(one.memory) for one in found) < MEAN_TOLERANCE, told
    assert statistics.mean(abs(one.time) for one in found) < MEAN_TOLERANCE, told


@pytest.mark.parametrize("batch", range(COUNT // BATCH))
def test_plans_agree_with_simulations(batch: int) -> None:
    """Memory and step time of every single layout, and on average by far."""
    rng = random.Random(4)
    drawn = [draw(rng) for _ in range(COUNT)]
    check([compare(one) for one in drawn[batch * BATCH : (batch + 1) * BATCH]])


LARGE = [
    pytest.param("llama2-7b", {"dp": 4, "tp": 2, "pp": 2}, {"zero": 1}, id="7b on 16"),
    pytest.param(
        "llama2-7b",
        {"dp": 8},
        {"zero": 3, "recompute": Recompute.FULL},
        id="7b on 8",
        marks=pytest.mark.full,
    ),
    pytest.param(
        "qwen3-8b", {"dp": 8, "tp": 2, "pp": 4}, {"zero": 2, "recompute": Recompute.FULL}, id="8b on 64"
    ),
    pytest.param(
        "llama2-70b",
        {"dp": 4, "tp": 8, "pp": 4},
        {"zero": 1, "recompute": Recompute.FULL},
        id="70b on 128",
        marks=pytest.mark.full,
    ),
    pytest.param(
        "llama2-70b",
        {"dp": 8, "tp": 8, "pp": 4},
        {"zero": 3, "recompute": Recompute.FULL},
        id="70b on 256",
        marks=pytest.mark.full,
    ),
]


@pytest.mark.parametrize(("name", "axes", "settings"), LARGE)
def test_large_models_agree(name: str, axes: dict[str, int], settings: dict[str, Any]) -> None:
    plan = StepPlan(
        model=load_config(name),
        microbatch_size=1,
        microbatches=16,
        sequence_length=4096,
        sequence_parallel=axes.get("tp", 1) > 1,
        dtype=Precision.BF16,
        **settings,
    )
    layout = Layout(plan=plan, topology=Topology(**axes), hardware=load_hardware("h100-80g"))
    found = compare(layout)
    assert abs(found.memory) < MEMORY_TOLERANCE and abs(found.time) < TIME_TOLERANCE, described(found)


def packed(document_tokens: int | None, microbatch_size: int = 3) -> Layout:
    plan = StepPlan(
        model=draw_model(random.Random(3)),
        microbatch_size=microbatch_size,
        microbatches=4,
        sequence_length=2048,
        document_tokens=document_tokens,
        sequence_parallel=True,
        zero=1,
        dtype=Precision.BF16,
    )
    return Layout(plan=plan, topology=Topology(dp=2, tp=2, pp=2), hardware=load_hardware("h100-80g"))


@pytest.mark.parametrize("document_tokens", [256, 300])
def test_rows_of_documents_agree(document_tokens: int) -> None:  # N74
    """300 do not fit evenly: seven documents a row, of two lengths."""
    found = compare(packed(document_tokens))
    assert abs(found.memory) < MEMORY_TOLERANCE and abs(found.time) < TIME_TOLERANCE, described(found)


def test_shorter_documents_cost_less_time_and_no_memory() -> None:  # N74
    whole, halves, eighths = (packed(length) for length in (None, 1024, 256))
    assert step_time(whole).seconds > step_time(halves).seconds > step_time(eighths).seconds
    assert memory(eighths).allocated <= memory(whole).allocated
    assert step_time(packed(5000)).seconds == step_time(whole).seconds


def test_a_large_table_takes_new_buffers_in_later_passes() -> None:
    """Interleaved and sharded, the third pass through the embedding is the highest; found among random layouts."""
    rng = random.Random(0)
    plan = StepPlan(
        model=replace(draw_model(rng), hidden_size=1024, layers=11, vocab_size=32000, tied=True),
        microbatch_size=2,
        microbatches=8,
        sequence_length=512,
        schedule=ScheduleName.INTERLEAVED,
        virtual_stages=2,
        sequence_parallel=True,
        recompute=Recompute.FULL,
        zero=3,
    )
    layout = Layout(plan=plan, topology=Topology(dp=2, tp=2, pp=4), hardware=load_hardware("a100-80g"))
    found = compare(layout)
    assert abs(found.memory) < MEMORY_TOLERANCE, described(found)


@pytest.mark.parametrize("model", [OWN, MIXED], ids=lambda model: model.name)
@pytest.mark.parametrize("zero", [1, 3])
def test_kinds_of_layers_that_nobody_told_the_planner_of_are_planned(model: ModelConfig, zero: int) -> None:
    """Of one's own module and configuration; of two kinds in one model, and with losses of their own."""
    plan = StepPlan(
        model=replace(model, max_positions=512, vocab_size=8192),
        microbatch_size=2,
        microbatches=8,
        sequence_length=512,
        zero=zero,
        dtype=Precision.BF16,
    )
    layout = Layout(plan=plan, topology=Topology(dp=2, tp=2, pp=2), hardware=load_hardware("h100-80g"))
    found = compare(layout)
    assert abs(found.memory) < MEMORY_TOLERANCE and abs(found.time) < TIME_TOLERANCE, described(found)


DEPTHS = [
    (load_config("tiny-v3"), 1, Topology(dp=2, tp=2, pp=2), 1, Recompute.NONE),
    (load_config("tiny-v3"), 2, Topology(dp=2, tp=2, pp=2), 3, Recompute.FULL),
    (load_config("small"), 2, Topology(dp=2, tp=2), 2, Recompute.NONE),
    (replace(load_config("small"), tied=True), 1, Topology(dp=2, pp=2), 1, Recompute.NONE),
]


@pytest.mark.parametrize(("model", "depths", "topology", "zero", "recompute"), DEPTHS)
def test_extra_prediction_depths_are_planned(
    model: ModelConfig, depths: int, topology: Topology, zero: int, recompute: Recompute
) -> None:
    """The stage that computes them has a second table where it is not the first, or shares the head's."""
    plan = StepPlan(
        model=replace(model, max_positions=512, vocab_size=8192, depths=depths),
        microbatch_size=2,
        microbatches=8,
        sequence_length=512,
        sequence_parallel=topology.tp > 1,
        zero=zero,
        recompute=recompute,
        dtype=Precision.BF16,
    )
    layout = Layout(plan=plan, topology=topology, hardware=load_hardware("h100-80g"))
    found = compare(layout)
    assert abs(found.memory) < MEMORY_TOLERANCE and abs(found.time) < TIME_TOLERANCE, described(found)
    without = replace(layout, plan=replace(plan, model=replace(plan.model, depths=0)))
    assert memory(layout).allocated > memory(without).allocated
    assert step_time(layout).seconds > step_time(without).seconds


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_plan_counts_what_the_model_counts(name: str) -> None:
    """Every parameter once, in every preset; a bias that only chooses experts has no gradient, and no state."""
    model = load_config(name)
    untrained = 0
    for kind, count in model.kinds().items():
        rule = getattr(getattr(kind, "feed_forward", None), "rule", None)
        untrained += count * rule.experts if rule is not None and rule.choosing_bias else 0
    plan = StepPlan(model=model, microbatch_size=1, microbatches=1, sequence_length=8)
    if name in ("671b", "deepseek-v3", "kimi-k2"):  # a layer's experts in one tensor: 30 GB and more
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if memory < 64e9:
            with pytest.raises(ValueError, match="experts are planned without ep yet"):
                shapes_of(plan, 1)
            return
    parts = shapes_of(plan, 1)
    held = [parts.embedding, parts.head]
    held += [parts.layers[kind] for kind, count in model.kinds().items() for _ in range(count)]
    counted = sum(one.elements for part in held for one in (*part.parameters, *part.root))
    assert counted == model.parameters() - untrained


SCHEDULES = [("1f1b", pp, count, 1) for pp in (1, 2, 5) for count in (1, 3, 9)]
SCHEDULES += [("gpipe", 3, 4, 1), ("interleaved", 2, 6, 2), ("interleaved", 4, 10, 3)]


@pytest.mark.parametrize(("name", "pp", "count", "chunks"), SCHEDULES)
def test_the_walk_is_the_schedule_in_time(name: str, pp: int, count: int, chunks: int) -> None:
    """With messages that take no time, a rank's last action ends when the schedule's own clock says."""
    spans = simulate_schedule(make_schedule(name, pp, count, chunks))
    seconds = (tuple((float(1 + slot % 2),) * 3 for slot in range(2 * chunks)),) * pp
    found = walk(compiled(name, pp, count, chunks), (0.0,) * pp, seconds, pp)
    assert found.ends == tuple(max(span.stop for span in of_rank) for of_rank in spans)


@pytest.mark.parametrize("seed", range(12))
def test_few_ranks_and_microbatches_stand_for_many(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    chunks, pp = rng.choice((1, 1, 2)), rng.choice((2, 4, 16))
    plan = StepPlan(
        model=load_config("llama2-7b"),
        microbatch_size=1,
        microbatches=6 * pp,
        sequence_length=2048,
        schedule=ScheduleName.INTERLEAVED if chunks > 1 else ScheduleName.ONE_F_ONE_B,
        virtual_stages=chunks,
        sequence_parallel=True,
        zero=rng.choice((0, 1, 2, 3)),
        recompute=rng.choice(list(Recompute)),
        dtype=Precision.BF16,
    )
    layout = Layout(plan=plan, topology=Topology(dp=4, tp=2, pp=pp), hardware=load_hardware("a100-80g"))
    few = step_time(layout).seconds
    monkeypatch.setattr(cost, "RANKS", pp)
    monkeypatch.setattr(cost, "walked_microbatches", lambda schedule, ranks, chunks, count: count)
    assert few == pytest.approx(step_time(layout).seconds, rel=0.005)


def test_what_a_process_gives_back_is_told_once() -> None:
    assert staging.OWN_MAPPING_BYTES == OWN_MAPPING_BYTES


def test_a_large_vocabulary_costs_its_chunks() -> None:
    """Chunks hold 512 tokens at least, so that each reading of the head is used: eight times the words, eight times."""
    plan = StepPlan(
        model=load_config("llama2-7b"),
        microbatch_size=1,
        microbatches=4,
        sequence_length=1024,
        dtype=Precision.BF16,
    )

    def head(vocabulary: int) -> float:
        model = replace(plan.model, vocab_size=vocabulary)
        found = Layout(
            plan=replace(plan, model=model), topology=Topology(), hardware=load_hardware("h100-80g")
        )
        return step_time(found).compute

    none = head(16)
    assert 6.5 < (head(256_000) - none) / (head(32_000) - none) < 8.5


def test_torch_comes_with_the_first_price_and_not_before() -> None:
    program = (
        "import sys\n"
        "from triaxis.launch.planner.search import Request\n"
        "import triaxis.launch.planner.cost, triaxis.launch.planner.held, triaxis.launch.pages.report\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
