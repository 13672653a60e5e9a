"""The mesh: a topology with a group for each axis, as one rank sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from triaxis.parallel.places.topology import Axis, Topology
from triaxis.parallel.worlds.group import Group, World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(slots=True)
class Mesh:
    """One rank's groups. Looking a group up never communicates; `subgroup` makes one, together.

    groups: "tp", "cp", "pp", "dp", "ep", "world", "ties", and the subgroups made since
    """

    world: World
    topology: Topology
    rank: int
    coordinates: dict[str, int]
    groups: dict[str, Group] = field(default_factory=dict)

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
    def pp_rank(self) -> int:
        return self.coordinates["pp"]

    @property
    def dp_rank(self) -> int:
        return self.coordinates["dp"]

    def subgroup(self, name: str, axis: str, parts: int) -> Group:
        """Cuts each group of `axis` into `parts` consecutive groups. Collective the first time a name is used.

        Example: a tp group of ranks 0 1 2 3 in 2 parts: 0 1 and 2 3.
        """
        if name not in self.groups:
            size = self.topology.size(axis)
            if parts < 1 or size % parts:
                raise ValueError(f"`parts` must divide {axis} {size}, but is {parts}")
            self.groups[name] = self.world.new_group(
                name,
                [
                    whole[i : i + size // parts]
                    for whole in self.topology.groups(axis)
                    for i in range(0, size, size // parts)
                ],
            )
        return self.groups[name]

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
    groups = {"world": world.new_group("world", everyone)}
    for axis in Axis:
        groups[axis.value] = world.new_group(axis.value, topology.groups(axis))
    groups["ties"] = world.new_group("ties", _ends(topology))
    return Mesh(world, topology, world.rank, topology.coordinates(world.rank), groups)


def _ends(topology: Topology) -> list[tuple[int, ...]]:
    """Each pipeline cut into its two ends and single ranks: 0 2 4 6 becomes 0 6, 2 and 4."""
    parts: list[tuple[int, ...]] = []
    for line in topology.groups(Axis.PP):
        parts.append(line if len(line) == 1 else (line[0], line[-1]))
        parts.extend((rank,) for rank in line[1:-1])
    return parts
