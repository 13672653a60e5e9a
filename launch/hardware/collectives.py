"""How long a collective takes: the best of a ring, a tree and a hierarchy, by who sits where.

Costs are α + bytes/β sums (Thakur, Rabenseifner, Gropp 2005; NCCL's ring and double tree). All groups of the same
kind are taken to run at once, so a rank has its share of its node's network cards and never more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from triaxis.launch.hardware.hardware import Hardware

BASE_SECONDS: Final = (
    25e-6  # enqueue, launch and meeting of the ranks: NCCL's small-message time on A100 and H100
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Where a group's ranks are. ranks: all; local: most on one node; nodes; the links they use, per rank."""

    ranks: int
    local: int
    nodes: int
    even: bool
    intra_bytes_per_s: float
    inter_bytes_per_s: float
    intra_latency: float
    inter_latency: float

    @property
    def ring_bytes_per_s(self) -> float:
        """What a flat ring carries: with several nodes, each node's ranks share the crossing of their cards."""
        if self.nodes == 1:
            return self.intra_bytes_per_s
        return min(self.intra_bytes_per_s, self.local * self.inter_bytes_per_s)

    @property
    def ring_latency(self) -> float:
        """Of n - 1 hops."""
        inter = self.nodes - 1
        return (self.ranks - 1 - inter) * self.intra_latency + inter * self.inter_latency


def collective_seconds(operation: str, nbytes: float, ranks: Sequence[int], hardware: Hardware) -> float:
    """Seconds of one collective over `ranks`; rank // gpus_per_node is the node.

    nbytes: of the whole tensor (what all_gather returns, reduce_scatter takes); for all_to_all, one rank's buffer.
    ValueError for an unknown operation.
    """
    if operation not in _SECONDS:
        raise ValueError(f"`operation` must be one of {', '.join(_SECONDS)}, but is {operation!r}")
    if len(ranks) <= 1:
        return 0.0
    return BASE_SECONDS + _SECONDS[operation](_group(ranks, hardware), nbytes)


def send_seconds(nbytes: float, source: int, destination: int, hardware: Hardware) -> float:
    """Seconds of one point-to-point message."""
    if source == destination:
        return 0.0
    group = _group((source, destination), hardware)
    if group.nodes == 1:
        return group.intra_latency + nbytes / group.intra_bytes_per_s
    return group.inter_latency + nbytes / group.inter_bytes_per_s


def _group(ranks: Sequence[int], hardware: Hardware) -> _Group:
    local, nodes, even = _placement(ranks, hardware.gpus_per_node)
    intra = hardware.intra.bytes_per_s
    if not hardware.switched and hardware.gpus_per_node > 1:
        intra *= max(local - 1, 1) / (hardware.gpus_per_node - 1)
    return _Group(
        ranks=len(ranks),
        local=local,
        nodes=nodes,
        even=even,
        intra_bytes_per_s=intra,
        inter_bytes_per_s=hardware.inter.bytes_per_s * hardware.nics_per_node / hardware.gpus_per_node,
        intra_latency=hardware.intra.latency_s,
        inter_latency=hardware.inter.latency_s,
    )


def _placement(ranks: Sequence[int], per_node: int) -> tuple[int, int, bool]:
    """Most ranks on one node, nodes, whether all nodes have as many."""
    if isinstance(ranks, range) and ranks.start == 0 and per_node % ranks.step == 0:
        local = min(len(ranks), per_node // ranks.step)
        return local, -(-len(ranks) // local), len(ranks) % local == 0
    counts = Counter(rank // per_node for rank in ranks)
    local = max(counts.values())
    return local, len(counts), len(set(counts.values())) == 1


def _one_way(group: _Group, nbytes: float) -> float:
    """All-gather or reduce-scatter: a flat ring, or over the nodes first and then inside them."""
    n, g, k = group.ranks, group.local, group.nodes
    best = group.ring_latency + (n - 1) / n * nbytes / group.ring_bytes_per_s
    if k > 1 and group.even and g > 1:
        across = (k - 1) * group.inter_latency + (k - 1) / k * nbytes / g / group.inter_bytes_per_s
        inside = (g - 1) * group.intra_latency + (g - 1) / g * nbytes / group.intra_bytes_per_s
        best = min(best, across + inside)
    return best


def _all_reduce(group: _Group, nbytes: float) -> float:
    g, k = group.local, group.nodes
    tree_latency = 2 * ((g - 1) * group.intra_latency + math.log2(k) * group.inter_latency)
    tree = tree_latency + 2 * nbytes / group.ring_bytes_per_s
    return min(2 * _one_way(group, nbytes), tree)


def _all_to_all(group: _Group, nbytes: float) -> float:
    """Each rank sends an n-th to each other, those on its node by the fast link, at the same time as the rest."""
    n, g = group.ranks, group.local
    inside = (g - 1) * group.intra_latency + (g - 1) / n * nbytes / group.intra_bytes_per_s
    if group.nodes == 1:
        return inside
    across = (group.nodes - 1) * group.inter_latency + (n - g) / n * nbytes / group.inter_bytes_per_s
    return max(inside, across)


def _broadcast(group: _Group, nbytes: float) -> float:
    return group.ring_latency + nbytes / group.ring_bytes_per_s


def _barrier(group: _Group, nbytes: float) -> float:
    return _all_reduce(group, 0.0)


_SECONDS: Final[dict[str, Callable[[_Group, float], float]]] = {
    "all_reduce": _all_reduce,
    "all_reduce largest": _all_reduce,
    "all_gather": _one_way,
    "reduce_scatter": _one_way,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "barrier": _barrier,
}
