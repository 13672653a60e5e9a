"""Closed forms of memory against the engine's own tensors, published figures and known sums."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from triaxis.engine.plan import Precision, StepPlan
from triaxis.launch.hardware.hardware import load_hardware
from triaxis.launch.planner.profiles import profile
from triaxis.launch.planner.profiles import state_bytes as own_state_bytes
from triaxis.launch.published.layout import (
    INTERNEVO_FSDP,
    MEGATRON,
    MEGATRON_TE,
    Recipe,
    Recompute,
)
from triaxis.launch.published.memory import layers_in_flight, memory, state_bytes
from triaxis.launch.published.memory_tables import ENGINES
from triaxis.launch.published.shapes import Shape, shape_of
from triaxis.models.batch import Batch, Inputs, SequenceContext
from triaxis.models.config import ModelConfig
from triaxis.models.fields import dense_model
from triaxis.models.parts import build_part
from triaxis.models.presets import load_config
from triaxis.parallel.layers.build import Build
from triaxis.parallel.pipeline.orders import make_schedule
from triaxis.parallel.pipeline.schedule import Kind
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.thread import run_threads

GIB = 2**30
MODEL = dense_model(
    name="memory",
    vocab_size=512,
    hidden_size=256,
    layers=2,
    heads=8,
    kv_heads=4,
    ffn_size=640,
    max_positions=128,
)
BASE = Recipe(
    shape=shape_of(MODEL),
    hardware=load_hardware("h100-80g"),
    dp=1,
    microbatch=2,
    global_batch=2,
    sequence=128,
)


def kept_by_block(model: ModelConfig, tp: int, sequence_parallel: bool) -> int:
    """Bytes of all storages that a block of rank 0 keeps for backward, its input and weights apart."""

    def main(world: World) -> int:
        mesh = build_mesh(world, Topology(tp=tp))
        block = build_part(
            model.kind(0),
            model,
            Build.on(mesh, dtype=torch.bfloat16, sequence_parallel=sequence_parallel),
            "layer",
        )
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        weights = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
        tokens = 2 * 128
        ids = torch.zeros(2, 128, dtype=torch.int64)
        batch = Batch(tokens_BL=ids, labels_BL=ids, positions_BL=ids, documents=None)
        inputs = Inputs(batch=batch, token_scale=torch.ones(()), row_scale=1.0)
        context = SequenceContext(inputs=inputs, cos_T1E=None, sin_T1E=None)
        hidden = torch.randn(
            tokens // (tp if sequence_parallel else 1), model.hidden_size, dtype=torch.bfloat16
        ).requires_grad_()
        kept: dict[int, tuple[int, Tensor]] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes(), tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = block(hidden, context)
        output.sum().backward()
        return sum(size for size, _ in kept.values())

    return run_threads(tp, main)[0]


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True), (4, True)])
def test_activations_equal_what_a_block_keeps(tp: int, sequence_parallel: bool) -> None:
    """What a plan takes a layer to keep, its output in place of its input, is what a layer's storages hold."""
    plan = StepPlan(
        model=MODEL,
        microbatch_size=2,
        microbatches=1,
        sequence_length=128,
        sequence_parallel=sequence_parallel,
        dtype=Precision.BF16,
    )
    (unit,) = profile(plan, tp, load_hardware("h100-80g")).layers.values()
    assert unit.forward.growth == pytest.approx(kept_by_block(MODEL, tp, sequence_parallel), rel=0.01)


@pytest.mark.parametrize(
    ("dtype", "accumulate", "each"),
    [
        (Precision.BF16, None, (2, 4, 12)),
        (Precision.BF16, Precision.BF16, (2, 2, 12)),
        (Precision.FP32, None, (4, 4, 8)),
        (Precision.FP64, None, (8, 8, 16)),
    ],
)
def test_own_states_are_the_known_sums(
    dtype: Precision, accumulate: Precision | None, each: tuple[int, int, int]
) -> None:
    """Bytes a parameter of weights, gradients, and master with both moments."""
    plan = StepPlan(
        model=MODEL,
        microbatch_size=1,
        microbatches=1,
        sequence_length=8,
        dtype=dtype,
        accumulate_dtype=accumulate,
    )
    found = own_state_bytes(plan)
    assert (found.parameters, found.gradients, found.optimizer) == pytest.approx(each, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "microbatches", "virtual_stages"),
    [("1f1b", 8, 1), ("gpipe", 5, 1), ("interleaved", 8, 3), ("1f1b", 2, 1)],
)
def test_layers_in_flight_equal_the_schedule(name: str, microbatches: int, virtual_stages: int) -> None:
    schedule = make_schedule(name, 4, microbatches, virtual_stages)
    layout = replace(BASE, pp=4, schedule=name, virtual_stages=virtual_stages, global_batch=2 * microbatches)
    for rank, order in enumerate(schedule.orders):
        held = most = 0
        for action in order:
            held += 1 if action.kind is Kind.FORWARD else -1
            most = max(most, held)
        assert layers_in_flight(layout, rank, 6) == pytest.approx(most * 6 / virtual_stages)


