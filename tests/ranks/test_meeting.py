"""How processes find each other, tried with threads: who is missing, who refuses, which interface listens."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch._C._distributed_c10d import PrefixStore

from triaxis.parallel.worlds.meeting import (
    Address,
    MeetingError,
    RefusedElsewhere,
    meet,
    open_store,
    say_refusal,
)


def free_address(**given: Any) -> Address:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return Address(host="127.0.0.1", port=server.getsockname()[1], **given)


def at_once(*acts: Callable[[], object]) -> list[object]:
    """What each returned or raised, all run at the same time."""
    results: list[object] = [None] * len(acts)

    def run(place: int) -> None:
        try:
            results[place] = acts[place]()
        except Exception as error:  # noqa: BLE001  (the result)
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def come(address: Address, rank: int, size: int, seconds: float) -> Callable[[], str]:
    def act() -> str:
        store = open_store(address, rank, seconds)
        act.store = store  # type: ignore[attr-defined]  # rank 0's is everybody's: it stays until all have met
        meet(PrefixStore("start-x", store), address, rank=rank, size=size, seconds=seconds)
        return "met"

    return act


def test_all_come() -> None:
    address = free_address(one_machine=True)
    assert at_once(*(come(address, rank, 4, 20) for rank in range(4))) == ["met"] * 4


def test_who_is_missing_is_named_with_the_machines_of_the_others() -> None:
    address = free_address()
    found = at_once(*(come(address, rank, 5, 1.5) for rank in (0, 2, 4)))
    assert all(isinstance(error, MeetingError) for error in found)
    assert len({str(error) for error in found}) == 1, "all say the same, so that it is told once"
    assert str(found[0]) == (
        f"5 ranks were to meet at {address} within 1.5 s, but without ranks 1, 3 (here: {socket.gethostname()}: "
        "ranks 0, 2, 4); check that all were started and can reach it"
    )


def test_a_rank_that_refuses_is_heard_by_all() -> None:
    """Rank 0 stays until the others know, so that nobody looks for a store that is gone."""
    address = free_address()

    def hear(rank: int) -> Callable[[], str]:
        def act() -> str:
            with pytest.raises(RefusedElsewhere) as caught:
                come(address, rank, 3, 20)()
            caught.value.let_go(rank, 3)
            return str(caught.value)

        return act

    refuser = lambda: say_refusal(address, "x", 1, "`data` must be there")  # noqa: E731
    said = f"rank 1 on {socket.gethostname()}:\n`data` must be there"
    assert at_once(hear(0), refuser, hear(2)) == [said, None, said]


def test_a_name_that_there_is_none_of_is_told_at_once() -> None:
    """By both sides, and without waiting for the time that ranks have to meet."""
    for rank in (0, 1):
        with pytest.raises(
            MeetingError, match=r"`MASTER_ADDR` must be a name .* but is 'no-such-host\.invalid'"
        ):
            open_store(Address(host="no-such-host.invalid", port=29500), rank, 1e6)


def test_rank_0_that_is_not_there_is_said_with_its_address() -> None:
    address = free_address()
    with pytest.raises(
        MeetingError, match=rf"rank 1 on .* could not reach rank 0 at {address} within 0.5 s \("
    ):
        open_store(address, 1, 0.5)


def test_only_the_interface_that_was_named_listens() -> None:
    """Another address of this machine finds nobody; with ranks on other machines, a loopback name opens all."""
    address = free_address(one_machine=True)
    store = open_store(address, 0, 5)
    socket.create_connection(("127.0.0.1", address.port), timeout=5).close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", address.port), timeout=5)
    del store
    wide = free_address(one_machine=False)
    store = open_store(wide, 0, 5)
    socket.create_connection(("127.0.0.2", wide.port), timeout=5).close()
    del store


def test_a_taken_port_names_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        address = Address(host="127.0.0.1", port=held.getsockname()[1], one_machine=True)
        with pytest.raises(
            MeetingError, match=rf"port {address.port} of {address} is taken by .*process.*choose a free port"
        ):
            open_store(address, 0, 5)
