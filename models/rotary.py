"""Tables of rotary positions: cosines and sines of every position's angles.

Shapes: E half of a head's turned elements, P positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triaxis.models.positions import Rope


def rotary_tables(
    positions: int, size: int, rope: Rope, *, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos_PE and sin_PE of position · theta^(-2e / size), scaled as `rope` says, computed in float64."""
    exponents_E = torch.arange(0, size, 2, dtype=torch.float64) / size
    frequencies_E = rope.theta**-exponents_E
    magnitude = 1.0
    if rope.scaling is not None:
        scaled = rope.scaling.scaled(frequencies_E.tolist(), rope.theta)
        frequencies_E, magnitude = torch.tensor(scaled, dtype=torch.float64), rope.scaling.magnitude()
    angles_PE = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies_E
    cos_PE, sin_PE = angles_PE.cos(), angles_PE.sin()
    if magnitude != 1.0:
        cos_PE, sin_PE = cos_PE * magnitude, sin_PE * magnitude
    return cos_PE.to(device, dtype), sin_PE.to(device, dtype)