# The bytes a parameter that ZeRO's paper and the engines' own estimators give.
@pytest.mark.parametrize(
    ("engine", "zero", "shards", "each"),
    [
        ("Megatron-LM", 1, 16, 6 + 12 / 16),
        ("DeepSpeed", 0, 4, 16),
        ("DeepSpeed", 2, 4, 2 + 14 / 4),
        ("PyTorch FSDP", 3, 4, 16 / 4),
    ],
)
def test_model_states_are_the_known_sums(engine: str, zero: int, shards: int, each: float) -> None:
    assert sum(state_bytes(1e9, zero=zero, shards=shards, software=ENGINES[engine])) == pytest.approx(
        each * 1e9
    )


def test_megatron_states_of_llama_8b_are_those_in_its_log() -> None:
    """Megatron-LM prints 57438.81 MiB of weights and optimizer for Llama 3.1 8B at dp 8."""
    layout = replace(
        BASE, shape=shape_of(load_config("llama3-8b")), dp=8, global_batch=16, software=MEGATRON_TE
    )
    assert memory(layout).model_states / 2**20 == pytest.approx(57438.81, rel=1e-3)


# Llama 3 70B and 405B cut to a few layers on B200s, Megatron-LM with Transformer Engine: GiB allocated at most.
@pytest.mark.parametrize(
    ("name", "layers", "axes", "gibibytes"),
    [
        ("llama3-70b", 12, {"dp": 4, "pp": 2}, 66.55),
        ("llama3-70b", 12, {"dp": 4, "tp": 2}, 60.68),
        ("llama3-70b", 12, {"tp": 8}, 28.29),
        ("llama3-405b", 4, {"dp": 2, "tp": 4}, 52.89),
    ],
)
def test_published_peaks_are_met(name: str, layers: int, axes: dict[str, int], gibibytes: float) -> None:
    shape = replace(shape_of(load_config(name)), layers=layers)
    layout = replace(
        BASE,
        shape=shape,
        hardware=load_hardware("b200"),
        microbatch=1,
        sequence=4096,
        global_batch=4 * axes.get("dp", 1),
        software=MEGATRON_TE,
        **axes,
    )
    assert memory(layout).allocated / GIB == pytest.approx(gibibytes, rel=0.03)


def test_each_remedy_lowers_what_it_should() -> None:
    shape = shape_of(load_config("llama2-70b"))
    wide = replace(BASE, shape=shape, dp=8, tp=4, pp=2, sequence=4096, microbatch=1, global_batch=256)
    base = memory(wide)
    assert memory(replace(wide, zero=0)).optimizer == pytest.approx(8 * base.optimizer)
    assert memory(replace(wide, zero=2)).gradients == pytest.approx(base.gradients / 8)
    assert memory(replace(wide, zero=3)).parameters == pytest.approx(base.parameters / 8)
    assert memory(replace(wide, recompute=Recompute.FULL)).activations < 0.2 * base.activations
    assert memory(replace(wide, sequence_parallel=False)).activations > 1.2 * base.activations
    assert memory(replace(wide, microbatch=2)).activations == pytest.approx(2 * base.activations)
    gpipe = memory(replace(wide, schedule="gpipe"))
    assert gpipe.activations > 10 * base.activations
    assert base.total == pytest.approx(sum(base.by_category().values()))


def test_experts_are_shared_by_their_own_ranks() -> None:
    shape = Shape(
        layers=4, hidden=1024, ffn=4096, heads=8, kv_heads=8, head_size=128, vocab=32000,
        experts=64, chosen=2, expert_ffn=512,
    )  # fmt: skip
    whole = replace(BASE, shape=shape, dp=8, ep=1, global_batch=16, software=MEGATRON)
    cut = replace(whole, ep=8)
    experts = 4 * shape.expert_parameters()
    assert memory(whole).parameters - memory(cut).parameters == pytest.approx(2 * experts * 7 / 8)
    assert (
        memory(cut).optimizer > memory(whole).optimizer * 0.99
    )  # eight replicas shard what one now holds alone


def test_an_update_that_needs_more_than_backward_is_the_peak() -> None:
    """28 bytes a weight in a replica of FSDP with an optimizer of many kernels: 16 of states, 12 of the update."""
    small = replace(BASE, software=INTERNEVO_FSDP, zero=3, microbatch=1, global_batch=1, dtype="bf16")
    found = memory(small)
    weights = small.shape.parameters()
    assert found.allocated == pytest.approx(28 * weights, rel=1e-3)  # all but the last norm
    long = replace(small, sequence=1 << 16)
    kernel = replace(INTERNEVO_FSDP, update_bytes=0.0)
    assert memory(long) == memory(replace(long, software=kernel))  # there backward takes more
