"""Rotary tables under every scaling, and partial rotation, against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from triaxis.models.positions import LinearScaling, Llama3Scaling, Rope, YarnScaling
from triaxis.models.rotary import rotary_tables
from triaxis.parallel.kernels.rotary import rotate_

SIZE, POSITIONS = 64, 96
ROPES: list[tuple[Rope, dict[str, Any]]] = [
    (Rope(theta=5e5), {"rope_type": "default", "rope_theta": 5e5}),
    (Rope(scaling=LinearScaling(factor=4.0)), {"rope_type": "linear", "factor": 4.0}),
    (
        Rope(
            theta=5e5,
            scaling=Llama3Scaling(
                factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=8192
            ),
        ),
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    (
        Rope(theta=1e6, scaling=YarnScaling(factor=4.0, original_positions=32768)),
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    ),
    (
        Rope(
            scaling=YarnScaling(
                factor=40.0, original_positions=4096, mscale=0.707, mscale_all_dim=1.0, truncate=False
            )
        ),
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 0.707,
            "mscale_all_dim": 1.0,
            "truncate": False,
        },
    ),
    (Rope(fraction=0.5), {"rope_type": "default", "partial_rotary_factor": 0.5}),
]


@pytest.mark.parametrize(
    ("rope", "theirs"), ROPES, ids=lambda one: one["rope_type"] if type(one) is dict else ""
)
def test_tables_are_those_of_transformers(rope: Rope, theirs: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.glm.modeling_glm import GlmRotaryEmbedding

    # GLM's module is the one of Llama, Qwen and Mistral that also knows `partial_rotary_factor`.
    config = transformers.GlmConfig(
        hidden_size=2 * SIZE,
        num_attention_heads=2,
        head_dim=SIZE,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": 10000.0, "partial_rotary_factor": 1.0, **theirs},
    )
    module = GlmRotaryEmbedding(config)
    cos, sin = module(torch.zeros(1, POSITIONS, 1, dtype=torch.float32), torch.arange(POSITIONS)[None])
    size = rope.turned(SIZE)
    ours = rotary_tables(POSITIONS, size, rope, dtype=torch.float32, device=torch.device("cpu"))
    for one, other in zip(ours, (cos[0], sin[0]), strict=True):
        torch.testing.assert_close(one, other[:, : size // 2], rtol=0, atol=2e-5)


def test_what_is_not_turned_stays() -> None:
    """Half of each head turned: as the first halves alone would be, and the rest to the bit."""
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(5, 3 * 8, dtype=torch.float64, generator=generator)
    tables = rotary_tables(5, 4, Rope(fraction=0.5), dtype=torch.float64, device=torch.device("cpu"))
    cos, sin = (table[:, None] for table in tables)
    turned = rotate_(fused.clone(), cos, sin, 2, 8).view(5, 3, 8)
    first_halves = fused.view(5, 3, 8)[:, :2, :4].reshape(5, 8)
    assert torch.equal(turned[:, :2, :4], rotate_(first_halves.clone(), cos, sin, 2, 4).view(5, 2, 4))
    assert torch.equal(turned[:, :2, 4:], fused.view(5, 3, 8)[:, :2, 4:])
    assert torch.equal(turned[:, 2], fused.view(5, 3, 8)[:, 2])
