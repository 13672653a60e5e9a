"""Data parallelism in ZeRO's stages over flat buckets, for any `nn.Module`.

What happens to one bucket in an optimizer step of several microbatches. Its replicas each hold P the parameters,
G the buffer of gradients and M masters and moments, whole; or p, g and m, the part of them that is theirs:

    stage  held    backward of a microbatch      of the last one also      update   publish
    0      P G M   G += its gradient             all-reduce G              M ← G
    1      P G m   G += its gradient             reduce-scatter G into g   m ← g    p ← m, all-gather p into P
    2      P g m   G = its gradient, borrowed;                             m ← g    p ← m, all-gather p into P
                   reduce-scatter G, g += it
    3      p g m   P gathered for forward and                              m ← g    p ← m
                   for backward, freed after;
                   G as in stage 2

In stage 1 g is a view into G, in stages 0 to 2 p is a view into P, and without a wider master m's weights are p.
Reductions run beside the backward pass that goes on: a bucket begins when its last gradient has come. A bucket with
one replica has nobody to share with and is kept as in stage 0, whatever the stage of the others.
(Rajbhandari et al. 2020, section 5.)

A unit is a submodule of one of the classes in `wrap`; what is in none, or in several, belongs to the root unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from triaxis.parallel.kernels.products import product_for
from triaxis.parallel.layers.declare import Layouts, declared
from triaxis.parallel.layers.gradient import Deferred, slot_of
from triaxis.parallel.replicas.bucket import Bucket, GradientPool
from triaxis.parallel.replicas.cut import Member, Segment, Sharding, fill_buckets, shard_range
from triaxis.parallel.replicas.data_parallel import squared_sum, sum_partial_gradients
from triaxis.parallel.replicas.initialize import Fill
from triaxis.parallel.replicas.limits import DEFAULT_BUCKET_ELEMENTS, REDUCTIONS_UNDER_WAY
from triaxis.parallel.replicas.reductions import ReductionQueue
from triaxis.parallel.replicas.units import Unit, Wrapping, group_parameters, hook_units
from triaxis.parallel.worlds.mesh import Mesh


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One module's buckets, and its units, which hold those buckets whose parameters are sharded."""

    buckets: list[Bucket]
    units: list[Unit]


def _member(parameter: nn.Parameter, layouts: Layouts, unit: int) -> Member:
    name, replicas = layouts[0].name, layouts[0].replicas
    assert all(layout.replicas == replicas for layout in layouts), f"pieces of {name} have other replicas"
    alone = any(layout.tied for layout in layouts)
    return Member(name, parameter.numel(), str(parameter.dtype), replicas, unit, alone)


