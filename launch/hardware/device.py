"""What of a device's memory tensors cannot have: one account for whoever plans, simulates or scores."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

CONTEXT_BYTES: Final = 1e9
"""Of the device's context and its libraries."""
COMMUNICATOR_BYTES: Final = 0.4e9
"""Of the buffers of each kind of group that a rank is in (0.3 to 0.5 GB in reports)."""
FRAGMENTED: Final = 0.05
"""Of what tensors take, held by torch's allocator besides."""


def context_bytes(group_sizes: Iterable[int]) -> float:
    """Of the context and the communicators of groups with more than one member."""
    return CONTEXT_BYTES + COMMUNICATOR_BYTES * sum(size > 1 for size in group_sizes)


def needed_bytes(allocated: float, group_sizes: Iterable[int]) -> float:
    """What the device must have for so many bytes of tensors at their peak."""
    return (1 + FRAGMENTED) * allocated + context_bytes(group_sizes)
