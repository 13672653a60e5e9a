"""Step time in closed form: known sums, and the directions in which each choice moves it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.yardstick import yardsticks
from triaxis.launch.hardware.hardware import load_hardware
from triaxis.launch.published.cost import step_time
from triaxis.launch.published.layout import MEGATRON, MEGATRON_TE, Recipe, Recompute
from triaxis.launch.published.shapes import Latent, Shape, shape_of
from triaxis.models.presets import PRESETS, load_config

LLAMA = shape_of(load_config("llama2-7b"))
ONE_NODE = Recipe(
    shape=LLAMA,
    hardware=load_hardware("h100-80g"),
    dp=8,
    microbatch=1,
    global_batch=64,
    sequence=4096,
)
DEEPSEEK_V3 = Shape(
    layers=61,
    hidden=7168,
    ffn=18432,
    heads=128,
    kv_heads=128,
    head_size=128,
    vocab=129280,
    experts=256,
    chosen=8,
    expert_ffn=2048,
    shared_ffn=2048,
    dense_layers=3,
    latent=Latent(q_rank=1536, kv_rank=512, plain=128, rotary=64, value=128),
)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_shapes_count_what_the_models_count(name: str) -> None:
    model = load_config(name)
    if model.experts():
        with pytest.raises(ValueError, match=f"{name} has not|{model.name} has not"):
            shape_of(model)
        return
    shape = shape_of(model)
    assert shape.parameters() == pytest.approx(model.parameters(), rel=2e-3)  # biases and layer norms apart
    assert shape.flops_per_token(1024) == pytest.approx(model.flops_per_token(1024))


def test_deepseek_v3_has_its_published_size_and_work() -> None:
    assert DEEPSEEK_V3.parameters() == 671_026_419_200
    assert DEEPSEEK_V3.flops_per_token(4096) == pytest.approx(2.504e11, rel=5e-3)


def test_a_step_is_no_faster_than_its_arithmetic() -> None:
    time_ = step_time(ONE_NODE)
    flops = LLAMA.flops_per_token(4096) * ONE_NODE.global_batch * 4096 / ONE_NODE.gpus
    assert time_.seconds > flops / 989e12
    assert 0.35 < flops / 989e12 / time_.seconds < 0.75  # the share that such runs report
    parts = ["compute", "recompute", "tensor", "context", "expert", "pipeline", "bubble", "data", "optimizer"]
    assert time_.seconds == pytest.approx(sum(getattr(time_, part) for part in parts))
    assert time_.tokens_per_s_per_gpu == pytest.approx(64 * 4096 / time_.seconds / 8)


def test_the_bubble_is_p_less_1_microbatches_and_chunks_divide_it() -> None:
    layout = replace(ONE_NODE, dp=1, pp=8, global_batch=32, software=MEGATRON)
    share = step_time(layout).bubble / (step_time(layout).seconds - step_time(layout).optimizer)
    assert share == pytest.approx(7 / (32 + 7), rel=0.15)
    cut = replace(layout, virtual_stages=4)
    assert step_time(cut).bubble == pytest.approx(step_time(layout).bubble / 4, rel=0.05)


def test_full_recompute_costs_a_forward_pass() -> None:
    plain, again = step_time(ONE_NODE), step_time(replace(ONE_NODE, recompute=Recompute.FULL))
    assert 0.25 < again.recompute / plain.compute < 0.38


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        ({"dp": 4, "tp": 2}, {}),  # 7B fits without tp: its messages are for nothing
        ({"dp": 1, "tp": 8, "sequence_parallel": False}, {"dp": 1, "tp": 8}),
        (
            {"dp": 64, "global_batch": 4096, "zero": 3, "sequence": 512},
            {"dp": 64, "global_batch": 4096, "zero": 1, "sequence": 512},
        ),
        ({"zero": 2, "dp": 64, "global_batch": 512}, {"zero": 1, "dp": 64, "global_batch": 512}),
        ({"dp": 1, "cp": 8, "sequence": 4096}, {}),
        ({"flash_attention": False}, {}),
        ({"hardware": load_hardware("a100-80g")}, {}),
        ({}, {"dtype": "fp8"}),
        ({"dp": 1, "tp": 16}, {"dp": 2, "tp": 8}),  # past the node
    ],
)
def test_directions(slower: dict[str, object], faster: dict[str, object]) -> None:
    first, second = replace(ONE_NODE, **slower), replace(ONE_NODE, **faster)  # type: ignore[arg-type]
    assert step_time(first).tokens_per_s_per_gpu < step_time(second).tokens_per_s_per_gpu


def test_experts_cost_exchanges_and_only_the_chosen_compute() -> None:
    layout = replace(ONE_NODE, shape=DEEPSEEK_V3, dp=64, pp=8, ep=32, global_batch=1024, software=MEGATRON_TE)
    found = step_time(layout)
    assert found.expert > 0.05 * found.seconds
    active = DEEPSEEK_V3.flops_per_token(4096) * 1024 * 4096 / layout.gpus / 989e12
    assert active < found.seconds < 12 * active


def test_a_token_sent_to_a_node_once_is_cheaper_and_imbalance_dearer() -> None:
    layout = replace(ONE_NODE, shape=DEEPSEEK_V3, dp=64, pp=8, ep=32, global_batch=1024, software=MEGATRON_TE)
    once = replace(layout, software=replace(MEGATRON_TE, dispatches_once=True))
    assert step_time(once).expert < 0.6 * step_time(layout).expert
    skewed = step_time(replace(layout, imbalance=1.5))
    assert skewed.expert == pytest.approx(1.5 * step_time(layout).expert, rel=0.05)
    assert skewed.compute > 1.05 * step_time(layout).compute


def test_unfused_heads_that_tensor_cores_cannot_read_are_slow() -> None:
    unfused = replace(ONE_NODE, software=MEGATRON, flash_attention=False)

    def seconds(heads: int, size: int) -> float:
        shape = replace(LLAMA, heads=heads, kv_heads=heads, head_size=size)
        return step_time(replace(unfused, shape=shape)).compute

    aligned, odd = seconds(32, 128), seconds(40, 102)  # 4096 and 4080 features
    assert 1.3 < odd / aligned < 5
    fused = replace(unfused, flash_attention=True)
    shape = replace(LLAMA, heads=40, kv_heads=40, head_size=102)
    assert step_time(replace(fused, shape=shape)).compute < 1.1 * step_time(fused).compute


def test_less_power_is_a_slower_clock() -> None:
    capped = replace(ONE_NODE, hardware=replace(ONE_NODE.hardware, sustained=0.8))
    assert 1.1 < step_time(capped).compute / step_time(ONE_NODE).compute < 1.25


def test_a_layout_is_priced_in_some_hundred_microseconds() -> None:
    layouts = [replace(ONE_NODE, dp=16384 // tp, tp=tp, global_batch=16384) for tp in (1, 2, 4, 8)] * 25
    step_time(layouts[0])
    assert yardsticks(lambda: [step_time(layout) for layout in layouts]) < 1
