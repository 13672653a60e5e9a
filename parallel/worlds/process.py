"""The process world: every rank is a process; NCCL where there is CUDA, Gloo elsewhere."""

from __future__ import annotations

import atexit
import gc
import json
import re
import socket
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a default group, which its default arguments would keep
from torch.distributed import (  # type: ignore[attr-defined]  # public, but not in its list
    HashStore,
    PrefixStore,
    Store,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from triaxis.parallel.places.topology import members_with
from triaxis.parallel.worlds.communicators import OPTIONS, Direction, Options, is_made
from triaxis.parallel.worlds.device import (
    Chosen,
    DeviceError,
    DeviceKind,
    Transport,
    choose_device,
    device_fault,
)
from triaxis.parallel.worlds.failure import RankError, call_site
from triaxis.parallel.worlds.group import Group, Partition, World
from triaxis.parallel.worlds.meeting import Address, MeetingError, RefusedElsewhere, meet, open_store
from triaxis.parallel.worlds.neighbours import NeighbourError, Neighbourhood, meet_neighbours
from triaxis.parallel.worlds.port_holder import port_holder
from triaxis.parallel.worlds.process_group import GlooGroup, ProcessGroup
from triaxis.parallel.worlds.shared_group import SharedGroup

FOREVER = timedelta(days=30)
"""What waits for storage is ended by the watchdog, who knows how long that may take."""


class ProcessWorld(World):
    """The processes of one run. Only one can be open in a process, since torch keeps one default group."""

    name = "process"

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        *,
        store: Store,
        setup: timedelta,
        operation: timedelta,
        near: Neighbourhood | None = None,
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._store, self._setup, self._operation = store, setup, operation
        self._near = near
        self._near_groups: list[SharedGroup] = []
        self._checks = False
        self._groups: list[ProcessGroup] = []
        self._handles: dict[tuple[Partition, Direction], dist.ProcessGroup | None] = {}
        self._waits = 0
        self._lends_meshes = False

    def _new_group(self, name: str, partition: Partition) -> Group:
        if self._near is not None and all(self._near.has(part) for part in partition):
            return self._near_group(name, partition, self._near)
        kind = ProcessGroup if self.device.type == "cuda" else GlooGroup
        handle = self._handle(name, partition, Direction.UP)
        own = kind(name, members_with(self.rank, partition), self.rank, handle)
        own.partition, own.checked = partition, self._checks
        self._groups.append(own)
        return own

    def _near_group(self, name: str, partition: Partition, near: Neighbourhood) -> Group:
        self._near_groups.append(
            SharedGroup(
                name,
                members_with(self.rank, partition),
                self.rank,
                near=near,
                key=len(self._near_groups),
                seconds=self._setup.total_seconds(),
            )
        )
        return self._near_groups[-1]

    def give_directions(self, group: Group) -> None:
        if self.device.type == "cuda":  # Gloo's messages wait for no other
            assert isinstance(group, ProcessGroup), "groups on a GPU are NCCL's"
            group.downward = self._handle(group.name, group.partition, Direction.DOWN)

    def wait_for_all(self, what: str) -> None:
        """In the store, whose waits have no time-out: an operation of NCCL would end the process after its own."""
        if self.size == 1:
            return
        key = f"{what} {self._waits}"
        self._waits += 1
        if self._store.add(f"here for {key}", 1) == self.size:
            self._store.set(f"all for {key}", "yes")
        self._store.wait([f"all for {key}"], FOREVER)

    def settle(self) -> None:
        for handle in {
            id(handle): handle for handle in self._handles.values() if handle is not None
        }.values():
            dist.distributed_c10d._set_pg_timeout(self._operation, handle)
        for near in self._near_groups:
            near.seconds = self._operation.total_seconds()

    def check_collectives(self, on: bool) -> None:
        self._checks = on
        for group in self._groups:
            group.checked = on

    def device_mesh(self, axes: Sequence[str], sizes: Sequence[int]) -> DeviceMesh:
        """PyTorch's mesh of these axes, outermost first. Collective."""
        self._lends_meshes = True
        return init_device_mesh(self.device.type, tuple(sizes), mesh_dim_names=tuple(map(str, axes)))

    def close(self) -> None:
        """Ends all groups and their threads.

        A thread of Gloo that outlives the interpreter aborts the process: it asks for the interpreter's lock, is ended
        for that, and C++ terminates. So nobody may keep a group: not ours, not a library's module (see the imports).
        """
        for group in self._groups:
            group.handle = group.downward = None
        self._groups.clear()
        self._handles.clear()
        if self._near is not None:
            self._near.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._store = HashStore()
        if self._lends_meshes:
            _forget_meshes()

    def _handle(self, name: str, partition: Partition, way: Direction) -> dist.ProcessGroup | None:
        """Torch's group of this rank's part, made with all other parts; groups of the same ranks share one."""
        key = partition, way
        if key not in self._handles:
            try:
                self._handles[key] = self._made(name, partition, way)
            except RuntimeError as error:
                raise RankError(
                    f"rank {self.rank}: making group '{name}' {members_with(self.rank, partition)} at {call_site()} "
                    f"failed: a rank died or makes other groups ({_first_line(error)})"
                ) from error
        return self._handles[key]

    def _made(self, name: str, partition: Partition, way: Direction) -> dist.ProcessGroup | None:
        if not is_made(partition, way):
            return dist.group.WORLD if len(partition) == 1 else None
        if self.device.type == "cuda":
            made = dist.split_group(
                split_ranks=[list(part) for part in partition],
                timeout=self._setup,
                pg_options=nccl_options(OPTIONS.get(name, Options())),
                group_desc=f"{name} {way}",
            )
            return made if len(members_with(self.rank, partition)) > 1 else None
        own: dist.ProcessGroup | None = None
        for part in partition:
            if len(part) > 1:
                made = dist.new_group(list(part), timeout=self._setup)
                own = made if self.rank in part else own
        return own


def nccl_options(options: Options) -> Any:  # noqa: ANN401  (torch's own, which a build without NCCL has not)
    """The same for torch."""
    made = dist.ProcessGroupNCCL.Options(is_high_priority_stream=options.urgent)
    if options.most_blocks is not None:
        made.config.max_ctas = options.most_blocks
    return made


def open_process_world(
    *,
    rank: int,
    size: int,
    local_rank: int,
    timeout_seconds: float,
    operation_seconds: float | None = None,
    setup_seconds: float | None = None,
    address: Address | None = None,
    init_method: str | None = None,
    device: DeviceKind = "auto",
    transport: Transport = "auto",
    start: str = "",
) -> ProcessWorld:
    """Joins the processes of a run into a world, at `address`, or as `init_method` or torch's environment has it.

    timeout_seconds: how long ranks wait for each other to come; operation_seconds: in an operation, later (as long);
    setup_seconds: in an operation before `settle` (as long as later)
    device: "auto" is a GPU where there is one, and all ranks must have found the same
    transport: "auto" lets ranks on CPUs of one machine read each other's memory; "gloo" sends all over sockets
    start: another for each start of the run; torchrun keeps its store over restarts, with the addresses of the dead
    Raises RuntimeError when the ranks cannot meet.
    """
    gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    place = torch.device(choose_device(device, visible_gpus=gpus, rank=rank, local_rank=local_rank))
    operation = timedelta(seconds=operation_seconds or timeout_seconds)
    setup = timedelta(seconds=setup_seconds or operation_seconds or timeout_seconds)
    where = str(address) if address else (init_method or "MASTER_ADDR:MASTER_PORT").removeprefix("tcp://")
    store: Store = HashStore()
    try:
        if size > 1 or init_method is not None:
            if address is not None:
                store = open_store(address, rank, timeout_seconds)
            else:
                store, rank, size = next(
                    rendezvous(
                        init_method or "env://", rank, size, timeout=timedelta(seconds=timeout_seconds)
                    )
                )
            store = PrefixStore(f"start-{start}", store)
            meet(store, where, rank=rank, size=size, seconds=timeout_seconds)
            agree_on_device(store, rank, size, place)
        store.set_timeout(setup)
        near = None
        if place.type == "cpu" and size > 1 and transport == "auto":
            near = meet_neighbours(store, rank, size, setup.total_seconds())
        dist.init_process_group(
            "nccl" if place.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=setup,
            device_id=_bound(place),
        )
    except (MeetingError, NeighbourError, RefusedElsewhere, DeviceError):
        raise
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(_unreachable(rank, size, where, timeout_seconds, error)) from error
    return ProcessWorld(rank, size, place, store=store, setup=setup, operation=operation, near=near)


def agree_on_device(store: Store, rank: int, size: int, place: torch.device) -> None:
    """Before anything is made there: rank 0 looks at what all have chosen. Raises DeviceError on every rank."""
    own = Chosen(host=socket.gethostname(), device=str(place), identity=_identity(place))
    store.set(f"device-{rank}", json.dumps(asdict(own)))
    if rank == 0:
        chosen = [Chosen(**json.loads(store.get(f"device-{other}"))) for other in range(size)]
        store.set("devices", device_fault(chosen) or "fit")
    verdict = store.get("devices").decode()
    if verdict != "fit":
        raise DeviceError(verdict)


def _identity(place: torch.device) -> str:
    return str(torch.cuda.get_device_properties(place).uuid) if place.type == "cuda" else ""


def _bound(place: torch.device) -> torch.device | None:
    """The device that NCCL connects to at once, so that groups can be split off and nothing is left for later."""
    if place.type != "cuda":
        return None
    torch.cuda.set_device(place)
    return place


def _forget_meshes() -> None:
    """Lets go of the groups of PyTorch's meshes, at the latest when the interpreter ends.

    DTensor remembers the mesh of every operation that it met, and modules that it sharded are cycles.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    gc.collect()
    atexit.register(gc.collect)  # for what the caller still holds: the interpreter collects it too late


def _unreachable(rank: int, size: int, address: str, seconds: float, error: Exception) -> str:
    text = _first_line(error)
    if "EADDRINUSE" in text or "address already in use" in text:
        port = re.search(r"port: (\d+)", text)
        taken = f"port {port[1]}" if port else "the port"
        holder = port_holder(int(port[1])) if port else "another process"
        return (
            f"{taken} of {address} is taken by {holder}, so that rank {rank} of {size} cannot open it; "
            f"choose a free port, or end the run that holds it ({text})"
        )
    return (
        f"rank {rank} of {size} could not meet the others at {address} within {seconds:g} s; check that "
        f"all ranks were started and that rank 0 can be reached there ({text})"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
