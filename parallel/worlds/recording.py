"""Writes down what a rank communicates, in whichever world: a `RecordingWorld` wraps it and its groups."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from triaxis.parallel.programs.program import Communicate, Event, Wait
from triaxis.parallel.worlds.failure import call_site
from triaxis.parallel.worlds.group import DONE, Group, Work, World


class Recorder:
    """The events of one rank so far."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.issued: dict[tuple[str, str], int] = {}
        self._repeated: dict[tuple[str, str], dict[int, tuple[int, int]]] = {}
        self.paused: Callable[[], AbstractContextManager[object]] = nullcontext
        self.gradient_of: Callable[[Tensor], int] = _no_bucket

    def forget(self) -> None:
        """Begins anew."""
        self.events.clear()
        self.issued.clear()
        self._repeated.clear()

    def issue(self, event: Communicate) -> int:
        """Notes a communication; returns its number among those of its group and kind."""
        self.events.append(event)
        key = event.group, event.operation
        number = self.issued.get(key, 0)
        self.issued[key] = number + 1
        return number

    def wait(self, group: str, operation: str, number: int) -> None:
        for first, (count, again) in self._repeated.get((group, operation), {}).items():
            if first <= number < first + count:
                number += again - first  # the latest that was issued in its place
                break
        age = self.issued[group, operation] - 1 - number
        self.events.append(Wait(group, operation, age))

    def repeat(self, key: tuple[str, str], first: int, count: int) -> None:
        """The communications `first`, … of a group and kind are issued again, as often as `count`."""
        again = self.issued.get(key, 0)
        self._repeated.setdefault(key, {})[first] = count, again
        self.issued[key] = again + count


def _no_bucket(_tensor: Tensor) -> int:
    return -1


class _RecordedWork:
    """A communication under way, whose wait is written down."""

    __slots__ = ("_group", "_number", "_operation", "_recorder", "_work")

    def __init__(self, recorder: Recorder, group: str, operation: str, number: int, work: Work) -> None:
        self._recorder, self._group, self._operation = recorder, group, operation
        self._number, self._work = number, work

    def wait(self) -> None:
        self._recorder.wait(self._group, self._operation, self._number)
        with self._recorder.paused():
            self._work.wait()


class RecordingGroup(Group):
    """A group that writes down each operation before the group inside carries it out."""

    def __init__(self, inner: Group, recorder: Recorder) -> None:
        super().__init__(inner.name, inner.ranks, inner.ranks[inner.rank])
        self._inner, self._recorder = inner, recorder

    def _record(
        self,
        operation: str,
        tensor: Tensor | None,
        start: Callable[[], Work],
        *,
        peer: int = -1,
        gradient: int = -1,
    ) -> Work:
        event = Communicate(
            operation,
            self.name,
            "" if tensor is None else str(tensor.dtype).removeprefix("torch."),
            0 if tensor is None else tensor.numel(),
            0 if tensor is None else tensor.nbytes,
            peer,
            self.last_site,
            gradient=gradient,
        )
        number = self._recorder.issue(event)
        with self._recorder.paused():
            work = start()
        return _RecordedWork(self._recorder, self.name, operation, number, work)

    def _all_reduce(self, tensor: Tensor, largest: bool) -> Work:
        return self._record(
            "all_reduce largest" if largest else "all_reduce",
            tensor,
            lambda: self._inner.all_reduce(tensor, largest=largest, asynchronous=True),
            gradient=self._recorder.gradient_of(tensor),
        )

    def _all_gather(self, output: Tensor, shard: Tensor) -> Work:
        return self._record(
            "all_gather", output, lambda: self._inner.all_gather(output, shard, asynchronous=True)
        )

    def _reduce_scatter(self, shard: Tensor, whole: Tensor) -> Work:
        return self._record(
            "reduce_scatter",
            whole,
            lambda: self._inner.reduce_scatter(shard, whole, asynchronous=True),
            gradient=self._recorder.gradient_of(whole),
        )

    def _all_to_all(self, output: Tensor, whole: Tensor) -> Work:
        return self._record(
            "all_to_all", whole, lambda: self._inner.all_to_all(output, whole, asynchronous=True)
        )

    def _broadcast(self, tensor: Tensor, root: int) -> Work:
        return self._record(
            "broadcast", tensor, lambda: self._inner.broadcast(tensor, root, asynchronous=True), peer=root
        )

    def _isend(self, tensor: Tensor, peer: int) -> Work:
        return self._record("send", tensor, lambda: self._inner.isend(tensor, peer), peer=peer)

    def _irecv(self, tensor: Tensor, peer: int) -> Work:
        return self._record("receive", tensor, lambda: self._inner.irecv(tensor, peer), peer=peer)

    def _barrier(self) -> None:
        def start() -> Work:
            self._inner.barrier()
            return DONE

        self._record("barrier", None, start).wait()


class RecordingWorld(World):
    """A world whose communication is written down in `recorder`."""

    def __init__(self, inner: World, recorder: Recorder) -> None:
        self.inner, self.recorder = inner, recorder
        self.name, self.rank, self.size, self.device = inner.name, inner.rank, inner.size, inner.device

    def new_group(self, name: str, partition: Sequence[Sequence[int]]) -> Group:
        parts = repr([tuple(part) for part in partition])
        detail = f"{name} {hashlib.sha256(parts.encode()).hexdigest()[:16]}"
        event = Communicate("new_group", "world", "", 0, 0, site=call_site(), detail=detail)
        number = self.recorder.issue(event)
        with self.recorder.paused():
            inner = self.inner.new_group(name, partition)
        self.recorder.wait("world", "new_group", number)
        return RecordingGroup(inner, self.recorder)

    def close(self) -> None:
        self.inner.close()
