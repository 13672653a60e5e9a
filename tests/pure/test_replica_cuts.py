"""The pure half of data parallelism: which parameters share a bucket, who keeps which part, what is waited for."""

from __future__ import annotations

import pytest

from triaxis.parallel.replicas.cut import Member, Sharding, fill_buckets, padded_elements, shard_range
from triaxis.parallel.replicas.reductions import ReductionQueue

WHOLE, PARTS = Sharding.of(0, 4), Sharding.of(3, 4)


def members(*sizes: int, **others: object) -> list[Member]:
    return [Member("", size, "fp32", "replicas")._replace(**others) for size in sizes]


def cut(records: list[Member], bucket_elements: int, sharding: Sharding = WHOLE) -> list[list[int]]:
    return fill_buckets(
        records, bucket_elements, {"replicas": sharding, "alone": Sharding.of(3, 1), "experts": sharding}
    )


def test_a_bucket_is_closed_once_it_is_full() -> None:
    assert cut(members(4, 4, 4, 4), 6) == [[0, 1], [2, 3]]
    assert cut(members(9, 1, 1, 9, 1), 2) == [[0], [1, 2], [3], [4]]
    assert cut([], 6) == []


def test_a_tied_weight_stands_alone_and_what_follows_begins_anew() -> None:
    assert cut([*members(1), *members(1, alone=True), *members(1, 1)], 100) == [[0], [1], [2, 3]]


def test_a_bucket_has_one_dtype_and_one_group_of_replicas() -> None:
    mixed = [*members(1), *members(1, replicas="experts"), *members(1), *members(1, replicas="experts")]
    assert cut(mixed, 100) == [[0, 2], [1, 3]]
    assert cut([*members(1), *members(1, dtype="bf16"), *members(1)], 100) == [[0, 2], [1]]


def test_buckets_of_sharded_parameters_keep_to_their_unit() -> None:
    records = [member._replace(unit=unit) for unit in (0, 1, 2) for member in members(1, 1)]
    assert cut(records, 100, PARTS) == [[0, 1], [2, 3], [4, 5]]
    assert cut(records, 100, WHOLE) == [[0, 1, 2, 3, 4, 5]]
    alone = [member._replace(replicas="alone") for member in records]
    assert cut(alone, 100, PARTS) == [[0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_one_replica_alone_shards_nothing(zero: int) -> None:
    assert Sharding.of(zero, 1) == Sharding(states=False, gradients=False, parameters=False)
    assert Sharding.of(zero, 2) == Sharding(states=zero >= 1, gradients=zero >= 2, parameters=zero == 3)


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
@pytest.mark.parametrize("elements", [1, 16, 100, 1283])
def test_shards_cover_a_padded_bucket_once(elements: int, replicas: int) -> None:
    padded = padded_elements(elements, replicas)
    assert elements <= padded < elements + 16 * replicas
    ranges = [shard_range(padded, replicas, rank) for rank in range(replicas)]
    assert [element for start, stop in ranges for element in range(start, stop)] == list(range(padded))
    assert len({stop - start for start, stop in ranges}) == 1


def test_the_oldest_reductions_are_waited_for_beyond_the_limit() -> None:
    queue = ReductionQueue[str](2)
    assert [queue.issue(bucket) for bucket in "abcd"] == [[], [], ["a"], ["b"]]
    assert "c" in queue and "a" not in queue
    assert queue.drain() == ["c", "d"]
    assert queue.drain() == []


def test_a_bucket_that_is_reduced_again_is_the_youngest() -> None:
    queue = ReductionQueue[str](2)
    assert [queue.issue(bucket) for bucket in "abac"] == [[], [], [], ["b"]]
    assert queue.drain() == ["a", "c"]


def test_without_a_limit_nothing_is_waited_for() -> None:
    queue = ReductionQueue[str](None)
    assert [queue.issue(bucket) for bucket in "abcd"] == [[], [], [], []]
    assert queue.drain() == list("abcd")
