"""The path that a GPU takes through a step, rehearsed without one: llama3-8b's own step, dry, with the kernels of CUDA.

Tensors are pages that nobody touches, on this machine; which function does what is chosen as for "cuda".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from triaxis.engine.plan import Precision, StepPlan
from triaxis.engine.step import build_stages
from triaxis.engine.trace.cluster import trace_cluster
from triaxis.engine.trace.meter import Known
from triaxis.engine.trace.rank import TracedRank, trace_rank
from triaxis.launch.hardware.hardware import load_hardware
from triaxis.launch.simulator.run import simulate_run
from triaxis.models.batch import SequenceContext
from triaxis.models.blocks import Block
from triaxis.models.presets import PRESETS
from triaxis.parallel.kernels.products import add_product, add_product_on_cuda, product_for
from triaxis.parallel.layers.loss_chunks import chunk_tokens
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.programs.program import SETUP, UPDATE, Compute
from triaxis.parallel.programs.proof import prove
from triaxis.parallel.worlds.communicators import Direction, held_by
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.trace import TraceWorld

LENGTH = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A layout of llama3-8b. rank: the one that is looked at."""

    topology: Topology
    rank: int = 0
    zero: int = 1
    sequence_parallel: bool = False
    documents: bool = True

    def __str__(self) -> str:
        where = self.topology
        return f"tp{where.tp} pp{where.pp} dp{where.dp} zero{self.zero} rank{self.rank}"

    def plan(self) -> StepPlan:
        return StepPlan(
            model=PRESETS["llama3-8b"],
            microbatch_size=1,
            microbatches=8,
            sequence_length=LENGTH,
            dtype=Precision.BF16,
            zero=self.zero,
            sequence_parallel=self.sequence_parallel,
            seed=None,
            document_tokens=LENGTH // 2 if self.documents else None,
        )


ROWS = [
    Row(topology=Topology(), documents=False),
    Row(topology=Topology()),
    Row(topology=Topology(tp=8), sequence_parallel=True),
    Row(topology=Topology(pp=4)),
    Row(topology=Topology(pp=4), rank=3),
    Row(topology=Topology(dp=8), zero=3),
]
EACH_ROW = pytest.mark.parametrize("row", ROWS, ids=str)


@cache
def traced(row: Row) -> tuple[TracedRank, Known]:
    known = Known()
    found = trace_rank(row.plan(), row.topology, row.rank, known=known, target="cuda")
    return found, known


def made_shapes(known: Known) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    """Operator, shape and dtype of everything that the step's operators return."""
    for key, call in known.calls.items():
        for made in call.results:
            if isinstance(made, tuple):
                yield key[0]._schema.name, tuple(made[0]), made[2]


@EACH_ROW
def test_the_host_waits_for_the_device_once_a_step_and_never_in_the_loop(row: Row) -> None:
    found, _ = traced(row)
    assert found.host_reads == ((UPDATE, "host_values"),)


@EACH_ROW
def test_nothing_is_as_large_as_the_square_of_the_length(row: Row) -> None:
    _, known = traced(row)
    shapes = list(made_shapes(known))
    assert shapes
    for name, shape, _ in shapes:
        assert shape.count(LENGTH) < 2, f"{name} makes {shape}"


@EACH_ROW
def test_no_product_as_large_as_a_weight_is_made_beside_its_bucket(row: Row) -> None:
    found, known = traced(row)
    world = TraceWorld(row.rank, row.topology.world_size, "meta")
    stages = build_stages(row.plan(), build_mesh(world, row.topology))
    weights = {tuple(p.shape) for stage in stages for p in stage.parameters() if p.dim() == 2}
    assert len(weights) >= 4
    for name, shape, dtype in made_shapes(known):
        assert shape not in weights, f"{name} makes {shape} {dtype}"
    products = [
        event
        for step in found.program.steps
        for event in step.segment.events
        if isinstance(event, Compute) and event.operation == "addmm"
    ]
    assert products
    assert {event.dtype for event in products} == {"bfloat16"}, "what is multiplied"
    sizes = {4 * rows * columns for rows, columns in weights}
    assert {event.written_bytes for event in products} <= sizes, "and into fp32"


