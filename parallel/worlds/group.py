"""The one interface through which ranks talk: `World`, `Group`, `Work`, and the traffic counter.

A collective is written as a signature over placements: R replicated, V varying (sharded), P partial.
    all_reduce: P → R     all_gather: V → R     reduce_scatter: P → V     all_to_all: V → V
Tensors are contiguous. Reductions are sums. A group of one is free: no copy, no message.
Whoever asks for an operation may say what it is for: `label` in words, on which the members must agree, and `bucket`,
the number of the bucket whose gradient is reduced. What a message is, is known from there and from nowhere else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from triaxis.parallel.programs.operation import Operation
from triaxis.parallel.worlds.failure import call_site

Partition = tuple[tuple[int, ...], ...]


class Work(Protocol):
    """A communication under way; `wait` returns when its tensors may be used, or raises."""

    def wait(self) -> None: ...


class Done:
    """The work of a group of one: finished before it began."""

    __slots__ = ()

    def wait(self) -> None:
        return None


DONE = Done()


@dataclass(slots=True)
class Traffic:
    """Messages and bytes that this rank sent in one group, by operation."""

    messages: dict[Operation, int] = field(default_factory=dict)
    sent_bytes: dict[Operation, int] = field(default_factory=dict)

    def add(self, operation: Operation, sent_bytes: int) -> None:
        self.messages[operation] = self.messages.get(operation, 0) + 1
        self.sent_bytes[operation] = self.sent_bytes.get(operation, 0) + sent_bytes

    def total_bytes(self) -> int:
        return sum(self.sent_bytes.values())

    def clear(self) -> None:
        self.messages.clear()
        self.sent_bytes.clear()


@dataclass(frozen=True, slots=True)
class Request:
    """What a rank asks of a group, and for what.

    site: where it was called, for people only; peer: the place of the other side, or of the root; -1 for neither
    input_rows, output_rows: given to and taken from each member, in an uneven all_to_all
    asynchronous: whoever asks goes on meanwhile
    """

    operation: Operation
    site: str
    label: str = ""
    bucket: int = -1
    peer: int = -1
    input_rows: tuple[int, ...] = ()
    output_rows: tuple[int, ...] = ()
    asynchronous: bool = False

    def told(self, ranks: Sequence[int]) -> str:
        """The operation, what it is for and with whom of the group's ranks: `send (F3 for stage 2) to rank 5`."""
        what = f"{self.operation} ({self.label})" if self.label else str(self.operation)
        return f"{what} {_WHOM[self.operation]} rank {ranks[self.peer]}" if self.peer >= 0 else what


_WHOM = {Operation.SEND: "to", Operation.RECEIVE: "of", Operation.BROADCAST: "of"}


def _part_of_others(nbytes: int, size: int) -> int:
    return nbytes * (size - 1) // size


_SENT_BYTES: dict[Operation, Callable[[int, int], int]] = {
    Operation.ALL_REDUCE: lambda nbytes, size: 2 * nbytes * (size - 1) // size,
    Operation.ALL_REDUCE_LARGEST: lambda nbytes, size: 2 * nbytes * (size - 1) // size,
    Operation.BROADCAST: lambda nbytes, size: nbytes,
    Operation.SEND: lambda nbytes, size: nbytes,
    Operation.RECEIVE: lambda nbytes, size: 0,
    Operation.BARRIER: lambda nbytes, size: 0,
}


def sent_bytes(operation: Operation, nbytes: int, size: int) -> int:
    """What a member of a group of `size` sends, at the lower bound of a ring.

    nbytes: of the whole tensor (gathered, or before it is scattered), or of the message
    """
    return _SENT_BYTES.get(operation, _part_of_others)(nbytes, size)


