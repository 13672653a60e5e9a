"""Ranks of one machine through each other's memory: nothing is read twice or too early, and nobody waits for ever."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path

import torch

from tests.forked import run_processes
from tests.patience import PATIENCE_SECONDS
from triaxis.parallel.worlds import shared_group
from triaxis.parallel.worlds.communicators import UNDER_WAY
from triaxis.parallel.worlds.failure import RankError
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.process import ProcessWorld
from triaxis.parallel.worlds.shared_group import SharedGroup


def all_ranks(world: World) -> SharedGroup:
    group = world.new_group("all", [range(world.size)])
    assert isinstance(group, SharedGroup)
    return group


def test_who_is_slow_finds_what_was_meant_for_him(tmp_path: Path) -> None:
    """The others are many operations ahead, and write to the regions that he has not read."""

    def main(world: World) -> list[float]:
        group = all_ranks(world)
        right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        given = [torch.full((3000,), 100.0 * world.rank + number) for number in range(40)]
        if world.rank == 1:
            time.sleep(0.2)
        for tensor in given:
            group.isend(tensor, right).wait()
            tensor.zero_()
        taken = [torch.empty(3000) for _ in given]
        works = [group.irecv(tensor, left) for tensor in taken]
        for work in reversed(works):  # later ones first
            work.wait()
        return [float(tensor.mean()) for tensor in taken]

    for rank, result in enumerate(run_processes(3, tmp_path, main)):
        assert result == [100.0 * ((rank - 1) % 3) + number for number in range(40)]


def test_more_messages_than_a_socket_holds(tmp_path: Path) -> None:
    """Both send before either reads: who cannot send reads what came."""
    count = 3000

    def main(world: World) -> float:
        group = all_ranks(world)
        for number in range(count):
            group.isend(torch.tensor([float(number)]), 1 - world.rank)
        taken = torch.empty(count, 1)
        for number in range(count):
            group.irecv(taken[number], 1 - world.rank).wait()
        return float((taken.view(-1) - torch.arange(float(count))).abs().max())

    assert run_processes(2, tmp_path, main) == [0.0, 0.0]


def test_large_sums_under_way_are_bounded(tmp_path: Path) -> None:
    """Twenty are asked for before the first is waited for: few of them have memory, and all are right.

    One rank has three under way, and the other may be two behind, with as many unread.
    """

    def main(world: World) -> tuple[float, int]:
        group = all_ranks(world)
        tensors = [torch.full((1 << 19,), float(number + world.rank)) for number in range(20)]
        for work in [group.all_reduce(tensor, asynchronous=True) for tensor in tensors]:
            work.wait()
        wrong = max(float((t - 2 * n - 1).abs().max()) for n, t in enumerate(tensors))
        assert isinstance(world, ProcessWorld) and world._near is not None
        return wrong, len(world._near.arena._regions[21])

    for wrong, regions in run_processes(2, tmp_path, main):
        assert wrong == 0.0 and regions <= 2 * (UNDER_WAY + 1) + 1


def test_a_region_of_another_size_gives_its_pages_back(tmp_path: Path) -> None:
    def main(world: World) -> int:
        group = all_ranks(world)
        for bits in (22, 24, 23):
            group.all_reduce(torch.ones(1 << (bits - 2)))
            group.barrier()
        assert isinstance(world, ProcessWorld) and world._near is not None
        return os.stat(world._near.arena.file).st_blocks * 512

    for held in run_processes(2, tmp_path, main):
        assert 1 << 23 <= held < 1 << 24


def test_a_sum_is_the_same_whether_it_goes_on_beside_or_not(tmp_path: Path) -> None:
    """Of three ranks: by parts and back, or all from all."""

    def main(world: World) -> bool:
        group = all_ranks(world)
        values = torch.randn(100_003, generator=torch.Generator().manual_seed(world.rank))
        assert values.nbytes > shared_group.SCATTERED_BYTES
        same = True
        for dtype in (torch.float32, torch.bfloat16):
            one, other = values.to(dtype), values.to(dtype)
            group.all_reduce(one)
            group.all_reduce(other, asynchronous=True).wait()
            same = same and torch.equal(one, other)
        return same

    assert run_processes(3, tmp_path, main) == [True] * 3


def test_without_means_or_room_all_ranks_send(tmp_path: Path) -> None:
    """One rank may map less than the machine has: no rank reads another's memory then."""

    def main(world: World) -> tuple[bool, float]:
        group = world.new_group("all", [range(world.size)])
        tensor = torch.ones(8)
        group.all_reduce(tensor)
        return isinstance(group, SharedGroup), float(tensor.sum())

    def limited(rank: int) -> None:
        if rank == 1:
            mapped, page = int(Path("/proc/self/statm").read_text().split()[0]), os.sysconf("SC_PAGE_SIZE")
            room = mapped + os.sysconf("SC_PHYS_PAGES") // 2
            resource.setrlimit(resource.RLIMIT_AS, (room * page, resource.RLIM_INFINITY))

    assert run_processes(2, tmp_path, main, before=limited) == [(False, 16.0)] * 2


def test_who_does_not_come_is_named(tmp_path: Path) -> None:
    def main(world: World) -> str:
        group = all_ranks(world)
        group.barrier()
        if world.rank == 1:
            time.sleep(2.0)
            return ""
        group.seconds = 0.3
        try:
            group.all_reduce(torch.ones(8), label="norm")
        except RankError as error:
            return str(error)
        return "no error"

    told = run_processes(2, tmp_path, main)[0]
    assert told.startswith("rank 0: all_reduce (norm) in group 'all' (0, 1) of (8,) float32 at ")
    assert told.endswith(" failed: rank 1 was waited for 0.3 s")


def test_a_childs_end_is_not_its_parents_and_a_parents_is_seen_beside_a_child(tmp_path: Path) -> None:
    """A forked worker holds no connection: that rank 1 was killed is seen though its child lives on."""

    def main(world: World) -> str:
        group = all_ranks(world)
        if world.rank == 1:
            child = os.fork()
            if child == 0:
                time.sleep(PATIENCE_SECONDS)
                os._exit(0)
            (tmp_path / "child").write_text(str(child))
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            group.all_reduce(torch.ones(8))
        except RankError as error:
            os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)  # it lives
            return str(error)
        return "no error"

    assert run_processes(2, tmp_path, main)[0].endswith("failed: the process of rank 1 ended")
