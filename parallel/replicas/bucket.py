"""A bucket: some parameters laid out flat and padded, so that every data-parallel rank's shard is equal.

What each ZeRO stage keeps per rank, for Ψ parameters in 16 bits, gradients in fp32 and n ranks:
    stage 0: 2Ψ + 4Ψ + 12Ψ      stage 1: 2Ψ + 4Ψ + 12Ψ/n
    stage 2: 2Ψ + 4Ψ/n + 12Ψ/n  stage 3: (2 + 4 + 12)Ψ/n
In 32 or 64 bits the parameters are their own master copy. (Rajbhandari et al. 2020, section 5.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from triaxis.parallel.kernels.products import AddProduct
from triaxis.parallel.layers.declare import Layouts
from triaxis.parallel.layers.gradient import GradientSlot, give_slot
from triaxis.parallel.places.layout import ParameterLayout
from triaxis.parallel.programs.program import MemoryKind
from triaxis.parallel.replicas.cut import Segment, Sharding, cut_segments, padded_elements, shard_range
from triaxis.parallel.replicas.initialize import Fill
from triaxis.parallel.worlds.group import DONE, Group, Work

_OPERATORS = torch.library.Library("triaxis", "FRAGMENT")
_OPERATORS.define("resize_storage(Tensor tensor, int nbytes) -> ()")


def _resize_storage(tensor: Tensor, nbytes: int) -> None:
    tensor.untyped_storage().resize_(nbytes)


_OPERATORS.impl("resize_storage", _resize_storage, "CompositeExplicitAutograd")
resize_storage = torch.ops.triaxis.resize_storage
"""Gives a tensor's storage `nbytes`; its shape and its views stay. An operator, so that a meter sees it."""


def _place(member: nn.Parameter, place: Tensor) -> None:
    """Lets a parameter be a view of its bucket. What it was made with is let go of.

    It stays the same object, so layers, hooks and ties know nothing of buckets.
    """
    if member.device.type != "meta":
        member.data = place
        return
    told = dict(member.__dict__)  # its layouts: a swap takes them along
    # `data`: a version counter of its own, so that filling the bucket again is no change of what autograd saved
    torch.utils.swap_tensors(member, nn.Parameter(place.data, requires_grad=member.requires_grad))
    member.__dict__.update(told)


