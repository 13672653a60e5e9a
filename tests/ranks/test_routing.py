"""Routing against the routers of `transformers`, and what the published faults of routers got wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from triaxis.models.experts_kind import GroupScore, RoutingRule, ScoreKind
from triaxis.models.routing import (
    bias_step,
    choose,
    expert_counts,
    margin,
)

TOKENS, HIDDEN, EXPERTS = 64, 16, 8
V3 = RoutingRule(
    experts=EXPERTS,
    chosen=3,
    scores=ScoreKind.SIGMOID,
    scale=2.5,
    groups=4,
    chosen_groups=2,
    group_score=GroupScore.TWO_BEST,
    choosing_bias=True,
)
V2 = RoutingRule(experts=EXPERTS, chosen=2, renormalised=False, scale=16.0, groups=4, chosen_groups=2)


def v3_router(**changes: Any) -> DeepseekV3TopkRouter:
    sizes = {
        "hidden_size": HIDDEN,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    }
    return DeepseekV3TopkRouter(DeepseekV3Config(**sizes | changes))


def v2_router() -> DeepseekV2TopkRouter:
    return DeepseekV2TopkRouter(
        DeepseekV2Config(
            hidden_size=HIDDEN,
            num_attention_heads=4,
            n_routed_experts=EXPERTS,
            num_experts_per_tok=2,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=16.0,
            topk_method="group_limited_greedy",
        )
    )


def mixtral_router() -> MixtralTopKRouter:
    return MixtralTopKRouter(
        MixtralConfig(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=2)
    )


def qwen3_router(renormalised: bool) -> Qwen3MoeTopKRouter:
    return Qwen3MoeTopKRouter(
        Qwen3MoeConfig(
            hidden_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=3, norm_topk_prob=renormalised
        )
    )


QWEN3 = RoutingRule(experts=EXPERTS, chosen=3)
FAMILIES = {
    "mixtral": (mixtral_router, RoutingRule(experts=EXPERTS, chosen=2)),
    "mixtral-by-logits": (
        mixtral_router,
        RoutingRule(experts=EXPERTS, chosen=2, scores=ScoreKind.CHOSEN_SOFTMAX),
    ),
    "qwen3": (lambda: qwen3_router(True), QWEN3),
    "qwen3-plain": (lambda: qwen3_router(False), replace(QWEN3, renormalised=False)),
    "deepseek-v2": (v2_router, V2),
    "deepseek-v3": (v3_router, V3),
    "kimi-k2": (lambda: v3_router(n_group=1, topk_group=1), replace(V3, groups=1, chosen_groups=1)),
}


def tried(family: str) -> tuple[Any, Tensor, Tensor | None]:
    """The family's router with random weights (and bias), logits of random tokens, and the bias."""
    torch.manual_seed(1)
    router = FAMILIES[family][0]()
    torch.nn.init.normal_(router.weight)
    bias = getattr(router, "e_score_correction_bias", None)
    if bias is not None:
        bias.normal_().mul_(0.5)  # large enough to make some scores negative
    return router, torch.randn(TOKENS, HIDDEN), bias


def dense(ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    return torch.zeros(TOKENS, EXPERTS).scatter(1, ids_TK, weights_TK.float())


@pytest.mark.parametrize("family", FAMILIES)
def test_routers_of_transformers_choose_the_same(family: str) -> None:
    router, hidden_TD, bias_E = tried(family)
    _, weights_TK, ids_TK = router(hidden_TD)
    routes = choose(hidden_TD @ router.weight.t(), FAMILIES[family][1], bias_E)
    torch.testing.assert_close(dense(routes.ids_TK, routes.weights_TK), dense(ids_TK, weights_TK))
    assert (routes.ids_TK.diff(dim=1) > 0).all()


@pytest.mark.parametrize(
    "fault",
    [
        {"group_score": GroupScore.BEST},
        {"scale": 1.0},
        {"renormalised": False},
        {"groups": 1, "chosen_groups": 1},
        {"scores": ScoreKind.SOFTMAX},
    ],
    ids=str,
)
def test_another_rule_is_seen(fault: dict[str, Any]) -> None:
    router, hidden_TD, bias_E = tried("deepseek-v3")
    _, weights_TK, ids_TK = router(hidden_TD)
    routes = choose(hidden_TD @ router.weight.t(), replace(V3, **fault), bias_E)
    assert (dense(routes.ids_TK, routes.weights_TK) - dense(ids_TK, weights_TK)).abs().max() > 1e-2


def test_the_bias_chooses_and_does_not_weigh() -> None:
    logits_TE = torch.zeros(4, EXPERTS)
    bias_E = torch.zeros(EXPERTS)
    bias_E[5:] = 1.0
    routes = choose(logits_TE, replace(V3, groups=1, chosen_groups=1, scale=1.0), bias_E)
    assert routes.ids_TK.tolist() == [[5, 6, 7]] * 4
    torch.testing.assert_close(routes.weights_TK, torch.full((4, 3), 1 / 3))


def test_a_recorded_choice_is_replayed() -> None:
    logits_TE = torch.randn(TOKENS, EXPERTS)
    ids_TK = torch.tensor([[0, 1, 2]]).expand(TOKENS, 3)
    routes = choose(logits_TE, QWEN3, ids_TK=ids_TK)
    assert torch.equal(routes.ids_TK, ids_TK)
    torch.testing.assert_close(routes.weights_TK.sum(1), torch.ones(TOKENS))


def test_the_margin_says_how_far_a_choice_is_from_another() -> None:
    logits_TE = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    rule = RoutingRule(experts=4, chosen=2, scores=ScoreKind.SIGMOID)
    scores = logits_TE.sigmoid()[0]
    torch.testing.assert_close(margin(logits_TE, rule), scores[1] - scores[2])


def test_padding_is_not_counted() -> None:
    ids_TK = torch.tensor([[0, 1], [1, 2], [0, 3]])
    assert expert_counts(ids_TK, 4).tolist() == [2, 2, 1, 1]
    assert expert_counts(ids_TK, 4, torch.tensor([True, True, False])).tolist() == [1, 2, 1, 0]


def test_the_bias_moves_against_the_load_by_integers() -> None:
    bias_E = bias_step(torch.zeros(4, dtype=torch.float64), torch.tensor([3, 1, 2, 2]), 0.001)
    assert bias_E.tolist() == [-0.001, 0.001, 0.0, 0.0]
    huge = torch.tensor([2**58, 2**58 - 1, 2**58, 2**58])
    assert bias_step(torch.zeros(4), huge, 1.0).tolist() == [-1.0, 1.0, -1.0, -1.0]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"chosen": 9}, "`chosen` experts must be from 1 to the 8"),
        ({"groups": 3}, "`groups` must divide the 8 experts, but is 3"),
        ({"groups": 4, "chosen_groups": 5}, "`chosen_groups` must be from 1 to 4"),
        ({"groups": 4, "chosen_groups": 1}, "must hold the 3 experts"),
    ],
)
def test_impossible_rules_are_refused(fault: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(QWEN3, **fault)
