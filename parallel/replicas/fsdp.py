"""torch's `fully_shard` (FSDP2) behind the interface of `ZeroDataParallel`; process world only.

Each unit's parameters are gathered before it runs and freed after, in both directions; the parameters that stay
are the master weights. Gradients add up unsharded over an optimizer step's microbatches and are
reduce-scattered in the last one. FSDP cuts every parameter along dimension 0, unevenly where it must.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from triaxis.parallel.layers.declare import declared
from triaxis.parallel.layers.gradient import Deferred
from triaxis.parallel.places.layout import ParameterLayout
from triaxis.parallel.programs.program import MemoryKind
from triaxis.parallel.replicas.cut import Segment, cut_segments
from triaxis.parallel.replicas.data_parallel import squared_sum, sum_partial_gradients
from triaxis.parallel.replicas.initialize import Fill
from triaxis.parallel.replicas.units import Wrapping, group_parameters
from triaxis.parallel.worlds.group import Group
from triaxis.parallel.worlds.mesh import Mesh


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, flat, in the same memory."""
    assert isinstance(tensor, DTensor)
    with torch.no_grad():
        return tensor.to_local().view(-1)


class FsdpShard:
    """One parameter's shard: whole rows, ceil(rows / dp) on each rank until none are left.

    Example: 5 rows of 4 over dp=2, of pieces with 2 and 3 rows: rank 0 holds elements [0, 12), segments [0, 8) and
    [8, 12); rank 1 holds [12, 20), one segment [0, 8) of the second piece, from its element 4.
    """

    def __init__(
        self, number: int, parameter: nn.Parameter, layouts: Sequence[ParameterLayout], group: Group
    ) -> None:
        self.number, self.parameter, self.group = number, parameter, group
        self._pieces: list[tuple[int, ParameterLayout]] = []
        self._elements = 0
        for layout in layouts:
            self._pieces.append((self._elements, layout))
            self._elements += layout.elements
        rows = parameter.shape[0]
        self._rank_elements = -(-rows // group.size) * (self._elements // rows)
        self.padded_elements = group.size * self._rank_elements
        start = min(group.rank * self._rank_elements, self._elements)
        self.master = _local(parameter)
        self.segments = cut_segments(self._pieces, start, start + self.master.numel())
        self.gradient_shard = self.master.new_empty(0)

    @property
    def pieces(self) -> tuple[tuple[int, ParameterLayout], ...]:
        """Each piece's first element in the parameter, and its layout."""
        return tuple(self._pieces)

    @property
    def shards(self) -> int:
        """Into how many parts the parameter is cut."""
        return self.group.size

    def move_master(self, moved: Callable[[Tensor], Tensor]) -> None:
        """Nothing: the masters are torch's own parameters."""

    def reductions(self, microbatches: int) -> int:
        """None that a group sees: torch's own hooks reduce."""
        return 0

    def states(self) -> Iterator[tuple[MemoryKind, Tensor]]:
        """The parameters, which are their own masters; gradients come and go with each step."""
        yield MemoryKind.PARAMETERS, self.master

    def drop_gradient(self) -> None:
        self.parameter.grad = None
        self.gradient_shard = self.master.new_empty(0)

    def take_gradient(self) -> None:
        """A parameter that took no part has a gradient of zero."""
        grad = self.parameter.grad
        self.gradient_shard = torch.zeros_like(self.master) if grad is None else _local(grad)

    def gathered(self, shard: Tensor) -> Iterator[tuple[Segment, Tensor]]:
        """Each piece, whole, of what `shard` is a shard of. Collective on the data-parallel axis."""
        padded = shard.new_zeros(self._rank_elements)
        padded[: shard.numel()] = shard
        whole = shard.new_empty(self.padded_elements)
        self.group.all_gather(whole, padded, label="what is inspected")
        for segment in cut_segments(self._pieces, 0, self._elements):
            yield segment, whole[segment.start : segment.stop].view(segment.layout.local_shape)


class FsdpDataParallel:
    """The data-parallel state of a rank's modules (one per pipeline chunk), sharded by torch.

    wrap: classes whose modules are units; a module that shares a parameter with another belongs to the root unit
    fill: gives each rank's rows their initial values once they are sharded; None keeps the present values
    accumulate_dtype: in which gradients add up and are reduced; None is the master weights' precision
    Gradients are summed, not averaged: the loss carries its scale.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        mesh: Mesh,
        *,
        wrap: Wrapping | tuple[type[nn.Module], ...] = (),
        accumulate_dtype: torch.dtype | None = None,
        fill: Fill | None = None,
    ) -> None:
        if mesh.replicas is not mesh.dp:
            raise ValueError(
                "`data_parallel` fsdp must shard over dp alone, but the replicas are dp × cp; use data_parallel zero"
            )
        device_mesh = mesh.device_mesh()["dp"]
        self._mesh = mesh
        self._roots: list[FSDPModule] = []
        self.buckets: list[FsdpShard] = []
        for module in modules:
            layouts = list(declared(module).values())
            dtype = next(module.parameters()).dtype
            policy = _widen(module, accumulate_dtype)
            units = [
                unit
                for unit, own in group_parameters(module, wrap)[1:]
                if len(own) == len(list(unit.parameters()))
            ]
            for unit in (*units, module):  # the root last: it takes what is left
                root = fully_shard(unit, mesh=device_mesh, mp_policy=policy, reshard_after_forward=True)
                root.set_gradient_divide_factor(1.0)
                root.set_force_sum_reduction_for_comms(True)
            self._roots.append(root)
            _give_memory(module, mesh.world.device)
            shards = [
                FsdpShard(number, parameter, pieces, mesh.dp)
                for number, (parameter, pieces) in enumerate(
                    zip(module.parameters(), layouts, strict=True), start=len(self.buckets)
                )
            ]
            if fill is not None:
                for shard in shards:
                    _fill(shard, fill, dtype)
            self.buckets += shards

    @property
    def reductions_under_way(self) -> int:
        """None: the last microbatch's backward pass ends with its reductions."""
        return 0

    def start_step(self) -> None:
        for bucket in self.buckets:
            bucket.drop_gradient()

    def start_backward(self, chunk: int, *, last: bool) -> None:
        """Before the backward pass of one microbatch through one chunk; `last`: no other follows in this step."""
        self._roots[chunk].set_requires_gradient_sync(last)
        self._roots[chunk].set_is_last_backward(last)

    def finish_backward(self, chunk: int) -> None:
        """Nothing: torch's own hooks end a backward pass."""

    def start_inputs(self, chunk: int) -> None:
        raise NotImplementedError("torch's fully_shard cannot put the gradients of weights off")

    def finish_inputs(self, chunk: int) -> Deferred:
        raise NotImplementedError("torch's fully_shard cannot put the gradients of weights off")

    @torch.no_grad()
    def synchronize_gradients(self) -> None:
        """Takes the reduced gradients and sums them over the further axes that layouts declare."""
        for bucket in self.buckets:
            bucket.take_gradient()
        sum_partial_gradients(self.buckets, self._mesh)

    @torch.no_grad()
    def squared_norm(self) -> Tensor:
        """This rank's part of the squared gradient norm (float64): summed over all ranks, each element counts once."""
        return squared_sum(
            (
                bucket.gradient_shard[segment.start : segment.stop]
                for bucket in self.buckets
                for segment in bucket.segments
                if segment.layout.counted
            ),
            self.buckets[0].master.device,
        )

    def publish(self) -> None:
        """Nothing: the next gather sends the updated masters."""

    def gathered_gradients(self) -> Iterator[tuple[Segment, Tensor]]:
        """Each piece's whole local gradient, on every data-parallel rank (for inspection)."""
        for bucket in self.buckets:
            yield from bucket.gathered(bucket.gradient_shard)

    def gathered_masters(self) -> Iterator[tuple[Segment, Tensor]]:
        """Each piece's whole local master weights, on every data-parallel rank (for inspection)."""
        for bucket in self.buckets:
            yield from bucket.gathered(bucket.master)

    def computing_weights(self) -> Iterator[tuple[Segment, Tensor]]:
        """None: every rank holds a part of its own, which is the master."""
        yield from ()

    def state_bytes(self) -> dict[str, int]:
        """Bytes that this rank's parameters and gradients take between steps; parameters are their own masters."""
        return {
            "parameters": sum(bucket.master.nbytes for bucket in self.buckets),
            "gradients": sum(bucket.gradient_shard.nbytes for bucket in self.buckets),
            "masters": 0,
        }


@torch.no_grad()
def _widen(module: nn.Module, accumulate_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """Makes the parameters master weights; torch casts them back to the model's precision."""
    declarations = declared(module)
    dtype = next(iter(declarations)).dtype
    master = torch.promote_types(dtype, torch.float32)
    for parameter in declarations:
        parameter.data = parameter.data.to(master)
    return MixedPrecisionPolicy(
        param_dtype=None if dtype == master else dtype,
        reduce_dtype=accumulate_dtype or master,
        cast_forward_inputs=False,
    )


@torch.no_grad()
def _give_memory(module: nn.Module, device: torch.device) -> None:
    """Gives this rank's rows of parameters that were sharded without memory theirs, as zeros."""
    module._apply(lambda held: torch.zeros_like(held, device=device) if held.device.type == "meta" else held)


@torch.no_grad()
def _fill(shard: FsdpShard, fill: Fill, dtype: torch.dtype) -> None:
    """First values of this rank's rows, rounded to the model's precision as everywhere."""
    for segment in shard.segments:
        run = shard.master[segment.start : segment.stop]
        rounded = run.to(dtype)
        fill(segment.layout, rounded, segment.first)
        run.copy_(rounded)
