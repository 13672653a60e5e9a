"""The thread world: every rank is a thread of this process, and no communication can hang.

Whoever comes last to a collective checks that all ask for the same and does the work for all. When nobody
can go on, every rank raises a `RankError` that says who waits where, for what.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from triaxis.parallel.places.topology import members_with
from triaxis.parallel.programs.operation import Operation
from triaxis.parallel.worlds.failure import RankError, call_site
from triaxis.parallel.worlds.group import DONE, Group, Partition, Request, Work, World
from triaxis.parallel.worlds.rendezvous import Call, Hub, Pending, Perform
from triaxis.parallel.worlds.summation import summed

__all__ = ["RankError", "ThreadWorld", "run_threads"]

T = TypeVar("T")


class ThreadGroup(Group):
    """A group of ranks that are threads."""

    def __init__(self, name: str, ranks: Sequence[int], world_rank: int, hub: Hub, key: int) -> None:
        super().__init__(name, ranks, world_rank)
        self._hub, self._key, self._world_rank, self._sequence = hub, key, world_rank, 0

    def _call(self, request: Request, output: Tensor | None, source: Tensor | None) -> Call:
        return Call(
            rank=self._world_rank,
            request=request,
            group=self.name,
            ranks=self.ranks,
            output=output,
            source=source,
        )

    def _collective(
        self,
        request: Request,
        perform: Perform,
        output: Tensor | None = None,
        source: Tensor | None = None,
    ) -> Work:
        call = self._call(request, output, source)
        for tensor in (output, source):
            if tensor is not None and not tensor.is_contiguous():
                raise ValueError(
                    f"a tensor must be contiguous, but its strides are {tensor.stride()}: {call}"
                )
        self._sequence += 1
        self._hub.collective((self._key, self.ranks, self._sequence), self.ranks, call, perform)
        return Pending(self._hub, call, self)

    def _sized(self, request: Request, whole: Tensor, shard: Tensor) -> None:
        if whole.numel() != shard.numel() * self.size:
            raise ValueError(
                f"{request.operation} in group '{self.name}' of {self.size} must have {self.size} × the shard's "
                f"{shard.numel()} elements, but has {whole.numel()}, at {request.site}"
            )

    def _all_reduce(self, request: Request, tensor: Tensor) -> Work:
        largest = request.operation is Operation.ALL_REDUCE_LARGEST
        return self._collective(request, _maximum if largest else _sum, tensor, None)

    def _all_gather(self, request: Request, output: Tensor, shard: Tensor) -> Work:
        self._sized(request, output, shard)
        return self._collective(request, _gather, output, shard)

    def _reduce_scatter(self, request: Request, shard: Tensor, whole: Tensor) -> Work:
        self._sized(request, whole, shard)
        return self._collective(request, _sum_parts, shard, whole)

    def _all_to_all(self, request: Request, output: Tensor, whole: Tensor) -> Work:
        if request.input_rows:
            return self._collective(request, _exchange_rows, output, whole)
        if output.numel() != whole.numel() or whole.numel() % self.size:
            raise ValueError(
                f"{request.operation} in group '{self.name}' must have equal tensors that {self.size} divides, "
                f"but has {output.numel()} and {whole.numel()} elements, at {request.site}"
            )
        return self._collective(request, _exchange, output, whole)

    def _broadcast(self, request: Request, tensor: Tensor) -> Work:
        def perform(calls: list[Call]) -> None:
            _copy_all(calls, _out(calls[request.peer]))

        return self._collective(request, perform, tensor)

    def _isend(self, request: Request, tensor: Tensor) -> Work:
        call, rank = self._call(request, None, tensor), self.ranks[request.peer]
        self._hub.send((self._key, self._world_rank, rank), call)
        return DONE

    def _irecv(self, request: Request, tensor: Tensor) -> Work:
        call, rank = self._call(request, tensor, None), self.ranks[request.peer]
        self._hub.receive((self._key, rank, self._world_rank), call, rank)
        return Pending(self._hub, call, self)

    def _barrier(self, request: Request) -> None:
        self._collective(request, _nothing).wait()


class ThreadWorld(World):
    """The ranks of `run_threads`, seen from one of them."""

    name = "thread"

    def __init__(self, hub: Hub, rank: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, hub.size, device
        self._hub, self._groups = hub, 0

    def _new_group(self, name: str, partition: Partition) -> Group:
        self._groups += 1
        call = Call(
            rank=self.rank,
            request=Request(Operation.NEW_GROUP, call_site(), f"'{name}' {partition}"),
            group="world",
            ranks=tuple(range(self.size)),
        )
        self._hub.collective(("new_group", self._groups), call.ranks, call, _nothing)
        Pending(self._hub, call).wait()
        return ThreadGroup(name, members_with(self.rank, partition), self.rank, self._hub, self._groups)

    def close(self) -> None:
        """Nothing to release: `run_threads` ends the threads."""


def run_threads(
    size: int,
    main: Callable[[ThreadWorld], T],
    *,
    names: Sequence[str] | None = None,
    device: str = "cpu",
) -> list[T]:
    """Runs `main` as every rank, each in a thread, and returns the results by rank.

    When ranks raise, the first one's own error is raised, with its rank as a note; a `RankError` only
    when no rank had an error of its own. `names` names the ranks in that note and the threads.
    device: all ranks' tensors are there, on one GPU or in one memory
    """
    hub = Hub(size)
    results: dict[int, T] = {}
    titles = [f"rank {rank}" + (f" ({names[rank]})" if names else "") for rank in range(size)]

    def run(rank: int) -> None:
        # Backward passes of all ranks would share one thread for a GPU, where one that waits for another rank in a hook
        # keeps that rank's pass from running. (The setting is the thread's own.)
        torch.autograd.set_multithreading_enabled(device == "cpu")
        try:
            results[rank] = main(ThreadWorld(hub, rank, torch.device(device)))
            hub.finish(rank)
        except BaseException as error:  # noqa: BLE001  (raised again by run_threads)
            hub.die(rank, error)

    threads = [
        threading.Thread(target=run, args=(rank,), name=titles[rank], daemon=True) for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if hub.deaths:
        own = [death for death in hub.deaths if not isinstance(death[1], RankError)]
        rank, error = (own or hub.deaths)[0]
        error.add_note(f"raised by {titles[rank]} of {size} in the thread world")
        raise error
    return [results[rank] for rank in range(size)]


def _out(call: Call) -> Tensor:
    assert call.output is not None
    return call.output.detach()


def _in(call: Call) -> Tensor:
    assert call.source is not None
    return call.source.detach()


def _copy_all(calls: list[Call], value: Tensor) -> None:
    for call in calls:
        if _out(call).data_ptr() != value.data_ptr():
            _out(call).copy_(value)


def _sum(calls: list[Call]) -> None:
    _copy_all(calls, summed([_out(call) for call in calls]))


def _maximum(calls: list[Call]) -> None:
    largest = _out(calls[0]).clone()
    for call in calls[1:]:
        torch.maximum(largest, _out(call), out=largest)
    _copy_all(calls, largest)


def _gather(calls: list[Call]) -> None:
    for call in calls:
        parts = _out(call).view(len(calls), -1)
        for part, member in zip(parts, calls, strict=True):
            if part.data_ptr() != _in(member).data_ptr():
                part.copy_(_in(member).view(-1))


def _sum_parts(calls: list[Call]) -> None:
    wholes = [_in(call).view(len(calls), -1) for call in calls]
    for place, call in enumerate(calls):
        _out(call).view(-1).copy_(summed([whole[place] for whole in wholes]))


def _exchange(calls: list[Call]) -> None:
    wholes = [_in(call).view(len(calls), -1) for call in calls]
    for place, call in enumerate(calls):
        torch.stack([whole[place] for whole in wholes], out=_out(call).view(len(calls), -1))


def _exchange_rows(calls: list[Call]) -> str | None:
    given = [_in(call).split(call.request.input_rows) for call in calls]
    taken = [_out(call).split(call.request.output_rows) for call in calls]
    for i, giver in enumerate(calls):
        for j, taker in enumerate(calls):
            if len(given[i][j]) != len(taken[j][i]):
                return (
                    f"a member gives {len(given[i][j])} rows where another takes {len(taken[j][i])}:"
                    f"\n  {giver}\n  {taker}"
                )
            taken[j][i].copy_(given[i][j])
    return None


def _nothing(calls: list[Call]) -> None:
    """A barrier moves no data."""
