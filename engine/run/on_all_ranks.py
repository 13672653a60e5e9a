"""Slow work that every rank does at once without communicating: all wait for all, and fail alike."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from triaxis.parallel.places.legal_values import first_of
from triaxis.parallel.worlds.agreement import agree, gather_json
from triaxis.parallel.worlds.mesh import Mesh

FIRST_POLL_SECONDS, LONGEST_POLL_SECONDS = 0.01, 1.0
RANKS_NAMED = 4
T = TypeVar("T")


def on_all_ranks(mesh: Mesh, work: Callable[[], T], still: Callable[[], None]) -> T:
    """This rank's result, once every rank has its own. Collective.

    still: called now and then meanwhile, since the work may take minutes on one rank and a moment on another
    Raises ValueError, on all ranks alike, where a rank's work raised it or an OSError.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="aside") as pool:
        done = pool.submit(work)
        poll = FIRST_POLL_SECONDS
        while agree(mesh, int(not wait([done], poll).done))[0]:
            poll = min(2 * poll, LONGEST_POLL_SECONDS)
            still()
    error = done.exception()
    if error is not None and not isinstance(error, (ValueError, OSError)):
        raise error
    faults = tell_faults(mesh, None if error is None else str(error) or repr(error))
    if faults is not None:
        raise ValueError(faults) from error
    return done.result()


def tell_faults(mesh: Mesh, fault: str | None) -> str | None:
    """What went wrong on any rank, on all of them: with rank and machine, unless it did so on all alike. Collective."""
    if not agree(mesh, int(fault is not None))[0]:
        return None
    answers = gather_json(mesh.everyone, [fault, socket.gethostname()], mesh.world.device)
    faults: dict[str, list[str]] = {}
    for rank, answer in enumerate(answers):
        assert isinstance(answer, list)
        if answer[0] is not None:
            faults.setdefault(answer[0], []).append(place_of(mesh, rank, answer[1]))
    if [len(ranks) for ranks in faults.values()] == [len(answers)]:
        return next(iter(faults))
    return "\n".join(f"{text} (on {listed_places(ranks)})" for text, ranks in faults.items())


def place_of(mesh: Mesh, rank: int, host: str) -> str:
    """`rank 1 (dp 0, pp 0, tp 1) on node7`."""
    return f"rank {rank} ({mesh.topology.place(rank)}) on {host}"


def listed_places(places: Sequence[str], count: int | None = None) -> str:
    """The first few of them; count: how many there are, if `places` are not all."""
    return first_of(places, RANKS_NAMED, separator=", ", count=count)
