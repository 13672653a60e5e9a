"""The process world: every rank is a process; NCCL where there is CUDA, Gloo elsewhere."""

from __future__ import annotations

import atexit
import gc
import re
from collections.abc import Sequence
from datetime import timedelta

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

from triaxis.parallel.worlds.failure import RankError, call_site
from triaxis.parallel.worlds.group import Group, Partition, World
from triaxis.parallel.worlds.meeting import Address, MeetingError, RefusedElsewhere, meet, open_store
from triaxis.parallel.worlds.port_holder import port_holder
from triaxis.parallel.worlds.process_group import GlooGroup, ProcessGroup


class ProcessWorld(World):
    """The processes of one run. Only one can be open in a process, since torch keeps one default group."""

    name = "process"

    def __init__(self, rank: int, size: int, device: torch.device, timeout: timedelta) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._timeout = timeout
        self._checks = False
        self._groups: list[ProcessGroup] = []
        self._lends_meshes = False

    def _new_group(self, name: str, partition: Partition) -> Group:
        kind = ProcessGroup if self.device.type == "cuda" else GlooGroup
        own: ProcessGroup | None = None
        for part in partition:
            handle = self._new_handle(name, part) if len(part) > 1 else None
            if self.rank in part:
                own = kind(name, part, self.rank, handle)
        assert own is not None
        own.checked = self._checks
        self._groups.append(own)
        return own

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
            group.handle = None
        self._groups.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
        if self._lends_meshes:
            _forget_meshes()

    def _new_handle(self, name: str, part: tuple[int, ...]) -> dist.ProcessGroup:
        try:
            handle: dist.ProcessGroup = dist.new_group(list(part), timeout=self._timeout)
        except RuntimeError as error:
            raise RankError(
                f"rank {self.rank}: making group '{name}' {part} at {call_site()} failed: a rank died or "
                f"makes other groups ({_first_line(error)})"
            ) from error
        return handle


def open_process_world(
    *,
    rank: int,
    size: int,
    local_rank: int,
    timeout_seconds: float,
    operation_seconds: float | None = None,
    address: Address | None = None,
    init_method: str | None = None,
    device: str | None = None,
    start: str = "",
) -> ProcessWorld:
    """Joins the processes of a run into a world, at `address`, or as `init_method` or torch's environment has it.

    timeout_seconds: how long ranks wait for each other to come; operation_seconds: in an operation, later (as long)
    start: another for each start of the run; torchrun keeps its store over restarts, with the addresses of the dead
    Raises RuntimeError when the ranks cannot meet.
    """
    on_cuda = torch.cuda.is_available() if device is None else torch.device(device).type == "cuda"
    place = torch.device(device or (f"cuda:{local_rank}" if on_cuda else "cpu"))
    if on_cuda:
        if place.index is not None and place.index >= torch.cuda.device_count():
            raise RuntimeError(
                f"`LOCAL_RANK` must be less than the {torch.cuda.device_count()} GPUs of this machine, but is "
                f"{local_rank} on rank {rank}; start one process a GPU (torchrun --nproc-per-node gpu sets it)"
            )
        torch.cuda.set_device(place)
    timeout = timedelta(seconds=operation_seconds or timeout_seconds)
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
        store.set_timeout(timeout)
        dist.init_process_group(
            "nccl" if on_cuda else "gloo", store=store, rank=rank, world_size=size, timeout=timeout
        )
    except (MeetingError, RefusedElsewhere):
        raise
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(_unreachable(rank, size, where, timeout_seconds, error)) from error
    return ProcessWorld(rank, size, place, timeout)


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
