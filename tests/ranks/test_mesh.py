"""Groups along sets of axes: who is in them, and that no second communicator is made of the same ranks."""

from __future__ import annotations

import pytest

from triaxis.parallel.places.topology import Topology
from triaxis.parallel.worlds.mesh import TOKENS, Mesh, build_mesh
from triaxis.parallel.worlds.trace import TraceWorld

AXES = {"world", "tp", "cp", "pp", "dp", "ep", "ties"}


def mesh_of(rank: int, topology: Topology) -> Mesh:
    return build_mesh(TraceWorld(rank, topology.world_size), topology)


@pytest.mark.parametrize("topology", [Topology(), Topology(dp=2, tp=2, pp=2), Topology(dp=4), Topology(tp=4)])
def test_dense_layouts_without_contexts_make_no_further_group(topology: Topology) -> None:
    mesh = mesh_of(0, topology)
    assert set(mesh.groups) == AXES
    assert mesh.replicas is mesh.dp


def test_contexts_widen_the_replicas() -> None:
    mesh = mesh_of(5, Topology(dp=2, cp=2, tp=2, order="tp-cp-dp"))
    assert mesh.replicas.ranks == (1, 3, 5, 7)
    assert set(mesh.groups) == {*AXES, "replicas"}
    alone = mesh_of(1, Topology(cp=2, tp=2, order="tp-cp"))
    assert alone.replicas is alone.cp


def test_experts_have_replicas_of_their_own() -> None:
    mesh = mesh_of(9, Topology(dp=4, tp=2, pp=2, ep=4))
    assert mesh.ep.ranks == (8, 9, 12, 13)
    assert mesh.expert_replicas.ranks == (1, 9)
    assert mesh.tokens.ranks == (0, 1, 4, 5, 8, 9, 12, 13)
    assert mesh.replicas is mesh.dp


def test_names_of_one_partition_share_a_group() -> None:
    spread = mesh_of(3, Topology(dp=4, ep=4))
    assert spread.tokens is spread.replicas is spread.dp
    assert spread.expert_replicas.size == 1
    assert set(spread.groups) == AXES
    once = mesh_of(0, Topology(dp=2, tp=2, pp=2))
    made = once.add(TOKENS, once.topology.groups("tp", "dp"))
    assert made.ranks == (0, 1, 4, 5)
    assert once.add(TOKENS, once.topology.groups("tp", "dp")) is made is once.tokens
    assert once.subgroup("tp/1", "tp", 1) is once.tp
