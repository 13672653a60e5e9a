"""Trials of public reports that no other test makes; tests/reports.csv says where each report is answered."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.agreement import LENGTH, Layout, plan_of
from tests.checkpointing import open_step
from tests.ranks.test_experts import MIXED
from tests.ranks.test_huggingface import CONFIG, make, read_model
from tests.ranks.test_zero import forced
from triaxis.engine.step import TrainingStep
from triaxis.launch.plan import main as plan_command
from triaxis.launch.simulate import main as simulate_command
from triaxis.models.batch import IGNORED, Batch
from triaxis.models.experts_kind import GroupScore, RoutingRule, ScoreKind
from triaxis.models.huggingface.fields import Unsupported
from triaxis.models.kinds import Layer
from triaxis.models.routing import bias_step, choose
from triaxis.parallel.layers.build import Build
from triaxis.parallel.layers.vocabulary import VocabParallelHead
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.replicas.initialize import initialize
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.thread import run_threads

EXPERT = "model.layers.1.mlp.experts.{}.gate_proj.weight"


@pytest.mark.parametrize("replicated", [False, True])
def test_experts_spread_over_ranks_enter_the_norm_by_their_squares(replicated: bool) -> None:  # N40
    """√20 on one rank's expert and √100 on the other's are √120; a replicated 4 counts once."""
    forces = {EXPERT.format(0): math.sqrt(20), EXPERT.format(7): 10.0, "model.norm.weight": 4.0 * replicated}
    for result, _ in forced(Topology(dp=2, ep=2), MIXED, 1, lambda layout, _: forces.get(layout.name, 0.0)):
        assert result.grad_norm == pytest.approx(11.661904 if replicated else 10.954451, abs=1e-6)


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2), Layout(pp=2)], ids=str)
def test_auxiliary_losses_weigh_alike_in_any_number_of_microbatches(layout: Layout) -> None:  # N44
    """Nothing but them: no token is trained, and the routers' gradients are those of one microbatch of four rows."""

    def gates(layout: Layout, microbatches: int) -> dict[str, Tensor]:
        rows = torch.arange(4 * LENGTH).view(4, LENGTH) * 7 % MIXED.vocab_size
        share = rows.shape[0] // layout.dp

        def main(world: World) -> dict[str, Tensor]:
            sizes = {"microbatches": microbatches, "microbatch_size": share // microbatches}
            plan = replace(plan_of(layout, MIXED, "sgd, no clip", "fp64"), **sizes)  # type: ignore[arg-type]
            step = TrainingStep(plan, build_mesh(world, layout.topology()))
            own = rows[step.mesh.dp.rank * share :][:share].split(share // microbatches)
            synchronize = step.data_parallel.synchronize_gradients
            found: dict[str, Tensor] = {}

            def keep() -> None:
                synchronize()
                for segment, tensor in step.data_parallel.gathered_gradients():
                    if segment.layout.name.endswith("gate.weight") and "shared" not in segment.layout.name:
                        found[segment.layout.name] = tensor.clone()

            step.data_parallel.synchronize_gradients = keep  # type: ignore[method-assign]
            step.train([_unlabelled(part) for part in own], 0.0)
            return found

        return {name: tensor for rank in run_threads(layout.size, main) for name, tensor in rank.items()}

    whole, found = gates(Layout(), 1), gates(layout, 2)
    assert len(whole) == 3 and whole.keys() == found.keys()
    for name, expected in whole.items():
        assert expected.norm() > 0
        torch.testing.assert_close(found[name], expected, rtol=1e-10, atol=1e-15)


def _unlabelled(tokens_BL: Tensor) -> Batch:
    return Batch(
        tokens_BL=tokens_BL,
        labels_BL=torch.full_like(tokens_BL, IGNORED),
        positions_BL=torch.arange(tokens_BL.shape[1]).expand_as(tokens_BL).contiguous(),
        documents=None,
    )


@pytest.mark.parametrize("pp", [1, 2])
def test_a_layer_without_balancing_ends_no_other_layers_updates(pp: int) -> None:  # N46
    dense = MIXED.kind(0)
    mixed = MIXED.kind(1)
    assert isinstance(mixed, Layer)
    experts: Any = mixed.feed_forward
    still = replace(experts, rule=replace(experts.rule, choosing_bias=False))
    model = replace(MIXED, leading=(dense, replace(mixed, feed_forward=still)), repeating=(mixed,))

    def main(world: World) -> list[float]:
        step = open_step(world, Layout(pp=pp), model, "sgd, no clip", "fp64")
        step.train([_unlabelled(torch.arange(LENGTH)[None] + row) for row in range(8)], 0.0)
        return [
            0.0 if layer.bias_E is None else float(layer.bias_E.abs().sum()) for layer in step.balance.layers
        ]

    moved = [layer for rank in run_threads(pp, main) for layer in rank]
    assert len(moved) == 3 and moved[0] == 0.0 and min(moved[1:]) > 0


def test_the_bias_of_a_published_load_moves_as_published() -> None:  # N47
    moved = bias_step(torch.zeros(4, dtype=torch.float64), torch.tensor([10, 2, 4, 0]), 0.001)
    assert moved.tolist() == [-0.001, 0.001, 0.0, 0.001]


def test_experts_of_groups_left_out_never_win() -> None:  # N49
    """Biased scores below 0: a mask of 0 would let those that are left out win."""
    rule = RoutingRule(
        experts=4, chosen=2, groups=2, chosen_groups=1, choosing_bias=True, scores=ScoreKind.SIGMOID
    )
    logits_TE = torch.zeros(1, 4, dtype=torch.float64)
    bias_E = torch.tensor([-0.6, -0.7, -0.8, -0.9], dtype=torch.float64)  # scores of 0.5 become −0.1 … −0.4
    assert choose(logits_TE, rule, bias_E).ids_TK.tolist() == [[0, 1]]


@pytest.mark.parametrize(("score", "chosen"), [(GroupScore.TWO_BEST, [2, 3]), (GroupScore.BEST, [0, 1])])
def test_groups_are_worth_what_their_family_says(score: GroupScore, chosen: list[int]) -> None:  # N49
    rule = RoutingRule(
        experts=4, chosen=2, groups=2, chosen_groups=1, group_score=score, scores=ScoreKind.SIGMOID
    )
    logits_TE = torch.tensor([[0.9, 0.01, 0.5, 0.5]], dtype=torch.float64).logit()
    assert choose(logits_TE, rule).ids_TK.tolist() == [chosen]


@pytest.mark.parametrize(
    ("renormalised", "weights"), [(True, [4 / 7, 3 / 7]), (False, [0.4, 0.3])], ids=["norm", "plain"]
)
def test_weights_of_the_chosen_are_shared_or_as_they_are(
    renormalised: bool, weights: list[float]
) -> None:  # N50
    rule = RoutingRule(experts=4, chosen=2, renormalised=renormalised)
    logits_TE = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log()
    assert choose(logits_TE, rule).weights_TK[0].tolist() == pytest.approx(weights)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"rope_interleave": False}, "rope_interleave"), ({"topk_method": "sampled"}, "topk_method")],
    ids=str,
)
def test_another_rule_of_deepseek_is_refused_by_name(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:  # N49, N56
    make("deepseek-v3", tmp_path)
    values = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(values | changes))
    with pytest.raises((Unsupported, ValueError), match=words):
        read_model(tmp_path)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_loss_over_a_cut_vocabulary_is_the_published_one(tp: int) -> None:  # N85
    """Logits 0, 1, 2, 3 and label 3: the loss of gathered logits fed in again would be 1.13334."""

    def main(world: World) -> tuple[float, list[float]]:
        head = VocabParallelHead(Build.on(build_mesh(world, Topology(tp=tp)), dtype=torch.float64), "w", 4, 4)
        initialize(head, 0)
        with torch.no_grad():
            head.weight.copy_(torch.eye(4, dtype=torch.float64)[head.start :][: head.weight.shape[0]])
        hidden = torch.arange(4.0, dtype=torch.float64)[None].requires_grad_()
        loss = head(hidden, torch.tensor([3]), torch.tensor(1.0, dtype=torch.float64))
        loss.backward()
        assert hidden.grad is not None
        return float(loss.detach()), hidden.grad[0].tolist()

    for loss, gradient in run_threads(tp, main):
        assert loss == pytest.approx(0.4401897, abs=1e-7)
        assert gradient == pytest.approx([0.0320586, 0.0871443, 0.2368828, -0.3560857], abs=1e-7)


