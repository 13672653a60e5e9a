"""All layouts keep NCCL's rules, on CPUs: nothing is read, changed or freed before its wait; planted faults are seen.

Numbers under the rules are those of plain threads, to the bit. A sample by default, all rows with TRIAXIS_FULL=1.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.frozen.portrait import batches_of, plan_of, topology_of
from tests.frozen.rows import ROWS, Row
from tests.nccl_rules import Violation, run_ruled
from triaxis.engine.step import TrainingStep
from triaxis.parallel.pipeline.executor import PipelineExecutor, _Step
from triaxis.parallel.replicas.bucket import Bucket, resize_storage
from triaxis.parallel.worlds.failure import RankError
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.thread import run_threads

STEPS = 2
SAMPLE = {
    "tp4 sp, kv heads shared",
    "tp2 dp2 zero 3, sp, qwen",
    "pp4 interleaved, short last group",
    "pp2 dp2 zero 2 gpipe",
    "pp2 dp2 zero 3, tied",
    "2 × 2 × 2 zero 1, sp, tied",
    "2 × 2 × 2 zero 3 interleaved, gpt",
}


def by_name(name: str) -> Row:
    return next(row for row in ROWS if row.name == name)


def train(world: World, row: Row, *, connect: bool = True) -> list[tuple[float, float]]:
    """Loss and gradient norm of two steps and an evaluation."""
    mesh = build_mesh(world, topology_of(row))
    step = TrainingStep(plan_of(row, row.dtypes[0]), mesh)
    if connect:
        step.connect()
    own = slice(mesh.dp.rank * row.microbatches, (mesh.dp.rank + 1) * row.microbatches)
    found = [step.train(batches_of(row, number)[own], 1e-3, row.most_norm) for number in range(STEPS)]
    return [(one.loss, one.grad_norm) for one in found] + [step.evaluate(batches_of(row, STEPS)[own])]


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=[] if row.name in SAMPLE else [pytest.mark.full], id=row.name)
        for row in ROWS
        if row.tp * row.pp * row.dp > 1
    ],
)
@pytest.mark.parametrize("two_ways", [True, pytest.param(False, marks=pytest.mark.full)])
def test_layouts_keep_the_rules(row: Row, two_ways: bool) -> None:
    size = row.tp * row.pp * row.dp
    expected = run_threads(size, lambda world: train(world, row))
    assert run_ruled(size, lambda world: train(world, row), two_ways=two_ways) == expected


def test_the_sample_is_of_the_rows() -> None:
    assert {row.name for row in ROWS} >= SAMPLE


def broken(row: str, match: str, **given: Any) -> None:  # noqa: ANN401
    found = by_name(row)
    with pytest.raises((Violation, RankError), match=match):
        run_ruled(found.tp * found.pp * found.dp, lambda world: train(world, found, **given))


def test_a_buffer_that_is_reused_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    send = PipelineExecutor._send

    def and_reuse(self: PipelineExecutor, step: _Step, instruction: Any) -> None:  # noqa: ANN401
        tensor = step.made[instruction.action]
        send(self, step, instruction)
        if step.sends:
            tensor.zero_()

    monkeypatch.setattr(PipelineExecutor, "_send", and_reuse)
    broken("pp2 dp2 zero 2 gpipe", "send .* what it sends was changed before its wait")


def test_a_missing_wait_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Step, "take_input", lambda self, action: self.received.pop(action)[0])
    broken("pp2 dp2 zero 2 gpipe", "receive .* nobody waited for it|must be finite")


def test_memory_that_is_freed_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Bucket.start_gather

    def and_free(self: Bucket) -> None:
        start(self)
        if self._gathering is not None:
            resize_storage(self.parameters, 0)

    monkeypatch.setattr(Bucket, "start_gather", and_free)
    broken("tp2 dp2 zero 3, sp, qwen", "all_gather .* its memory was freed before its wait")


def test_what_is_read_before_its_wait_is_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a bucket that is gathered: the layer computes with what is not there yet."""
    monkeypatch.setattr(Bucket, "gather", Bucket.start_gather)
    row = by_name("tp2 dp2 zero 3, sp, qwen")

    def main(world: World) -> float:
        mesh = build_mesh(world, topology_of(row))
        step = TrainingStep(plan_of(row, row.dtypes[0]), mesh)
        own = slice(mesh.dp.rank * row.microbatches, (mesh.dp.rank + 1) * row.microbatches)
        return step.evaluate(batches_of(row, 0)[own])[0]

    assert all(math.isnan(loss) for loss in run_ruled(4, main))


def test_a_connection_that_opens_while_a_receive_spins_is_seen() -> None:
    broken(
        "pp4 interleaved, short last group", "opens a connection while a receive spins: rank", connect=False
    )


def exchange(world: World) -> None:
    """Both send first and receive then, which plain threads carry out."""
    group = world.new_group("pp", [range(2)])
    tensors = torch.zeros(2), torch.zeros(2)
    works = [group.isend(tensors[0], 1 - group.rank), group.irecv(tensors[1], 1 - group.rank)]
    for work in works:
        work.wait()


def test_crossed_sends_of_one_communicator_are_seen() -> None:
    run_threads(2, exchange)
    run_ruled(2, exchange)  # a communicator for each direction: nothing stands behind the other
    with pytest.raises(RankError, match="no rank can go on"):
        run_ruled(2, exchange, two_ways=False)


def test_messages_in_another_order_are_seen_with_two_directions_too() -> None:
    """0 → 2 stands before 0 → 1 on rank 0, 1 → 2 before 0 → 2 on rank 2, and rank 1 sends when it has received."""

    def main(world: World) -> None:
        group = world.new_group("pp", [range(3)])
        order = {
            0: [("send", 2), ("send", 1)],
            1: [("receive", 0), ("send", 2)],
            2: [("receive", 1), ("receive", 0)],
        }
        for sender, receiver in ((0, 1), (0, 2), (1, 2)):
            if group.rank == sender:
                group.isend(torch.zeros(1), receiver).wait()
            elif group.rank == receiver:
                group.irecv(torch.zeros(1), sender).wait()
        works = [
            group.isend(torch.zeros(1), peer) if what == "send" else group.irecv(torch.zeros(1), peer)
            for what, peer in order[group.rank]
        ]
        for work in works:
            work.wait()

    run_threads(3, main)
    with pytest.raises(RankError, match="no rank can go on"):
        run_ruled(3, main)
