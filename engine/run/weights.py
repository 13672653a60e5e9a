"""Where a run's first weights come from: random values, a Hugging Face folder, or another run's checkpoint."""

from __future__ import annotations

import math
from pathlib import Path

from torch import Tensor

from triaxis.engine.checkpoint.folder import checkpoints_at
from triaxis.engine.config import ConfigError, ResolvedRun, RunConfig
from triaxis.engine.run.metrics import StepRow
from triaxis.models.huggingface.places import Shape
from triaxis.models.weights import filler, whole_shapes
from triaxis.parallel.replicas.initialize import Fill


def first_values(config: RunConfig, resolved: ResolvedRun) -> Fill | None:
    """What fills each parameter before training; None for random values by the seed.

    Raises ImportRefused or ConfigError, which list everything that does not fit, before anything is trained.
    """
    if config.model_name_or_path is not None:
        from triaxis.models.huggingface.folder import open_weights

        return filler(open_weights(Path(config.model_name_or_path), resolved.model))
    if config.init_from is not None:
        return filler(StoredWeights(Path(config.init_from), whole_shapes(resolved.model)))
    return None


def told_first_loss(config: RunConfig, row: StepRow, vocab_size: int) -> str | None:
    """What the weights that a run began with are worth, beside a guess: near it or above, something was read wrongly.

    None after the first step, and where the weights were random.
    """
    if row.step > 1 or row.loss is None or (config.model_name_or_path or config.init_from) is None:
        return None
    guess = f"of a guess, ln {vocab_size}: {math.log(vocab_size):.4f}"
    return f"loss of the weights that were read: {row.loss:.4f}; {guess}"


class StoredWeights:
    """The master weights of a checkpoint of this engine, of any layout. path: a checkpoint, or a folder of them."""

    def __init__(self, path: Path, expected: dict[str, Shape]) -> None:
        from triaxis.engine.checkpoint.stored import StoredTensors  # loads torch's checkpoint package

        found = checkpoints_at(path)
        if not found:
            raise ConfigError(
                (f"`init_from` must hold a complete checkpoint, but {path} holds none; check the path",)
            )
        self._stored = StoredTensors(found[-1])
        there = self._stored.manifest.tensors
        faults = [
            f"`init_from` must be a checkpoint of this model, but {found[-1]} has {name} "
            + (f"of shape {list(there[key].shape)} for {list(shape)}" if key in there else "not at all")
            for name, shape in expected.items()
            for key in (MASTER + name,)
            if key not in there or there[key].shape != shape
        ]
        if faults:
            raise ConfigError(tuple(faults[:20]))

    def read(self, name: str, offsets: Shape, sizes: Shape) -> Tensor:
        """A rectangle of a tensor, in the masters' dtype."""
        return self._stored.read(MASTER + name, offsets, sizes)


MASTER = "master/"
