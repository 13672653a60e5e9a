"""A world of threads under NCCL's rules, which Gloo and plain threads forgive.

An operation runs some time between its start and its wait: what it fills is poison until then, what it sends must not
change, and neither may be freed. Messages of one communicator run one behind the other, and only when both sides
have come to them. A connection that is opened while a receive spins on the device may never open.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from triaxis.parallel.programs.operation import Operation
from triaxis.parallel.worlds.communicators import Direction, direction
from triaxis.parallel.worlds.group import Group, Partition, Request, Work, World
from triaxis.parallel.worlds.rendezvous import Call, Hub
from triaxis.parallel.worlds.thread import ThreadGroup, ThreadWorld, run_threads

T = TypeVar("T")
Queue = tuple[str, tuple[int, ...], Direction]


class Violation(AssertionError):
    """A rule of NCCL that a rank broke; the message has the operation and its place in the code."""


class Rules:
    """What the ranks share: each rank's queue of messages in each communicator. two_ways: one for each direction."""

    def __init__(self, *, two_ways: bool) -> None:
        self.two_ways = two_ways
        self._queues: defaultdict[tuple[Queue, int], deque[Call]] = defaultdict(deque)

    def post(self, hub: Hub, queue: Queue, call: Call) -> None:
        """Adds a message to its rank's queue; those that both sides have come to are carried out."""
        with hub.lock:
            hub._check(call)
            self._queues[queue, call.rank].append(call)
            while self._advance(hub, queue):
                pass

    def _advance(self, hub: Hub, queue: Queue) -> bool:
        for rank in queue[1]:
            own = self._queues[queue, rank]
            if not own or own[0].request.operation is not Operation.SEND:
                continue
            send = own[0]
            other = self._queues[queue, send.ranks[send.request.peer]]
            if not other or other[0].request.operation is not Operation.RECEIVE:
                continue
            receive = other[0]
            if receive.ranks[receive.request.peer] != rank:
                continue
            if send.request.label != receive.request.label:
                hub._fail(f"a message does not fit where it is received:\n  {send}\n  {receive}")
            assert send.source is not None
            assert receive.output is not None
            receive.output.copy_(send.source)
            for queue_of_rank, call in ((own, send), (other, receive)):
                queue_of_rank.popleft()
                hub._complete(call)
            return True
        return False


class _Started:
    """An operation under way: copies stand for what the device does meanwhile."""

    def __init__(
        self,
        world: RuledWorld,
        request: Request,
        wait: Callable[[], None],
        sent: list[tuple[Tensor, Tensor]],
        filled: list[tuple[Tensor, Tensor]],
    ) -> None:
        self._wait, self._sent, self._filled = wait, sent, filled
        self.what = f"rank {world.rank}: {request.operation} ({request.label}) at {request.site}"
        self.receives = request.operation is Operation.RECEIVE
        self._world, self._done = world, False
        for place, _ in filled:
            _poison(place)
        world.under_way.append(self)

    def wait(self) -> None:
        if self._done:
            return
        self._done = True
        self._wait()
        self._world.under_way.remove(self)
        for place, copy in (*self._sent, *self._filled):
            if place.untyped_storage().nbytes() < copy.numel() * copy.element_size():
                raise Violation(f"{self.what}: its memory was freed before its wait")
        for place, copy in self._sent:
            if not _same_bits(place, copy):
                raise Violation(f"{self.what}: what it sends was changed before its wait")
        for place, copy in self._filled:
            if not _is_poison(place):
                raise Violation(f"{self.what}: somebody wrote where it writes, before its wait")
            place.copy_(copy)


def _poison(tensor: Tensor) -> None:
    tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)


def _is_poison(tensor: Tensor) -> bool:
    if tensor.is_floating_point():
        return bool(tensor.isnan().all())
    return bool((tensor == torch.iinfo(tensor.dtype).max).all())


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


