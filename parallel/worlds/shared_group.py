"""Groups of processes of one machine: parts are read out of each other's memory, and added in member order.

    operation        a rank writes          and reads of each other        at (size of the whole tensor)
    all_gather       its shard              its shard                      1 / members
    reduce_scatter   the parts of others    the part that is this rank's   1 / members
    all_to_all       the parts of others    the part that is this rank's   1 / members
    all_reduce       all                    all, or as both of the above where it need not go on beside

Nothing runs in the background: what is given is written when it is asked for, what is taken is read in `wait`.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from triaxis.parallel.programs.operation import Operation
from triaxis.parallel.worlds.communicators import UNDER_WAY
from triaxis.parallel.worlds.failure import RankError
from triaxis.parallel.worlds.group import DONE, Group, Request, Work
from triaxis.parallel.worlds.neighbours import Message, NeighbourError, Neighbourhood
from triaxis.parallel.worlds.shared_memory import Region
from triaxis.parallel.worlds.summation import sum_into

COLLECTIVE, MESSAGE = 0, 1
SCATTERED_BYTES = 1 << 16
"""From here an all_reduce of three or more is a reduce_scatter and an all_gather, so that it is read about twice."""

LARGE_BYTES = 1 << 20
"""Of collectives from here on only some are under way at once: their parts lie there until they are waited for."""

NOWHERE = Region(0, 0)

Take = Callable[[Mapping[int, Tensor]], None]
"""What is done with the members' parts, by their places."""


