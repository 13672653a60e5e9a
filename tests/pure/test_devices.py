"""What is decided for GPUs before there is one: each rank's device, communicators, the environment."""

from __future__ import annotations

import pytest

from triaxis.launch.gpu_environment import DEFAULTS, DETERMINISTIC, gpu_environment
from triaxis.parallel.places.topology import Axis, Topology
from triaxis.parallel.worlds.communicators import Direction, direction, held_by, is_made
from triaxis.parallel.worlds.device import Chosen, DeviceError, choose_device, device_fault


@pytest.mark.parametrize(
    ("asked", "gpus", "local_rank", "device"),
    [
        ("auto", 8, 3, "cuda:3"),
        ("cuda", 8, 0, "cuda:0"),
        ("auto", 1, 3, "cuda:0"),  # srun shows each task its own
        ("auto", 0, 3, "cpu"),
        ("cpu", 8, 3, "cpu"),
    ],
)
def test_a_rank_takes_its_device(asked: str, gpus: int, local_rank: int, device: str) -> None:
    assert choose_device(asked, visible_gpus=gpus, rank=3, local_rank=local_rank) == device


def test_a_rank_without_a_device_is_refused() -> None:
    with pytest.raises(DeviceError, match="less than the 4 GPUs of this machine, but is 5 on rank 13"):
        choose_device("auto", visible_gpus=4, rank=13, local_rank=5)
    with pytest.raises(DeviceError, match=r"`device` must be cpu or auto .* but is cuda on rank 2"):
        choose_device("cuda", visible_gpus=0, rank=2, local_rank=2)


def test_ranks_on_unlike_devices_are_named() -> None:
    gpus = [Chosen(host="node0", device=f"cuda:{i}", identity=f"GPU-{i}") for i in range(2)]
    cpu = Chosen(host="node1", device="cpu")
    assert device_fault(gpus) is None
    assert device_fault([cpu, cpu]) is None
    for ranks in ([*gpus, cpu], [cpu, *gpus]):
        told = device_fault(ranks)
        assert told is not None
        assert f"rank {ranks.index(cpu)} on node1 none that can be used" in told
    alike = Chosen(host="node1", device="cuda:0", identity="GPU-0")  # another machine's first one
    assert device_fault([*gpus, alike]) is None
    told = device_fault([*gpus, Chosen(host="node0", device="cuda:0", identity="GPU-1")])
    assert told is not None
    assert "ranks 1 and 2 on node0 have the same one (GPU-1)" in told


def test_both_sides_of_a_message_find_the_same_queue() -> None:
    assert direction(0, 1) is Direction.UP
    assert direction(1, 0) is Direction.DOWN
    assert direction(0, 7) is Direction.UP  # round the ring of an interleaved schedule, backward
    assert direction(7, 0) is Direction.DOWN


def test_a_rank_of_512_holds_four_communicators_beside_the_worlds() -> None:
    """tp 8 × pp 8 × dp 8: tp, dp, and one for each direction of the pipeline; each axis is one split of the world."""
    topology = Topology(tp=8, pp=8, dp=8)
    wanted = [(topology.groups(axis), Direction.UP) for axis in Axis]
    wanted.append((topology.groups(Axis.PP), Direction.DOWN))
    assert sum(is_made(partition, way) for partition, way in dict.fromkeys(wanted)) == 4
    for rank in (0, 77, 511):
        assert held_by(rank, wanted) == 4


def test_groups_of_the_same_ranks_share_a_communicator() -> None:
    topology = Topology(dp=64)
    wanted = [(topology.groups(axis), Direction.UP) for axis in Axis]
    assert held_by(5, [*wanted, (topology.groups(Axis.PP), Direction.DOWN)]) == 0
    pipeline = Topology(pp=4)
    assert held_by(1, [(pipeline.groups(Axis.PP), way) for way in Direction]) == 1


def test_what_is_set_stays_unless_bits_depend_on_it() -> None:
    given = {"NCCL_DEBUG": "INFO", "NCCL_ALGO": "Tree"}
    assert gpu_environment(given, deterministic=False) == {
        name: value for name, value in DEFAULTS.items() if name != "NCCL_DEBUG"
    }
    assert gpu_environment(given, deterministic=True)["NCCL_ALGO"] == "Ring"
    assert not DEFAULTS.keys() & DETERMINISTIC.keys()
