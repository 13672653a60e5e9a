"""Linear layers under tp: column parallel (several named weights, one product), row parallel, replicated.

Shapes: T tokens of the microbatch, I/O in and out features held here, D hidden. Under sequence parallelism the
layers' outside is [T/tp, D]: the first gathers the tokens, the second scatters the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from triaxis.parallel.layers.build import Build
from triaxis.parallel.layers.collectives import gather, reduction, start_gather
from triaxis.parallel.layers.declare import declare
from triaxis.parallel.layers.gradient import is_put_off, put_off, weight_gradient
from triaxis.parallel.places.layout import Init, ParameterLayout, replicated, slab
from triaxis.parallel.worlds.group import Group
from triaxis.parallel.worlds.mesh import Mesh


class _ColumnParallel(Function):
    """y_TO = x_TI · Wᵀ + b; the input's gradient is summed (or scattered) while the weight's is computed."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        input_TI: Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        group: Group,
        sequence_parallel: bool,
    ) -> Tensor:
        ctx.save_for_backward(input_TI)
        ctx.weight, ctx.group, ctx.sequence_parallel = weight, group, sequence_parallel
        whole_TI = gather(input_TI, group) if sequence_parallel else input_TI
        return F.linear(whole_TI, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        (input_TI,) = ctx.saved_tensors
        grad_TO, weight, group = grads[0].contiguous(), ctx.weight, ctx.group
        grad_bias = grad_TO.sum(0) if ctx.needs_input_grad[2] else None
        later = is_put_off(weight)
        gathers = ctx.sequence_parallel and not later  # the product with the inputs is what needs all of them
        whole_TI, gathered = start_gather(input_TI, group) if gathers else (input_TI, None)
        grad_TI = grad_TO @ weight
        if gathered is not None:
            gathered.wait()
        grad_input, reduced = reduction(ctx.sequence_parallel)(grad_TI, group)
        if later and ctx.sequence_parallel:
            put_off(weight, partial(_add_gathered, weight, group), grad_TO, input_TI)
            grad_weight = None
        else:
            grad_weight = weight_gradient(weight, grad_TO, whole_TI)
        reduced.wait()
        return grad_input, grad_weight, grad_bias, None, None


def _add_gathered(weight: nn.Parameter, group: Group, grad_TO: Tensor, input_TI: Tensor) -> None:
    weight_gradient(weight, grad_TO, gather(input_TI, group))


class _RowParallel(Function):
    """y = Σ_tp x_TI · Wᵀ: summed in forward; backward needs no sum (under sp it gathers the gradient)."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        input_TI: Tensor,
        weight: nn.Parameter,
        group: Group,
        sequence_parallel: bool,
    ) -> Tensor:
        ctx.save_for_backward(input_TI)
        ctx.weight, ctx.group, ctx.sequence_parallel = weight, group, sequence_parallel
        output, work = reduction(sequence_parallel)(F.linear(input_TI, weight), group)
        work.wait()
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        (input_TI,) = ctx.saved_tensors
        grad_TO = gather(grads[0], ctx.group) if ctx.sequence_parallel else grads[0].contiguous()
        grad_TI = grad_TO @ ctx.weight
        return grad_TI, weight_gradient(ctx.weight, grad_TO, input_TI), None, None


class _Replicated(Function):
    """y_TO = x_TI · Wᵀ, the same weight on every tensor rank: nothing is sent."""

    @staticmethod
    def forward(ctx: Any, input_TI: Tensor, weight: nn.Parameter) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(input_TI)
        ctx.weight = weight
        return F.linear(input_TI, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        (input_TI,) = ctx.saved_tensors
        grad_TO = grads[0].contiguous()
        return grad_TO @ ctx.weight, weight_gradient(ctx.weight, grad_TO, input_TI)


@dataclass(frozen=True, slots=True)
class Part:
    """One named weight of a column-parallel layer: global rows, cut along whole blocks (heads) if given."""

    name: str
    rows: int
    blocks: int | None = None


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a part's rows fall on this tensor rank: `copies` ranks in a row hold the same shard."""

    start: int
    rows: int
    copies: int


def _cut(part: Part, group: Group) -> _Cut:
    blocks = part.rows if part.blocks is None else part.blocks
    if blocks % group.size == 0:
        rows = part.rows // group.size
        return _Cut(group.rank * rows, rows, 1)
    if part.blocks is not None and group.size % blocks == 0:
        rows, copies = part.rows // blocks, group.size // blocks
        return _Cut(group.rank // copies * rows, rows, copies)
    unit = "rows" if part.blocks is None else "heads"
    raise ValueError(
        f"`tp` must divide the {blocks} {unit} of {part.name}"
        + ("" if part.blocks is None else " or be a multiple of them")
        + f", but is {group.size}"
    )


class ColumnParallelLinear(nn.Module):
    """Several weights that share an input, cut by rows over tp and multiplied as one.

    forward: [T, I] → [T, O], O the sum of the parts' local rows in order (`local_rows`).
    A part with fewer heads than tp is replicated on consecutive tensor ranks, its gradient summed over them.
    """

    def __init__(
        self,
        build: Build,
        parts: Sequence[Part],
        in_features: int,
        *,
        bias: bool = False,
        std: float = 0.02,
    ) -> None:
        super().__init__()
        mesh = build.mesh
        self.group, self.sequence_parallel = mesh.tp, build.sequence_parallel
        cuts = [_cut(part, mesh.tp) for part in parts]
        self.local_rows = [cut.rows for cut in cuts]
        size = sum(self.local_rows)
        self.weight = build.parameter(size, in_features)
        self.bias = build.parameter(size) if bias else None
        pieces = list(zip(parts, cuts, strict=True))
        declare(
            self.weight,
            *(_column_layout(mesh, p, c, (in_features,), Init.NORMAL, std) for p, c in pieces),
        )
        if self.bias is not None:
            declare(self.bias, *(_column_layout(mesh, p, c, (), Init.ZEROS, 0.0) for p, c in pieces))

    def forward(self, input_TI: Tensor) -> Tensor:
        return _ColumnParallel.apply(  # type: ignore[no-any-return, no-untyped-call]
            input_TI, self.weight, self.bias, self.group, self.sequence_parallel
        )


def _column_layout(
    mesh: Mesh, part: Part, cut: _Cut, inner: tuple[int, ...], init: Init, std: float
) -> ParameterLayout:
    partial: tuple[str, ...] = ()
    if cut.copies > 1:
        shards = mesh.tp.size // cut.copies
        partial = (mesh.subgroup(f"tp/{shards}", "tp", shards).name,)
    shape = (part.rows, *inner)
    offsets, sizes = slab(shape, 0, cut.start, cut.start + cut.rows)
    return ParameterLayout(
        name=f"{part.name}.{'weight' if inner else 'bias'}",
        shape=shape,
        offsets=offsets,
        sizes=sizes,
        local_shape=sizes,
        partial=partial,
        counted=mesh.tp.rank % cut.copies == 0,
        decayed=bool(inner),
        init=init,
        std=std,
    )


class ReplicatedLinear(nn.Module):
    """Several weights that share an input, whole on every tensor rank and multiplied as one; [T, I] → [T, O].

    Under sequence parallelism [T/tp, I] → [T/tp, O]: each rank multiplies its tokens, and the weights' gradients are
    summed over tp. Without it all ranks do the same, and must be given the whole gradient.
    """

    def __init__(self, build: Build, parts: Sequence[Part], in_features: int, *, std: float = 0.02) -> None:
        super().__init__()
        self.weight = build.parameter(sum(part.rows for part in parts), in_features)
        layouts = [
            replicated(
                f"{part.name}.weight",
                (part.rows, in_features),
                build.mesh.tp.rank,
                sequence_parallel=build.sequence_parallel,
                decayed=True,
                init=Init.NORMAL,
                std=std,
            )
            for part in parts
        ]
        declare(self.weight, *layouts)

    def forward(self, input_TI: Tensor) -> Tensor:
        return _Replicated.apply(input_TI, self.weight)  # type: ignore[no-any-return, no-untyped-call]


class RowParallelLinear(nn.Module):
    """One weight cut by columns over tp; [T, I] → [T, O], or [T/tp, O] under sequence parallelism."""

    def __init__(
        self,
        build: Build,
        name: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        std: float = 0.02,
    ) -> None:
        super().__init__()
        mesh = build.mesh
        self.group, self.sequence_parallel = mesh.tp, build.sequence_parallel
        if in_features % mesh.tp.size:
            raise ValueError(f"`tp` must divide the {in_features} inputs of {name}, but is {mesh.tp.size}")
        size = in_features // mesh.tp.size
        shape = (out_features, in_features)
        offsets, sizes = slab(shape, 1, mesh.tp.rank * size, (mesh.tp.rank + 1) * size)
        self.weight = declare(
            build.parameter(out_features, size),
            ParameterLayout(
                name=f"{name}.weight",
                shape=shape,
                offsets=offsets,
                sizes=sizes,
                local_shape=sizes,
                outermost=1,
                std=std,
            ),
        )
        self.bias = build.parameter(out_features) if bias else None
        if self.bias is not None:
            layout = replicated(
                f"{name}.bias",
                (out_features,),
                mesh.tp.rank,
                sequence_parallel=build.sequence_parallel,
                init=Init.ZEROS,
            )
            declare(self.bias, layout)

    def forward(self, input_TI: Tensor) -> Tensor:
        output: Tensor = _RowParallel.apply(  # type: ignore[no-untyped-call]
            input_TI, self.weight, self.group, self.sequence_parallel
        )
        return output if self.bias is None else output + self.bias
