"""Comparing copies: every bit counts, experts and the layers' own states too, and it costs next to nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from tests.agreement import MODEL, TIED, Layout
from tests.checkpointing import open_step, train
from tests.ranks.test_checkpoint_cost import LARGER
from tests.ranks.test_experts import MIXED
from triaxis.engine.checkpoint.states import held_layer_states
from triaxis.engine.faults import replicas
from triaxis.engine.faults.replicas import ReplicaError, check_replicas
from triaxis.models.config import ModelConfig
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.thread import run_threads


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 4096, 5001])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_bit_counts_in_a_checksum(size: int, dtype: torch.dtype) -> None:
    """Wherever the run begins in memory, equal bits have equal sums; one bit, or two in other places, change them."""
    random = torch.Generator().manual_seed(size)
    buffer = torch.randn(size + 1, dtype=torch.float64, generator=random).to(dtype)
    values = buffer[1:]
    found = int(replicas._checksum(values))
    assert found == int(replicas._checksum(values.clone()))
    bits = values.view(replicas.INTEGERS[values.element_size()])
    for place in {0, size // 2, size - 1}:
        for bit in (0, 8 * values.element_size() - 2):
            bits[place] ^= 1 << bit
            assert int(replicas._checksum(values)) != found, (place, bit)
            bits[place] ^= 1 << bit
    if size > 1 and bits[0] != bits[-1]:
        bits[[0, -1]] = bits[[-1, 0]]
        assert int(replicas._checksum(values)) != found


LAYOUTS = [
    (Layout(tp=4), MODEL),  # two heads of keys on four ranks
    (Layout(tp=2, pp=2, dp=2, zero=1, sp=True), TIED),
    (Layout(pp=2, dp=2, zero=3), TIED),
    (Layout(tp=2, dp=2, ep=4, zero=1), MIXED),
    (Layout(dp=4, ep=2, zero=3), MIXED),
]


@pytest.mark.parametrize(("layout", "model"), LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_sound_copies_pass_with_two_small_messages(layout: Layout, model: ModelConfig, dtype: str) -> None:
    def rank(world: World) -> tuple[dict[str, int], int]:
        step = open_step(world, layout, model, "adamw, clip 1", dtype)
        check_replicas(step, "before the first step", way_out="")
        train(step, layout, range(2))
        step.mesh.clear_traffic()
        check_replicas(step, "after step 2", way_out="")
        sent = {
            name: group.traffic for name, group in step.mesh.groups.items() if group.traffic.total_bytes()
        }
        assert set(sent) == {"world"}
        return dict(sent["world"].messages), sent["world"].total_bytes()

    for messages, sent_bytes in run_threads(layout.size, rank):
        assert messages == {"all_reduce largest": 1, "all_gather": 1}
        assert sent_bytes < 16 * 4 * 200 * layout.size


EXPERTS = [
    (Layout(dp=4, ep=2), "experts", 2),  # ranks 0 and 2 hold the same experts
    (Layout(dp=4, ep=2, zero=1), "experts", 2),
    (Layout(tp=2, ep=2), "bias", 1),
    (Layout(dp=2), "bias", 1),
]


@pytest.mark.parametrize(("layout", "what", "rank"), EXPERTS, ids=str)
def test_replicas_of_experts_and_their_choosing_bias_are_compared(
    layout: Layout, what: str, rank: int
) -> None:
    """What no optimizer updates, and what has replicas of its own beside the dense weights."""

    def main(world: World) -> tuple[str, str]:
        step = open_step(world, layout, MIXED, "adamw, clip 1", "bf16")
        train(step, layout, range(1))
        check_replicas(step, "after step 1", way_out="")
        held = held_layer_states(step.stages)
        if what == "bias":
            name = min(held)
            copies = list(held[name].chunks.values())
        else:
            weights = list(step.data_parallel.computing_weights())
            name = min(segment.layout.name for segment, _ in weights if ".experts." in segment.layout.name)
            copies = [tensor for segment, tensor in weights if segment.layout.name == name]
        if world.rank == rank:
            for values in copies:
                values.add_(1.0)
        with pytest.raises(ReplicaError) as raised:
            check_replicas(step, "after step 1", way_out="")
        return name.removeprefix("master/"), str(raised.value)

    answers = run_threads(layout.size, main)
    name = answers[rank][0]
    for _, text in answers:
        assert f"{name}, on rank {rank} (" in text
        assert "parameters more" not in text


def test_comparing_costs_less_than_a_hundredth_of_training_between_two_saves() -> None:
    """At the default interval of 500 steps: less than 5 steps (it takes a fifth of one)."""
    from triaxis.engine.run.saving import DEFAULT_SAVE_STEPS

    layout = Layout(dp=2, bucket_elements=4_000_000)

    def rank(world: World) -> tuple[float, float]:
        step = open_step(world, layout, LARGER, "adamw, clip 1", "fp32")

        def seconds(work: Callable[[], object]) -> float:
            start = time.perf_counter()
            work()
            return time.perf_counter() - start

        train(step, layout, range(1))
        comparing = min(seconds(lambda: check_replicas(step, "now", way_out="")) for _ in range(3))
        return comparing, min(seconds(lambda: train(step, layout, range(1))) for _ in range(2))

    comparing, training = map(max, zip(*run_threads(2, rank), strict=True))
    print(f"comparing {1e3 * comparing:.1f} ms, a step {1e3 * training:.1f} ms")
    assert comparing / (DEFAULT_SAVE_STEPS * training) < 0.01
