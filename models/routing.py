"""Which experts a token goes to, and with what weight: the rules of the published families.

Scores, choice and weights are computed in fp32 at least, by the same code in forward, recomputation and on every rank.
The rule is told by the family, never guessed from sizes: where DeepSeek-V2 scores a group of experts by its best
one, DeepSeek-V3 takes the sum of its two best.

Shapes: T tokens, E experts of the layer, K experts chosen for a token, G groups of experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from triaxis.models.experts_kind import GroupScore, RoutingRule, ScoreKind

SMALLEST_SUM = 1e-20  # added to a sum of sigmoid weights before dividing by it, as DeepSeek-V3 does


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """Where tokens go. ids_TK: experts, ascending; weights_TK: of their outputs; scores_TE: of all experts."""

    ids_TK: Tensor
    weights_TK: Tensor
    scores_TE: Tensor


def choose(
    logits_TE: Tensor, rule: RoutingRule, bias_E: Tensor | None = None, ids_TK: Tensor | None = None
) -> Routes:
    """Experts and weights for each token; `ids_TK` replays a recorded choice.

    Ids ascend, so the order in which a token's experts are summed does not depend on their scores.
    """
    scores_TE = torch.sigmoid(logits_TE) if rule.scores is ScoreKind.SIGMOID else logits_TE.softmax(-1)
    if ids_TK is None:
        ids_TK = _chosen(scores_TE.detach(), rule, bias_E)
    if rule.scores is ScoreKind.CHOSEN_SOFTMAX:
        weights_TK = logits_TE.gather(1, ids_TK).softmax(-1)
    else:
        weights_TK = scores_TE.gather(1, ids_TK)
        if rule.renormalised:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + SMALLEST_SUM)
    return Routes(ids_TK=ids_TK, weights_TK=weights_TK * rule.scale, scores_TE=scores_TE)


def _chosen(scores_TE: Tensor, rule: RoutingRule, bias_E: Tensor | None) -> Tensor:
    """The experts of the best `chosen_groups` groups with the largest score (plus bias)."""
    worth_TE = scores_TE if bias_E is None else scores_TE + bias_E.to(scores_TE.dtype)
    if rule.chosen_groups < rule.groups:
        grouped_TGE = worth_TE.unflatten(1, (rule.groups, -1))
        best = 1 if rule.group_score is GroupScore.BEST else 2
        worth_TG = grouped_TGE.topk(best, dim=-1).values.sum(-1)
        kept_TG = torch.zeros_like(worth_TG, dtype=torch.bool)
        kept_TG.scatter_(1, worth_TG.topk(rule.chosen_groups, dim=-1).indices, True)
        # Not zero: a bias makes scores negative, and zero would then beat them.
        worth_TE = grouped_TGE.masked_fill(~kept_TG[..., None], -torch.inf).flatten(1)
    return worth_TE.topk(rule.chosen, dim=-1).indices.sort(-1).values


def margin(logits_TE: Tensor, rule: RoutingRule, bias_E: Tensor | None = None) -> Tensor:
    """The least gap between an expert that is chosen and one that is not, over all tokens (within the groups kept).

    Rounding may flip a choice only where the gap is of its size: two layouts agree in fp32 while it is larger.
    """
    scores_TE = torch.sigmoid(logits_TE) if rule.scores is ScoreKind.SIGMOID else logits_TE.softmax(-1)
    worth_TE = scores_TE if bias_E is None else scores_TE + bias_E.to(scores_TE.dtype)
    ids_TK = _chosen(scores_TE, rule, bias_E)
    least_T = worth_TE.gather(1, ids_TK).amin(1)
    others_TE = worth_TE.scatter(1, ids_TK, -torch.inf)
    return (least_T[:, None] - others_TE).amin()


def expert_counts(ids_TK: Tensor, experts: int, trained_T: Tensor | None = None) -> Tensor:
    """How many tokens each expert gets (int64); trained_T leaves out padding. Of known length: no host is asked."""
    ones_TK = torch.ones_like(ids_TK) if trained_T is None else trained_T[:, None].expand_as(ids_TK).long()
    counts_E = torch.zeros(experts, dtype=torch.int64, device=ids_TK.device)
    return counts_E.scatter_add_(0, ids_TK.flatten(), ones_TK.flatten())


def bias_step(bias_E: Tensor, counts_E: Tensor, rate: float) -> Tensor:
    """The choosing bias after a step: up by `rate` for experts below the mean load, down above it.

    counts_E: integers over the whole global batch, so the comparison E · count with the total is exact and the bias is
    bit-identical on every layout (DeepSeek-V3, section 2.1.2; Wang et al. 2024).
    """
    behind_E = counts_E.sum() - counts_E * counts_E.numel()
    return bias_E + rate * torch.sign(behind_E).to(bias_E.dtype)
