"""Experts over ranks: rows that travel to the ranks of their experts and back, and products by groups of rows.

Nothing is dropped: every row goes to each expert that it chose, however uneven the load. One `Exchange` serves four
movements, since what brings rows back is the adjoint of what sent them:

    forward    rows → experts (send)      outputs → rows' ranks (back)
    backward   gradients of outputs go as rows went, gradients of rows come as outputs came

Shapes: R rows sent (tokens × experts chosen), S rows received, E experts of the layer, P ranks of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function

from triaxis.parallel.layers.collectives import gather, reduction, split_tokens
from triaxis.parallel.layers.gradient import grouped_weight_gradient, weight_gradient
from triaxis.parallel.worlds.group import Group, World


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """How a rank's rows travel in one layer. Every rank of the group holds consecutive experts, equally many.

    sent, received: rows to and from each rank of the group
    counts: rows of each expert held here, over all ranks
    arrival_S: for each row in the order of experts, where it stands in the order of arrival
    """

    group: Group
    sent: tuple[int, ...]
    received: tuple[int, ...]
    counts: tuple[int, ...]
    arrival_S: Tensor


def plan_exchange(counts_E: Tensor, rows: int, group: Group, world: World) -> Exchange:
    """Tells each rank of the group how many rows it will get for each of its experts. One all-to-all of integers.

    counts_E: this rank's rows for each expert, `rows` in all. The host reads the counts: the layer's one wait.
    """
    experts = counts_E.numel() // group.size
    arriving_E = torch.empty_like(counts_E)
    group.all_to_all(arriving_E, counts_E, label="rows for each expert")
    sent = world.host_counts(counts_E, rows)
    received = world.host_counts(arriving_E, rows)
    by_rank = [received[place * experts : (place + 1) * experts] for place in range(group.size)]
    return Exchange(
        group=group,
        sent=tuple(sum(sent[place * experts : (place + 1) * experts]) for place in range(group.size)),
        received=tuple(map(sum, by_rank)),
        counts=tuple(map(sum, zip(*by_rank, strict=True))),
        arrival_S=_arrival(by_rank, counts_E.device),
    )


def _arrival(by_rank: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Rows arrive by rank and then expert, and are multiplied by expert and then rank: the order between the two.

    Example: two ranks that send (2, 1) and (0, 3) rows for two experts: 0 1 | 2 3 4 5, expert 0's rows first.
    """
    starts: list[list[int]] = []
    start = 0
    for counts in by_rank:
        starts.append([])
        for count in counts:
            starts[-1].append(start)
            start += count
    runs = [
        np.arange(starts[rank][expert], starts[rank][expert] + counts[expert])
        for expert in range(len(by_rank[0]))
        for rank, counts in enumerate(by_rank)
    ]
    return torch.from_numpy(np.concatenate(runs)).to(device)


def _send(rows: Tensor, exchange: Exchange) -> Tensor:
    """V → V over the group: rows in the order of experts, to the ranks that hold them, in the order of experts."""
    group = exchange.group
    if group.size == 1:
        return rows
    arrived = rows.new_empty(sum(exchange.received), *rows.shape[1:])
    group.all_to_all(
        arrived,
        rows.contiguous(),
        output_rows=exchange.received,
        input_rows=exchange.sent,
        label="rows to experts",
    )
    return arrived[exchange.arrival_S]


def _bring_back(rows: Tensor, exchange: Exchange) -> Tensor:
    """V → V over the group: the adjoint and the inverse of `_send`."""
    group = exchange.group
    if group.size == 1:
        return rows
    leaving = torch.empty_like(rows)
    leaving[exchange.arrival_S] = rows
    back = rows.new_empty(sum(exchange.sent), *rows.shape[1:])
    group.all_to_all(
        back, leaving, output_rows=exchange.sent, input_rows=exchange.received, label="rows from experts"
    )
    return back


class _Move(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange, back: bool) -> Tensor:  # noqa: ANN401
        ctx.exchange, ctx.back = exchange, back
        return _bring_back(rows, exchange) if back else _send(rows, exchange)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        move = _send if ctx.back else _bring_back
        return move(grads[0], ctx.exchange), None, None


