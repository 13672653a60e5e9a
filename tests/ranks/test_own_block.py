"""A kind of layer that the engine has never heard of: a configuration class and a module, both of them here.

Attention and MLP stand side by side on one norm (Wang and Komatsuzaki 2021); a second kind adds a loss of its own.
It trains on 2 × 2 × 2 as on one rank, is traced and proved, and its checkpoint goes on in another layout.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from tests.agreement import LENGTH, MODEL, Layout, disagreements, plan_of, run
from tests.checkpointing import gathered as gathered_states
from tests.checkpointing import open_step, state_at, train, whole_states
from triaxis.engine.checkpoint.store import CheckpointStore
from triaxis.engine.config import RunConfig
from triaxis.engine.plan import step_plan
from triaxis.engine.rules import resolve
from triaxis.engine.step import StepResult, TrainingStep
from triaxis.engine.trace.cluster import trace_cluster
from triaxis.launch.hardware.hardware import load_hardware
from triaxis.launch.simulator.run import simulate_run
from triaxis.models.batch import SequenceContext
from triaxis.models.config import ModelConfig
from triaxis.models.kinds import Layer
from triaxis.models.norm import hidden_norm
from triaxis.models.parts import build_part
from triaxis.parallel.layers.build import Build
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.programs.proof import prove
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.thread import run_threads

PENALTY = 1e-2


class SideBySide(Layer):
    """x + attention(norm(x)) + mlp(norm(x))."""

    module: ClassVar[str] = f"{__name__}:SideBySideBlock"
    norms: ClassVar[int] = 1


class Penalised(Layer):
    """The same, with a loss on the size of what it adds."""

    module: ClassVar[str] = f"{__name__}:PenalisedBlock"
    norms: ClassVar[int] = 1
    has_loss: ClassVar[bool] = True


class SideBySideBlock(nn.Module):
    def __init__(self, kind: Layer, model: ModelConfig, build: Build, name: str) -> None:
        super().__init__()
        self.norm = hidden_norm(model, build, f"{name}.input_layernorm")
        self.attention = build_part(kind.attention, model, build, f"{name}.self_attn")
        self.mlp = build_part(kind.feed_forward, model, build, f"{name}.mlp")

    def added(self, hidden_TD: Tensor, context: SequenceContext) -> Tensor:
        normed_TD = self.norm(hidden_TD)
        added_TD: Tensor = self.attention(normed_TD, context) + self.mlp(normed_TD, context)
        return added_TD

    def forward(self, hidden_TD: Tensor, context: SequenceContext) -> Tensor:
        return hidden_TD + self.added(hidden_TD, context)


class PenalisedBlock(SideBySideBlock):
    def forward(self, hidden_TD: Tensor, context: SequenceContext) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        added_TD = self.added(hidden_TD, context)
        return hidden_TD + added_TD, added_TD.square().sum() * (PENALTY * context.inputs.row_scale)


def with_kind(kind: type[Layer], **changes: object) -> ModelConfig:
    (plain,) = MODEL.repeating
    assert isinstance(plain, Layer)
    own = kind(attention=plain.attention, feed_forward=plain.feed_forward)
    return replace(MODEL, name=kind.__name__, repeating=(own,), **changes)  # type: ignore[arg-type]


OWN = with_kind(SideBySide)
MIXED = replace(with_kind(Penalised, tied=True), leading=MODEL.repeating, layers=5)
"""A plain layer before four with losses of their own."""

LAYOUTS = [
    Layout(tp=2, pp=2, dp=2, zero=1, sp=True),
    Layout(tp=2, pp=2, dp=2, zero=3, recompute=True),
    Layout(tp=1, pp=2, dp=2, zero=2, schedule="interleaved", virtual_stages=2),
]


@pytest.mark.parametrize("model", [OWN, MIXED], ids=lambda model: model.name)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_it_trains_as_on_one_rank(layout: Layout, model: ModelConfig) -> None:
    found, expected = (run(one, model=model, dtype="fp64", steps=6) for one in (layout, Layout()))
    assert not disagreements(found, expected, "fp64")


def test_losses_of_inner_stages_are_trained_and_told() -> None:
    """The sum over all layers, ranks and microbatches, and gradients that are not those without it."""

    def auxiliary(layout: Layout, model: ModelConfig) -> StepResult:
        def main(world: World) -> StepResult:
            return train(open_step(world, layout, model, "sgd, no clip", "fp64"), layout, range(1))[0]

        ranks = run_threads(layout.size, main)
        assert all(result == ranks[0] for result in ranks)
        return ranks[0]

    alone = auxiliary(Layout(), MIXED)
    assert alone.auxiliary_loss > 0
    for layout in LAYOUTS:
        found = auxiliary(layout, MIXED)
        assert found.auxiliary_loss == pytest.approx(alone.auxiliary_loss, rel=1e-10)
        assert found.loss == pytest.approx(alone.loss, rel=1e-10)
    without = replace(MIXED, repeating=OWN.repeating)
    assert auxiliary(Layout(), without).loss == pytest.approx(alone.loss, rel=1e-12)
    assert auxiliary(Layout(), without).grad_norm != pytest.approx(alone.grad_norm, rel=1e-6)


@pytest.mark.parametrize("model", [OWN, MIXED], ids=lambda model: model.name)
def test_it_is_counted_traced_and_proved(model: ModelConfig) -> None:
    def parameters(world: World) -> int:
        step = open_step(world, Layout(), model, "sgd, no clip", "fp32")
        return sum(p.numel() for stage in step.stages for p in stage.parameters())

    assert run_threads(1, parameters) == [model.parameters()]
    for layout in LAYOUTS:
        topology = Topology(tp=layout.tp, pp=layout.pp, dp=layout.dp)
        proof = prove(trace_cluster(plan_of(layout, model, "adamw, clip 1", "fp32"), topology))
        assert not proof.faults and not proof.warnings


def test_its_checkpoint_goes_on_in_another_layout(tmp_path: Path) -> None:
    """Weights and moments to the bit, and the next step's loss as that of the run that went on."""
    before, after = LAYOUTS[0], Layout(tp=4, pp=1, dp=2, zero=2)

    def first(world: World) -> tuple[list, list[StepResult]]:  # type: ignore[type-arg]
        step = open_step(world, before, MIXED, "adamw, clip 1", "fp64")
        train(step, before, range(2))
        CheckpointStore(tmp_path, step).save(state_at(2))
        return gathered_states(step), train(step, before, range(2, 4))

    def second(world: World) -> tuple[list, list[StepResult]]:  # type: ignore[type-arg]
        step: TrainingStep = open_step(world, after, MIXED, "adamw, clip 1", "fp64")
        store = CheckpointStore(tmp_path, step)
        path = store.latest()
        assert path is not None
        store.load(path)
        return gathered_states(step), train(step, after, range(2, 4))

    saved, loaded = run_threads(before.size, first), run_threads(after.size, second)
    for name, tensor in whole_states([rank[0] for rank in saved]).items():
        assert torch.equal(tensor, whole_states([rank[0] for rank in loaded])[name]), name
    for one, other in zip(saved[0][1], loaded[0][1], strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-10)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-10)


def test_a_module_that_is_not_there_is_told_by_name() -> None:
    class Lost(Layer):
        module: ClassVar[str] = "triaxis.models.blocks:Lost"

    def main(world: World) -> None:
        build_part(with_kind(Lost).kind(0), MODEL, Build.on(build_mesh(world, Topology())), "layer")

    with pytest.raises(
        ValueError, match=r"`module` of Lost must be .*, but triaxis\.models\.blocks has no Lost"
    ):
        run_threads(1, main)


def test_it_is_simulated() -> None:
    """Priced from the trace of the very layers: with a norm less in each, a little less than the plain model."""
    config = RunConfig(tp=2, pp=2, dp=2, zero=2, seq=LENGTH, microbatches=4, per_device_train_batch_size=1)
    seconds = []
    for model in (OWN, MODEL):
        resolved = resolve(config, 8, model)
        simulation = simulate_run(step_plan(config, resolved), resolved.topology, load_hardware("h100-80g"))
        assert simulation.proof.holds and simulation.fits and simulation.timeline is not None
        seconds.append(simulation.timeline.seconds)
    assert 0.8 * seconds[1] < seconds[0] < seconds[1]
