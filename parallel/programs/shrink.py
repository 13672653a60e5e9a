"""The smallest pipeline that still shows a fault. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from triaxis.parallel.programs.program import Cluster
from triaxis.parallel.programs.proof import Proof, prove


@dataclass(frozen=True, slots=True, kw_only=True)
class Smallest:
    """A faulty cluster of `pp` pipeline ranks and as few microbatches as any such has, and what is wrong with it."""

    pp: int
    microbatches: int
    proof: Proof

    def __str__(self) -> str:
        shown = f"the smallest that shows it has pp {self.pp} and microbatches {self.microbatches}"
        return "\n".join([shown, *(f"  {fault}" for fault in self.proof.faults)])


def smallest(build: Callable[[int, int], Cluster], pp: int, microbatches: int) -> Smallest | None:
    """The first (pp, microbatches) with a fault, by pp · microbatches and then by pp; None if none up to these has one.

    build: makes the cluster; a ValueError says that there is none of that size
    Example: a naive 1F1B that gets stuck with pp 16 and 32 microbatches does so with pp 2 and 2 microbatches.
    """
    sizes = [(p, m) for p in range(1, pp + 1) for m in range(1, microbatches + 1)]
    for size in sorted(sizes, key=lambda size: (size[0] * size[1], size[0])):
        try:
            cluster = build(*size)
        except ValueError:
            continue
        proof = prove(cluster)
        if not proof.holds:
            return Smallest(pp=size[0], microbatches=size[1], proof=proof)
    return None