class SharedGroup(Group):
    """A group of ranks that are processes of one machine.

    key: the group's number in its world; seconds: how long to wait for a member
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        world_rank: int,
        *,
        near: Neighbourhood,
        key: int,
        seconds: float,
    ) -> None:
        super().__init__(name, ranks, world_rank)
        self._near, self._key, self.seconds = near, key, seconds
        self._world_rank = world_rank
        self._collectives = 0
        self._sent: dict[int, int] = defaultdict(int)
        self._received: dict[int, int] = defaultdict(int)
        self._under_way: deque[Reading] = deque()
        self._others = [member for member in range(self.size) if member != self.rank]

    def _all_reduce(self, request: Request, tensor: Tensor) -> Work:
        own = tensor.detach().view(-1)
        largest = request.operation is Operation.ALL_REDUCE_LARGEST
        if self.size > 2 and not request.asynchronous and not largest and tensor.nbytes >= SCATTERED_BYTES:
            return self._scattered(request, own)

        def take(parts: Mapping[int, Tensor]) -> None:
            given = [own if member == self.rank else parts[member] for member in range(self.size)]
            if largest:
                for part in parts.values():
                    torch.maximum(own, part, out=own)
            else:
                sum_into(own, given)

        same = dict.fromkeys(self._others, own)
        return self._collective(request, tensor, same, same, take)

    def _scattered(self, request: Request, own: Tensor) -> Work:
        parts = own.tensor_split(self.size)

        def take(theirs: Mapping[int, Tensor]) -> None:
            sum_into(parts[self.rank], [theirs.get(member, parts[self.rank]) for member in range(self.size)])

        def spread(theirs: Mapping[int, Tensor]) -> None:
            for member, part in theirs.items():
                parts[member].copy_(part)

        of_others = {member: parts[member] for member in self._others}
        same = dict.fromkeys(self._others, parts[self.rank])
        self._collective(request, own, of_others, same, take).wait()
        return self._collective(request, own, same, of_others, spread)

    def _all_gather(self, request: Request, output: Tensor, shard: Tensor) -> Work:
        parts, own = output.detach().view(self.size, -1), shard.detach().view(-1)
        if parts[self.rank].data_ptr() != own.data_ptr():
            parts[self.rank].copy_(own)

        def take(theirs: Mapping[int, Tensor]) -> None:
            for member, part in theirs.items():
                parts[member].copy_(part)

        same = dict.fromkeys(self._others, own)
        return self._collective(request, shard, same, same, take)

    def _reduce_scatter(self, request: Request, shard: Tensor, whole: Tensor) -> Work:
        own, parts = shard.detach().view(-1), whole.detach().view(self.size, -1)

        def take(theirs: Mapping[int, Tensor]) -> None:
            sum_into(own, [theirs.get(member, parts[self.rank]) for member in range(self.size)])

        given = {member: parts[member] for member in self._others}
        return self._collective(request, whole, given, dict.fromkeys(self._others, own), take)

    def _all_to_all(self, request: Request, output: Tensor, whole: Tensor) -> Work:
        if request.input_rows:
            given: Sequence[Tensor] = whole.detach().split(request.input_rows)
            taken: Sequence[Tensor] = output.detach().split(request.output_rows)
        else:
            given = whole.detach().view(self.size, -1).unbind()
            taken = output.detach().view(self.size, -1).unbind()
        taken[self.rank].copy_(given[self.rank])

        def take(theirs: Mapping[int, Tensor]) -> None:
            for member, part in theirs.items():
                taken[member].view(-1).copy_(part)

        parts = {member: given[member] for member in self._others}
        return self._collective(request, whole, parts, {i: taken[i] for i in self._others}, take)

    def _broadcast(self, request: Request, tensor: Tensor) -> Work:
        own, root = tensor.detach().view(-1), request.peer

        def take(theirs: Mapping[int, Tensor]) -> None:
            if root in theirs:
                own.copy_(theirs[root])

        nothing = own[:0]
        given = dict.fromkeys(self._others, own if self.rank == root else nothing)
        return self._collective(
            request, tensor, given, {i: own if i == root else nothing for i in self._others}, take
        )

    def _barrier(self, request: Request) -> None:
        nothing = torch.empty(0, dtype=torch.uint8)
        same = dict.fromkeys(self._others, nothing)
        self._collective(request, nothing, same, same, _nothing).wait()

    def _isend(self, request: Request, tensor: Tensor) -> Work:
        number = self._sent[request.peer]
        self._sent[request.peer] += 1
        self._give(request, MESSAGE, number, tensor, {request.peer: tensor.detach()})
        return DONE

    def _irecv(self, request: Request, tensor: Tensor) -> Work:
        number, own = self._received[request.peer], tensor.detach().view(-1)
        self._received[request.peer] += 1

        def take(theirs: Mapping[int, Tensor]) -> None:
            own.copy_(theirs[request.peer])

        return Reading(self, request, MESSAGE, number, tensor, {request.peer: own}, take)

    def _collective(
        self,
        request: Request,
        subject: Tensor,
        given: Mapping[int, Tensor],
        taken: Mapping[int, Tensor],
        take: Take,
    ) -> Work:
        """Gives each member its part; its work reads from each what is `taken`. subject: what the request is about."""
        number = self._collectives
        self._collectives += 1
        self._give(request, COLLECTIVE, number, subject, given)
        work = Reading(self, request, COLLECTIVE, number, subject, taken, take)
        if subject.nbytes >= LARGE_BYTES:
            self._under_way.append(work)
            if len(self._under_way) > UNDER_WAY:
                self._under_way.popleft().wait()
        return work

    def _give(
        self, request: Request, kind: int, number: int, subject: Tensor, given: Mapping[int, Tensor]
    ) -> None:
        words = f"{asked(request, subject)}\n{request.told(self.ranks)} at {request.site}"
        parts = list(given.values())
        same = all(part is parts[0] for part in parts)
        shared = self._near.arena.put(parts[0], len(parts)) if same and parts[0].numel() else NOWHERE
        for member, part in given.items():
            region = shared if same or not part.numel() else self._near.arena.put(part, 1)
            message = Message(region.offset, part.nbytes, region.number, words)
            try:
                self._near.tell(self.ranks[member], (self._key, kind), number, message, self.seconds)
            except NeighbourError as error:
                raise self.failed(request, subject, error) from error

    def hear(self, request: Request, kind: int, number: int, subject: Tensor, member: int) -> Message:
        """What a member says to a request. Raises RankError where it does not, or asks for something else."""
        try:
            message = self._near.neighbours[self.ranks[member]].hear((self._key, kind), number, self.seconds)
        except NeighbourError as error:
            raise self.failed(request, subject, error) from error
        own, theirs = asked(request, subject), message.words.partition("\n")
        if theirs[0] != own:
            sides = {
                self._world_rank: f"{own} at {request.site}",
                self.ranks[member]: f"{theirs[0]} at {theirs[2].rpartition(' at ')[2]}",
            }
            raise RankError(
                f"members of group '{self.name}' {self.ranks} ask for different things:\n"
                + "\n".join(f"  rank {rank}: {said}" for rank, said in sorted(sides.items()))
            )
        return message

    def read(self, messages: Mapping[int, Message], taken: Mapping[int, Tensor], take: Take) -> None:
        """Takes the members' parts where they lie, and says that they may be used again."""
        near = self._near
        memories = {member: near.neighbours[self.ranks[member]].memory for member in messages}
        with torch.no_grad():
            take({i: memories[i].view(message.offset, taken[i]) for i, message in messages.items()})
        for member, message in messages.items():
            if message.nbytes:
                memories[member].mark_read(message.region, near.place)

    def failed(self, request: Request, subject: Tensor, error: NeighbourError) -> RankError:
        shapes = f" of {tuple(subject.shape)} {_dtype(subject)}" if subject.numel() else ""
        return RankError(
            f"rank {self._world_rank}: {request.told(self.ranks)} in group '{self.name}' {self.ranks}{shapes} at "
            f"{request.site} failed: {error}"
        )


class Reading:
    """A communication whose part this rank has given, and what it still takes."""

    def __init__(
        self,
        group: SharedGroup,
        request: Request,
        kind: int,
        number: int,
        subject: Tensor,
        taken: Mapping[int, Tensor],
        take: Take,
    ) -> None:
        self._group, self._request, self._kind, self._number = group, request, kind, number
        self._subject, self._taken, self._take = subject, taken, take
        self._done = False

    def wait(self) -> None:
        if self._done:
            return
        started = time.perf_counter()
        messages = {
            member: self._group.hear(self._request, self._kind, self._number, self._subject, member)
            for member in self._taken
        }
        self._group.waited_seconds += time.perf_counter() - started
        self._group.read(messages, self._taken, self._take)
        self._done, self._taken, self._take = True, {}, _nothing
        del self._subject


def asked(request: Request, subject: Tensor) -> str:
    """What all members must say alike: of a message its purpose, of a collective the operation; shape and dtype."""
    what = request.label if request.operation in _MESSAGES else str(request.operation)
    root = f" of {request.peer}" if request.operation is Operation.BROADCAST else ""
    shape = "" if request.input_rows else f" {tuple(subject.shape)}"
    return f"{what}{root}{shape} {_dtype(subject)}".strip()


_MESSAGES = (Operation.SEND, Operation.RECEIVE)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _nothing(theirs: Mapping[int, Tensor]) -> None:
    return None