class RuledGroup(Group):
    """A group whose operations are done on copies; the tensors themselves see what is certain, and no more."""

    def __init__(self, inner: ThreadGroup, world: RuledWorld) -> None:
        super().__init__(inner.name, inner.ranks, inner.ranks[inner.rank])
        self._inner, self._world = inner, world
        self._connected: set[object] = set()

    def _connect(self, what: object, request: Request) -> None:
        if what in self._connected:
            return
        self._connected.add(what)
        spinning = [started.what for started in self._world.under_way if started.receives]
        if spinning:
            raise Violation(
                f"rank {self._world.rank}: {request.operation} ({request.label}) at {request.site} opens a connection "
                f"while a receive spins: {spinning[0]}"
            )

    def _start(
        self,
        request: Request,
        sent: list[Tensor],
        filled: list[Tensor],
        begin: Callable[[list[Tensor], list[Tensor]], Work],
    ) -> Work:
        self._connect("collectives", request)
        with torch.no_grad():
            sources, places = [t.detach() for t in sent], [t.detach() for t in filled]
            copies, results = [t.clone() for t in sources], [t.clone() for t in places]
            work = begin(copies, results)
            unlike = [
                pair
                for pair in zip(sources, copies, strict=True)
                if not any(_within(pair[0], p) for p in places)
            ]
            return _Started(self._world, request, work.wait, unlike, list(zip(places, results, strict=True)))

    def _all_reduce(self, request: Request, tensor: Tensor) -> Work:
        return self._start(request, [], [tensor], lambda _, out: self._inner._all_reduce(request, out[0]))

    def _all_gather(self, request: Request, output: Tensor, shard: Tensor) -> Work:
        if not _within(shard, output):
            return self._start(
                request, [shard], [output], lambda src, out: self._inner._all_gather(request, out[0], src[0])
            )
        parts = output.detach().view(self.size, -1)
        others = [part for place, part in enumerate(parts) if place != self.rank]
        whole = torch.empty_like(output)

        def begin(copies: list[Tensor], results: list[Tensor]) -> Work:
            work = self._inner._all_gather(request, whole, copies[0])
            rows = [row for place, row in enumerate(whole.view(self.size, -1)) if place != self.rank]
            return _Then(work, lambda: _assign(results, rows))

        return self._start(request, [shard.view(-1)], others, begin)

    def _reduce_scatter(self, request: Request, shard: Tensor, whole: Tensor) -> Work:
        return self._start(
            request,
            [] if _within(shard, whole) else [whole],
            [shard],
            lambda src, out: self._inner._reduce_scatter(request, out[0], src[0] if src else whole.clone()),
        )

    def _all_to_all(self, request: Request, output: Tensor, whole: Tensor) -> Work:
        return self._start(
            request, [whole], [output], lambda src, out: self._inner._all_to_all(request, out[0], src[0])
        )

    def _broadcast(self, request: Request, tensor: Tensor) -> Work:
        return self._start(request, [], [tensor], lambda _, out: self._inner._broadcast(request, out[0]))

    def _isend(self, request: Request, tensor: Tensor) -> Work:
        return self._message(request, tensor, direction(self.rank, request.peer))

    def _irecv(self, request: Request, tensor: Tensor) -> Work:
        return self._message(request, tensor, direction(request.peer, self.rank))

    def _message(self, request: Request, tensor: Tensor, way: Direction) -> Work:
        way = way if self._world.rules.two_ways else Direction.UP
        self._connect((way, request.peer, request.operation), request)
        sends = request.operation is Operation.SEND
        hub = self._world.hub
        with torch.no_grad():
            place = tensor.detach()
            copy = place.clone()
            call = Call(
                rank=self._world.rank,
                request=request,
                group=self.name,
                ranks=self.ranks,
                output=None if sends else copy,
                source=copy if sends else None,
            )
            self._world.rules.post(hub, (self.name, self.ranks, way), call)
            pairs = [(place, copy)]
            started = pairs if sends else [], [] if sends else pairs
            return _Started(self._world, request, lambda: hub.wait(call), *started)

    def _barrier(self, request: Request) -> None:
        self._inner._barrier(request)


def _within(part: Tensor, whole: Tensor) -> bool:
    first = whole.data_ptr()
    return (
        part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        and first <= part.data_ptr() < first + whole.numel() * whole.element_size()
    )


def _assign(results: list[Tensor], rows: list[Tensor]) -> None:
    for result, row in zip(results, rows, strict=True):
        result.copy_(row)


class _Then:
    def __init__(self, work: Work, after: Callable[[], None]) -> None:
        self._work, self._after = work, after

    def wait(self) -> None:
        self._work.wait()
        self._after()


class RuledWorld(World):
    """One rank's view. under_way: its operations that nobody has waited for yet."""

    name = "ruled"

    def __init__(self, inner: ThreadWorld, rules: Rules) -> None:
        self.inner, self.rules, self.hub = inner, rules, inner._hub
        self.rank, self.size, self.device = inner.rank, inner.size, inner.device
        self.under_way: list[_Started] = []

    def _new_group(self, name: str, partition: Partition) -> Group:
        made = self.inner.new_group(name, partition)
        assert isinstance(made, ThreadGroup)
        return RuledGroup(made, self)

    def left(self) -> Iterator[str]:
        """What nobody waited for."""
        return (started.what for started in self.under_way)

    def close(self) -> None:
        self.inner.close()


def run_ruled(size: int, main: Callable[[RuledWorld], T], *, two_ways: bool = True) -> list[T]:
    """Runs `main` as every rank, and looks afterwards for what nobody waited for."""
    rules = Rules(two_ways=two_ways)

    def rank(inner: ThreadWorld) -> T:
        world = RuledWorld(inner, rules)
        made = main(world)
        for what in world.left():
            raise Violation(f"{what}: nobody waited for it")
        return made

    return run_threads(size, rank)
