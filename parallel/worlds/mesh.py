"""The mesh: a topology with a group for each axis and each set of axes in use, as one rank sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from triaxis.parallel.places.layout import EXPERT_REPLICAS, REPLICAS
from triaxis.parallel.places.topology import Axis, Topology
from triaxis.parallel.worlds.group import Group, World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

TOKENS = "tokens"
SHARED = (Axis.DP, Axis.CP, Axis.TP, Axis.EP, Axis.PP)

Partition = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class Mesh:
    """One rank's groups. Looking one up never communicates; `add` and `subgroup` make one, all ranks together.

    groups: each once, by its own name: "world", "tp", "cp", "pp", "dp", "ep", "ties", and those made since
    shared: whose group a further name of the same partition of the ranks means; others: those names
    """

    world: World
    topology: Topology
    rank: int
    coordinates: dict[str, int]
    groups: dict[str, Group] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    shared: dict[Partition, str] = field(default_factory=dict)

    def named(self, name: str) -> Group:
        """The group of a name, which may be another's too."""
        return self.groups[self.others.get(name, name)]

    @property
    def tp(self) -> Group:
        return self.groups["tp"]

    @property
    def cp(self) -> Group:
        return self.groups["cp"]

    @property
    def pp(self) -> Group:
        return self.groups["pp"]

    @property
    def dp(self) -> Group:
        return self.groups["dp"]

    @property
    def ep(self) -> Group:
        """The ranks over which the experts of a layer are spread: consecutive ones of tp × cp × dp."""
        return self.groups["ep"]

    @property
    def replicas(self) -> Group:
        """The ranks that hold the same pieces of dense parameters: cp × dp."""
        return self.named(REPLICAS)

    @property
    def expert_replicas(self) -> Group:
        """The ranks that hold the same experts: one place in every ep cut of tp × cp × dp."""
        return self.named(EXPERT_REPLICAS)

    @property
    def tokens(self) -> Group:
        """The ranks that see different tokens in the same layers: tp × cp × dp. Made where ep > 1, or by `add`."""
        return self.named(TOKENS)

    @property
    def everyone(self) -> Group:
        return self.groups["world"]

    @property
    def ties(self) -> Group:
        """The first and the last stage of this pipeline, which share tied embeddings; others are alone."""
        return self.groups["ties"]

    @property
    def tp_rank(self) -> int:
        return self.coordinates["tp"]

    @property
    def dp_rank(self) -> int:
        return self.coordinates["dp"]

    def add(self, name: str, partition: Sequence[tuple[int, ...]]) -> Group:
        """The group `name`, of this partition of the ranks. Collective the first time a name is used.

        A communicator costs memory and threads on every rank, so two names of one partition share a group.
        """
        if name not in self.groups and name not in self.others:
            parts = tuple(sorted(partition))
            if parts in self.shared:
                self.others[name] = self.shared[parts]
            else:
                self.groups[name] = self.world.new_group(name, parts)
                self.shared[parts] = name
        return self.named(name)

    def subgroup(self, name: str, axis: str, parts: int) -> Group:
        """Cuts each group of `axis` into `parts` consecutive groups. Collective the first time a name is used.

        Example: a tp group of ranks 0 1 2 3 in 2 parts: 0 1 and 2 3.
        """
        size = self.topology.size(axis)
        if parts < 1 or size % parts:
            raise ValueError(f"`parts` must divide {axis} {size}, but is {parts}")
        wholes, step = self.topology.groups(axis), size // parts
        return self.add(name, [whole[i : i + step] for whole in wholes for i in range(0, size, step)])

    def connect(self) -> None:
        """Uses every group once, in the order in which they were made. Collective.

        NCCL opens connections at first use, by calls that may wait for the device; there a receive that was posted
        early may spin until a neighbour sends that waits in such a call itself. So none is left for the first step.
        """
        for group in self.groups.values():
            group.all_reduce(torch.zeros(1, device=self.world.device), label="connection")

    def clear_traffic(self) -> None:
        """Starts counting sent bytes anew."""
        for group in self.groups.values():
            group.traffic.clear()

    def sent_bytes(self) -> dict[str, int]:
        """Bytes that this rank sent since, by group; groups without any are left out."""
        sent = {name: group.traffic.total_bytes() for name, group in self.groups.items()}
        return {name: count for name, count in sent.items() if count}

    def device_mesh(self) -> DeviceMesh:
        """PyTorch's own mesh of this topology, outermost axis first (process world only). Collective."""
        from triaxis.parallel.worlds.process import ProcessWorld

        if not isinstance(self.world, ProcessWorld):
            raise ValueError(
                f"a device mesh must be made in the process world, but this is the {self.world.name} world; "
                "start the ranks with the launcher"
            )
        axes = tuple(reversed(self.topology.axes))
        return self.world.device_mesh(axes, tuple(self.topology.size(axis) for axis in axes))


def build_mesh(world: World, topology: Topology) -> Mesh:
    """Makes every group of the topology, in one order on all ranks. Collective over the world."""
    if topology.world_size != world.size:
        raise ValueError(
            f"`topology` must have as many ranks as the world, {world.size}, but has {topology.world_size}: "
            f"dp {topology.dp} × tp {topology.tp} × pp {topology.pp} × cp {topology.cp}"
        )
    everyone = (tuple(range(world.size)),)
    # An axis has a group of its own even where another has the same ranks: messages and traffic go by its name.
    groups = {"world": world.new_group("world", everyone)}
    partitions = {axis: topology.groups(axis) for axis in Axis}
    for axis, partition in partitions.items():
        groups[axis.value] = world.new_group(axis.value, partition)
    world.give_directions(groups[Axis.PP.value])
    groups["ties"] = world.new_group("ties", _ends(topology))
    # Of equal axes dp comes first: what is reduced over dp × cp is told as dp where cp is one.
    shared: dict[Partition, str] = {everyone: "world"}
    shared |= {partitions[axis]: axis.value for axis in reversed(SHARED)}
    mesh = Mesh(world, topology, world.rank, topology.coordinates(world.rank), groups, shared=shared)
    mesh.add(REPLICAS, topology.groups(Axis.CP, Axis.DP))
    if topology.ep > 1:  # no experts, no group of theirs
        mesh.add(TOKENS, topology.groups(Axis.TP, Axis.CP, Axis.DP))
        mesh.add(EXPERT_REPLICAS, topology.expert_replicas())
    return mesh


def _ends(topology: Topology) -> list[tuple[int, ...]]:
    """Each pipeline cut into its two ends and single ranks: 0 2 4 6 becomes 0 6, 2 and 4."""
    parts: list[tuple[int, ...]] = []
    for line in topology.groups(Axis.PP):
        parts.append(line if len(line) == 1 else (line[0], line[-1]))
        parts.extend((rank,) for rank in line[1:-1])
    return parts
