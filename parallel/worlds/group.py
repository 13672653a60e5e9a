"""The one interface through which ranks talk: `World`, `Group`, `Work`, and the traffic counter.

A collective is written as a signature over placements: R replicated, V varying (sharded), P partial.
    all_reduce: P → R     all_gather: V → R     reduce_scatter: P → V     all_to_all: V → V
Tensors are contiguous. Reductions are sums. A group of one is free: no copy, no message.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from triaxis.parallel.worlds.failure import call_site


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

    messages: dict[str, int] = field(default_factory=dict)
    sent_bytes: dict[str, int] = field(default_factory=dict)

    def add(self, operation: str, sent_bytes: int) -> None:
        self.messages[operation] = self.messages.get(operation, 0) + 1
        self.sent_bytes[operation] = self.sent_bytes.get(operation, 0) + sent_bytes

    def total_bytes(self) -> int:
        return sum(self.sent_bytes.values())

    def clear(self) -> None:
        self.messages.clear()
        self.sent_bytes.clear()


def sent_bytes(operation: str, nbytes: int, size: int) -> int:
    """What a member of a group of `size` sends, at the lower bound of a ring.

    nbytes: of the whole tensor (gathered, or before it is scattered), or of the message
    """
    if operation.startswith("all_reduce"):
        return 2 * nbytes * (size - 1) // size
    if operation in ("receive", "barrier"):
        return 0
    if operation in ("send", "broadcast"):
        return nbytes
    return nbytes * (size - 1) // size


class Group(ABC):
    """Some ranks of a world, in order, and how they talk.

    name: what the group is called in messages and metrics ("tp", "dp", "world", …)
    ranks: the members' ranks in the world; rank: this rank's place among them
    operations: how many there were; last_operation, last_site: the latest one, and where it was called
    `asynchronous=True` returns at once: the tensors belong to the group until `wait`.
    """

    def __init__(self, name: str, ranks: Sequence[int], world_rank: int) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.rank = self.ranks.index(world_rank)
        self.traffic = Traffic()
        self.operations = 0
        self.last_operation = self.last_site = ""

    def _note(self, operation: str, nbytes: int) -> None:
        self.traffic.add(operation, sent_bytes(operation, nbytes, self.size))
        self.operations += 1
        self.last_operation, self.last_site = operation, call_site()

    def all_reduce(self, tensor: Tensor, *, largest: bool = False, asynchronous: bool = False) -> Work:
        """P → R, in place: every member gets the sum (or, with `largest`, the maximum)."""
        if self.size == 1:
            return DONE
        self._note("all_reduce", tensor.nbytes)
        return self._finish(self._all_reduce(tensor, largest), asynchronous)

    def all_gather(self, output: Tensor, shard: Tensor, *, asynchronous: bool = False) -> Work:
        """V → R: `output` (size × shard elements) gets the members' shards in order.

        `shard` may be the member's own part of `output`.
        """
        if self.size == 1:
            return self._copy(output, shard)
        self._note("all_gather", shard.nbytes * self.size)
        return self._finish(self._all_gather(output, shard), asynchronous)

    def reduce_scatter(self, shard: Tensor, whole: Tensor, *, asynchronous: bool = False) -> Work:
        """P → V: `shard` gets this member's part of the sum of the members' `whole` (size × shard elements).

        `shard` may be the member's own part of `whole`; the rest of `whole` is undefined afterwards.
        """
        if self.size == 1:
            return self._copy(shard, whole)
        self._note("reduce_scatter", shard.nbytes * self.size)
        return self._finish(self._reduce_scatter(shard, whole), asynchronous)

    def all_to_all(self, output: Tensor, whole: Tensor, *, asynchronous: bool = False) -> Work:
        """V → V: equal part i of `whole` goes to member i; part j of `output` comes from member j."""
        if self.size == 1:
            return self._copy(output, whole)
        self._note("all_to_all", whole.nbytes)
        return self._finish(self._all_to_all(output, whole), asynchronous)

    def broadcast(self, tensor: Tensor, root: int, *, asynchronous: bool = False) -> Work:
        """In place: every member gets the tensor of member `root` (its place in the group)."""
        if self.size == 1:
            return DONE
        self._note("broadcast", tensor.nbytes if self.rank == root else 0)
        return self._finish(self._broadcast(tensor, root), asynchronous)

    def isend(self, tensor: Tensor, peer: int) -> Work:
        """Sends to member `peer`; messages between two members arrive in the order sent."""
        self._note("send", tensor.nbytes)
        return self._isend(tensor, peer)

    def irecv(self, tensor: Tensor, peer: int) -> Work:
        """Fills `tensor` with the next message of member `peer`."""
        self._note("receive", 0)
        return self._irecv(tensor, peer)

    def barrier(self) -> None:
        """Returns when every member has come here."""
        if self.size > 1:
            self._note("barrier", 0)
            self._barrier()

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

    @abstractmethod
    def _all_reduce(self, tensor: Tensor, largest: bool) -> Work: ...
    @abstractmethod
    def _all_gather(self, output: Tensor, shard: Tensor) -> Work: ...
    @abstractmethod
    def _reduce_scatter(self, shard: Tensor, whole: Tensor) -> Work: ...
    @abstractmethod
    def _all_to_all(self, output: Tensor, whole: Tensor) -> Work: ...
    @abstractmethod
    def _broadcast(self, tensor: Tensor, root: int) -> Work: ...
    @abstractmethod
    def _isend(self, tensor: Tensor, peer: int) -> Work: ...
    @abstractmethod
    def _irecv(self, tensor: Tensor, peer: int) -> Work: ...
    @abstractmethod
    def _barrier(self) -> None: ...


class World(ABC):
    """All the ranks of one run, seen from one of them."""

    name: str
    rank: int
    size: int
    device: torch.device

    @abstractmethod
    def new_group(self, name: str, partition: Sequence[Sequence[int]]) -> Group:
        """The group that holds this rank. Collective: every rank passes the same partition of the world."""

    @abstractmethod
    def close(self) -> None:
        """Releases what the world holds."""
