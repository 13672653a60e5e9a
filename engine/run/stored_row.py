"""A row of data that is kept in the checkpoint: its loss shows after a load whether the model is the one saved."""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np
import torch

from triaxis.engine.checkpoint.folder import previous_checkpoint
from triaxis.engine.checkpoint.manifest import CheckpointError, RunState
from triaxis.engine.config import ResolvedRun, RunConfig
from triaxis.engine.data.loader import Loader, make_batch
from triaxis.engine.data.stream import Sample
from triaxis.engine.step import TrainingStep
from triaxis.models.batch import IGNORED
from triaxis.parallel.worlds.group import World

Row = dict[str, list[int] | None]
ROWS_TRIED = 64
TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 5e-3, "fp16": 1e-3}
"""Relative, on another topology or machine, where sums are rounded in another order."""


def choose_row(loader: Loader) -> Row:
    """The source's first row with something to predict, as JSON."""
    samples = (loader.source.sample(0, index) for index in range(min(ROWS_TRIED, len(loader.source))))
    sample = next((s for s in samples if bool((s.labels_L != IGNORED).any())), loader.source.sample(0, 0))
    return _row_of(sample)


def _row_of(sample: Sample) -> Row:
    return {
        "tokens": sample.tokens_L.tolist(),
        "labels": sample.labels_L.tolist(),
        "positions": sample.positions_L.tolist(),
        "documents": None if sample.documents_L is None else sample.documents_L.tolist(),
    }


def _sample_of(row: Row) -> Sample:
    """The other way round."""

    def array(name: str) -> np.ndarray:
        return np.array(row[name], dtype=np.int64)

    return Sample(
        tokens_L=array("tokens"),
        labels_L=array("labels"),
        positions_L=array("positions"),
        documents_L=None if row["documents"] is None else array("documents"),
    )


def replay(training: TrainingStep, row: Row) -> float:
    """The row's loss under the present weights. Collective: the first replica computes it, the others padding."""
    rows = [_sample_of(row)] if training.mesh.dp.rank == 0 else []
    batch = make_batch(rows, training.plan.microbatch_size, training.plan.sequence_length)
    loss, _ = training.evaluate([batch])
    return loss


def rounding(config: RunConfig, resolved: ResolvedRun, world: World) -> dict[str, object]:
    """Everything that decides how sums are rounded; where two runs have it in common, equal means bit-equal."""
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else platform.machine()
    topology = resolved.topology
    return {
        "world": world.name,
        "sizes": [topology.dp, topology.tp, topology.pp],
        "order": config.order,
        "sp": config.sp,
        "stages": [resolved.virtual_stages, str(config.schedule)],
        "sharding": [str(config.data_parallel), resolved.zero],
        "microbatch_size": resolved.microbatch_size,
        "torch": torch.__version__,
        "device": device,
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        **(gpu_rounding(config.deterministic) if world.device.type == "cuda" else {}),
    }


def gpu_rounding(deterministic: bool) -> dict[str, object]:
    """What else decides on GPUs; without `deterministic` NCCL and kernels choose anew each time."""
    return {
        "deterministic": deterministic,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": str(torch.cuda.nccl.version()),
    }


def repeats(rounding: dict[str, object]) -> bool:
    """Whether the same program rounds alike each time: on CPUs always, on GPUs with --deterministic."""
    return bool(rounding.get("deterministic", True))


def check_replay(
    state: RunState, found: float, here: dict[str, object], dtype: str, path: Path
) -> str | None:
    """Raises CheckpointError unless the replayed loss is the saved one, to the bit where sums are rounded alike.

    Where they need not be, says by how much it differs.
    """
    saved = state.eval_loss
    if saved is None or found == saved or (found != found and saved != saved):
        return None
    exact = repeats(here) and here == state.extra.get("rounding")
    if not exact and abs(found - saved) <= TOLERANCE[dtype] * abs(saved):
        return f"the stored row's loss is {found!r} here and was {saved!r}: sums are rounded in another order"
    previous = previous_checkpoint(path)
    way_out = (
        f"--resume {previous} goes on from the checkpoint before it, also in the same --output-dir"
        if previous
        else "there is no checkpoint before it; start anew in another --output-dir"
    )
    raise CheckpointError(
        f"the loss of the row stored with step {state.step} must be {saved!r}"
        f"{'' if exact else f' within {TOLERANCE[dtype]:g}'}, as when it was saved, but is {found!r} after the load of "
        f"{path}, whose files are as they were written: the ranks held other weights when it was saved, or the "
        f"program is another one. {way_out}",
        previous,
    )
