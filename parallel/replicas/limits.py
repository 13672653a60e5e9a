"""How much of its data-parallel work a rank takes on at once. No torch: the step and whoever plans it read the same."""

from __future__ import annotations

from typing import Final

DEFAULT_BUCKET_ELEMENTS: Final = 1 << 25
REDUCTIONS_UNDER_WAY: Final = 2
