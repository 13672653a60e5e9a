"""The kernels chosen on CUDA against plain twins there."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from triaxis.parallel.kernels.activation import plain_swiglu
from triaxis.parallel.kernels.attention import Attend, Documents, attend_masked
from triaxis.parallel.kernels.kernels import Kernels, kernels_for
from triaxis.parallel.kernels.norm import rms_norm

pytestmark = pytest.mark.gpu
HEADS, SIZE, TOKENS = 8, 64, 512
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def kernels(dtype: torch.dtype) -> Kernels:
    return kernels_for(torch.device("cuda"), dtype)


def attended(attend: Attend, fused_TO: Tensor, kv_heads: int, documents: Documents | None) -> list[Tensor]:
    """Output and gradient of one row."""
    leaf_TO = fused_TO.clone().requires_grad_()
    sizes = [HEADS * SIZE, kv_heads * SIZE, kv_heads * SIZE]
    parts = (part.unflatten(-1, (-1, SIZE)) for part in leaf_TO.split(sizes, dim=-1))
    mixed_THD = attend(*parts, 1, documents)
    mixed_THD.float().square().sum().backward()
    assert leaf_TO.grad is not None
    return [mixed_THD.detach().double(), leaf_TO.grad.double()]


@DTYPES
@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize(
    "borders", [None, (0, 3, 200, 201, TOKENS), tuple(range(0, TOKENS + 1, 64))], ids=str
)
def test_documents_are_attended_as_under_a_mask(
    borders: tuple[int, ...] | None, kv_heads: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(TOKENS, (HEADS + 2 * kv_heads) * SIZE, generator=generator).to("cuda", dtype)
    documents = None if borders is None else Documents(borders=borders).to(torch.device("cuda"))
    found = attended(kernels(dtype).attend, fused, kv_heads, documents)
    expected = attended(attend_masked, fused.double(), kv_heads, documents)
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).norm()) <= TOLERANCES[dtype] * float(other.norm())


@DTYPES
def test_norms_and_activations_are_their_twins(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(64, 256, generator=generator).to("cuda", dtype)
    weight = torch.randn(256, generator=generator).to("cuda", dtype)
    chosen = kernels(dtype)
    pairs = [
        (chosen.rms_norm(wide, weight, 1e-5), rms_norm(wide.double(), weight.double(), 1e-5)),
        (chosen.swiglu(wide), plain_swiglu(wide.double())),
    ]
    assert {"attend", "rms_norm", "swiglu", "gelu"} == {field.name for field in fields(Kernels)}
    for one, other in pairs:
        assert float((one.double() - other).norm()) <= TOLERANCES[dtype] * float(other.norm())
