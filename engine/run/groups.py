"""Which parameters weight decay acts on, as a run says it once."""

from __future__ import annotations

import re
from typing import cast

from triaxis.engine.step import TrainingStep
from triaxis.parallel.worlds.agreement import gather_json


def told_groups(training: TrainingStep, weight_decay: float) -> str:
    """The two groups by name, layers' numbers left out. Collective over the stages, one small message.

    Example: `weight decay 0.1 on embedding, every layer's mlp.up mlp.down; none on norm`.
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
        wanted: _told([name for name, decayed in found.items() if decayed is wanted])
        for wanted in (True, False)
    }
    return (
        f"weight decay {weight_decay:g} on {groups[True] or 'nothing'}; none on {groups[False] or 'nothing'}"
    )


def _told(names: list[str]) -> str:
    """`embedding, every layer's mlp.down mlp.up`: what all layers have is named once, and weights without that word."""
    layers: dict[str, list[str]] = {}
    for name in names:
        folder, star, rest = name.removesuffix(".weight").partition(".*.")
        layers.setdefault(folder if star else "", []).append(rest if star else folder)
    alone = layers.pop("", [])
    several = len(layers) > 1
    return ", ".join(
        [
            *alone,
            *(
                f"every layer's {' '.join(rest)}" + f" in {folder}" * several
                for folder, rest in layers.items()
            ),
        ]
    )
