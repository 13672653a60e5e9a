"""Groups of processes, over torch.distributed: as the backend does it, and composed where Gloo's own is slower.

Milliseconds on 2 cores (fp32, median, the slowest rank; size of the whole tensor):
                                      2 ranks, 256 KB   16 MB     4 ranks, 256 KB   16 MB
    all_reduce      native                       1.22    24.8                9.68    60.8
                    exchange and add             0.65    23.4                   -       -   two ranks: used
                    all_to_all, all_gather       4.23    49.4                8.51     130
    reduce_scatter  native                       1.23    68.8                9.05     115
                    all_to_all and add           0.74    18.3                4.92    36.8   used
                    messages and add             3.18    19.8                6.65    44.2
    all_gather      native                       0.74    23.5                3.60    40.5   used if small
                    messages                     2.20    12.2                6.19    30.6   used if large
                    all_reduce of zeros          1.46    28.5                7.11    73.3
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from triaxis.parallel.programs.operation import Operation
from triaxis.parallel.worlds.communicators import Direction, direction
from triaxis.parallel.worlds.failure import RankError
from triaxis.parallel.worlds.group import Group, Partition, Request, Work
from triaxis.parallel.worlds.headers import HEADER_BYTES, MESSAGES, header, refuse_differences
from triaxis.parallel.worlds.summation import HALVES, summed

COLLECTIVE_TAG = 1  # keeps the messages that make up a collective apart from those of `isend` (tag 0)
HEADER_TAGS = {
    Direction.UP: 2,
    Direction.DOWN: 3,
}  # of a message's headers, which go both ways, by the way it goes
FIRST_COMPARED_TAG = 4  # of the first message that follows its headers
LARGE_GATHER_BYTES = 1 << 20  # messages win from here: 0.9 against 1.7 ms (2 ranks), 2.4 against 7.0 (4)


class _Pending:
    """Works of torch under way, the tensors they use, and what is left to do when they are done."""

    def __init__(
        self,
        start: Callable[[], Sequence[Any]],  # torch's Work, whose methods are untyped
        tensors: tuple[Tensor, ...],
        what: str,
        site: str,
        group: Group,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._group = group
        self._tensors, self._what, self._site, self._finish = tensors, what, site, finish
        self._works: Sequence[Any] = ()
        try:
            self._works = [work for work in start() if work is not None]
        except RuntimeError as error:
            raise self._failed(error) from error

    def wait(self) -> None:
        works, self._works = self._works, ()
        if not works:
            return
        started = time.perf_counter()
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self._failed(error) from error
        self._group.waited_seconds += time.perf_counter() - started
        if self._finish is not None:
            with torch.no_grad():
                self._finish()
        self._tensors, self._finish = (), None

    def _failed(self, error: RuntimeError) -> RankError:
        reason = plain_reason(error)
        shapes = ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in self._tensors)
        return RankError(
            f"{self._what}{' of ' * bool(shapes)}{shapes} at {self._site} failed: a rank died, came too late or asked "
            f"for something else ({reason})"
        )


def plain_reason(error: Exception) -> str:
    """What the backend found, without the place in its source and its guesses and wishes behind it."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^]]*:\d+\] ", "", text).split(". This is typically")[0].removesuffix(".")


