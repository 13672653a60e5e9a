"""Which parameters weight decay acts on, as a run says it once."""

from __future__ import annotations

import re
from typing import cast

from triaxis.engine.step import TrainingStep
from triaxis.parallel.worlds.agreement import gather_json


def told_groups(training: TrainingStep, weight_decay: float) -> str:
    """The two groups by name, layers' numbers left out. Collective over the stages, one small message.

    Example: `weight decay 0.1 on embedding.weight, layers.*.mlp.down.weight; none on norm.weight`.
    """
    own = {
        re.sub(r"\.\d+\.", ".*.", layout.name): layout.decayed
        for shard in training.data_parallel.buckets
        for _, layout in shard.pieces
    }
    mesh = training.mesh
    found: dict[str, bool] = {}
    for stage in gather_json(mesh.pp, [[name, decayed] for name, decayed in own.items()], mesh.world.device):
        found |= {str(name): bool(decayed) for name, decayed in cast(list[list[object]], stage)}
    groups = {
        wanted: ", ".join(name for name, decayed in found.items() if decayed is wanted)
        for wanted in (True, False)
    }
    return (
        f"weight decay {weight_decay:g} on {groups[True] or 'nothing'}; none on {groups[False] or 'nothing'}"
    )
