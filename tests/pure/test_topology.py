"""Rank arithmetic, without ranks."""

import pytest

from triaxis.parallel.places.topology import Topology, describe, resolve_topology

SIXTEEN = Topology(dp=4, tp=2, pp=2)


def test_worked_example_of_sixteen_ranks() -> None:
    assert SIXTEEN.groups("tp")[:4] == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert SIXTEEN.groups("pp")[:3] == ((0, 2), (1, 3), (4, 6))
    assert SIXTEEN.groups("dp") == ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
    assert SIXTEEN.groups("tp", "pp") == tuple(tuple(range(i, i + 4)) for i in (0, 4, 8, 12))
    assert SIXTEEN.coordinates(6) == {"tp": 0, "cp": 0, "pp": 1, "dp": 1, "ep": 0}
    assert SIXTEEN.group_of(6, "dp") == (2, 6, 10, 14)
    assert describe(SIXTEEN).splitlines()[6] == "rank  6: dp1 pp1 tp0"


@pytest.mark.parametrize("order", ["tp-pp-dp", "tp-dp-pp", "dp-pp-tp", "tp-cp-dp-pp", "tp-cp-pp-dp"])
def test_every_order_places_every_rank_once(order: str) -> None:
    topology = Topology(dp=2, tp=4, pp=3, cp=2 if "cp" in order else 1, order=order)
    ranks = range(topology.world_size)
    for rank in ranks:
        places = topology.coordinates(rank)
        assert topology.rank(**{axis: places[axis] for axis in ("tp", "cp", "pp", "dp")}) == rank
    for axes in (("tp",), ("cp",), ("pp",), ("dp",), ("dp", "cp"), ("tp", "pp")):
        assert sorted(rank for group in topology.groups(*axes) for rank in group) == list(ranks)


def test_order_decides_which_ranks_are_neighbours() -> None:
    assert Topology(dp=2, tp=2, pp=2, order="tp-dp-pp").groups("dp")[0] == (0, 2)
    assert Topology(dp=2, tp=2, pp=2, order="dp-pp-tp").groups("tp")[0] == (0, 4)


def test_ep_is_consecutive_ranks_of_tp_cp_and_dp() -> None:
    topology = Topology(dp=4, tp=2, pp=2, ep=4)
    assert topology.world_size == 16
    assert topology.groups("ep") == ((0, 1, 4, 5), (2, 3, 6, 7), (8, 9, 12, 13), (10, 11, 14, 15))
    assert topology.expert_replicas()[:4] == ((0, 8), (1, 9), (2, 10), (3, 11))


@pytest.mark.parametrize("order", ["tp-pp-dp", "dp-tp-pp", "tp-cp-dp-pp", "pp-dp-cp-tp"])
@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_expert_replicas_are_one_place_of_every_cut(order: str, ep: int) -> None:
    topology = Topology(
        dp=2 if "cp" in order else 4, tp=2, pp=2, cp=2 if "cp" in order else 1, ep=ep, order=order
    )
    for group in topology.groups("ep"):
        assert [topology.coordinates(rank)["ep"] for rank in group] == list(range(ep))
    for group in topology.expert_replicas():
        assert len(group) == 8 // ep
        assert len({topology.coordinates(rank)["ep"] for rank in group}) == 1
        assert len({topology.coordinates(rank)["pp"] for rank in group}) == 1
    assert sorted(rank for group in topology.expert_replicas() for rank in group) == list(range(16))


def test_a_place_tells_every_rank_apart() -> None:
    topology = Topology(dp=2, tp=2, cp=2, order="tp-cp-dp")
    assert SIXTEEN.place(6) == "dp 1, pp 1, tp 0"
    assert topology.place(6) == "dp 1, pp 0, cp 1, tp 0"
    assert len({topology.place(rank) for rank in range(8)}) == 8


def test_dp_is_what_the_world_leaves() -> None:
    assert resolve_topology(world_size=16, tp=2, pp=2, dp=None, order="tp-pp-dp") == SIXTEEN
    assert resolve_topology(world_size=4096, tp=8, pp=16).dp == 32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 3, "pp": 2}, "tp 3 × pp 2 × cp 1 = 6, but is 16; .*world_size 12 or 18, or tp 2 or 4"),
        (
            {"tp": 2, "pp": 2, "dp": 3},
            "world_size` must be dp 3 .* = 12, but is 16; .*world_size 12, or dp 4",
        ),
        ({"tp": 0, "pp": 1}, "`tp` must be at least 1, but is 0"),
        ({"tp": 2, "pp": 1, "ep": 3}, "`ep` must divide tp 2 × cp 1 × dp 8 = 16, but is 3; .*ep 2 or 4"),
        ({"tp": 2, "pp": 1, "cp": 2}, "without cp; for example 'tp-cp-pp-dp'"),
        ({"tp": 2, "pp": 1, "order": "tp-xx-dp"}, "'xx' is not one"),
        ({"tp": 2, "pp": 1, "order": "tp-ep-dp"}, "ep is carved out"),
        ({"tp": 2, "pp": 1, "order": "tp-tp-dp"}, "'tp' comes twice"),
    ],
)
def test_refusals_name_the_nearest_that_work(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_topology(world_size=16, **options)  # type: ignore[arg-type]
