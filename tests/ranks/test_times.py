"""Where a step's time goes, and the rank that the others wait for: with clocks of the test's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runs import prepare, run
from triaxis.engine.run.times import STEPS_IN_A_ROW, TOLD_EVERY, StepTime, StepTimes
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.thread import run_threads


def steps(
    topology: Topology, seconds: dict[int, tuple[float, float]], count: int, *, straggler_factor: float = 2.0
) -> tuple[list[StepTime], list[str]]:
    """The last step of each rank and what rank 0 says; `seconds`: a rank's (data, compute), else (0.01, 0.1)."""

    def rank(world: World) -> tuple[StepTime, list[str]]:
        data, compute = seconds.get(world.rank, (0.01, 0.1))
        now = [0.0]
        times = StepTimes(build_mesh(world, topology), straggler_factor, clock=lambda: now[0])
        said = []
        for _ in range(count):
            times.start()
            now[0] += data
            times.data_is_there()
            now[0] += compute
            found = times.finish()
            said += [text for text in (times.straggler(),) if text]
        return found, said

    results = run_threads(topology.world_size, rank)
    return [found for found, _ in results], results[0][1]


@pytest.mark.parametrize(
    ("slow", "what"),
    [((0.21, 0.1), "0.31 s, mostly reading data"), ((0.01, 0.3), "0.31 s, mostly computing")],
)
def test_a_rank_that_is_slow_for_long_is_named(slow: tuple[float, float], what: str) -> None:
    topology = Topology(dp=4, tp=1, pp=1)
    found, said = steps(topology, {2: slow}, STEPS_IN_A_ROW - 1)
    assert [one.slowest_rank for one in found] == [2] * 4 and not said
    found, said = steps(topology, {2: slow}, STEPS_IN_A_ROW + TOLD_EVERY)
    assert len(said) == 2, "once, and again after a hundred steps"
    assert (
        f"warning: rank 2 (dp 2, pp 0, tp 0) is slow: for {STEPS_IN_A_ROW} steps" in said[0]
        and what in said[0]
    )
    assert (found[2].data, found[2].compute) == pytest.approx(slow, abs=1e-6)
    assert not steps(topology, {2: slow}, STEPS_IN_A_ROW + 5, straggler_factor=4)[1]


def test_a_stage_that_has_more_to_do_is_no_straggler() -> None:
    """Ranks are compared with those of their own stage."""
    topology = Topology(dp=2, tp=1, pp=2)
    last = {rank: (0.01, 0.5) for rank in range(4) if topology.coordinates(rank)["pp"] == 1}
    found, said = steps(topology, last, 3 * STEPS_IN_A_ROW)
    assert found[0].slowest_rank in last and not said


def test_every_row_has_the_seconds_of_its_step(tmp_path: Path) -> None:
    flags = prepare(tmp_path) | {"dp": 2, "tp": 2, "steps": 4, "output_dir": str(tmp_path / "out")}
    run(flags)
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    for row in rows:
        assert {"data", "compute", "dp", "tp", "world"} <= row["seconds"].keys()
        assert all(seconds >= 0 for seconds in row["seconds"].values()) and row["seconds"]["compute"] > 0
        assert 0 <= row["slowest_rank"] < 4
