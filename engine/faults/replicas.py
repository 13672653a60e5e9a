"""Whether replicas still hold the same weights: looked at before each save, so that none hides that they do not."""

from __future__ import annotations

import torch
from torch import Tensor

from triaxis.engine.step import TrainingStep

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaError(RuntimeError):
    """Replicas of one model hold different weights; raised on all ranks alike."""


def check_replicas(training: TrainingStep, step: int) -> None:
    """Compares a checksum of each bucket over dp (nothing to compare in stage 3). Collective, two small messages."""
    mesh = training.mesh
    held = training.data_parallel.replicated()
    differs = torch.zeros(mesh.everyone.size, dtype=torch.int32, device=mesh.world.device)
    if held:
        sums = torch.stack([_bits(weights) for weights in held])
        most = torch.cat((sums, -sums))
        mesh.dp.all_reduce(most, largest=True)
        differs[mesh.world.rank] = bool((most[: len(held)] != -most[len(held) :]).any())
    mesh.everyone.all_reduce(differs, largest=True)
    ranks = [str(rank) for rank, flag in enumerate(differs.tolist()) if flag]
    if ranks:
        raise ReplicaError(
            f"the weights of replicas must be equal to the bit after step {step}, but those of ranks "
            f"{', '.join(ranks)} are not; nothing was saved of them. Go on from the checkpoint before with --resume "
            "auto; if it happens again, a device is faulty or a gradient is not summed"
        )


def _bits(weights: Tensor) -> Tensor:
    """The sum of the values' bits, as a whole number."""
    return weights.detach().view(INTEGERS[weights.element_size()]).sum(dtype=torch.int64)
