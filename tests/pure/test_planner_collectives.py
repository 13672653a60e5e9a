"""Collective costs: lower bounds, placement, and what others measured."""

from __future__ import annotations

import pytest

from triaxis.launch.hardware.collectives import collective_seconds, send_seconds
from triaxis.launch.hardware.hardware import load_hardware

MIB = 2**20
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier")

# accelerator, ranks, MiB, measured bus bandwidth of an all-reduce in GB/s (nccl-tests and vTrain's tables)
MEASURED = [
    ("a100-80g", 8, 16384, 234.9),
    ("a100-80g", 8, 1024, 229.4),
    ("a100-80g", 8, 64, 202.5),
    ("a100-80g", 8, 1, 19.8),
    ("a100-80g", 4, 64, 185.1),
    ("a100-80g", 4, 1, 30.6),
    ("a100-80g", 2, 1, 23.7),
    ("h200", 8, 16384, 367.6),
    ("h200", 32, 4096, 364.9),
    ("b200", 8, 256, 646.1),
    ("b200", 8, 1, 36.1),
    ("b200", 32, 4096, 377.3),
    ("v100-32g", 8, 1024, 134.5),
    ("mi300x", 8, 4096, 312.9),
    ("mi300x", 2, 4096, 47.7),
]


@pytest.mark.parametrize(("name", "ranks", "mib", "bus"), MEASURED)
def test_all_reduce_is_near_what_was_measured(name: str, ranks: int, mib: int, bus: float) -> None:
    seconds = collective_seconds("all_reduce", mib * MIB, range(ranks), load_hardware(name))
    assert 2 * (ranks - 1) / ranks * mib * MIB / seconds / 1e9 == pytest.approx(bus, rel=0.25)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_collective_beats_its_bandwidth_bound_or_is_free(operation: str) -> None:
    hardware, nbytes = load_hardware("h100-80g"), 1e9
    for ranks in (range(8), range(0, 64, 8), range(64)):
        n = len(ranks)
        seconds = collective_seconds(operation, nbytes, ranks, hardware)
        floor = 0.0 if operation == "barrier" else (n - 1) / n * nbytes / hardware.intra.bytes_per_s
        assert seconds > (2 if operation == "all_reduce" else 1) * floor * (1 - 1e-12)
    assert collective_seconds(operation, nbytes, [5], hardware) == 0


def test_ranks_decide_the_placement_however_they_are_given() -> None:
    hardware = load_hardware("a100-80g")
    inside = collective_seconds("all_gather", 1e8, range(8), hardware)
    strided = collective_seconds("all_gather", 1e8, range(0, 64, 8), hardware)
    assert strided > 5 * inside  # each rank is alone on its node and has one card's share
    for ranks in (range(8), range(0, 64, 8), range(0, 32, 2), range(0, 48, 3), range(24)):
        listed = collective_seconds("all_reduce", 1e8, list(ranks), hardware)
        assert collective_seconds("all_reduce", 1e8, ranks, hardware) == pytest.approx(listed)
    shifted = collective_seconds("all_gather", 1e8, [6, 7, 8, 9], hardware)
    assert shifted > collective_seconds("all_gather", 1e8, [8, 9, 10, 11], hardware)


def test_all_to_all_over_nodes_is_bound_by_the_cards() -> None:
    hardware, nbytes = load_hardware("h100-80g"), 1e9
    seconds = collective_seconds("all_to_all", nbytes, range(32), hardware)
    assert seconds == pytest.approx(24 / 32 * nbytes / hardware.inter.bytes_per_s, rel=0.02)


def test_messages_between_two_ranks() -> None:
    hardware = load_hardware("h100-80g")
    assert send_seconds(1e8, 3, 3, hardware) == 0
    near, far = send_seconds(1e8, 0, 1, hardware), send_seconds(1e8, 0, 8, hardware)
    assert near == pytest.approx(1e8 / 367e9 + 1.5e-6)
    assert far == pytest.approx(1e8 / 47e9 + 15e-6)


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`operation` must be one of all_reduce, .*'allreduce'"):
        collective_seconds("allreduce", 1.0, range(2), load_hardware("h200"))
