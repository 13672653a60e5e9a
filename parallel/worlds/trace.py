"""The trace world: one rank of a cluster that is not there. Its groups answer at once and move nothing.

What the rank asks for is written down by `recording`; that all ranks' requests fit is shown by `proof`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triaxis.parallel.places.topology import members_with
from triaxis.parallel.worlds.group import DONE, Group, Partition, Request, Work, World


class TraceGroup(Group):
    """A group whose other members are imagined."""

    def _all_reduce(self, request: Request, tensor: Tensor) -> Work:
        return DONE

    def _all_gather(self, request: Request, output: Tensor, shard: Tensor) -> Work:
        return DONE

    def _reduce_scatter(self, request: Request, shard: Tensor, whole: Tensor) -> Work:
        return DONE

    def _all_to_all(self, request: Request, output: Tensor, whole: Tensor) -> Work:
        return DONE

    def _broadcast(self, request: Request, tensor: Tensor) -> Work:
        return DONE

    def _isend(self, request: Request, tensor: Tensor) -> Work:
        return DONE

    def _irecv(self, request: Request, tensor: Tensor) -> Work:
        return DONE

    def _barrier(self, request: Request) -> None:
        return None


class TraceWorld(World):
    """Rank `rank` of `size` ranks, none of which runs.

    partitions: the groups made so far, by name; device "meta": tensors have shapes and no memory
    target: the kind of device that the program is for
    """

    name = "trace"

    def __init__(self, rank: int, size: int, device: str = "cpu", target: str = "cpu") -> None:
        if not 0 <= rank < size:
            raise ValueError(f"`rank` must be from 0 to {size - 1}, but is {rank}")
        self.rank, self.size, self.device = rank, size, torch.device(device)
        self.partitions: dict[str, Partition] = {}
        self._target = target

    @property
    def target(self) -> str:
        return self._target

    def _new_group(self, name: str, partition: Partition) -> Group:
        self.partitions[name] = partition
        return TraceGroup(name, members_with(self.rank, partition), self.rank)

    def host_counts(self, counts: Tensor, total: int) -> list[int]:
        """Even shares of `total`; what is over goes to the first ones."""
        each, over = divmod(total, counts.numel())
        return [each + (place < over) for place in range(counts.numel())]

    def host_values(self, values: Tensor) -> list[float]:
        """Ones."""
        return [1.0] * values.numel()

    def close(self) -> None:
        """Nothing to release."""