class Group(ABC):
    """Some ranks of a world, in order, and how they talk.

    name: what the group is called in messages and metrics ("tp", "dp", "world", …)
    ranks: the members' ranks in the world; rank: this rank's place among them
    operations: how many there were; last: the latest one; waited_seconds: spent until others had done their part
    `asynchronous=True` returns at once: the tensors belong to the group until `wait`.
    """

    def __init__(self, name: str, ranks: Sequence[int], world_rank: int) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.rank = self.ranks.index(world_rank)
        self.traffic = Traffic()
        self.operations = 0
        self.last: Request | None = None
        self.waited_seconds = 0.0

    def _ask(
        self,
        operation: Operation,
        nbytes: int,
        label: str = "",
        bucket: int = -1,
        peer: int = -1,
        input_rows: tuple[int, ...] = (),
        output_rows: tuple[int, ...] = (),
        asynchronous: bool = False,
    ) -> Request:
        sent = sent_bytes(operation, nbytes, self.size)
        if input_rows:
            sent = nbytes - nbytes // max(1, sum(input_rows)) * input_rows[self.rank]
        self.traffic.add(operation, sent)
        self.operations += 1
        self.last = Request(
            operation, call_site(), label, bucket, peer, input_rows, output_rows, asynchronous
        )
        return self.last

    def all_reduce(
        self,
        tensor: Tensor,
        *,
        largest: bool = False,
        label: str = "",
        bucket: int = -1,
        asynchronous: bool = False,
    ) -> Work:
        """P → R, in place: every member gets the sum (or, with `largest`, the maximum).

        bucket: the number of the bucket whose gradient it is; -1 for none
        """
        if self.size == 1:
            return DONE
        operation = Operation.ALL_REDUCE_LARGEST if largest else Operation.ALL_REDUCE
        request = self._ask(operation, tensor.nbytes, label, bucket, asynchronous=asynchronous)
        return self._finish(self._all_reduce(request, tensor), asynchronous)

    def all_gather(
        self, output: Tensor, shard: Tensor, *, label: str = "", asynchronous: bool = False
    ) -> Work:
        """V → R: `output` (size × shard elements) gets the members' shards in order.

        `shard` may be the member's own part of `output`.
        """
        if self.size == 1:
            return self._copy(output, shard)
        request = self._ask(Operation.ALL_GATHER, shard.nbytes * self.size, label, asynchronous=asynchronous)
        return self._finish(self._all_gather(request, output, shard), asynchronous)

    def reduce_scatter(
        self,
        shard: Tensor,
        whole: Tensor,
        *,
        label: str = "",
        bucket: int = -1,
        asynchronous: bool = False,
    ) -> Work:
        """P → V: `shard` gets this member's part of the sum of the members' `whole` (size × shard elements).

        `shard` may be the member's own part of `whole`; the rest of `whole` is undefined afterwards.
        bucket: as in `all_reduce`
        """
        if self.size == 1:
            return self._copy(shard, whole)
        request = self._ask(
            Operation.REDUCE_SCATTER, shard.nbytes * self.size, label, bucket, asynchronous=asynchronous
        )
        return self._finish(self._reduce_scatter(request, shard, whole), asynchronous)

    def all_to_all(
        self,
        output: Tensor,
        whole: Tensor,
        *,
        output_rows: Sequence[int] = (),
        input_rows: Sequence[int] = (),
        label: str = "",
        asynchronous: bool = False,
    ) -> Work:
        """V → V: part i of `whole` goes to member i; part j of `output` comes from member j.

        Parts are equal, or have rows of dimension 0 as told: input_rows[i] for member i, output_rows[j] from member j;
        what member i gives j must be what j takes from i. Where that is nothing, nothing is sent.
        Example: 2 members; the first gives (1, 3) rows and takes (1, 0), the second gives (0, 2) and takes (3, 2).
        """
        if input_rows or output_rows:
            self._check_rows("output", output, output_rows)
            self._check_rows("input", whole, input_rows)
        if self.size == 1:
            return self._copy(output, whole)
        request = self._ask(
            Operation.ALL_TO_ALL,
            whole.nbytes,
            label,
            input_rows=tuple(input_rows),
            output_rows=tuple(output_rows),
            asynchronous=asynchronous,
        )
        return self._finish(self._all_to_all(request, output, whole), asynchronous)

    def _check_rows(self, side: str, tensor: Tensor, rows: Sequence[int]) -> None:
        if len(rows) != self.size or sum(rows) != tensor.shape[0] or min(rows) < 0:
            raise ValueError(
                f"`{side}_rows` in group '{self.name}' must be {self.size} counts whose sum is the tensor's "
                f"{tensor.shape[0]} rows, but are {list(rows)}"
            )

    def broadcast(self, tensor: Tensor, root: int, *, label: str = "", asynchronous: bool = False) -> Work:
        """In place: every member gets the tensor of member `root` (its place in the group)."""
        if self.size == 1:
            return DONE
        nbytes = tensor.nbytes if self.rank == root else 0
        request = self._ask(Operation.BROADCAST, nbytes, label, peer=root, asynchronous=asynchronous)
        return self._finish(self._broadcast(request, tensor), asynchronous)

    def isend(self, tensor: Tensor, peer: int, *, label: str = "") -> Work:
        """Sends to member `peer`; messages between two members arrive in the order sent."""
        return self._isend(self._ask(Operation.SEND, tensor.nbytes, label, peer=peer), tensor)

    def irecv(self, tensor: Tensor, peer: int, *, label: str = "") -> Work:
        """Fills `tensor` with the next message of member `peer`; its label must be the sender's."""
        return self._irecv(self._ask(Operation.RECEIVE, 0, label, peer=peer), tensor)

    def barrier(self, *, label: str = "") -> None:
        """Returns when every member has come here."""
        if self.size > 1:
            self._barrier(self._ask(Operation.BARRIER, 0, label))

    @staticmethod
    def _finish(work: Work, asynchronous: bool) -> Work:
        if asynchronous:
            return work
        work.wait()
        return DONE

    @staticmethod
    def _copy(output: Tensor, source: Tensor) -> Work:
        if output.data_ptr() != source.data_ptr():
            output.view(-1).copy_(source.reshape(-1))
        return DONE

    # What a world does. Requests are made by the methods above, never for a group of one.

    @abstractmethod
    def _all_reduce(self, request: Request, tensor: Tensor) -> Work: ...
    @abstractmethod
    def _all_gather(self, request: Request, output: Tensor, shard: Tensor) -> Work: ...
    @abstractmethod
    def _reduce_scatter(self, request: Request, shard: Tensor, whole: Tensor) -> Work: ...
    @abstractmethod
    def _all_to_all(self, request: Request, output: Tensor, whole: Tensor) -> Work: ...
    @abstractmethod
    def _broadcast(self, request: Request, tensor: Tensor) -> Work: ...
    @abstractmethod
    def _isend(self, request: Request, tensor: Tensor) -> Work: ...
    @abstractmethod
    def _irecv(self, request: Request, tensor: Tensor) -> Work: ...
    @abstractmethod
    def _barrier(self, request: Request) -> None: ...


