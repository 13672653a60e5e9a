"""Token-wise collectives: tensors [T, …] cut along the tokens, whole on every rank, or partial sums.

Out-of-place forms of the group's operations; a group of one returns its argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
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


def part_of(whole: Tensor, group: Group) -> Tensor:
    """This rank's equal part of a flat tensor, as a view."""
    size = whole.numel() // group.size
    return torch.narrow(whole, 0, group.rank * size, size)
