"""How the processes of a run find each other: one store, the name of everyone in it, and who is missing.

Ranks come to one address. Who cannot take part says so there, so that one rank can tell it for all.
"""

from __future__ import annotations

import errno
import json
import socket
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public, not in its list

from triaxis.parallel.places.legal_values import first_of
from triaxis.parallel.worlds.port_holder import port_holder

ALL_HERE = "all"
KNOCK_SECONDS = 0.2
NAMED = 8
LATER_SECONDS = 3.0
"""How much longer others wait than rank 0, which then says for all who is missing."""
TOLD_SECONDS = 30.0
"""How long a rank that cannot take part waits for rank 0 to say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where ranks meet.

    hosted: a launcher's process has the store open already; else rank 0 opens it
    one_machine: all ranks are on this machine, so that nobody else need reach the store
    """

    host: str
    port: int
    hosted: bool = False
    one_machine: bool = False

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class MeetingError(RuntimeError):
    """The ranks did not come together; the message says who is missing, or why nobody can come."""


class RefusedElsewhere(RuntimeError):
    """Another rank found that the run cannot start; the message has its words, rank and machine."""

    def __init__(self, text: str, store: Store) -> None:
        super().__init__(text)
        self._store = store

    def let_go(self, rank: int, size: int) -> None:
        """Rank 0, once it has spoken, stays until all have heard it, since the store may end with it."""
        with suppress(RuntimeError):
            if rank:
                self._store.add("heard", 1)
                return
            self._store.set("told", "yes")
            deadline = time.monotonic() + TOLD_SECONDS
            while self._store.add("heard", 0) < size - 1 and time.monotonic() < deadline:
                time.sleep(KNOCK_SECONDS / 2)


def open_store(address: Address, rank: int, seconds: float) -> Store:
    """The store at the address, within so many seconds. Raises MeetingError."""
    deadline = time.monotonic() + seconds
    here = _resolved(address)
    timeout = timedelta(seconds=seconds)
    if rank == 0 and not address.hosted:
        listener = _listen(address, here)
        return TCPStore(
            *(address.host, address.port, None, True, timeout),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    _knock(address, rank, deadline, seconds)
    left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    return TCPStore(address.host, address.port, None, False, left, wait_for_workers=False)


def meet(store: Store, where: object, *, rank: int, size: int, seconds: float) -> None:
    """Returns when all ranks have come. Raises MeetingError, or RefusedElsewhere if one says that it cannot."""
    store.set(f"here-{rank}", socket.gethostname())
    if store.add("arrived", 1) == size:
        store.set("go", ALL_HERE)
    store.set_timeout(timedelta(seconds=seconds if rank == 0 else seconds + LATER_SECONDS))
    try:
        word = store.get("go").decode()
    except RuntimeError as error:
        text = _missing(store, where, size, seconds)
        with suppress(RuntimeError):
            store.set("go", json.dumps({"missing": text}))
            time.sleep(LATER_SECONDS / 2)  # the store ends with rank 0: the others hear it first
        raise MeetingError(text) from error
    if word == ALL_HERE:
        return
    told = json.loads(word)
    if "missing" in told:
        raise MeetingError(told["missing"])
    raise RefusedElsewhere(f"rank {told['rank']} on {told['host']}:\n{told['text']}", store)


def say_refusal(address: Address, start: str, rank: int, text: str) -> None:
    """Tells the ranks that meet there why this one cannot; returns when rank 0 has it, or cannot be found."""
    with suppress(RuntimeError, OSError):
        store = PrefixStore(f"start-{start}", open_store(address, rank, TOLD_SECONDS))
        store.set("go", json.dumps({"rank": rank, "host": socket.gethostname(), "text": text}))
        store.set_timeout(timedelta(seconds=TOLD_SECONDS))
        store.get("told")
        store.add("heard", 1)


def _resolved(address: Address) -> str:
    """The numeric address; a name that there is none of is told at once."""
    try:
        return str(socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise MeetingError(
            f"`MASTER_ADDR` must be a name or an address that {socket.gethostname()} knows, but is "
            f"{address.host!r} ({error.strerror}); check the name, or give the address of rank 0's machine"
        ) from error


def _listen(address: Address, numeric: str) -> socket.socket:
    """A socket on the interface that was named, not on all; on all where others would not find it there.

    A machine may know its own name as 127.0.1.1, and a cluster's service may have an address of its own.
    """
    family = socket.AF_INET6 if ":" in numeric else socket.AF_INET
    everywhere = "::" if ":" in numeric else "0.0.0.0"
    wanted = everywhere if numeric.startswith("127.") and not address.one_machine else numeric
    for place in dict.fromkeys((wanted, everywhere)):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((place, address.port))
            listener.listen(2048)
            return listener
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRNOTAVAIL and place != everywhere:
                continue
            raise MeetingError(_taken(address, error)) from error
    raise AssertionError("the last place is everywhere")


def _taken(address: Address, error: OSError) -> str:
    if error.errno != errno.EADDRINUSE:
        return f"rank 0 cannot listen at {address}: {error.strerror}; choose another port with MASTER_PORT"
    return (
        f"port {address.port} of {address} is taken by {port_holder(address.port)}, so that rank 0 cannot open it; "
        f"choose a free port, or end the run that holds it"
    )


def _knock(address: Address, rank: int, deadline: float, seconds: float) -> None:
    """Returns when somebody listens there."""
    while True:
        try:
            left = max(0.1, deadline - time.monotonic())
            socket.create_connection((address.host, address.port), timeout=left).close()
            return
        except OSError as error:
            if time.monotonic() + KNOCK_SECONDS > deadline:
                raise MeetingError(
                    f"rank {rank} on {socket.gethostname()} could not reach rank 0 at {address} within {seconds:g} s "
                    f"({error.strerror or error}); check that rank 0 was started there, and that no firewall is "
                    f"between them"
                ) from error
        time.sleep(KNOCK_SECONDS)


def _missing(store: Store, where: object, size: int, seconds: float) -> str:
    """Who is not there, and where the others are."""
    opening = f"{size} ranks were to meet at {where} within {seconds:g} s, but without "
    hosts: defaultdict[str, list[int]] = defaultdict(list)
    missing = []
    for other in range(size):
        if store.check([f"here-{other}"]):
            hosts[store.get(f"here-{other}").decode()].append(other)
        else:
            missing.append(other)
    present = "; ".join(f"{host}: {_ranks(ranks)}" for host, ranks in hosts.items())
    return f"{opening}{_ranks(missing)} (here: {present}); check that all were started and can reach it"


def _ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0, 1, 2`, shortened where there are many."""
    each = [str(rank) for rank in ranks]
    return ("rank " if len(each) == 1 else "ranks ") + first_of(each, NAMED, separator=", ")