class GradientPool:
    """Buffers for unsharded gradients, reused by the buckets of stages 2 and 3."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def take(self, like: Tensor, elements: int) -> Tensor:
        free = self._free.setdefault((elements, like.dtype), [])
        return free.pop() if free else like.new_empty(elements)

    def give(self, buffer: Tensor) -> None:
        self._free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)

    def clear(self) -> None:
        self._free.clear()


class Bucket:
    """Parameters, gradients and master weights of some parameters, as one ZeRO stage keeps them.

    number: its place among the rank's buckets; parameters: flat [padded elements], freed between uses in stage 3
    shard: this rank's part of it (stage 0: all of it); master: the same in the optimizer's precision
    gradient_shard: the gradient of `shard`, valid once reduced
    """

    def __init__(
        self,
        members: Mapping[nn.Parameter, Layouts],
        group: Group,
        *,
        number: int,
        sharding: Sharding,
        accumulate_dtype: torch.dtype,
        master_dtype: torch.dtype,
        pool: GradientPool,
        fill: Fill | None,
        device: torch.device,
        product: AddProduct,
    ) -> None:
        self.members, self.group, self._pool = tuple(members), group, pool
        self.number, self.sharding = number, sharding
        self._pieces: list[tuple[int, ParameterLayout]] = []
        self._offsets: list[int] = []
        elements = 0
        for layouts in members.values():
            self._offsets.append(elements)
            for layout in layouts:
                self._pieces.append((elements, layout))
                elements += layout.elements
        self.elements, self.padded_elements = elements, padded_elements(elements, group.size)
        self._gathering: Work | None = None
        self._place_parameters(fill, device)
        self._make_states(accumulate_dtype, master_dtype, product)
        self._reducing: tuple[Work, Tensor, Tensor] | None = None
        self.pending = 0
        self.reduced_once = False

    @torch.no_grad()
    def _place_parameters(self, fill: Fill | None, device: torch.device) -> None:
        # What is sharded gets its memory here and never as a whole, unless the members have values of their own:
        # where parameters are freed between uses, only their places are made, and freed before anybody writes there.
        made = self.members[0].device.type != "meta"
        kept = made or not self.sharding.parameters
        allocate = torch.zeros if kept else torch.empty
        self.parameters = allocate(self.padded_elements, dtype=self.members[0].dtype, device=device)
        for member, offset in zip(self.members, self._offsets, strict=True):
            place = self.parameters[offset : offset + member.numel()].view(member.shape)
            if made and fill is None:
                place.copy_(member.data)
            _place(member, place)
        self.start, self.stop = 0, self.padded_elements
        if self.sharding.states:
            self.start, self.stop = shard_range(self.padded_elements, self.group.size, self.group.rank)
        self.shard = self.parameters[self.start : self.stop]
        if self.sharding.parameters:
            # its own memory: the whole is freed
            self.shard = self.shard.clone() if kept else torch.zeros_like(self.shard)
        self.segments = cut_segments(self._pieces, self.start, self.stop)
        if fill is not None:
            self._fill(fill)

    def _fill(self, fill: Fill) -> None:
        """Each replica fills its own part; those that hold all get the others' from them. Collective on `group`."""
        start, stop = shard_range(self.padded_elements, self.group.size, self.group.rank)
        own = self.shard[start - self.start : stop - self.start]
        for segment in cut_segments(self._pieces, start, stop):
            fill(segment.layout, own[segment.start : segment.stop], segment.first)
        if not self.sharding.parameters:
            self.group.all_gather(self.parameters, own, label=self._label("first values"))

    @torch.no_grad()
    def _make_states(
        self, accumulate_dtype: torch.dtype, master_dtype: torch.dtype, product: AddProduct
    ) -> None:
        # In 32 or 64 bits the update works on the parameters themselves: nothing is kept twice.
        self.master = self.shard if master_dtype == self.shard.dtype else self.shard.to(master_dtype)
        device = self.parameters.device
        self._buffer: Tensor | None = None
        # A whole buffer is kept, and a shard reduced in place; where gradients are sharded the buffer is borrowed from
        # the pool between a bucket's first gradient and its reduction's end.
        if not self.sharding.gradients:
            self._buffer = torch.zeros(self.padded_elements, dtype=accumulate_dtype, device=device)
            self.gradient_shard = self._buffer[self.start : self.stop]
        else:
            self.gradient_shard = torch.zeros(self.stop - self.start, dtype=accumulate_dtype, device=device)
        self.slots = [GradientSlot(self._place_finder(i), product) for i in range(len(self.members))]
        for member, slot in zip(self.members, self.slots, strict=True):
            give_slot(member, slot)

    def _place_finder(self, index: int) -> Callable[[], Tensor]:
        # A finder, not a view: a borrowed buffer is another one in each microbatch.
        offset, shape = self._offsets[index], self.members[index].shape
        count = shape.numel()

        def find() -> Tensor:
            return self._gradients()[offset : offset + count].view(shape)

        return find

    def _gradients(self) -> Tensor:
        if self._buffer is None:
            self._buffer = self._pool.take(self.gradient_shard, self.padded_elements)
            self._buffer[
                self.elements :
            ].zero_()  # no slot writes the padding, and it is summed with the rest
        return self._buffer

    def gradient_bytes(self) -> int:
        """Bytes of gradients kept between microbatches."""
        return self._buffer.nbytes if self._buffer is not None else self.gradient_shard.nbytes

    @property
    def pieces(self) -> tuple[tuple[int, ParameterLayout], ...]:
        """Each piece's first element in the bucket, and its layout."""
        return tuple(self._pieces)

    @property
    def shards(self) -> int:
        """Into how many parts the bucket's master weights are cut: 1 in stage 0, where every rank updates all."""
        return self.group.size if self.sharding.states else 1

    def move_master(self, moved: Callable[[Tensor], Tensor]) -> None:
        """Puts `master` elsewhere, unless it is the parameters themselves."""
        if self.master is not self.shard:
            self.master = moved(self.master)

    def reductions(self, microbatches: int) -> int:
        """How often a step of so many microbatches reduces the bucket's gradient."""
        if self.group.size == 1:
            return 0
        return microbatches if self.sharding.gradients else 1

    def states(self) -> Iterator[tuple[MemoryKind, Tensor]]:
        """The tensors that are held all the time, or come and go as wholes, and what for."""
        yield MemoryKind.GATHERED if self.sharding.parameters else MemoryKind.PARAMETERS, self.parameters
        yield MemoryKind.GRADIENTS, self.gradient_shard
        yield MemoryKind.PARAMETERS, self.shard
        yield MemoryKind.OPTIMIZER, self.master

    def whole_segments(self) -> tuple[Segment, ...]:
        """The bucket's pieces, each as one segment of the whole bucket."""
        return cut_segments(self._pieces, 0, self.padded_elements)

    def _label(self, what: str) -> str:
        return f"{what} of bucket {self.number}"

    # Parameters: stage 3 gathers them before use and frees them after.

    def start_gather(self) -> None:
        """V → R on the data-parallel axis, asynchronously; nothing if the parameters are here."""
        # Freed is the storage, not the tensor: members, and what autograd saved, are views that find it filled again.
        storage = self.parameters.untyped_storage()
        if self._gathering is None and storage.nbytes() == 0:
            resize_storage(self.parameters, self.padded_elements * self.parameters.element_size())
            self._gathering = self.group.all_gather(
                self.parameters, self.shard, label=self._label("parameters"), asynchronous=True
            )

    def gather(self) -> None:
        self.start_gather()
        self._finish_gather()

    def _finish_gather(self) -> None:
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def release(self) -> None:
        """Frees the parameters; a gather under way ends first, or it would write into freed memory."""
        self._finish_gather()
        resize_storage(self.parameters, 0)

    # Gradients.

    def start_microbatch(self) -> None:
        """Before a backward pass: all members' gradients are still to come."""
        self.pending = len(self.members)
        for slot in self.slots:
            slot.complete = False

    def complete(self, slot: GradientSlot) -> bool:
        """A member's gradient of this backward pass is there; True if it was the last one."""
        if not slot.complete:
            slot.complete = True
            self.pending -= 1
            return self.pending == 0
        return False

    def start_reduce(self) -> None:
        """P → R (stage 0) or P → V over the data-parallel axis, asynchronously."""
        self.pending = 0
        for slot in self.slots:
            slot.fill_if_empty()
        whole, label = self._gradients(), self._label("gradient")
        self.finish_reduce()  # of the microbatch before: both add to the same shard
        if not self.sharding.states:
            work = self.group.all_reduce(whole, label=label, bucket=self.number, asynchronous=True)
            self._reducing = (work, whole, self.gradient_shard)
            return
        shard = self.gradient_shard
        if self.sharding.gradients:
            if self.reduced_once:
                shard = torch.empty_like(shard)  # to be added to what earlier microbatches left
            for slot in self.slots:
                slot.empty = True
        work = self.group.reduce_scatter(shard, whole, label=label, bucket=self.number, asynchronous=True)
        self._reducing = (work, whole, shard)
        if self.sharding.gradients:
            self._buffer = None  # lent to the reduction; the next microbatch takes another
        self.reduced_once = True

    @torch.no_grad()
    def finish_reduce(self) -> None:
        """The reduction under way is over; in stages 2 and 3 its buffer goes back to the pool."""
        if self._reducing is None:
            return
        work, whole, shard = self._reducing
        self._reducing = None
        work.wait()
        if shard is not self.gradient_shard:
            self.gradient_shard.add_(shard)
        if self.sharding.gradients:
            self._pool.give(whole)

    def start_step(self) -> None:
        """Before an optimizer step's first microbatch: gradients are empty."""
        self.reduced_once = False
        for slot in self.slots:
            slot.empty = True

    @torch.no_grad()
    def start_publish(self) -> Work:
        """After the update: the master shard becomes the parameters, V → R in stages 1 and 2."""
        if self.master is not self.shard:
            self.shard.copy_(self.master)
        if self.sharding.parameters or not self.sharding.states:
            return DONE  # the next gather sends them, or every replica has made the same update
        return self.group.all_gather(
            self.parameters, self.shard, label=self._label("updated parameters"), asynchronous=True
        )
