"""How much of its pipeline work a rank takes on at once. No torch: the executor and whoever plans it read the same."""

from __future__ import annotations

from typing import Final

SENDS_UNDER_WAY: Final = 4
"""Tensors that a rank keeps for its peers; waiting earlier is safe, only slower."""
