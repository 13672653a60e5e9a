"""Whether a model whose attention is not the engine's keeps the documents of a row apart: seen, not believed."""

from __future__ import annotations

import numpy as np

from triaxis.engine.config import ConfigError, ResolvedRun, RunConfig
from triaxis.engine.data.loader import make_batch
from triaxis.engine.data.stream import Sample
from triaxis.engine.step import TrainingStep
from triaxis.models.batch import IGNORED

LOOKED_AT = 8
"""Tokens at the second document's head, which would see the first one most."""
TOLERANCE = 1e-6
"""Relative, of their loss. A masked token adds nothing, in any precision: without experts the two are equal."""
WITH_EXPERTS = {"fp64": 1e-6, "fp32": 1e-6, "bf16": 2e-3, "fp16": 2e-3}
"""Other tokens beside them at an expert are products of other sizes, which may be rounded in another way."""


def check_packing(config: RunConfig, resolved: ResolvedRun, training: TrainingStep) -> None:
    """Raises ConfigError where the first of two documents in a row changes the loss of the second. Collective.

    Two forward passes of one microbatch, once a run, and only where rows are packed and attention is not ours.
    """
    if not config.pack or resolved.model.own_attention or config.seq < 2 * LOOKED_AT:
        return
    random = np.random.default_rng(config.seed)
    losses = []
    second_L = random.integers(resolved.model.vocab_size, size=config.seq)
    for _ in range(2):
        row = _two_documents(random.integers(resolved.model.vocab_size, size=config.seq), second_L)
        rows = [row] if training.mesh.dp.rank == 0 else []
        batch = make_batch(rows, training.plan.microbatch_size, training.plan.sequence_length)
        losses.append(training.evaluate([batch])[0])
    tolerance = WITH_EXPERTS[config.dtype] if resolved.model.mixes() else TOLERANCE
    if abs(losses[1] - losses[0]) > tolerance * abs(losses[0]):
        raise ConfigError(
            (
                f"`pack` must be off for {resolved.model.name}, as transformers builds it: of two documents in a row "
                f"the second's loss was {losses[0]:.6f} after one document and {losses[1]:.6f} after another, so it "
                "sees what is not its own; give --no-pack, which has one document in a row",
            )
        )


def _two_documents(first_L: np.ndarray, second_L: np.ndarray) -> Sample:
    """A row of two halves, with the targets of the second half's first tokens."""
    half = len(first_L) // 2
    positions_L = np.concatenate((np.arange(half), np.arange(len(first_L) - half)))
    labels_L = np.full(len(first_L), IGNORED, dtype=np.int64)
    labels_L[half : half + LOOKED_AT] = second_L[half + 1 : half + 1 + LOOKED_AT]
    return Sample(
        tokens_L=np.concatenate((first_L[:half], second_L[half:])).astype(np.int64),
        labels_L=labels_L,
        positions_L=positions_L.astype(np.int64),
        documents_L=(np.arange(len(first_L)) >= half).astype(np.int64),
    )
