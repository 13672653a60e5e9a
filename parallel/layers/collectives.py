"""Token-wise collectives: tensors [T, …] cut along the tokens, whole on every rank, or partial sums.

Out-of-place forms of the group's operations; a group of one returns its argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function

from triaxis.parallel.worlds.group import DONE, Group, Work


def start_gather(shard: Tensor, group: Group) -> tuple[Tensor, Work]:
    """V → R: [T/n, …] to [T, …], asynchronously."""
    if group.size == 1:
        return shard, DONE
    whole = shard.new_empty(shard.shape[0] * group.size, *shard.shape[1:])
    return whole, group.all_gather(whole, shard.contiguous(), asynchronous=True)


def start_scatter(partial: Tensor, group: Group) -> tuple[Tensor, Work]:
    """P → V: [T, …] to the sum's [T/n, …], asynchronously. `partial` is consumed."""
    if group.size == 1:
        return partial, DONE
    shard = partial.new_empty(partial.shape[0] // group.size, *partial.shape[1:])
    return shard, group.reduce_scatter(shard, partial.contiguous(), asynchronous=True)


def start_sum(partial: Tensor, group: Group) -> tuple[Tensor, Work]:
    """P → R, in place, asynchronously."""
    return partial, group.all_reduce(partial, asynchronous=True)


def gather(shard: Tensor, group: Group) -> Tensor:
    whole, work = start_gather(shard, group)
    work.wait()
    return whole


Reduction = Callable[[Tensor, Group], tuple[Tensor, Work]]


def reduction(sequence_parallel: bool) -> Reduction:
    """How a row-parallel output's partial sums are combined."""
    return start_scatter if sequence_parallel else start_sum


class _SplitTokens(Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, group: Group) -> Tensor:  # noqa: ANN401
        ctx.group = group
        return hidden_TD.chunk(group.size, dim=0)[group.rank].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return gather(grads[0], ctx.group), None


def split_tokens(hidden_TD: Tensor, group: Group) -> Tensor:
    """R → V: this rank's part of the tokens. Backward gathers the parts (V → R)."""
    if group.size == 1:
        return hidden_TD
    return _SplitTokens.apply(hidden_TD, group)  # type: ignore[no-any-return, no-untyped-call]


class _Shared(Function):
    @staticmethod
    def forward(ctx: Any, part_TD: Tensor, group: Group, sequence_parallel: bool) -> Tensor:  # noqa: ANN401
        ctx.group, ctx.reduce = group, reduction(sequence_parallel)
        whole_TD = gather(part_TD, group) if sequence_parallel else part_TD
        return whole_TD.clone() if whole_TD is part_TD else whole_TD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        reduced_TD, work = ctx.reduce(grads[0].contiguous(), ctx.group)
        work.wait()
        return reduced_TD, None, None


def shared_by_ranks(part_TD: Tensor, group: Group, sequence_parallel: bool) -> Tensor:
    """V → R under sequence parallelism, else R → R: a fresh tensor that each rank's own heads read.

    Each rank's gradient is that of its heads alone, so backward sums: P → V, or P → R.
    """
    return _Shared.apply(part_TD, group, sequence_parallel)  # type: ignore[no-any-return, no-untyped-call]
