"""Data parallelism in ZeRO's stages over flat buckets, for any `nn.Module`.

    0: gradients all-reduced            1: optimizer states sharded, gradients reduce-scattered once a step
    2: gradients sharded, reduced bucket by bucket while backward runs
    3: parameters sharded too, gathered before a unit runs and freed after, the next one prefetched

A unit is a submodule of one of the classes in `wrap`; what is in none, or in several, belongs to the root unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from triaxis.parallel.layers.declare import Layouts, declared
from triaxis.parallel.layers.gradient import slot_of
from triaxis.parallel.replicas.bucket import Bucket, GradientPool
from triaxis.parallel.replicas.cut import Member, Segment, Sharding, fill_buckets
from triaxis.parallel.replicas.data_parallel import squared_sum, sum_partial_gradients
from triaxis.parallel.replicas.initialize import Fill
from triaxis.parallel.replicas.limits import DEFAULT_BUCKET_ELEMENTS, REDUCTIONS_UNDER_WAY
from triaxis.parallel.replicas.reductions import ReductionQueue
from triaxis.parallel.worlds.group import Group
from triaxis.parallel.worlds.mesh import Mesh


@dataclass(slots=True)
class Unit:
    """A submodule whose parameters are gathered and freed together."""

    module: nn.Module
    buckets: list[Bucket] = field(default_factory=list)
    in_backward: bool = False


def group_parameters(
    module: nn.Module, wrap: tuple[type[nn.Module], ...]
) -> list[tuple[nn.Module, list[nn.Parameter]]]:
    """Each unit's module and its own parameters, the root first; every parameter once."""
    units = [m for m in module.modules() if m is not module and isinstance(m, wrap)]
    uses: dict[nn.Parameter, int] = {}
    for unit in units:
        for parameter in unit.parameters():
            uses[parameter] = uses.get(parameter, 0) + 1
    root = [p for p in module.parameters() if uses.get(p, 0) != 1]
    return [(module, root)] + [(u, [p for p in u.parameters() if uses[p] == 1]) for u in units]


def _member(parameter: nn.Parameter, layouts: Layouts, group: Group, unit: int) -> Member:
    alone = any(layout.tied for layout in layouts)
    return Member(layouts[0].name, parameter.numel(), str(parameter.dtype), group.name, unit, alone)


