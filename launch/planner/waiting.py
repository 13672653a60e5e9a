"""What to say of a pipeline that waits more than it should. Standard library only."""

from __future__ import annotations

import math
from typing import Final

MUCH_WAITING: Final = 0.3
"""Of a step, for want of work: more is told."""
FAIR: Final = 0.2


def waiting_share(pp: int, microbatches: int, chunks: int = 1) -> float:
    """Of a step whose stages take the same time: (p - 1) / (v·m + p - 1). pp 4 with 2 microbatches waits 60%."""
    return (pp - 1) / (chunks * microbatches + pp - 1)


def microbatches_for(share: float, pp: int, chunks: int = 1) -> int:
    """The fewest microbatches with which it is at most this share. Example: pp 4 waits 20% with 12 of them."""
    return math.ceil((pp - 1) * (1 - share) / (share * chunks) - 1e-9)


def waiting_text(pp: int, microbatches: int, chunks: int = 1) -> str | None:
    """The share, and how many microbatches would make it a fair one; None where it is not much."""
    share = waiting_share(pp, microbatches, chunks)
    if share <= MUCH_WAITING:
        return None
    return (
        f"the pipeline waits about {share:.0%} of the step; with {microbatches_for(FAIR, pp, chunks)} microbatches or "
        f"more on each rank it is {FAIR:.0%} or less: a larger global batch, smaller microbatches, or fewer stages"
    )