class ZeroDataParallel:
    """The data-parallel state of a rank's modules (one per pipeline chunk).

    fill: gives each rank's part its initial values once it has its place in a bucket; None keeps the present values.
    Parameters on "meta" get their memory on the mesh's device, a bucket at a time, and never more than is kept of it.
    In each optimizer step: `start_step`, then per microbatch and chunk `start_backward`, backward and
    `finish_backward`, then `synchronize_gradients`, the update of every bucket's `master`, and `publish`.
    Gradients are summed, not averaged: the loss carries its scale.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        mesh: Mesh,
        *,
        stage: int,
        wrap: Wrapping | tuple[type[nn.Module], ...] = (),
        accumulate_dtype: torch.dtype | None = None,
        bucket_elements: int = DEFAULT_BUCKET_ELEMENTS,
        fill: Fill | None = None,
    ) -> None:
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"`zero` must be 0, 1, 2 or 3, but is {stage}")
        self._stage, self._mesh = stage, mesh
        self._accumulate_dtype, self._bucket_elements, self._fill = accumulate_dtype, bucket_elements, fill
        self._pool = GradientPool()
        self._nodes: list[object] = []
        # Only buckets that borrow a buffer for each reduction make memory grow with what is under way.
        self._under_way = {
            borrows: ReductionQueue[Bucket](REDUCTIONS_UNDER_WAY if borrows else None)
            for borrows in (True, False)
        }
        self._last = False
        numbers = count()
        self._chunks = [self._make_chunk(module, wrap, numbers) for module in modules]
        self.buckets = [bucket for chunk in self._chunks for bucket in chunk.buckets]

    def _make_chunk(
        self, module: nn.Module, wrap: Wrapping | tuple[type[nn.Module], ...], numbers: Iterator[int]
    ) -> _Chunk:
        grouped, layouts = group_parameters(module, wrap), declared(module)
        parameters = [(p, number) for number, (_, own) in enumerate(grouped) for p in own]
        members = [_member(parameter, layouts[parameter], unit) for parameter, unit in parameters]
        shardings = {
            name: Sharding.of(self._stage, self._mesh.named(name).size)
            for name in {member.replicas for member in members}
        }
        buckets, units = [], [Unit(owner) for owner, _ in grouped]
        for places in fill_buckets(members, self._bucket_elements, shardings):
            first = members[places[0]]
            held = {parameters[place][0]: layouts[parameters[place][0]] for place in places}
            bucket = self._make_bucket(held, first.replicas, shardings[first.replicas], next(numbers))
            buckets.append(bucket)
            unit = units[first.unit] if bucket.sharding.parameters else None
            if unit is not None:
                unit.buckets.append(bucket)
            self._hook_gradients(bucket, unit)
        if any(unit.buckets for unit in units):
            hook_units(units)
        return _Chunk(buckets, units)

    def _make_bucket(
        self, members: dict[nn.Parameter, Layouts], replicas: str, sharding: Sharding, number: int
    ) -> Bucket:
        # Masters, moments and sums are at least fp32: in 16 bits a small update would be rounded away.
        master = torch.promote_types(next(iter(members)).dtype, torch.float32)
        return Bucket(
            members,
            self._mesh.named(replicas),
            number=number,
            sharding=sharding,
            accumulate_dtype=self._accumulate_dtype or master,
            master_dtype=master,
            pool=self._pool,
            fill=self._fill,
            device=self._mesh.world.device,
            product=product_for(self._mesh.world.target),
        )

    def _hook_gradients(self, bucket: Bucket, unit: Unit | None) -> None:
        # A parameter's gradient is whole when autograd is done with its AccumulateGrad node: however often the
        # parameter was used, the node comes once, after the last use. The node is found behind any view of the
        # parameter, and a view needs the storage, which stage 3 frees from here on. A list keeps the nodes alive, since
        # a parameter alone holds its node by a weak reference and would come back with a new one.
        for member in bucket.members:
            node = member.expand_as(member).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            node.register_hook(self._completion(unit, bucket, member))  # type: ignore[union-attr]
            self._nodes.append(node)
        if bucket.sharding.parameters:
            bucket.release()

    def _completion(
        self, unit: Unit | None, bucket: Bucket, member: nn.Parameter
    ) -> Callable[[object, object], None]:
        slot = slot_of(member)
        assert slot is not None
        # Autograd holds a parameter through its node, unseen by the garbage collector, and the parameter holds this:
        # were `self`, which holds the node, held as well, a model and all its states would never be freed.
        ready = WeakMethod(self._bucket_ready)

        def told() -> None:
            if bucket.complete(slot) and (reduce := ready()) is not None:
                reduce(bucket)

        slot.on_complete = told

        def complete(_inputs: object, _outputs: object) -> None:
            # Weights put their product into the slot themselves; autograd brings what ordinary operators made.
            if member.grad is not None:
                slot.take(slot.add, member.grad)
                member.grad = None
            slot.finish()
            if unit is not None:
                unit.done_with(slot)

        return complete

    def _bucket_ready(self, bucket: Bucket) -> None:
        # A whole buffer takes all microbatches' gradients, and is reduced once; a borrowed one takes one's.
        if not bucket.sharding.gradients and not self._last:
            return
        bucket.start_reduce()
        for earlier in self._under_way[bucket.sharding.gradients].issue(bucket):
            earlier.finish_reduce()

    # One optimizer step.

    @property
    def reductions_under_way(self) -> int:
        """How many reductions may outlast the backward pass that began them; 0 if none does."""
        return REDUCTIONS_UNDER_WAY if any(bucket.sharding.gradients for bucket in self.buckets) else 0

    def start_step(self) -> None:
        for bucket in self.buckets:
            bucket.start_step()

    def start_backward(self, chunk: int, *, last: bool) -> None:
        """Before the backward pass of one microbatch through one chunk; `last`: no other follows in this step."""
        self._last = last
        for unit in self._chunks[chunk].units:
            unit.expect()
        for bucket in self._chunks[chunk].buckets:
            bucket.start_microbatch()

    def finish_backward(self, chunk: int) -> None:
        """After it: buckets with parameters that took no part are reduced too.

        All replicas must reduce alike, and a parameter may have taken part on another one (an expert without tokens).
        """
        for bucket in self._chunks[chunk].buckets:
            if bucket.pending:
                self._bucket_ready(bucket)
        for unit in self._chunks[chunk].units:
            unit.release_after_backward()

    def start_inputs(self, chunk: int) -> None:
        """Before a backward pass for the gradients of inputs alone: no gradient of a weight reaches a bucket.

        A bucket counts one backward pass at a time, and in stages 2 and 3 its buffer holds one microbatch: so all that
        concerns weights is put off, the smallest included, and buckets never see the difference.
        """
        later: Deferred = []
        for unit in self._chunks[chunk].units:
            unit.expect()
        for bucket in self._chunks[chunk].buckets:
            for slot in bucket.slots:
                slot.later = later

    def finish_inputs(self, chunk: int) -> Deferred:
        """After it: what is left to do, between `start_backward` and `finish_backward`."""
        left: Deferred = []
        for bucket in self._chunks[chunk].buckets:
            for slot in bucket.slots:
                assert slot.later is not None, "`start_inputs` comes first"
                left, slot.later = slot.later, None
        for unit in self._chunks[chunk].units:  # gradients of weights need no weights
            unit.release_after_backward()
        return left

    @torch.no_grad()
    def synchronize_gradients(self) -> None:
        """Waits for the reductions, then sums over the further axes that layouts declare (tp, tied stages)."""
        for queue in self._under_way.values():
            for bucket in queue.drain():
                bucket.finish_reduce()
        self._pool.clear()  # the update needs its memory for moments
        sum_partial_gradients(self.buckets, self._mesh)

    @torch.no_grad()
    def squared_norm(self) -> Tensor:
        """This rank's part of the squared gradient norm (float64): summed over all ranks, each element counts once."""
        runs = (run for bucket in self.buckets for run in self._counted_runs(bucket))
        return squared_sum(runs, self.buckets[0].master.device)

    @staticmethod
    def _counted_runs(bucket: Bucket) -> Iterator[Tensor]:
        # All replicas hold the same gradient where it is whole; each counts the part that would be its shard.
        low, high = 0, bucket.stop - bucket.start
        if not bucket.sharding.states:
            low, high = shard_range(bucket.padded_elements, bucket.group.size, bucket.group.rank)
        for segment in bucket.segments:
            if segment.layout.counted:
                start, stop = max(segment.start, low), min(segment.stop, high)
                if start < stop:
                    yield bucket.gradient_shard[start:stop]

    def publish(self) -> None:
        """The updated masters become the parameters of every rank."""
        for work in [bucket.start_publish() for bucket in self.buckets]:
            work.wait()

    def gathered_gradients(self) -> Iterator[tuple[Segment, Tensor]]:
        """Each piece's whole local gradient, on every data-parallel rank (for inspection)."""
        yield from self._gathered(lambda bucket: bucket.gradient_shard)

    def gathered_masters(self) -> Iterator[tuple[Segment, Tensor]]:
        """Each piece's whole local master weights, on every data-parallel rank (for inspection)."""
        yield from self._gathered(lambda bucket: bucket.master)

    @torch.no_grad()
    def _gathered(self, shard_of: Callable[[Bucket], Tensor]) -> Iterator[tuple[Segment, Tensor]]:
        for bucket in self.buckets:
            shard = shard_of(bucket)
            whole = shard
            if bucket.sharding.states:
                whole = shard.new_empty(bucket.padded_elements)
                bucket.group.all_gather(whole, shard, label="what is inspected")
            for segment in bucket.whole_segments():
                yield segment, whole[segment.start : segment.stop].view(segment.layout.local_shape)

    def computing_weights(self) -> Iterator[tuple[Segment, Tensor]]:
        """The flat weights that this rank computes with, piece by piece, where they are not its masters themselves."""
        for bucket in self.buckets:
            own_masters = not bucket.sharding.states and bucket.master is bucket.shard
            if not bucket.sharding.parameters and not own_masters:
                for segment in bucket.whole_segments():
                    yield segment, bucket.parameters[segment.start : segment.stop]

    def state_bytes(self) -> dict[str, int]:
        """Bytes that this rank's parameters, gradients and separate master weights take now."""
        sizes = {"parameters": 0, "gradients": 0, "masters": 0}
        for bucket in self.buckets:
            parameters = bucket.shard if bucket.sharding.parameters else bucket.parameters
            sizes["parameters"] += parameters.nbytes
            sizes["gradients"] += bucket.gradient_bytes()
            sizes["masters"] += 0 if bucket.master is bucket.shard else bucket.master.nbytes
        return sizes