@EACH_ROW
def test_building_takes_no_more_than_training(row: Row) -> None:
    found, _ = traced(row)
    assert found.program.held is not None
    assert found.building_bytes <= sum(found.program.held.values())


def test_stage_3_is_built_within_its_states_and_one_bucket() -> None:
    row = ROWS[-1]
    found, _ = traced(row)
    elements = sum(bucket.elements for bucket in found.buckets)
    largest = max(bucket.elements for bucket in found.buckets)
    assert found.building_bytes <= (2 + 4 + 4) * elements / row.topology.dp + 2 * largest + (64 << 20)


def test_a_rank_of_512_holds_six_communicators() -> None:
    """The world, tp, dp, two of the pipeline, and the ends that a tied embedding would share."""
    topology = Topology(tp=8, pp=8, dp=8)
    world = TraceWorld(137, topology.world_size, "meta")
    build_mesh(world, topology)
    wanted = [(partition, Direction.UP) for partition in world.partitions.values()]
    wanted.append((world.partitions["pp"], Direction.DOWN))
    assert 1 + held_by(0, wanted) == 6
    assert 1 + held_by(137, wanted) == 5  # in the middle of its pipeline


def test_documents_run_through_the_kernel_of_variable_lengths() -> None:
    names = {name for name, _, _ in made_shapes(traced(ROWS[1])[1])}
    assert "torch_attn::_varlen_attn" in names
    assert not any("for_cpu" in name for name in names)


def test_a_read_that_is_planted_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of the device in the loop, where only the update may read."""
    row = Row(topology=Topology(dp=2))
    forward = Block.forward

    def reading(self: Block, hidden_TD: Tensor, context: SequenceContext) -> Tensor:
        made = forward(self, hidden_TD, context)
        assert isinstance(made, Tensor)
        return made * float(made.detach().view(-1)[0])

    monkeypatch.setattr(Block, "forward", reading)
    found = trace_rank(row.plan(), row.topology, 0, target="cuda")
    reads = [label for label, what in found.host_reads if what == "_local_scalar_dense"]
    assert len(reads) >= 32
    assert UPDATE not in reads
    assert SETUP not in reads


def test_the_whole_cluster_is_proved_and_priced_on_that_path() -> None:
    row = Row(topology=Topology(tp=2, pp=2, dp=2), sequence_parallel=True)
    plan = row.plan()
    assert not prove(trace_cluster(plan, row.topology, target="cuda")).faults
    hardware = load_hardware("h100-80g")
    on_cpu, on_gpu = (simulate_run(plan, row.topology, hardware, target=target) for target in ("cpu", "cuda"))
    assert on_gpu.timeline is not None
    assert on_cpu.timeline is not None
    assert on_gpu.timeline.seconds < on_cpu.timeline.seconds
    assert on_gpu.timeline.flops == on_cpu.timeline.flops


def test_a_gpus_chunks_of_the_loss_are_larger() -> None:
    assert chunk_tokens(128_256, target="cuda") == (1 << 28) // 128_256
    assert chunk_tokens(128_256) == 512


def test_products_into_wider_buckets_are_chosen_by_the_target() -> None:
    assert product_for("cuda") is add_product_on_cuda
    assert product_for("cpu") is add_product


@pytest.mark.parametrize("empty", [True, False])
def test_in_one_dtype_both_products_are_the_same(empty: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    grad, inputs, before = (torch.randn(shape, generator=generator) for shape in ((8, 3), (8, 5), (3, 5)))
    found = [before.clone(), before.clone()]
    add_product(found[0], grad, inputs, empty)
    add_product_on_cuda(found[1], grad, inputs, empty)
    assert torch.equal(*found)
    expected = grad.double().t() @ inputs.double() + (0 if empty else before.double())
    assert torch.allclose(found[0].double(), expected, atol=1e-5)
