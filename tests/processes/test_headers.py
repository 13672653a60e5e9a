"""Processes that ask for different things hear both sides at once, as threads do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.crash.ranks import Ranks, arguments
from tests.forked import run_processes
from tests.runs import prepare
from triaxis.parallel.worlds.device import Transport
from triaxis.parallel.worlds.group import Group, World
from triaxis.parallel.worlds.process_group import ProcessGroup

pytestmark = pytest.mark.processes

Act = Callable[[Group], object]
SAME: Act = lambda group: group.all_reduce(torch.ones(8))  # noqa: E731
OTHERS: dict[str, tuple[Act, str]] = {
    "type": (lambda group: group.all_reduce(torch.ones(8, dtype=torch.float64)), "all_reduce (8,) float64"),
    "half": (lambda group: group.all_reduce(torch.ones(8, dtype=torch.bfloat16)), "all_reduce (8,) bfloat16"),
    "shape": (lambda group: group.all_reduce(torch.ones(9)), "all_reduce (9,) float32"),
    "operation": (lambda group: group.barrier(), "barrier"),
    "largest": (
        lambda group: group.all_reduce(torch.ones(8), largest=True),
        "all_reduce largest (8,) float32",
    ),
}


@pytest.mark.parametrize("transport", ["auto", "gloo"])
@pytest.mark.parametrize("what", OTHERS)
def test_both_sides_of_a_mismatch_are_told(what: str, transport: Transport, tmp_path: Path) -> None:
    """Before: died without a word, or waited out the hang timeout with one side's call only."""
    act, said = OTHERS[what]

    def main(world: World) -> None:
        world.check_collectives(transport == "gloo")  # who reads another's memory always compares
        group = world.new_group("all", [range(world.size)])
        SAME(group)
        (act if world.rank == 2 else SAME)(group)

    results = run_processes(3, tmp_path, main, transport=transport)
    assert all(result.startswith("RankError: ") for result in results)
    told = [result for result in results if "ask for different things" in result]
    assert len(told) == 3 or (
        transport == "auto" and told
    )  # one may hear first that another has ended for it
    for result in told:
        assert re.search(
            r"'all' \(0, 1, 2\) ask for different things:\n  rank [01]: all_reduce \(8,\)", result
        )
        assert f"  rank 2: {said}" in result and "processes/test_headers.py:" in result


def test_headers_are_exchanged_in_the_first_steps(tmp_path: Path) -> None:
    """--check-collectives 2: each of two ranks compares in two steps, and not in the third."""

    def count(rank: int) -> None:
        compare = ProcessGroup._compare

        def counts(self: ProcessGroup, *given: object) -> None:
            with (tmp_path / f"compared-{rank}").open("a") as log:
                log.write(".")
            compare(self, *given)  # type: ignore[arg-type]

        ProcessGroup._compare = counts  # type: ignore[method-assign]

    sizes = []
    for check_collectives, steps in ((0, 3), (2, 2), (2, 3)):
        flags = prepare(tmp_path) | {"dp": 2, "warmup_steps": 0, "steps": steps, "eval_batches": 0}
        flags |= {
            "check_collectives": check_collectives,
            "transport": "gloo",
            "output_dir": str(tmp_path / f"{check_collectives}-{steps}"),
        }
        with Ranks(2, arguments(flags), tmp_path / "log", before=count) as ranks:
            assert ranks.wait() == [0, 0], ranks.said()
        log = tmp_path / "compared-0"
        sizes.append(log.stat().st_size if log.exists() else 0)
        log.unlink(missing_ok=True)
    assert sizes[0] == 0 < sizes[1] and sizes[2] <= sizes[1] + 3
