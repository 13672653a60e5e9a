"""Layouts on real Gloo processes give the thread world's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from agreement import MODEL, TIED, Layout, collect, disagreements, process_main, run
from processes import run_processes

from triaxis.models.config import ModelConfig

STEPS = 3
ROWS = [
    (Layout(tp=2, pp=2, dp=2, zero=1, sp=True), TIED, "sgd, clip 0.1"),
    (Layout(tp=2, dp=2, zero=3), MODEL, "adamw, clip 1"),
    (Layout(pp=2, dp=2, zero=2, schedule="interleaved", virtual_stages=2), TIED, "sgd, clip 0.1"),
    (Layout(dp=4, zero=0), MODEL, "adamw, clip 1"),
]


@pytest.mark.processes
@pytest.mark.parametrize(("layout", "model", "rule"), ROWS, ids=lambda part: getattr(part, "name", str(part)))
def test_processes_train_the_thread_worlds_model(
    layout: Layout, model: ModelConfig, rule: str, tmp_path: Path
) -> None:
    main = process_main(layout, model=model, rule=rule, dtype="fp64", steps=STEPS)
    ranks = run_processes(layout.size, tmp_path, main)
    failures = [rank for rank in ranks if not isinstance(rank, tuple)]
    assert not failures, failures[0]
    expected = run(layout, model=model, rule=rule, dtype="fp64", steps=STEPS)
    assert len(expected.gradients) == len({layout.name for rank in ranks for layout, _ in rank[2]})
    assert not disagreements(collect(ranks), expected, "fp64")