class ProcessGroup(Group):
    """A group of ranks that are processes.

    handle: torch's process group (None for a group of one)
    partition: the ranks' parts, of which this group is one
    downward: the one for messages to earlier members, where they have their own
    """

    def __init__(
        self, name: str, ranks: Sequence[int], world_rank: int, handle: dist.ProcessGroup | None
    ) -> None:
        super().__init__(name, ranks, world_rank)
        self.handle = handle
        self.downward: dist.ProcessGroup | None = None
        self.partition: Partition = (self.ranks,)
        self.checked = False
        self._compared_messages: dict[tuple[Operation, int], int] = defaultdict(int)
        self._world_rank = world_rank

    def _compare(self, request: Request, tensors: tuple[Tensor, ...]) -> None:
        """Tells each other what is asked for before it is done, so that a mismatch is told with both sides at once.

        Otherwise the backend may end the process, or wait for what does not come. A short message of its own.
        """
        device = tensors[0].device if tensors else torch.device("cpu")
        own = header(self, request, tensors).to(device)
        all_headers = torch.empty(self.size, HEADER_BYTES, dtype=torch.uint8, device=device)
        try:
            dist.all_gather_single(all_headers.view(-1), own, group=self.handle)
        except RuntimeError as error:
            raise RankError(
                f"rank {self._world_rank}: {request.told(self.ranks)} in group '{self.name}' {self.ranks} at "
                f"{request.site} failed: a rank died or came too late ({plain_reason(error)})"
            ) from error
        refuse_differences(self, dict(zip(self.ranks, all_headers.cpu().unbind(), strict=True)))

    def _pending(
        self,
        request: Request,
        start: Callable[[], Sequence[Any]],
        *tensors: Tensor,
        finish: Callable[[], None] | None = None,
    ) -> Work:
        if self.checked and request.operation not in MESSAGES:
            self._compare(request, tensors)
        what = f"rank {self._world_rank}: {request.told(self.ranks)} in group '{self.name}' {self.ranks}"
        return _Pending(start, tensors, what, request.site, self, finish)

    def _goes_on(self, request: Request) -> bool:
        """Whether the operation runs beside what follows.

        If not, NCCL puts it on the stream of the computations itself. Then no event is waited for on either side and
        no second stream takes part: under tp that happens four times a layer and direction.
        """
        return request.asynchronous

    def _all_reduce(self, request: Request, tensor: Tensor) -> Work:
        tensor = tensor.detach()
        largest = request.operation is Operation.ALL_REDUCE_LARGEST
        operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM

        def start() -> list[Any]:
            return [dist.all_reduce(tensor, operation, group=self.handle, async_op=self._goes_on(request))]

        return self._pending(request, start, tensor)

    def _all_gather(self, request: Request, output: Tensor, shard: Tensor) -> Work:
        output, shard = output.detach().view(-1), shard.detach().view(-1)

        def start() -> list[Any]:
            return [dist.all_gather_single(output, shard, group=self.handle, async_op=self._goes_on(request))]

        return self._pending(request, start, output, shard)

    def _reduce_scatter(self, request: Request, shard: Tensor, whole: Tensor) -> Work:
        shard, whole = shard.detach().view(-1), whole.detach().view(-1)

        def start() -> list[Any]:
            return [
                dist.reduce_scatter_single(shard, whole, group=self.handle, async_op=self._goes_on(request))
            ]

        return self._pending(request, start, shard, whole)

    def _all_to_all(self, request: Request, output: Tensor, whole: Tensor) -> Work:
        output, whole = output.detach(), whole.detach()
        if not request.input_rows:
            output, whole = output.view(-1), whole.view(-1)
        rows = list(request.output_rows) or None, list(request.input_rows) or None

        def start() -> list[Any]:
            return [
                dist.all_to_all_single(
                    output, whole, *rows, group=self.handle, async_op=self._goes_on(request)
                )
            ]

        return self._pending(request, start, output, whole)

    def _broadcast(self, request: Request, tensor: Tensor) -> Work:
        tensor = tensor.detach()

        def start() -> list[Any]:
            return [
                dist.broadcast(
                    tensor, self.ranks[request.peer], group=self.handle, async_op=self._goes_on(request)
                )
            ]

        return self._pending(request, start, tensor)

    def _isend(self, request: Request, tensor: Tensor) -> Work:
        tensor, rank = tensor.detach(), self.ranks[request.peer]
        handle = self._queue(direction(self.rank, request.peer))
        return self._pending(request, lambda: [dist.isend(tensor, rank, group=handle)], tensor)

    def _irecv(self, request: Request, tensor: Tensor) -> Work:
        tensor, rank = tensor.detach(), self.ranks[request.peer]
        handle = self._queue(direction(request.peer, self.rank))
        return self._pending(request, lambda: [dist.irecv(tensor, rank, group=handle)], tensor)

    def _queue(self, way: Direction) -> dist.ProcessGroup | None:
        return self.downward if way is Direction.DOWN and self.downward is not None else self.handle

    def _barrier(self, request: Request) -> None:
        def start() -> list[Any]:
            return [dist.barrier(group=self.handle, async_op=True)]

        self._pending(request, start).wait()