def send_to_experts(rows: Tensor, exchange: Exchange) -> Tensor:
    """[R, …] → [S, …] in the order of this rank's experts. Backward brings the gradients back."""
    return _Move.apply(rows, exchange, False)  # type: ignore[no-any-return, no-untyped-call]


def bring_back(rows: Tensor, exchange: Exchange) -> Tensor:
    """[S, …] → [R, …] in the order in which the rows were sent. Backward sends the gradients."""
    return _Move.apply(rows, exchange, True)  # type: ignore[no-any-return, no-untyped-call]


def grouped_product(rows_SI: Tensor, weight_EOI: Tensor, counts: Sequence[int]) -> Tensor:
    """Rows in the order of experts, each times its expert's weight transposed: [S, I] → [S, O].

    A loop of products on CPUs (in any precision); one grouped kernel for bf16 on CUDA.
    """
    if rows_SI.is_cuda and rows_SI.dtype is torch.bfloat16:
        ends = torch.tensor(counts, device=rows_SI.device, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return torch._grouped_mm(rows_SI, weight_EOI.transpose(1, 2), offs=ends)
    output_SO = rows_SI.new_empty(rows_SI.shape[0], weight_EOI.shape[1])
    start = 0
    for expert, count in enumerate(counts):
        stop = start + count
        if count:
            torch.mm(rows_SI[start:stop], weight_EOI[expert].t(), out=output_SO[start:stop])
        start = stop
    return output_SO


class _GroupedLinear(Function):
    """y = x · W_eᵀ for the rows of each expert e; an expert without rows gets a gradient of exactly zero."""

    @staticmethod
    def forward(ctx: Any, rows_SI: Tensor, weight: nn.Parameter, counts: tuple[int, ...]) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(rows_SI)
        ctx.weight, ctx.counts = weight, counts
        return grouped_product(rows_SI, weight.view(len(counts), -1, weight.shape[1]), counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        (rows_SI,) = ctx.saved_tensors
        grad_SO, weight, counts = grads[0].contiguous(), ctx.weight, ctx.counts
        weight_EOI = weight.view(len(counts), -1, weight.shape[1])
        grad_SI = grouped_product(grad_SO, weight_EOI.transpose(1, 2), counts)
        return grad_SI, grouped_weight_gradient(weight, grad_SO, rows_SI, counts), None


def grouped_linear(rows_SI: Tensor, weight: nn.Parameter, counts: tuple[int, ...]) -> Tensor:
    """[S, I] → [S, O]. weight: [experts · O, I], experts one below the other; counts: rows of each, in order."""
    return _GroupedLinear.apply(rows_SI, weight, counts)  # type: ignore[no-any-return, no-untyped-call]


class _TakeRows(Function):
    """Each token once for each expert that it chose; backward sums a token's rows in the order of its choices."""

    @staticmethod
    def forward(ctx: Any, tokens_TD: Tensor, order_R: Tensor, chosen: int) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(order_R)
        ctx.chosen = chosen
        return tokens_TD[order_R // chosen]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        (order_R,) = ctx.saved_tensors
        return _unsorted(grads[0], order_R).unflatten(0, (-1, ctx.chosen)).sum(1), None, None


class _ReturnRows(Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, order_R: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(order_R)
        return _unsorted(rows_RD, order_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        (order_R,) = ctx.saved_tensors
        return grads[0][order_R], None


def _unsorted(rows_RD: Tensor, order_R: Tensor) -> Tensor:
    """Rows back in the order before the sort: a plain copy, where adding by index would be in no fixed order."""
    back_RD = torch.empty_like(rows_RD)
    back_RD[order_R] = rows_RD
    return back_RD


def take_rows(tokens_TD: Tensor, order_R: Tensor, chosen: int) -> Tensor:
    """[T, D] → [T · chosen, D]: rows in the order of experts. order_R: for each row, token · chosen + choice."""
    return _TakeRows.apply(tokens_TD, order_R, chosen)  # type: ignore[no-any-return, no-untyped-call]


def return_rows(rows_RD: Tensor, order_R: Tensor) -> Tensor:
    """Rows in the order of experts → in the order of tokens and choices."""
    return _ReturnRows.apply(rows_RD, order_R)  # type: ignore[no-any-return, no-untyped-call]


class _Router(Function):
    """Logits in fp32 at least, whatever the hidden state is in: a rounded score would send a token elsewhere."""

    @staticmethod
    def forward(ctx: Any, tokens_TD: Tensor, weight: nn.Parameter) -> Tensor:  # noqa: ANN401
        dtype = torch.promote_types(tokens_TD.dtype, torch.float32)
        ctx.save_for_backward(tokens_TD)
        ctx.weight = weight
        return tokens_TD.to(dtype) @ weight.to(dtype).t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        (tokens_TD,) = ctx.saved_tensors
        grad_TE = grads[0]
        grad_TD = (grad_TE @ ctx.weight.to(grad_TE.dtype)).to(tokens_TD.dtype)
        product_ED = weight_gradient(ctx.weight, grad_TE, tokens_TD.to(grad_TE.dtype))
        return grad_TD, None if product_ED is None else product_ED.to(ctx.weight.dtype)


def router_logits(tokens_TD: Tensor, weight: nn.Parameter) -> Tensor:
    """[T, D] → [T, experts]."""
    return _Router.apply(tokens_TD, weight)  # type: ignore[no-any-return, no-untyped-call]


# How tokens come to the experts and go again. Where experts are cut over tp (ep 1), every tensor rank has all tokens
# and makes a part of each output, so gradients of the input, and of the router, are partial sums over tp. Where
# experts are whole (ep > 1), each tensor rank has its own tokens.


class _EnterCut(Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, group: Group, sequence_parallel: bool) -> Tensor:  # noqa: ANN401
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        return gather(hidden_TD, group) if sequence_parallel else hidden_TD.view_as(hidden_TD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        # The sum is in place, and a gradient may be another's too.
        grad, work = reduction(ctx.sequence_parallel)(grads[0].clone(), ctx.group)
        work.wait()
        return grad, None, None


class _LeaveCut(Function):
    @staticmethod
    def forward(ctx: Any, partial_TD: Tensor, group: Group, sequence_parallel: bool) -> Tensor:  # noqa: ANN401
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        output, work = reduction(sequence_parallel)(partial_TD.clone(), group)
        work.wait()
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        return gather(grads[0], ctx.group) if ctx.sequence_parallel else grads[0], None, None


class _JoinTokens(Function):
    @staticmethod
    def forward(ctx: Any, part_TD: Tensor, group: Group) -> Tensor:  # noqa: ANN401
        ctx.group = group
        return gather(part_TD, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return grads[0].chunk(ctx.group.size, dim=0)[ctx.group.rank].contiguous(), None


def enter_experts(hidden_TD: Tensor, group: Group, *, whole: bool, sequence_parallel: bool) -> Tensor:
    """The tokens that this rank routes. whole: experts are not cut over tp, `group`.

    Cut experts get all tokens (backward: P → R, or P → V under sequence parallelism); whole ones this rank's part.
    """
    if not whole:
        return _EnterCut.apply(hidden_TD, group, sequence_parallel)  # type: ignore[no-any-return, no-untyped-call]
    return hidden_TD if sequence_parallel else split_tokens(hidden_TD, group)


def leave_experts(output_TD: Tensor, group: Group, *, whole: bool, sequence_parallel: bool) -> Tensor:
    """The way back: cut experts' outputs are summed over tp (P → R or V), whole experts' joined (V → R)."""
    if not whole:
        return _LeaveCut.apply(output_TD, group, sequence_parallel)  # type: ignore[no-any-return, no-untyped-call]
    if sequence_parallel or group.size == 1:
        return output_TD
    return _JoinTokens.apply(output_TD, group)  # type: ignore[no-any-return, no-untyped-call]
