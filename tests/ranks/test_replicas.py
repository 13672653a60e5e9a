"""Parameters of one module with replicas of their own, as dense weights and experts have: all ranks equal one rank.

Every rank has other tokens. A dense layer is held by all (partial over tp, replicas dp); the rows of a wide layer are
spread over ep ranks, which see each other's tokens (replicas: one place in every ep cut); a grid is cut along both
dimensions, each block held by one rank alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.agreement import Piece, assemble
from tests.checkpointing import state_at
from triaxis.engine.checkpoint.store import CheckpointStore
from triaxis.engine.optimizer import ShardOptimizer
from triaxis.engine.plan import UpdateRule
from triaxis.parallel.layers.declare import declare
from triaxis.parallel.layers.linear import _ColumnParallel, _RowParallel
from triaxis.parallel.places.layout import (
    EXPERT_REPLICAS,
    REPLICAS,
    Init,
    ParameterLayout,
    replicated,
    slab,
)
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.replicas.initialize import random_values
from triaxis.parallel.replicas.zero import ZeroDataParallel
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import Mesh, build_mesh
from triaxis.parallel.worlds.thread import run_threads

WIDTH, WIDE, TOKENS = 6, 8, 5
PLACES = 8  # of tokens in a global microbatch, and of blocks in the grid
MICROBATCHES, STEPS, LEARNING_RATE = 3, 3, 1e-2
RULE = UpdateRule(name="adamw", weight_decay=0.1)


class Layer(nn.Module):
    """x + W x, then + down tanh(up x): dense, then spread over ep."""

    def __init__(self, mesh: Mesh, name: str) -> None:
        super().__init__()
        self.group = mesh.ep
        replicas = EXPERT_REPLICAS if mesh.topology.ep > 1 else REPLICAS
        dense = functools.partial(replicated, tensor_rank=mesh.tp.rank, sequence_parallel=True)
        self.dense = declare(
            empty(WIDTH, WIDTH),
            dense(f"{name}.dense", (WIDTH, WIDTH), decayed=True, init=Init.NORMAL, std=0.3),
        )
        self.shift = declare(empty(WIDTH), dense(f"{name}.shift", (WIDTH,), init=Init.ZEROS))
        rows = WIDE // mesh.ep.size
        self.up = self._spread(f"{name}.up", (WIDE, WIDTH), 0, rows, replicas)
        self.down = self._spread(f"{name}.down", (WIDTH, WIDE), 1, rows, replicas)

    def _spread(self, name: str, shape: tuple[int, int], dim: int, rows: int, replicas: str) -> nn.Parameter:
        offsets, sizes = slab(shape, dim, self.group.rank * rows, (self.group.rank + 1) * rows)
        layout = ParameterLayout(
            name=name,
            shape=shape,
            offsets=offsets,
            sizes=sizes,
            local_shape=sizes,
            replicas=replicas,
            outermost=dim,
            std=0.3,
        )
        return declare(empty(*sizes), layout)

    def forward(self, input_TD: Tensor) -> Tensor:
        hidden_TD = input_TD + input_TD @ self.dense.t() + self.shift
        wide_SF = torch.tanh(_ColumnParallel.apply(hidden_TD, self.up, None, self.group, True))
        output: Tensor = hidden_TD + _RowParallel.apply(wide_SF, self.down, self.group, True)
        return output


class Net(nn.Module):
    """Layers, and a grid [2 · D, 4 · D] of which the tokens of each of the eight places use one block."""

    def __init__(self, mesh: Mesh, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(mesh, f"layers.{number}") for number in range(layers))
        whole = mesh.topology.world_size == 1
        down, across = (0, 0) if whole else divmod(mesh.rank, 4)
        sizes = (2 * WIDTH, 4 * WIDTH) if whole else (WIDTH, WIDTH)
        mesh.add("alone", [(rank,) for rank in range(mesh.topology.world_size)])
        layout = ParameterLayout(
            name="grid",
            shape=(2 * WIDTH, 4 * WIDTH),
            offsets=(down * WIDTH, across * WIDTH),
            sizes=sizes,
            local_shape=sizes,
            replicas="alone",
            std=0.3,
        )
        self.grid = declare(empty(*sizes), layout)
        self.first = (down, across)

    def forward(self, input_TD: Tensor, place: int) -> Tensor:
        down, across = (whole - first for whole, first in zip(divmod(place, 4), self.first, strict=True))
        block = self.grid[down * WIDTH :][:WIDTH, across * WIDTH :][:, :WIDTH]
        hidden_TD = input_TD @ block
        for layer in self.layers:
            hidden_TD = layer(hidden_TD)
        return hidden_TD.square().sum() / 100


def empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.float64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A layout under test. units: layers are gathered and reduced one by one."""

    topology: Topology
    zero: int = 0
    bucket_elements: int = 40
    units: bool = True

    def __str__(self) -> str:
        axes = self.topology
        units = "" if self.units else " no units"
        return f"tp{axes.tp} dp{axes.dp} ep{axes.ep} {axes.order} zero{self.zero}{units}"