class GlooGroup(ProcessGroup):
    """A group on Gloo, with the compositions that were measured to be faster than Gloo's own."""

    def _goes_on(self, request: Request) -> bool:
        """Always: a host that waits can be told that a rank died."""
        return True

    def _all_reduce(self, request: Request, tensor: Tensor) -> Work:
        """Two ranks exchange and add, which rounds alike on both; half precision is summed in fp32."""
        tensor = tensor.detach()
        if request.operation is Operation.ALL_REDUCE_LARGEST:
            return super()._all_reduce(request, tensor)
        if self.size == 2:
            other = torch.empty_like(tensor)
            return self._pending(
                request,
                lambda: self._messages({1 - self.rank: tensor}, {1 - self.rank: other}),
                tensor,
                other,
                finish=lambda: _add(tensor, other),
            )
        if tensor.dtype in HALVES:
            if self.checked:
                self._compare(request, (tensor,))
            wide = tensor.float()
            work = super()._all_reduce(request, wide)
            return _Then(work, lambda: _assign(tensor, wide))
        return super()._all_reduce(request, tensor)

    def _all_gather(self, request: Request, output: Tensor, shard: Tensor) -> Work:
        if output.nbytes < LARGE_GATHER_BYTES:
            return super()._all_gather(request, output, shard)
        parts, shard = output.detach().view(self.size, -1), shard.detach().view(-1)
        if parts[self.rank].data_ptr() != shard.data_ptr():
            parts[self.rank].copy_(shard)
        others = [member for member in range(self.size) if member != self.rank]
        return self._pending(
            request,
            lambda: self._messages(dict.fromkeys(others, shard), {i: parts[i] for i in others}),
            parts,
            shard,
        )

    def _reduce_scatter(self, request: Request, shard: Tensor, whole: Tensor) -> Work:
        shard, whole = shard.detach().view(-1), whole.detach().view(-1)
        parts = torch.empty_like(whole)

        def start() -> list[Any]:
            return [dist.all_to_all_single(parts, whole, group=self.handle, async_op=True)]

        return self._pending(
            request,
            start,
            shard,
            whole,
            parts,
            finish=lambda: _assign(shard, summed(parts.view(self.size, -1).unbind(0))),
        )

    def _all_to_all(self, request: Request, output: Tensor, whole: Tensor) -> Work:
        """Uneven parts are messages, as Gloo gives empty ones trouble; even ones are Gloo's own."""
        if not request.input_rows:
            return super()._all_to_all(request, output, whole)
        given = dict(enumerate(whole.detach().split(request.input_rows)))
        taken = dict(enumerate(output.detach().split(request.output_rows)))
        taken.pop(self.rank).copy_(given.pop(self.rank))
        return self._pending(
            request,
            lambda: self._messages(
                {member: part for member, part in given.items() if part.numel()},
                {member: part for member, part in taken.items() if part.numel()},
            ),
            output,
            whole,
        )

    def _isend(self, request: Request, tensor: Tensor) -> Work:
        if not self.checked:
            return super()._isend(request, tensor)
        return self._compared(request, tensor.detach(), dist.isend)

    def _irecv(self, request: Request, tensor: Tensor) -> Work:
        if not self.checked:
            return super()._irecv(request, tensor)
        return self._compared(request, tensor.detach(), dist.irecv)

    def _compared(self, request: Request, tensor: Tensor, start: Callable[..., Any]) -> Work:
        """A message with headers. Its data have a tag of their own: receives may be waited for in any order.

        sender      header ->   <- header   data ->          all at once: who receives may wait before the sender does
        receiver    header ->   <- header   compares, data   data of another size would end the process
        """
        rank, way = self.ranks[request.peer], (request.operation, request.peer)
        number = self._compared_messages[way]
        self._compared_messages[way] += 1
        sends = request.operation is Operation.SEND
        tag = HEADER_TAGS[direction(self.rank, request.peer) if sends else direction(request.peer, self.rank)]
        own, theirs = header(self, request, (tensor,)), torch.empty(HEADER_BYTES, dtype=torch.uint8)

        def exchange() -> list[Any]:
            return [
                dist.isend(own, rank, group=self.handle, tag=tag),
                dist.irecv(theirs, rank, group=self.handle, tag=tag),
            ]

        def move() -> Work:
            def begin() -> list[Any]:
                return [start(tensor, rank, group=self.handle, tag=FIRST_COMPARED_TAG + number)]

            return self._pending(request, begin, tensor)

        headers = self._pending(request, exchange, own, theirs)
        under_way = move() if sends else None

        def follow() -> None:
            refuse_differences(self, {self._world_rank: own, rank: theirs})
            (under_way or move()).wait()

        return _Then(headers, follow)

    def _messages(self, sent: dict[int, Tensor], received: dict[int, Tensor]) -> list[Any]:
        works = [
            dist.isend(tensor, self.ranks[peer], group=self.handle, tag=COLLECTIVE_TAG)
            for peer, tensor in sent.items()
        ]
        works += [
            dist.irecv(tensor, self.ranks[peer], group=self.handle, tag=COLLECTIVE_TAG)
            for peer, tensor in received.items()
        ]
        return works


class _Then:
    """A work and what follows it, once."""

    def __init__(self, work: Work, finish: Callable[[], None]) -> None:
        self._work, self._finish = work, [finish]

    def wait(self) -> None:
        self._work.wait()
        while self._finish:
            self._finish.pop()()


def _add(tensor: Tensor, other: Tensor) -> None:
    tensor.add_(other)


def _assign(tensor: Tensor, value: Tensor) -> None:
    tensor.copy_(value)
