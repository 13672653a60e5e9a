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


MESSAGES: dict[str, tuple[torch.Tensor, str, str]] = {
    "type": (torch.ones(8, dtype=torch.float64), "F0", "(8,) float64"),
    "shape": (torch.ones(9), "F0", "(9,) float32"),
    "purpose": (torch.ones(8), "B0", "(8,) float32"),
}


@pytest.mark.parametrize("transport", ["auto", "gloo"])
@pytest.mark.parametrize("what", MESSAGES)
def test_both_sides_of_a_message_are_told(what: str, transport: Transport, tmp_path: Path) -> None:
    """Before, over sockets: Gloo ended the process, or the receiver waited, with one side's call only."""
    buffer, label, kinds = MESSAGES[what]

    def main(world: World) -> None:
        world.check_collectives(transport == "gloo")
        group = world.new_group("pp", [range(world.size)])
        if world.rank == 0:
            work = group.isend(torch.ones(8), 1, label="F0")
            group.irecv(
                torch.ones(8), 1, label="B7"
            ).wait()  # what a sender does before it looks at what it sent
            work.wait()
        else:
            group.irecv(buffer, 0, label=label).wait()

    results = run_processes(2, tmp_path, main, transport=transport)
    assert all(result.startswith("RankError: ") for result in results)
    assert "'pp' (0, 1) ask for different things:" in results[1]
    assert re.search(r"  rank 0: .*F0.*\(8,\) float32 at .*test_headers.py:", results[1])
    assert re.search(rf"  rank 1: .*{label}.*{re.escape(kinds)} at .*test_headers.py:", results[1])


@pytest.mark.parametrize("checked", [True, False])
def test_compared_messages_come_as_they_were_sent(checked: bool, tmp_path: Path) -> None:
    """Both ways at once, and waited for in the reverse order."""

    def main(world: World) -> list[float]:
        world.check_collectives(checked)
        group, other = world.new_group("pp", [range(2)]), 1 - world.rank
        sends = [
            group.isend(torch.full((4,), 10.0 * world.rank + i), other, label=f"{world.rank} {i}")
            for i in range(3)
        ]
        buffers = [torch.empty(4) for _ in range(3)]
        works = [group.irecv(buffers[i], other, label=f"{other} {i}") for i in range(3)]
        for work in [*reversed(works), *sends]:
            work.wait()
        return [float(buffer.sum()) / 4 for buffer in buffers]

    assert run_processes(2, tmp_path, main, transport="gloo") == [[10.0, 11.0, 12.0], [0.0, 1.0, 2.0]]


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
