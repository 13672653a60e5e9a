"""Attention over packed documents: against its masked twin, and what it costs."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from triaxis.engine.trace.meter import Meter
from triaxis.parallel.kernels.attention import (
    Attend,
    Documents,
    attend_by_document,
    attend_masked,
    attend_on_cpu,
    attend_on_cpu_if_short,
    documents_of,
    is_short,
)
from triaxis.parallel.worlds.recording import Recorder

HEADS, SIZE = 8, 16


def test_borders_are_where_numbers_change_and_where_rows_begin() -> None:
    numbers = torch.tensor([[0, 0, 1], [0, 0, 0], [0, 1, 2]])
    assert documents_of(numbers).borders == (0, 2, 3, 6, 7, 8, 9)
    assert documents_of(numbers[1:2]).borders == (0, 3)
    assert documents_of(numbers).longest() == 3
    assert list(documents_of(numbers).runs()) == [
        (slice(0, 2), 1),
        (slice(2, 3), 1),
        (slice(3, 6), 1),
        (slice(6, 9), 3),
    ]


def attended(
    attend: Attend, fused_TO: Tensor, kv_heads: int, rows: int, documents: Documents | None
) -> tuple[Tensor, Tensor]:
    """The kernel's output, and the gradient of some function of it."""
    leaf_TO = fused_TO.clone().requires_grad_()
    sizes = [HEADS * SIZE, kv_heads * SIZE, kv_heads * SIZE]
    query, key, value = (part.unflatten(-1, (-1, SIZE)) for part in leaf_TO.split(sizes, dim=-1))
    mixed_THD = attend(query, key, value, rows, documents)
    mixed_THD.mul(
        torch.linspace(-1, 1, mixed_THD.numel(), dtype=leaf_TO.dtype).view_as(mixed_THD)
    ).sum().backward()
    assert leaf_TO.grad is not None
    return mixed_THD.detach(), leaf_TO.grad


@pytest.mark.parametrize(
    "borders",
    [(0, 5, 6, 20, 40), (0, 20, 33, 40), (0, 20, 40), (0, 10, 20, 25, 30, 35, 40), tuple(range(41))],
)
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("attend", [attend_on_cpu, attend_by_document])
def test_documents_are_attended_as_under_a_mask(
    attend: Attend, kv_heads: int, borders: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(1)
    fused = torch.randn(40, (HEADS + 2 * kv_heads) * SIZE, dtype=torch.float64, generator=generator)
    documents = Documents(borders=borders)
    found = attended(attend, fused, kv_heads, 2, documents)
    expected = attended(attend_masked, fused, kv_heads, 2, documents)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


@pytest.mark.parametrize("borders", [None, (0, 20, 40), tuple(range(0, 41, 10)), (0, 5, 6, 20, 40)])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_short_rows_of_bf16_are_as_exact_as_flash_attention(
    kv_heads: int, borders: tuple[int, ...] | None
) -> None:
    """Against float64, outputs and gradients are about as far off: weights are rounded once, behind an fp32 softmax."""
    generator = torch.Generator().manual_seed(1)
    fused = torch.randn(40, (HEADS + 2 * kv_heads) * SIZE, generator=generator).bfloat16()
    documents = None if borders is None else Documents(borders=borders)
    assert is_short(fused.view(40, -1, SIZE), 2)
    exact = attended(attend_masked, fused.double(), kv_heads, 2, documents)
    ours = attended(attend_on_cpu_if_short, fused, kv_heads, 2, documents)
    flash = attended(attend_by_document, fused, kv_heads, 2, documents)
    for one, other, true in zip(ours, flash, exact, strict=True):
        assert one.dtype == torch.bfloat16
        assert float((one - true).norm()) <= 1.4 * float((other - true).norm()) < 0.02 * float(true.norm())


def metered(documents: Documents | None) -> tuple[int, int]:
    """FLOPs and peak bytes of one row of 2,048 tokens, forward and backward, the inputs apart."""
    recorder = Recorder()
    with Meter(recorder, dry=True) as meter:
        fused = torch.empty(2048, 3 * HEADS * SIZE)
        before = meter.live_bytes
        attended(attend_on_cpu, fused, HEADS, 1, documents)
        peak = max(accumulate(delta for _, _, delta in meter.changes))
    return sum(getattr(event, "flops", 0) for event in recorder.events), peak - before


def test_packed_rows_cost_the_sum_of_their_documents_squares_and_no_memory() -> None:
    whole_flops, whole_peak = metered(None)
    packed_flops, packed_peak = metered(Documents(borders=tuple(range(0, 2049, 256))))
    assert packed_flops == whole_flops // 8
    assert packed_peak <= whole_peak
