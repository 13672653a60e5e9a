"""Writes down what a rank communicates, in whichever world: a `RecordingWorld` wraps it and its groups."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from triaxis.parallel.programs.operation import Operation
from triaxis.parallel.programs.program import Communicate, Event, Wait
from triaxis.parallel.worlds.failure import call_site
from triaxis.parallel.worlds.group import DONE, Group, Partition, Request, Work, World


class Recorder:
    """The events of one rank so far. host_reads: what made the host wait for the device, since somebody took it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.host_reads: list[str] = []
        self.issued: dict[tuple[str, Operation], int] = {}
        self._repeated: dict[tuple[str, Operation], dict[int, tuple[int, int]]] = {}
        self.paused: Callable[[], AbstractContextManager[object]] = nullcontext

    def forget(self) -> None:
        """Begins anew."""
        self.events.clear()
        self.host_reads.clear()
        self.issued.clear()
        self._repeated.clear()

    def issue(self, event: Communicate) -> int:
        """Notes a communication; returns its number among those of its group and kind."""
        self.events.append(event)
        key = event.group, event.operation
        number = self.issued.get(key, 0)
        self.issued[key] = number + 1
        return number

    def wait(self, group: str, operation: Operation, number: int) -> None:
        for first, (count, again) in self._repeated.get((group, operation), {}).items():
            if first <= number < first + count:
                number += again - first  # the latest that was issued in its place
                break
        age = self.issued[group, operation] - 1 - number
        self.events.append(Wait(group, operation, age))

    def repeat(self, key: tuple[str, Operation], first: int, count: int) -> None:
        """The communications `first`, … of a group and kind are issued again, as often as `count`."""
        again = self.issued.get(key, 0)
        self._repeated.setdefault(key, {})[first] = count, again
        self.issued[key] = again + count


class _RecordedWork:
    """A communication under way, whose wait is written down."""

    __slots__ = ("_group", "_number", "_operation", "_recorder", "_work")

    def __init__(self, recorder: Recorder, group: str, operation: Operation, number: int, work: Work) -> None:
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
        self.inner, self._recorder = inner, recorder

    def _record(self, request: Request, tensor: Tensor | None, start: Callable[[], Work]) -> Work:
        row = 0 if tensor is None or not request.input_rows else math.prod(tensor.shape[1:])
        event = Communicate(
            request.operation,
            self.name,
            "" if tensor is None else str(tensor.dtype).removeprefix("torch."),
            0 if tensor is None else tensor.numel(),
            0 if tensor is None else tensor.nbytes,
            request.peer,
            request.site,
            request.label,
            gradient=request.bucket,
            gives=tuple(row * rows for rows in request.input_rows),
            takes=tuple(row * rows for rows in request.output_rows),
        )
        number = self._recorder.issue(event)
        with self._recorder.paused():
            work = start()
        return _RecordedWork(self._recorder, self.name, request.operation, number, work)

    def _all_reduce(self, request: Request, tensor: Tensor) -> Work:
        largest = request.operation is Operation.ALL_REDUCE_LARGEST
        return self._record(
            request,
            tensor,
            lambda: self.inner.all_reduce(
                tensor, largest=largest, label=request.label, bucket=request.bucket, asynchronous=True
            ),
        )

    def _all_gather(self, request: Request, output: Tensor, shard: Tensor) -> Work:
        return self._record(
            request,
            output,
            lambda: self.inner.all_gather(output, shard, label=request.label, asynchronous=True),
        )

    def _reduce_scatter(self, request: Request, shard: Tensor, whole: Tensor) -> Work:
        return self._record(
            request,
            whole,
            lambda: self.inner.reduce_scatter(
                shard, whole, label=request.label, bucket=request.bucket, asynchronous=True
            ),
        )

    def _all_to_all(self, request: Request, output: Tensor, whole: Tensor) -> Work:
        return self._record(
            request,
            whole,
            lambda: self.inner.all_to_all(
                output,
                whole,
                output_rows=request.output_rows,
                input_rows=request.input_rows,
                label=request.label,
                asynchronous=True,
            ),
        )

    def _broadcast(self, request: Request, tensor: Tensor) -> Work:
        return self._record(
            request,
            tensor,
            lambda: self.inner.broadcast(tensor, request.peer, label=request.label, asynchronous=True),
        )

    def _isend(self, request: Request, tensor: Tensor) -> Work:
        return self._record(
            request, tensor, lambda: self.inner.isend(tensor, request.peer, label=request.label)
        )

    def _irecv(self, request: Request, tensor: Tensor) -> Work:
        return self._record(
            request, tensor, lambda: self.inner.irecv(tensor, request.peer, label=request.label)
        )

    def _barrier(self, request: Request) -> None:
        def start() -> Work:
            self.inner.barrier(label=request.label)
            return DONE

        self._record(request, None, start).wait()


class RecordingWorld(World):
    """A world whose communication is written down in `recorder`."""

    def __init__(self, inner: World, recorder: Recorder) -> None:
        self.inner, self.recorder = inner, recorder
        self.name, self.rank, self.size, self.device = inner.name, inner.rank, inner.size, inner.device

    def _new_group(self, name: str, partition: Partition) -> Group:
        parts = hashlib.sha256(repr(list(partition)).encode()).hexdigest()[:16]
        event = Communicate(Operation.NEW_GROUP, "world", "", 0, 0, site=call_site(), label=f"{name} {parts}")
        number = self.recorder.issue(event)
        with self.recorder.paused():
            inner = self.inner.new_group(name, partition)
        self.recorder.wait("world", Operation.NEW_GROUP, number)
        return RecordingGroup(inner, self.recorder)

    def give_directions(self, group: Group) -> None:
        assert isinstance(group, RecordingGroup), "this world's groups record"
        self.inner.give_directions(group.inner)

    def wait_for_all(self, what: str) -> None:
        self.inner.wait_for_all(what)

    def settle(self) -> None:
        self.inner.settle()

    @property
    def target(self) -> str:
        return self.inner.target

    def host_values(self, values: Tensor) -> list[float]:
        self.recorder.host_reads.append("host_values")
        with self.recorder.paused():
            return self.inner.host_values(values)

    def host_counts(self, counts: Tensor, total: int) -> list[int]:
        self.recorder.host_reads.append("host_counts")
        return self.inner.host_counts(counts, total)

    def close(self) -> None:
        self.inner.close()
