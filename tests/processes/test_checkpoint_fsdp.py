"""Checkpoints between worlds: our ZeRO on threads and torch's `fully_shard` on processes read each other's."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.agreement import TIED, Layout
from tests.checkpointing import Pieces, gathered, open_step, state_at, train, whole_states
from tests.forked import run_processes
from triaxis.engine.checkpoint.store import CheckpointStore
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.thread import run_threads

RULE, DTYPE = "adamw, clip 1", "fp64"


def one_step(world: World, layout: Layout, directory: Path) -> tuple[Pieces, Pieces, float]:
    """Resumes if there is a checkpoint, trains a step, saves: the states before and after, and the loss."""
    step = open_step(world, layout, TIED, RULE, DTYPE)
    store = CheckpointStore(directory, step)
    path = store.latest()
    done = store.load(path).step if path else 0
    before = gathered(step)
    (result,) = train(step, layout, range(done, done + 1))
    store.save(state_at(done + 1))
    return before, gathered(step), result.loss


@pytest.mark.processes
@pytest.mark.parametrize("sharded", [Layout(dp=2, zero=3, data_parallel="fsdp")], ids=str)
def test_zero_to_fsdp_and_back(sharded: Layout, tmp_path: Path) -> None:  # B81
    before, after = Layout(tp=2, pp=2, zero=1), Layout(dp=4, zero=3)
    for number in range(2):
        (tmp_path / f"ranks{number}").mkdir()
    runs = [  # threads after the forks: a child may wait for a lock that a thread of its parent held
        run_processes(before.size, tmp_path / "ranks0", lambda world: one_step(world, before, tmp_path)),
        run_processes(sharded.size, tmp_path / "ranks1", lambda world: one_step(world, sharded, tmp_path)),
        run_threads(after.size, lambda world: one_step(world, after, tmp_path)),
    ]
    failures = [rank for ranks in runs[:2] for rank in ranks if not isinstance(rank, tuple)]
    assert not failures, failures[0]
    for saved, loaded in pairwise(runs):
        expected = whole_states([rank[1] for rank in saved])
        found = whole_states([rank[0] for rank in loaded])
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)

    def straight(world: World) -> list[float]:
        step = open_step(world, before, TIED, RULE, DTYPE)
        return [result.loss for result in train(step, before, range(3))]

    expected_losses = run_threads(before.size, straight)[0]
    assert [run[0][2] for run in runs] == pytest.approx(expected_losses, rel=1e-10)