class Training:
    """What a checkpoint takes for a training step."""

    def __init__(self, world: World, row: Row, seed: int) -> None:
        self.mesh = build_mesh(world, row.topology)
        self.net = Net(self.mesh)
        self.stages = [self.net]
        self.data_parallel = ZeroDataParallel(
            [self.net],
            self.mesh,
            stage=row.zero,
            wrap=(Layer,) if row.units else (),
            bucket_elements=row.bucket_elements,
            fill=random_values(seed),
        )
        self.optimizer = ShardOptimizer(self.data_parallel.buckets, RULE)

    def train(self, step: int) -> tuple[float, list[Piece]]:
        """The gradient norm of one step, and the first gradients."""
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randn(MICROBATCHES, PLACES, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
        whole = self.mesh.topology.world_size == 1
        inputs = [
            (place, tokens[number, place])
            for number in range(MICROBATCHES)
            for place in (range(PLACES) if whole else (self.mesh.rank,))
        ]
        parallel = self.data_parallel
        parallel.start_step()
        for number, (place, input_TD) in enumerate(inputs):
            loss = self.net(input_TD, place)
            parallel.start_backward(0, last=number == len(inputs) - 1)
            loss.backward()
            parallel.finish_backward(0)
        parallel.synchronize_gradients()
        gradients = [(segment.layout, whole.clone()) for segment, whole in parallel.gathered_gradients()]
        norm = parallel.squared_norm()
        self.mesh.everyone.all_reduce(norm)
        self.optimizer.step(LEARNING_RATE, torch.ones((), dtype=torch.float64))
        parallel.publish()
        return float(norm.sqrt()), gradients

    def weights(self) -> list[Piece]:
        return [(segment.layout, whole.clone()) for segment, whole in self.data_parallel.gathered_masters()]


@dataclass(frozen=True, slots=True)
class Trained:
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    replicas_equal: bool


def trained(row: Row, change: Any = None) -> Trained:  # noqa: ANN401
    def main(world: World) -> tuple[list[float], list[Piece], list[Piece]]:
        training = Training(world, row, seed=5)
        if change is not None:
            change(training)
        steps = [training.train(step) for step in range(STEPS)]
        return [norm for norm, _ in steps], steps[0][1], training.weights()

    ranks = run_threads(row.topology.world_size, main)
    assert all(norms == ranks[0][0] for norms, _, _ in ranks)
    (gradients, same), (weights, equal) = assemble([r[1] for r in ranks]), assemble([r[2] for r in ranks])
    return Trained(ranks[0][0], gradients, weights, same and equal)


@functools.cache
def reference() -> Trained:
    return trained(Row(topology=Topology()))


def differences(found: Trained) -> list[str]:
    one = reference()
    told = [] if found.replicas_equal else ["replicas differ"]
    told += [
        f"norm of step {step}"
        for step, (a, b) in enumerate(zip(found.norms, one.norms, strict=True))
        if abs(a - b) > 1e-12 * b
    ]
    for what in ("gradients", "weights"):
        ours, theirs = getattr(found, what), getattr(one, what)
        assert ours.keys() == theirs.keys()
        told += [
            f"{what} of {name}"
            for name in theirs
            if not torch.allclose(ours[name], theirs[name], rtol=1e-11, atol=1e-13)
        ]
    return told


TOPOLOGIES = [
    Topology(dp=4, tp=2, ep=4),
    Topology(dp=4, tp=2, ep=2),  # of tp's size: experts' replicas are dp
    Topology(dp=4, tp=2, ep=8),  # one replica of each expert
    Topology(dp=8, ep=4),
    Topology(tp=8, ep=4),  # dense weights are alone, experts are not
    Topology(dp=2, tp=2, cp=2, ep=4, order="tp-cp-dp"),
    Topology(dp=4, tp=2, ep=4, order="dp-tp"),
]
ROWS = [Row(topology=topology, zero=zero) for topology in TOPOLOGIES for zero in range(4)]
ROWS += [Row(topology=TOPOLOGIES[0], zero=zero, bucket_elements=1 << 20, units=False) for zero in range(4)]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_every_layout_trains_the_same_module(row: Row) -> None:
    assert not differences(trained(row))


def test_a_bucket_has_the_group_and_the_stage_of_its_replicas() -> None:
    def main(world: World) -> set[tuple[str, str, int, bool]]:
        training = Training(world, Row(topology=Topology(dp=4, tp=2, ep=8), zero=3), seed=5)
        return {
            (layout.name.split(".")[-1], layout.replicas, bucket.group.size, bucket.sharding.parameters)
            for bucket in training.data_parallel.buckets
            for _, layout in bucket.pieces
        }

    expected = {
        ("dense", "replicas", 4, True),
        ("shift", "replicas", 4, True),
        ("up", "expert_replicas", 1, False),
        ("down", "expert_replicas", 1, False),
        ("grid", "alone", 1, False),
    }
    assert all(found == expected for found in run_threads(8, main))


# Planted faults.


def relayout(training: Training, **changes: Any) -> None:  # noqa: ANN401
    for bucket in training.data_parallel.buckets:
        bucket.segments = tuple(
            replace(segment, layout=replace(segment.layout, **changes))
            if segment.layout.name.endswith("dense")
            else segment
            for segment in bucket.segments
        )


def wrong_group(training: Training) -> None:
    """Experts are reduced over the dense weights' replicas."""
    for bucket in training.data_parallel.buckets:
        if bucket.group is training.mesh.expert_replicas:
            bucket.group = training.mesh.replicas


FAULTS = {
    "counted by every tensor rank": lambda training: relayout(training, counted=True),
    "not summed over tp": lambda training: relayout(training, partial=()),
    "experts summed over dp": wrong_group,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name: str) -> None:
    assert differences(trained(Row(topology=TOPOLOGIES[0]), FAULTS[name]))


# Checkpoints.


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_save_resumes_on_another_layout(zero: int, tmp_path: Path) -> None:
    """Two steps on one layout and the third on another are as three on one rank."""

    def save(world: World) -> None:
        training = Training(world, Row(topology=TOPOLOGIES[0], zero=zero), seed=5)
        store = CheckpointStore(tmp_path, training)  # type: ignore[arg-type]
        for step in range(STEPS - 1):
            training.train(step)
        store.save(state_at(STEPS - 1))

    run_threads(8, save)

    def resume(world: World, row: Row) -> tuple[float, list[Piece]]:
        training = Training(world, row, seed=6)
        store = CheckpointStore(tmp_path, training)  # type: ignore[arg-type]
        path = store.latest()
        assert path is not None
        store.load(path)
        norm, _ = training.train(STEPS - 1)
        return norm, training.weights()

    for topology in (Topology(dp=2, tp=4, ep=2), Topology(dp=4, tp=2, ep=8), Topology()):
        row = Row(topology=topology, zero=3 - zero)
        ranks = run_threads(topology.world_size, functools.partial(resume, row=row))
        weights, equal = assemble([weights for _, weights in ranks])
        assert equal and ranks[0][0] == pytest.approx(reference().norms[-1], rel=1e-12)
        for name, weight in reference().weights.items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-11, atol=1e-13)