class ZeroDataParallel:
    """The data-parallel state of a rank's modules (one per pipeline chunk).

    fill: gives each piece its initial values once it has its place in a bucket; None keeps the present values.
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
        wrap: tuple[type[nn.Module], ...] = (),
        accumulate_dtype: torch.dtype | None = None,
        bucket_elements: int = DEFAULT_BUCKET_ELEMENTS,
        fill: Fill | None = None,
    ) -> None:
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"`zero` must be 0, 1, 2 or 3, but is {stage}")
        self.group, self._mesh = mesh.replicas, mesh
        self.stage = stage if self.group.size > 1 else 0  # sharding over one rank is no sharding
        self._pool = GradientPool()
        self._nodes: list[object] = []
        self._under_way = ReductionQueue[Bucket](REDUCTIONS_UNDER_WAY if self.stage >= 2 else None)
        self._last = False
        self._units: list[list[Unit]] = []
        numbers = count()
        for module in modules:
            units = self._make_units(module, wrap, accumulate_dtype, bucket_elements, fill, numbers)
            self._units.append(units)
            self._hook_gradients(units)
            if self.stage == 3:
                for index in range(len(units)):
                    self._hook_parameters(units, index)
        self.buckets = [b for units in self._units for unit in units for b in unit.buckets]

    def _make_units(
        self,
        module: nn.Module,
        wrap: tuple[type[nn.Module], ...],
        accumulate_dtype: torch.dtype | None,
        bucket_elements: int,
        fill: Fill | None,
        numbers: Iterator[int],
    ) -> list[Unit]:
        grouped = group_parameters(module, wrap)
        units = [Unit(owner) for owner, _ in grouped] if self.stage == 3 else [Unit(module)]
        parameters = [(p, number) for number, (_, own) in enumerate(grouped) for p in own]
        layouts = declared(module)
        records = [_member(parameter, layouts[parameter], self.group, unit) for parameter, unit in parameters]
        shardings = {self.group.name: Sharding.of(self.stage, self.group.size)}
        for places in fill_buckets(records, bucket_elements, shardings):
            members = [parameters[place][0] for place in places]
            master = torch.promote_types(members[0].dtype, torch.float32)
            bucket = Bucket(
                {member: layouts[member] for member in members},
                self.group,
                number=next(numbers),
                stage=self.stage,
                accumulate_dtype=accumulate_dtype or master,
                master_dtype=master,
                pool=self._pool,
                fill=fill,
            )
            units[records[places[0]].unit if self.stage == 3 else 0].buckets.append(bucket)
        return units

    def _hook_gradients(self, units: Sequence[Unit]) -> None:
        for unit in units:
            for bucket in unit.buckets:
                for member in bucket.members:
                    bucket.gather()
                    node = member.expand_as(member).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
                    node.register_hook(self._completion(unit, bucket, member))  # type: ignore[union-attr]
                    self._nodes.append(node)
                if self.stage == 3:
                    bucket.release()

    def _completion(
        self, unit: Unit, bucket: Bucket, member: nn.Parameter
    ) -> Callable[[object, object], None]:
        slot = slot_of(member)
        assert slot is not None

        def complete(_inputs: object, _outputs: object) -> None:
            if member.grad is not None:
                slot.add(member.grad)
                member.grad = None
            if bucket.complete(slot):
                self._bucket_ready(bucket)
                if self.stage == 3 and all(b.pending == 0 for b in unit.buckets):
                    self._release_after_backward(unit)

        return complete

    def _bucket_ready(self, bucket: Bucket) -> None:
        if self.stage < 2 and not self._last:
            return
        bucket.start_reduce()
        for earlier in self._under_way.issue(bucket):
            earlier.finish_reduce()

    # Stage 3: a unit's parameters come before it runs and go after, in both directions.

    def _hook_parameters(self, units: Sequence[Unit], index: int) -> None:
        unit = units[index]

        def before_forward(_module: nn.Module, _inputs: object) -> None:
            self._gather(unit, units[index + 1] if index + 1 < len(units) and not unit.in_backward else None)

        def after_forward(_module: nn.Module, _inputs: object, output: object) -> None:
            if unit.in_backward:  # recomputed: the backward pass needs them next
                return
            for bucket in unit.buckets:
                bucket.release()
            for made in tree_leaves(output):  # whichever of them backward reaches first
                if isinstance(made, Tensor) and made.requires_grad:
                    made.register_hook(before_backward)

        def before_backward(_grad: Tensor) -> None:
            unit.in_backward = True
            self._gather(unit, units[index - 1] if index > 1 else None)

        unit.module.register_forward_pre_hook(before_forward)
        unit.module.register_forward_hook(after_forward)

    @staticmethod
    def _gather(unit: Unit, following: Unit | None) -> None:
        for bucket in unit.buckets:
            bucket.start_gather()
        if following is not None:
            for bucket in following.buckets:
                bucket.start_gather()
        for bucket in unit.buckets:
            bucket.gather()

    @staticmethod
    def _release_after_backward(unit: Unit) -> None:
        unit.in_backward = False
        for bucket in unit.buckets:
            bucket.release()

    # One optimizer step.

    @property
    def reductions_under_way(self) -> int:
        """How many reductions may outlast the backward pass that began them; 0 if none does."""
        return REDUCTIONS_UNDER_WAY if self.stage >= 2 else 0

    def start_step(self) -> None:
        for bucket in self.buckets:
            bucket.start_step()

    def start_backward(self, chunk: int, *, last: bool) -> None:
        """Before the backward pass of one microbatch through one chunk; `last`: no other follows in this step."""
        self._last = last
        for unit in self._units[chunk]:
            for bucket in unit.buckets:
                bucket.start_microbatch()

    def finish_backward(self, chunk: int) -> None:
        """After it: buckets with parameters that took no part are reduced too."""
        for unit in self._units[chunk]:
            for bucket in unit.buckets:
                if bucket.pending:
                    self._bucket_ready(bucket)
            if self.stage == 3:
                self._release_after_backward(unit)

    @torch.no_grad()
    def synchronize_gradients(self) -> None:
        """Waits for the reductions, then sums over the further axes that layouts declare (tp, tied stages)."""
        for bucket in self._under_way.drain():
            bucket.finish_reduce()
        self._pool.clear()
        sum_partial_gradients(self.buckets, self._mesh)

    @torch.no_grad()
    def squared_norm(self) -> Tensor:
        """This rank's part of the squared gradient norm (float64): summed over all ranks, each element counts once."""
        runs = (run for bucket in self.buckets for run in self._counted_runs(bucket))
        return squared_sum(runs, self.buckets[0].master.device)

    def _counted_runs(self, bucket: Bucket) -> Iterator[Tensor]:
        size = bucket.padded_elements // self.group.size
        low = 0 if self.stage else self.group.rank * size
        for segment in bucket.segments:
            if segment.layout.counted:
                start, stop = max(segment.start, low), min(segment.stop, low + size)
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
            if self.stage:
                whole = shard.new_empty(bucket.padded_elements)
                self.group.all_gather(whole, shard, label="what is inspected")
            for segment in bucket.whole_segments():
                yield segment, whole[segment.start : segment.stop].view(segment.layout.local_shape)

    def computing_weights(self) -> Iterator[tuple[Segment, Tensor]]:
        """The flat weights that this rank computes with, piece by piece, where they are not its masters themselves."""
        for bucket in self.buckets:
            own_masters = self.stage == 0 and bucket.master is bucket.shard
            if self.stage != 3 and not own_masters:
                for segment in bucket.whole_segments():
                    yield segment, bucket.parameters[segment.start : segment.stop]

    def state_bytes(self) -> dict[str, int]:
        """Bytes that this rank's parameters, gradients and separate master weights take now."""
        sizes = {"parameters": 0, "gradients": 0, "masters": 0}
        for bucket in self.buckets:
            parameters = bucket.shard if self.stage == 3 else bucket.parameters
            sizes["parameters"] += parameters.nbytes
            sizes["gradients"] += bucket.gradient_bytes()
            sizes["masters"] += 0 if bucket.master is bucket.shard else bucket.master.nbytes
        return sizes
