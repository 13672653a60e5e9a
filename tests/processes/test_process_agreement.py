"""Layouts on real Gloo processes give the thread world's numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.agreement import MODEL, TIED, Layout, collect, disagreements, rank_main, run, train_rank
from tests.forked import run_processes
from triaxis.models.config import ModelConfig
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.worlds.group import Group, Work, World
from triaxis.parallel.worlds.mesh import build_mesh

STEPS = 3
ROWS = [
    (Layout(tp=2, pp=2, dp=2, zero=1, sp=True), TIED, "sgd, clip 0.1"),
    (Layout(tp=2, dp=2, zero=3), MODEL, "adamw, clip 1"),
    (Layout(pp=2, dp=2, zero=2, schedule="interleaved", virtual_stages=2), TIED, "sgd, clip 0.1"),
    (Layout(pp=2, dp=2, zero=3, schedule="zb-v", virtual_stages=2), MODEL, "sgd, clip 0.1"),
    (Layout(dp=4, zero=0), MODEL, "adamw, clip 1"),
]


@pytest.mark.processes
@pytest.mark.parametrize(("layout", "model", "rule"), ROWS, ids=lambda part: getattr(part, "name", str(part)))
def test_processes_train_the_thread_worlds_model(
    layout: Layout, model: ModelConfig, rule: str, tmp_path: Path
) -> None:  # B25
    main = rank_main(layout, model=model, rule=rule, dtype="fp64", steps=STEPS)
    ranks = run_processes(layout.size, tmp_path, main)
    failures = [rank for rank in ranks if not isinstance(rank, tuple)]
    assert not failures, failures[0]
    expected = run(layout, model=model, rule=rule, dtype="fp64", steps=STEPS)
    assert len(expected.gradients) == len({layout.name for rank in ranks for layout, _ in rank[2]})
    assert not disagreements(collect(ranks), expected, "fp64")


@pytest.mark.processes
def test_overlapped_reductions_give_those_that_are_waited_for(tmp_path: Path) -> None:  # B25
    """ZeRO-2, three times: every communication waited for at once or not, buckets tiny, usual, beyond the model."""
    model = replace(MODEL, layers=1)
    finish = Group._finish

    def at_once(work: Work, asynchronous: bool) -> Work:
        return finish(work, False)

    def main(world: World) -> list[list[list[float]]]:
        mesh = build_mesh(world, Topology(dp=2))

        def norms(bucket_elements: int) -> list[float]:
            layout = Layout(dp=2, zero=2, bucket_elements=bucket_elements)
            return train_rank(mesh, layout, model=model, rule="sgd, clip 0.1", dtype="fp32", steps=2)[1]

        found = []
        for bucket_elements in (1, 3000, 1 << 20):
            found.append([norms(bucket_elements) for _ in range(3)])
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Group, "_finish", staticmethod(at_once))
                found[-1].append(norms(bucket_elements))
        return found

    for rank in run_processes(2, tmp_path, main):
        assert isinstance(rank, list), rank
        assert len(rank) == 3
        for *overlapped, waited_for in rank:
            assert overlapped == [waited_for] * 3
            assert waited_for == pytest.approx(rank[0][-1], rel=1e-6)
