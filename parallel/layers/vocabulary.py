"""Vocabulary-parallel embedding and loss: the rows of the vocabulary are cut over tp, padded to equal parts.

Shapes: T tokens of the microbatch, D hidden, V vocabulary rows held here. Padding is never multiplied, so neither
the loss nor a gradient sees it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from triaxis.parallel.kernels.norm import widened
from triaxis.parallel.layers.build import Build
from triaxis.parallel.layers.collectives import gather, reduction
from triaxis.parallel.layers.declare import declare, layouts_of
from triaxis.parallel.layers.gradient import rows_gradient, weight_gradient
from triaxis.parallel.layers.loss_chunks import KEPT_LOGITS, chunk_tokens
from triaxis.parallel.places.layout import ParameterLayout, slab
from triaxis.parallel.worlds.group import Group

IGNORED_LABEL = -100


def vocabulary_parameter(
    build: Build,
    name: str,
    vocab_size: int,
    hidden_size: int,
    *,
    tied: bool,
    counted: bool,
    std: float,
) -> nn.Parameter:
    """A [V, D] weight: ceil(vocab_size / tp) rows a rank, those past the vocabulary being padding.

    `tied`: the first and the last stage both hold it; its gradient is summed over them and the first has it `counted`.
    """
    mesh = build.mesh
    rows = -(-vocab_size // mesh.tp.size)
    start = min(mesh.tp.rank * rows, vocab_size)  # the last ranks may have nothing but padding
    shape = (vocab_size, hidden_size)
    offsets, sizes = slab(shape, 0, start, min(start + rows, vocab_size))
    layout = ParameterLayout(
        name=name,
        shape=shape,
        offsets=offsets,
        sizes=sizes,
        local_shape=(rows, hidden_size),
        partial=("ties",) if tied and not build.turns else (),
        counted=counted,
        std=std,
        tied=tied,
        twice=tied and build.turns,
    )
    return declare(build.parameter(rows, hidden_size), layout)


def _rows_held(weight: nn.Parameter) -> tuple[int, int]:
    """The first row of the vocabulary that is held here, and how many are."""
    (layout,) = layouts_of(weight)
    return layout.offsets[0], layout.sizes[0]


class _Embedding(Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        ids_T: Tensor,
        weight: nn.Parameter,
        start: int,
        valid: int,
        group: Group,
        sequence_parallel: bool,
    ) -> Tensor:
        rows_T = ids_T - start
        # Another tensor rank has the rows outside: here they are zero, and the sum over tp leaves its own.
        outside_T = (rows_T < 0) | (rows_T >= valid)
        rows_T = rows_T.masked_fill_(outside_T, 0)
        partial_TD = F.embedding(rows_T, weight).masked_fill_(outside_T[:, None], 0)
        ctx.save_for_backward(rows_T, outside_T)
        ctx.weight, ctx.group, ctx.sequence_parallel = weight, group, sequence_parallel
        output, work = reduction(sequence_parallel)(partial_TD, group)
        work.wait()
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        rows_T, outside_T = ctx.saved_tensors
        grad_TD = gather(grads[0], ctx.group) if ctx.sequence_parallel else grads[0]
        grad_TD = grad_TD.masked_fill(outside_T[:, None], 0)
        return None, rows_gradient(ctx.weight, rows_T, grad_TD), None, None, None, None


class VocabParallelEmbedding(nn.Module):
    """ids [T] → hidden [T, D] (under sequence parallelism [T/tp, D]).

    weight: the head's, where a tied one is held by the same stage.
    """

    def __init__(
        self,
        build: Build,
        name: str,
        vocab_size: int,
        hidden_size: int,
        *,
        weight: nn.Parameter | None = None,
        tied: bool = False,
        counted: bool = True,
        std: float = 0.02,
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel = build.mesh.tp, build.sequence_parallel
        self.weight = (
            weight
            if weight is not None
            else vocabulary_parameter(
                build, name, vocab_size, hidden_size, tied=tied, counted=counted, std=std
            )
        )
        self.start, self.valid = _rows_held(self.weight)

    def forward(self, ids_T: Tensor) -> Tensor:
        return _Embedding.apply(  # type: ignore[no-any-return, no-untyped-call]
            ids_T, self.weight, self.start, self.valid, self.group, self.sequence_parallel
        )


def _chunks(tokens: int, chunk: int) -> range:
    return range(0, tokens, max(1, min(tokens, chunk)))


class _CrossEntropy(Function):
    """Σ_t trained_t · (log Σ_v exp(logit_tv) - logit_t,label) · scale, by chunks of tokens.

    Forward keeps one log-sum-exp per token; backward multiplies a chunk's logits again, unless there are so few
    (KEPT_LOGITS) that their exponentials were kept. Two sums of [T] over tp in forward (maximum; exponentials
    with target logits), one of [T, D] in backward.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden_TD: Tensor,
        weight: nn.Parameter,
        labels_T: Tensor,
        scale: Tensor,
        start: int,
        valid: int,
        group: Group,
        sequence_parallel: bool,
        chunk: int,
    ) -> Tensor:
        whole_TD = gather(hidden_TD, group) if sequence_parallel else hidden_TD
        weight_VD, tokens = weight[:valid], whole_TD.shape[0]
        rows_T = labels_T - start
        here_T = (rows_T >= 0) & (rows_T < valid)
        rows_T = rows_T.masked_fill(~here_T, 0)
        dtype = widened(whole_TD.dtype)
        largest_T = torch.full((tokens,), -torch.inf, dtype=dtype, device=whole_TD.device)
        sums_2T = torch.zeros(2, tokens, dtype=dtype, device=whole_TD.device)
        steps = _chunks(tokens, chunk)
        kept_TV: Tensor | None = None
        for first in steps if valid else ():  # a rank may have nothing but padding
            part = slice(first, first + steps.step)
            logits_CV = (whole_TD[part] @ weight_VD.t()).to(dtype)
            torch.amax(logits_CV, dim=1, out=largest_T[part])
            sums_2T[1, part] = logits_CV.gather(1, rows_T[part, None])[:, 0]
            logits_CV.sub_(largest_T[part, None]).exp_()
            torch.sum(logits_CV, dim=1, out=sums_2T[0, part])
            if logits_CV.numel() == tokens * valid <= KEPT_LOGITS:
                kept_TV = logits_CV
        sums_2T[1].masked_fill_(~here_T, 0)
        # Exponentials are over this rank's own largest logit; once all ranks' largest is known, one factor a token
        # puts them right, so no chunk of logits is needed a second time.
        local_T = largest_T.clone()
        group.all_reduce(largest_T, largest=True, label="largest logits")
        sums_2T[0].mul_((local_T - largest_T).exp_())
        group.all_reduce(sums_2T, label="exponentials and target logits")
        lse_T = largest_T.add_(sums_2T[0].log())
        weight_T = (labels_T != IGNORED_LABEL).to(dtype).mul_(scale)
        ctx.save_for_backward(hidden_TD, rows_T, here_T, lse_T, weight_T, local_T.sub_(lse_T).exp_(), kept_TV)
        ctx.weight, ctx.valid, ctx.group = weight, valid, group
        ctx.sequence_parallel, ctx.chunk = sequence_parallel, chunk
        return torch.dot(lse_T - sums_2T[1], weight_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        hidden_TD, rows_T, here_T, lse_T, weight_T, ratio_T, kept_TV = ctx.saved_tensors
        whole_TD = gather(hidden_TD, ctx.group) if ctx.sequence_parallel else hidden_TD
        weight_VD, valid = ctx.weight[: ctx.valid], ctx.valid
        factor_T = weight_T * grads[0]
        # Of a token whose label another rank has, nothing is taken from the probabilities here (row 0 stands in).
        target_T = torch.where(here_T, -factor_T, 0)
        # Chunks write all of it, but a rank without a row of the vocabulary has no chunk.
        grad_TD = torch.zeros_like(whole_TD) if valid == 0 else torch.empty_like(whole_TD)
        grad_weight: Tensor | None = None
        steps = _chunks(whole_TD.shape[0], ctx.chunk)
        for first in steps if valid else ():
            part = slice(first, first + steps.step)
            if (
                kept_TV is not None
            ):  # exponentials over the rank's largest; the ratio makes probabilities of them
                logits_CV = kept_TV * (ratio_T * factor_T)[:, None]
            else:
                logits_CV = (whole_TD[part] @ weight_VD.t()).to(lse_T.dtype)
                logits_CV.sub_(lse_T[part, None]).exp_().mul_(factor_T[part, None])
            logits_CV.scatter_add_(1, rows_T[part, None], target_T[part, None])
            grad_CV = logits_CV.to(whole_TD.dtype)
            torch.mm(grad_CV, weight_VD, out=grad_TD[part])
            # With a slot each chunk adds to the buffer and nothing is returned; without one they are summed here.
            product = weight_gradient(ctx.weight, grad_CV, whole_TD[part], valid)
            grad_weight = product if grad_weight is None or product is None else grad_weight + product
        grad_hidden, work = reduction(ctx.sequence_parallel)(grad_TD, ctx.group)
        work.wait()
        return grad_hidden, grad_weight, None, None, None, None, None, None, None


class VocabParallelHead(nn.Module):
    """The output projection and its loss; whole logits never exist.

    weight: the embedding's, where a tied one is held by the same stage.
    """

    def __init__(
        self,
        build: Build,
        name: str,
        vocab_size: int,
        hidden_size: int,
        *,
        weight: nn.Parameter | None = None,
        tied: bool = False,
        counted: bool = True,
        std: float = 0.02,
        chunk_logits: int | None = None,
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel = build.mesh.tp, build.sequence_parallel
        self.vocab_size = vocab_size
        self.weight = (
            weight
            if weight is not None
            else vocabulary_parameter(
                build, name, vocab_size, hidden_size, tied=tied, counted=counted, std=std
            )
        )
        self.start, self.valid = _rows_held(self.weight)
        self.chunk_tokens = chunk_tokens(self.valid, chunk_logits, target=build.mesh.world.target)

    def forward(self, hidden_TD: Tensor, labels_T: Tensor, scale: Tensor) -> Tensor:
        """The sum of the trained tokens' losses times `scale` (a scalar tensor), the same on every tensor rank."""
        return self.loss(hidden_TD, labels_T, scale)

    def loss(self, hidden_TD: Tensor, labels_T: Tensor, scale: Tensor) -> Tensor:
        """The sum of the trained tokens' losses times `scale` (a scalar tensor), the same on every tensor rank."""
        return _CrossEntropy.apply(  # type: ignore[no-any-return, no-untyped-call]
            hidden_TD,
            self.weight,
            labels_T,
            scale,
            self.start,
            self.valid,
            self.group,
            self.sequence_parallel,
            self.chunk_tokens,
        )

    @torch.no_grad()
    def logits(self, hidden_TD: Tensor) -> Tensor:
        """All logits [T, vocabulary], for inspection."""
        whole_TD = gather(hidden_TD, self.group) if self.sequence_parallel else hidden_TD
        logits_VT = self.weight @ whole_TD.t()
        return gather(logits_VT.contiguous(), self.group)[: self.vocab_size].t()
