"""Where rank threads meet: calls wait in slots and queues until they can be carried out.

All ranks share one `Hub` under one lock. A collective is a slot that the members fill; whoever comes last
carries it out for all. Because the hub sees every rank, it knows at once when nobody can go on.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from triaxis.parallel.worlds.failure import RankError
from triaxis.parallel.worlds.group import Group, Request

Key = tuple[object, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """One rank's part in one operation."""

    rank: int
    request: Request
    group: str
    ranks: tuple[int, ...]
    output: Tensor | None = None
    source: Tensor | None = None
    done: bool = False

    def asked(self) -> tuple[object, ...]:
        """What the members of a collective must agree on."""
        uneven = bool(
            self.request.input_rows
        )  # then each has its own rows, which are compared member by member
        tensors = [(t.shape[uneven:], t.dtype) for t in (self.output, self.source) if t is not None]
        return (self.request.operation, self.request.label, self.request.peer, *tensors)

    def __str__(self) -> str:
        shapes = [
            f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"
            for t in (self.output, self.source)
            if t is not None
        ]
        asked = f"{self.request.told(self.ranks)} {' from '.join(shapes)}".strip()
        return f"rank {self.rank}: {asked} in group '{self.group}' {self.ranks} at {self.request.site}"


Perform = Callable[[list[Call]], "str | None"]
"""Carries a collective out for all members; says what is wrong if they do not fit together."""


@dataclass(slots=True)
class Slot:
    """One collective of one group: its members, those who have come, and what is done when all have."""

    ranks: tuple[int, ...]
    perform: Perform
    calls: dict[int, Call] = field(default_factory=dict)


class Hub:
    """What the ranks share. Every method takes the lock, or is called by one that holds it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self.wake = [threading.Condition(self.lock) for _ in range(size)]
        self.waiting: dict[int, Call] = {}
        self.finished: set[int] = set()
        self.slots: dict[Key, Slot] = {}
        self.sends: defaultdict[Key, deque[Call]] = defaultdict(deque)
        self.receives: defaultdict[Key, deque[Call]] = defaultdict(deque)
        self.failure: str | None = None
        self.deaths: list[tuple[int, BaseException]] = []

    def collective(self, key: Key, ranks: tuple[int, ...], call: Call, perform: Perform) -> None:
        """Adds the call to its slot; the last member to come performs it for all."""
        with self.lock:
            self._check(call)
            slot = self.slots.setdefault(key, Slot(ranks, perform))
            first = next(iter(slot.calls.values()), call)
            slot.calls[call.rank] = call
            if first.asked() != call.asked():
                self._fail(f"members of a group ask for different things:\n  {first}\n  {call}")
            self._check_absent(slot)
            if len(slot.calls) == len(ranks):
                del self.slots[key]
                with torch.no_grad():
                    wrong = slot.perform([slot.calls[rank] for rank in ranks])
                if wrong is not None:
                    self._fail(wrong)
                for member in slot.calls.values():
                    self._complete(member)

    def send(self, key: Key, call: Call) -> None:
        with self.lock:
            self._check(call)
            if not self.receives[key]:
                assert call.source is not None
                call.source = call.source.detach().clone()
            self.sends[key].append(call)
            self._match(key)
            call.done = True

    def receive(self, key: Key, call: Call, source_rank: int) -> None:
        with self.lock:
            self._check(call)
            self.receives[key].append(call)
            self._match(key)
            if not call.done and source_rank in self.finished:
                self._fail(f"a message is awaited from rank {source_rank}, which has finished:\n  {call}")

    def wait(self, call: Call) -> None:
        """Sleeps until the call is done; notices when nobody is left who could complete it."""
        with self.lock:
            while not call.done:
                self._check(call)
                self.waiting[call.rank] = call
                self._check_progress()
                self.wake[call.rank].wait()

    def finish(self, rank: int) -> None:
        """The rank's main function has returned; whoever still waits for it will never be served."""
        with self.lock:
            if self.failure is not None:
                return
            self.finished.add(rank)
            for slot in list(self.slots.values()):
                self._check_absent(slot)
            if len(self.finished) == self.size:
                left = [call for queue in self.sends.values() for call in queue]
                left += [call for queue in self.receives.values() for call in queue]
                left += [call for slot in self.slots.values() for call in slot.calls.values()]
                if left:
                    self._fail("all ranks have finished, and nobody took part in:" + _lines(left))
            self._check_progress()

    def die(self, rank: int, error: BaseException) -> None:
        """The rank's main function has raised: all others raise too, wherever they wait or come next."""
        with self.lock:
            self.deaths.append((rank, error))
            if self.failure is None:
                self.failure = f"rank {rank} died of {type(error).__name__}: {error}"
                self.failure += self._waiting_lines()
            self._wake_all()

    def _match(self, key: Key) -> None:
        sends, receives = self.sends[key], self.receives[key]
        while sends and receives:
            send, receive = sends.popleft(), receives.popleft()
            assert send.source is not None and receive.output is not None
            sent, expected = send.source, receive.output
            labels = send.request.label, receive.request.label
            if (sent.shape, sent.dtype, labels[0]) != (expected.shape, expected.dtype, labels[1]):
                self._fail(f"a message does not fit where it is received:\n  {send}\n  {receive}")
            with torch.no_grad():
                receive.output.detach().copy_(send.source)
            self._complete(receive)

    def _complete(self, call: Call) -> None:
        call.done = True
        if self.waiting.get(call.rank) is call:
            del self.waiting[call.rank]
            self.wake[call.rank].notify_all()

    def _check(self, call: Call) -> None:
        if self.failure is not None:
            here = f"\n  {call}"
            raise RankError(self.failure if here in self.failure else self.failure + here)

    def _check_absent(self, slot: Slot) -> None:
        absent = sorted(rank for rank in slot.ranks if rank in self.finished and rank not in slot.calls)
        if absent:
            self._fail(f"{_named(absent)} finished without taking part in:" + _lines(slot.calls.values()))

    def _check_progress(self) -> None:
        if self.waiting and len(self.waiting) + len(self.finished) == self.size:
            finished = f"; {_named(sorted(self.finished))} finished" if self.finished else ""
            self._fail(f"no rank can go on: each waits for another{finished}" + self._waiting_lines())

    def _waiting_lines(self) -> str:
        return _lines(self.waiting[rank] for rank in sorted(self.waiting))

    def _fail(self, text: str) -> None:
        self.failure = text
        self._wake_all()
        raise RankError(text)

    def _wake_all(self) -> None:
        for condition in self.wake:
            condition.notify_all()


class Pending:
    """A call under way."""

    __slots__ = ("call", "group", "hub")

    def __init__(self, hub: Hub, call: Call, group: Group | None = None) -> None:
        self.hub, self.call, self.group = hub, call, group

    def wait(self) -> None:
        if self.call.done:
            return
        started = time.perf_counter()
        self.hub.wait(self.call)
        if self.group is not None:
            self.group.waited_seconds += time.perf_counter() - started


def _lines(calls: Iterable[Call]) -> str:
    return "".join(f"\n  {call}" for call in calls)


def _named(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