class World(ABC):
    """All the ranks of one run, seen from one of them."""

    name: str
    rank: int
    size: int
    device: torch.device

    @property
    def target(self) -> str:
        """The kind of device that the program is for, "cuda" or "cpu", which may be imagined elsewhere."""
        return self.device.type

    def host_values(self, values: Tensor) -> list[float]:
        """Values on the host. Waits for the device: once a step, and never between its microbatches."""
        found: list[float] = values.tolist()
        return found

    def new_group(self, name: str, partition: Sequence[Sequence[int]]) -> Group:
        """The group that holds this rank. Collective: every rank passes the same partition of the world."""
        parts = tuple(tuple(part) for part in partition)
        if sorted(rank for part in parts for rank in part) != list(range(self.size)):
            raise ValueError(f"`partition` of '{name}' must hold each of {self.size} ranks once: {parts}")
        return self._new_group(name, parts)

    @abstractmethod
    def _new_group(self, name: str, partition: Partition) -> Group: ...

    def host_counts(self, counts: Tensor, total: int) -> list[int]:
        """A tensor of whole numbers on the host, which decides by them how much is sent. Waits for the device.

        total: what they add up to; a world without numbers imagines even shares of it
        """
        found: list[int] = counts.tolist()
        return found

    def check_collectives(self, on: bool) -> None:  # noqa: B027  (most worlds compare anyway)
        """Whether members compare what they ask for before each collective; threads and the trace always do."""

    def give_directions(self, group: Group) -> None:  # noqa: B027  (most worlds have a queue for each pair)
        """Lets messages to later members of the group not wait for those to earlier ones. Collective."""

    def wait_for_all(self, what: str) -> None:  # noqa: B027  (most worlds wait in any operation as long as it takes)
        """Returns when every rank has come here, however long it takes: no operation's time-out runs. Collective."""

    def settle(self) -> None:  # noqa: B027  (most worlds know no time-out)
        """The set-up, in which a rank may be late, is over: from here on operations have their usual time-out."""

    @abstractmethod
    def close(self) -> None:
        """Releases what the world holds."""