@pytest.mark.parametrize(("gpus", "least_bytes"), [(4, 1.1e12 / 4), (8, 1.1e12 / 8), (16, 80e9)])
def test_70b_on_too_few_gpus_is_told_what_it_needs(
    gpus: int, least_bytes: float, capsys: pytest.CaptureFixture[str]
) -> None:  # N80
    assert (
        plan_command(["--model", "llama3-70b", "--gpus", str(gpus), "--hardware", "h100-80g", "--json"]) == 1
    )
    found = json.loads(capsys.readouterr().out)
    assert found["best"] is None and found["needed_bytes_per_gpu"] > least_bytes and found["least_gpus"] == 20


def test_the_memory_of_a_layout_lists_all_that_it_counts(capsys: pytest.CaptureFixture[str]) -> None:  # N79
    wish = ["--model", "llama2-7b", "--gpus", "4", "--seq", "2048", "--hardware", "a100-80g"]
    assert plan_command([*wish, "--explain", "dp=4,zero=3"]) == 0
    told = " ".join(capsys.readouterr().out.split()).rpartition(" memory ")[2].partition(" step ")[0]
    parts = ("parameters", "gradients", "optimizer", "activations", "buffers", "temporaries", "context")
    assert all(f"{part} " in told for part in parts), told


def test_activations_of_experts_do_not_shrink_with_ep(capsys: pytest.CaptureFixture[str]) -> None:  # N82
    """Where experts are even, ep trades tokens: what a rank keeps for backward stays what it was."""

    def activations(ep: int) -> float:
        flags = f"--model tiny-moe --dp 4 --ep {ep} --microbatches 2 --hardware a100-80g --json"
        assert simulate_command(flags.split()) == 0
        memory = json.loads(capsys.readouterr().out)["memory"]
        return float(memory["ranks"][0]["breakdown"]["activations"])

    alone = activations(1)
    for ep in (2, 4):
        assert activations(ep) == pytest.approx(alone, rel=0.01)


def test_a_step_of_many_microbatches_is_a_warm_up_and_a_slope(
    capsys: pytest.CaptureFixture[str],
) -> None:  # N77
    """The step is a warm-up and a slope: 128 microbatches tell 1,024 to a thousandth."""

    def simulated(microbatches: int) -> float:
        flags = f"--model tiny --tp 2 --pp 2 --dp 2 --microbatches {microbatches} --hardware a100-80g --json"
        assert simulate_command(flags.split()) == 0
        return float(json.loads(capsys.readouterr().out)["time"]["step_seconds"])

    few, some, many = (simulated(count) for count in (8, 128, 1024))
    assert many == pytest.approx(some + (some - few) / 120 * 896, rel=1e-3)
