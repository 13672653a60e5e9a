"""Groups of threads: what each operation means, and that every mistake is told at once, to every rank."""

from collections.abc import Callable

import pytest
import torch

from triaxis.parallel.places.topology import Topology
from triaxis.parallel.worlds.group import Group, World
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.thread import RankError, run_threads


def whole(world: World) -> Group:
    return world.new_group("all", [range(world.size)])


def values(rank: int, elements: int) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("size", [1, 2, 3, 64])
def test_operations_mean_what_they_say(size: int) -> None:
    inputs = [values(rank, 2 * size) for rank in range(size)]
    total = inputs[0].clone()
    for tensor in inputs[1:]:
        total += tensor

    def main(world: World) -> None:
        group, rank = whole(world), world.rank
        mine = inputs[rank].clone()
        group.all_reduce(mine)
        assert torch.equal(mine, total)
        mine = inputs[rank].clone()
        group.all_reduce(mine, largest=True)
        assert torch.equal(mine, torch.stack(inputs).amax(0))
        output = torch.empty(2 * size * size)
        group.all_gather(output, inputs[rank])
        assert torch.equal(output, torch.cat(inputs))
        shard = torch.empty(2)
        group.reduce_scatter(shard, inputs[rank].clone())
        assert torch.equal(shard, total[2 * rank : 2 * rank + 2])
        output = torch.empty(2 * size)
        group.all_to_all(output, inputs[rank])
        assert torch.equal(output, torch.cat([tensor[2 * rank : 2 * rank + 2] for tensor in inputs]))
        mine = inputs[rank].clone()
        group.broadcast(mine, size - 1)
        assert torch.equal(mine, inputs[-1])
        group.barrier()

    run_threads(size, main)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_rows_go_where_they_are_told(size: int) -> None:
    """Member i gives member j (i + 2j) % 4 rows, sometimes none; each row says where it comes from and goes."""

    def main(world: World) -> tuple[list[list[int]], int]:
        group, rank = whole(world), world.rank
        input_rows = [(rank + 2 * j) % 4 for j in range(size)]
        output_rows = [(i + 2 * rank) % 4 for i in range(size)]
        whole_rows = torch.tensor([[rank, j] for j in range(size) for _ in range(input_rows[j])]).view(-1, 2)
        output = torch.full((sum(output_rows), 2), -1)
        group.all_to_all(output, whole_rows, output_rows=output_rows, input_rows=input_rows)
        assert output.tolist() == [[i, rank] for i in range(size) for _ in range(output_rows[i])]
        others = sum(input_rows) - input_rows[rank]
        return output.tolist(), group.traffic.total_bytes() - others * 2 * 8

    assert [extra for _, extra in run_threads(size, main)] == [0] * size


def test_rows_that_do_not_fit_are_refused_before_anything_is_sent() -> None:
    def main(world: World) -> None:
        group = whole(world)
        with pytest.raises(
            ValueError, match=r"`input_rows` .* 2 counts whose sum .* 3 rows, but are \[1, 1\]"
        ):
            group.all_to_all(torch.ones(2, 4), torch.ones(3, 4), output_rows=(1, 1), input_rows=(1, 1))
        with pytest.raises(ValueError, match="`output_rows`"):
            group.all_to_all(torch.ones(2, 4), torch.ones(3, 4), input_rows=(1, 2))

    run_threads(2, main)


def test_a_shard_may_be_part_of_the_whole() -> None:
    def main(world: World) -> None:
        group = whole(world)
        buffer = torch.full((3, 2), float(world.rank + 1))
        group.reduce_scatter(buffer[world.rank], buffer)
        assert buffer[world.rank].tolist() == [6.0, 6.0]
        group.all_gather(buffer, buffer[world.rank])
        assert buffer.eq(6).all()

    run_threads(3, main)


def test_half_precision_is_summed_in_fp32() -> None:
    def main(world: World) -> float:
        tensor = torch.tensor([256.0 if world.rank == 0 else 0.5], dtype=torch.bfloat16)
        whole(world).all_reduce(tensor)
        return tensor.item()

    assert run_threads(5, main) == [258.0] * 5


def test_asynchronous_operations_do_not_block() -> None:
    def main(world: World) -> None:
        group = whole(world)
        first, second = torch.ones(2), torch.full((2,), float(world.rank))
        works = [group.all_reduce(first, asynchronous=True), group.all_reduce(second, asynchronous=True)]
        peer = 1 - world.rank
        received = [torch.empty(1), torch.empty(1)]
        works += [group.irecv(tensor, peer) for tensor in received]
        sends = [group.isend(torch.tensor([10.0 * world.rank + i]), peer) for i in range(2)]
        for work in reversed(works + sends):
            work.wait()
        assert first.tolist() == [2.0, 2.0]
        assert second.tolist() == [1.0, 1.0]
        assert [tensor.item() for tensor in received] == [10.0 * peer, 10.0 * peer + 1]

    run_threads(2, main)


def test_a_mesh_has_every_group() -> None:
    def main(world: World) -> dict[str, tuple[int, ...]]:
        mesh = build_mesh(world, Topology(dp=2, tp=4, pp=3))
        mesh.subgroup("pairs", "tp", 2)
        with pytest.raises(ValueError, match="process world"):
            mesh.device_mesh()
        return {name: group.ranks for name, group in mesh.groups.items()}

    groups = run_threads(24, main)
    assert groups[0]["ties"] == (0, 8)
    assert groups[5]["ties"] == (5,)
    assert groups[6]["pairs"] == (6, 7)
    assert groups[6]["dp"] == (6, 18)
    assert groups[6]["pp"] == (2, 6, 10)


