"""The ranks of one machine and how they call each other: a socket for every two of them, and each one's arena.

A message says where in the sender's arena something lies, and what it is for: so that ranks that ask for different
things are told at once, by name. A rank whose process ended is seen as the end of its socket.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in its list

from triaxis.parallel.worlds.shared_memory import Arena, SharedMemory

HEADER: Final = struct.Struct("<IBQQQQ")
MESSAGE_BYTES: Final = 4096
WORDS_BYTES: Final = 1000

Channel = tuple[int, int]
"""A group's number in the world, and what of it: 0 for collectives, 1 for messages from one member to another."""


class Message(NamedTuple):
    """What a neighbour offers: `nbytes` at `offset` of its arena, in region `region`. words: what it asks for."""

    offset: int
    nbytes: int
    region: int
    words: str


class NeighbourError(RuntimeError):
    """A neighbour did not answer; the message says why."""


class Neighbour:
    """Another rank of this machine."""

    def __init__(self, rank: int, connection: socket.socket, memory: SharedMemory) -> None:
        self.rank, self.memory = rank, memory
        self._connection = connection
        connection.setblocking(False)
        self._arrivals = select.poll()
        self._arrivals.register(connection, select.POLLIN)
        self._heard: dict[tuple[Channel, int], Message] = {}
        self._ended = False

    def tell(self, channel: Channel, number: int, message: Message) -> bool:
        """Sends, or returns False where the neighbour has too many to read; one that ended is found by `hear`."""
        header = HEADER.pack(*channel, number, message.offset, message.nbytes, message.region)
        try:
            self._connection.send(header + message.words.encode()[:WORDS_BYTES])
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def hear(self, channel: Channel, number: int, seconds: float) -> Message:
        """The message of that number in the channel; those that come before it are kept. Raises NeighbourError."""
        key = channel, number
        deadline = 0.0
        while key not in self._heard:
            if self._ended:
                raise NeighbourError(f"the process of rank {self.rank} ended")
            deadline = deadline or time.monotonic() + seconds
            left = deadline - time.monotonic()
            if not self._read() and not self._arrivals.poll(max(0.0, 1e3 * left)) and left <= 0:
                raise NeighbourError(f"rank {self.rank} was waited for {seconds:g} s")
        return self._heard.pop(key)

    def _read(self) -> bool:
        """Keeps the next message, or that there will be none. False if none is there."""
        try:
            text = self._connection.recv(MESSAGE_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            text = b""
        if not text:
            self._ended = True
            return True
        group, kind, number, offset, nbytes, region = HEADER.unpack_from(text)
        words = text[HEADER.size :].decode(errors="replace")
        self._heard[(group, kind), number] = Message(offset, nbytes, region, words)
        return True

    def wait_for_room(self, seconds: float) -> None:
        """Returns when a message can be sent, or after that time."""
        room = select.poll()
        room.register(self._connection, select.POLLOUT)
        room.poll(1e3 * seconds)

    def read_all(self) -> None:
        """Keeps what is there."""
        while not self._ended and self._read():
            pass

    def close(self) -> None:
        self._connection.close()


class Neighbourhood:
    """All ranks of this machine, seen from one of them.

    ranks: in order; hosts: for every rank of the world, which machine it is on
    """

    def __init__(
        self, rank: int, hosts: list[int], arena: Arena, neighbours: Mapping[int, Neighbour]
    ) -> None:
        self.hosts, self.arena, self.neighbours = hosts, arena, neighbours
        self.ranks = tuple(sorted([rank, *neighbours]))
        self.place = self.ranks.index(rank)
        _open.add(self)

    def has(self, ranks: tuple[int, ...]) -> bool:
        """Whether these are all on one machine, which need not be this one."""
        return len({self.hosts[rank] for rank in ranks}) == 1

    def tell(self, rank: int, channel: Channel, number: int, message: Message, seconds: float) -> None:
        """Sends; while the neighbour has too many to read, reads what comes. Raises NeighbourError."""
        neighbour = self.neighbours[rank]
        deadline = 0.0
        while not neighbour.tell(channel, number, message):
            deadline = deadline or time.monotonic() + seconds
            if time.monotonic() > deadline:
                raise NeighbourError(f"rank {rank} read no message within {seconds:g} s")
            for other in self.neighbours.values():
                other.read_all()
            neighbour.wait_for_room(0.05)

    def close(self) -> None:
        for neighbour in self.neighbours.values():
            neighbour.close()
        self.arena.close()
        _open.discard(self)


_open: weakref.WeakSet[Neighbourhood] = weakref.WeakSet()


def _leave() -> None:
    """A forked child keeps no connection: it would hide the end of its parent."""
    for neighbourhood in list(_open):
        neighbourhood.close()


os.register_at_fork(after_in_child=_leave)


def meet_neighbours(store: Store, rank: int, size: int, seconds: float) -> Neighbourhood | None:
    """Connects this rank with all others of its machine. Collective over the world; None on a system without means.

    Raises NeighbourError where one does not answer.
    """
    listener = _listen() if can_share() else None
    name = listener.getsockname().hex() if listener else ""
    store.set(f"near-{rank}", json.dumps([_machine() if listener else f"alone {rank}", name]))
    if rank == 0:
        store.set("near", json.dumps([json.loads(store.get(f"near-{other}")) for other in range(size)]))
    machines, names = zip(*json.loads(store.get("near")), strict=True)
    if not all(names):
        return None
    assert listener is not None
    near = [other for other in range(size) if machines[other] == machines[rank]]
    arena = Arena(len(near))
    with listener:
        neighbours = _connect(listener, names, near, rank, arena, seconds)
    hosts = [machines.index(machine) for machine in machines]
    return Neighbourhood(rank, hosts, arena, neighbours)


def _connect(
    listener: socket.socket, names: tuple[str, ...], near: list[int], rank: int, arena: Arena, seconds: float
) -> dict[int, Neighbour]:
    """Calls who is before this rank and is called by who comes after it; all have listened before anyone calls."""
    neighbours: dict[int, Neighbour] = {}
    called = []
    listener.settimeout(seconds)
    try:
        for other in near[: near.index(rank)]:
            connection = _socket()
            connection.settimeout(seconds)
            connection.connect(bytes.fromhex(names[other]))
            called.append(connection)
        answered: list[socket.socket] = []
        while len(answered) < len(near) - 1 - len(called):
            connection = listener.accept()[0]
            if _is_own(connection):
                connection.settimeout(seconds)
                answered.append(connection)
        for connection in [*called, *answered]:
            socket.send_fds(connection, [str(rank).encode()], [arena.file])
        for connection in [*called, *answered]:
            text, files, _, _ = socket.recv_fds(connection, 32, 1)
            neighbours[int(text)] = Neighbour(int(text), connection, SharedMemory(files[0], len(near)))
            os.close(files[0])
    except (OSError, ValueError, IndexError) as error:
        missing = sorted({*near} - {*neighbours, rank})
        raise NeighbourError(
            f"ranks {missing} of this machine do not answer rank {rank} ({error})"
        ) from error
    return neighbours


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _listen() -> socket.socket:
    """A socket with a name that the system gives it, in no file system."""
    listener = _socket()
    listener.bind("")
    listener.listen(1024)
    return listener


def _is_own(connection: socket.socket) -> bool:
    """Whether the other side is a process of the same user."""
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.getuid())


def can_share() -> bool:
    """Whether the system has what this needs (Linux has), and lets a process map as much."""
    try:
        _machine()
        Arena(1).close()
    except (AttributeError, OSError, ValueError):
        return False
    return True


def _machine() -> str:
    """The same for all processes that can reach each other's sockets: this start of the system, and its network."""
    started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{started} {os.readlink('/proc/self/ns/net')} {os.getuid()}"