def other_operation(world: World, group: Group) -> None:
    if world.rank == 1:
        group.all_reduce(torch.ones(4))
    else:
        group.broadcast(torch.ones(4), 0)


def other_shape(world: World, group: Group) -> None:
    group.all_reduce(torch.ones(4 if world.rank == 1 else 5))


def other_dtype(world: World, group: Group) -> None:
    group.all_reduce(torch.ones(4, dtype=torch.int32 if world.rank == 1 else torch.float32))


def other_purpose(world: World, group: Group) -> None:
    group.all_reduce(torch.ones(4), label="losses" if world.rank == 1 else "trained tokens")


def other_message(world: World, group: Group) -> None:
    if world.rank == 1:
        group.isend(torch.ones(4), 0, label="F1 for stage 1").wait()
    if world.rank == 0:
        group.irecv(torch.ones(4), 1, label="F2 for stage 1").wait()
    group.barrier()


def other_rows(world: World, group: Group) -> None:
    rows = (0, 1, 2) if world.rank == 1 else (1, 1, 1)
    group.all_to_all(torch.ones(3, 2), torch.ones(3, 2), output_rows=(1, 1, 1), input_rows=rows)


def other_width(world: World, group: Group) -> None:
    one = torch.ones(3, 2 + (world.rank == 1))
    group.all_to_all(one.clone(), one, output_rows=(1, 1, 1), input_rows=(1, 1, 1))


def uneven_and_even(world: World, group: Group) -> None:
    rows = (1, 1, 1) if world.rank == 1 else ()
    group.all_to_all(torch.ones(3, 2), torch.ones(3, 2), output_rows=rows, input_rows=rows)


def other_root(world: World, group: Group) -> None:
    group.broadcast(torch.ones(4), int(world.rank == 1))


def absent(world: World, group: Group) -> None:
    if world.rank != 1:
        group.all_reduce(torch.ones(4))


def crossed(world: World, group: Group) -> None:
    group.irecv(torch.ones(4), (world.rank + 1) % world.size).wait()


def unreceived(world: World, group: Group) -> None:
    if world.rank == 1:
        group.isend(torch.ones(4), 0).wait()


def unfitting(world: World, group: Group) -> None:
    if world.rank == 1:
        group.isend(torch.ones(4), 0).wait()
    if world.rank == 0:
        group.irecv(torch.ones(3), 1).wait()
    group.barrier()


def other_group(world: World, group: Group) -> None:
    world.new_group("new" if world.rank == 1 else "newer", [range(world.size)])


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (other_operation, ["rank 1: all_reduce (4,) float32 in group 'all'", "broadcast of rank 0"]),
        (other_shape, ["(4,) float32", "(5,) float32"]),
        (other_dtype, ["(4,) int32", "(4,) float32"]),
        (other_purpose, ["all_reduce (losses) (4,)", "all_reduce (trained tokens) (4,)"]),
        (other_message, ["send (F1 for stage 1) to rank 0", "receive (F2 for stage 1) of rank 1"]),
        (
            other_rows,
            ["a member gives 0 rows where another takes 1", "rank 0: all_to_all", "rank 1: all_to_all"],
        ),
        (other_width, ["(3, 2) float32", "(3, 3) float32"]),
        (uneven_and_even, ["ask for different things"]),
        (other_root, ["broadcast of rank 0", "broadcast of rank 1"]),
        (absent, ["rank 1 finished without taking part", "all_reduce (4,)"]),
        (crossed, ["no rank can go on", "rank 0: receive of rank 1", "rank 2: receive of rank 0"]),
        (unreceived, ["nobody took part in", "rank 1: send to rank 0 (4,) float32"]),
        (unfitting, ["(4,) float32", "(3,) float32", "rank 1: send to rank 0", "rank 0: receive of rank 1"]),
        (other_group, ["new_group ('new'", "new_group ('newer'"]),
    ],
)
def test_mistakes_are_told_to_every_rank(mistake: Callable[[World, Group], None], words: list[str]) -> None:
    told: dict[int, str] = {}

    def main(world: World) -> None:
        group = whole(world)
        try:
            mistake(world, group)
            group.barrier()
        except RankError as error:
            told[world.rank] = str(error)
            raise

    def unfinished(world: World) -> None:
        mistake(world, whole(world))

    alone = mistake in (absent, unreceived)
    with pytest.raises(RankError) as caught:
        run_threads(3, unfinished if alone else main)
    for word in [*words, "ranks/test_thread_world.py:"]:
        assert word in str(caught.value)
    if not alone:
        assert sorted(told) == [0, 1, 2]


def test_a_dead_rank_is_named_and_its_own_error_raised() -> None:
    told: dict[int, str] = {}

    def main(world: World) -> None:
        group = whole(world)
        if world.rank == 1:
            raise ZeroDivisionError("by nothing")
        try:
            group.all_reduce(torch.ones(4))
        except RankError as error:
            told[world.rank] = str(error)
            raise

    with pytest.raises(ZeroDivisionError, match="by nothing") as caught:
        run_threads(3, main, names=["a", "b", "c"])
    assert "rank 1 (b)" in caught.value.__notes__[0]
    assert sorted(told) == [0, 2]
    for rank, text in told.items():
        assert "rank 1 died of ZeroDivisionError: by nothing" in text
        assert f"rank {rank}: all_reduce (4,) float32" in text


def test_gradients_flow_in_rank_threads() -> None:
    def main(world: World) -> float:
        weight = torch.ones(1, requires_grad=True)
        torch.autograd.backward((weight * (world.rank + 1)).sum())
        assert weight.grad is not None
        whole(world).all_reduce(weight.grad)
        return weight.grad.item()

    assert run_threads(2, main) == [3.0, 3.0]
