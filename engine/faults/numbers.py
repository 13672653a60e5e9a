"""What a run does about a loss or gradient norm that is not finite, or leaps: the same on all ranks, in one step."""

from __future__ import annotations

import math
from typing import cast

import torch

from triaxis.engine.loss_scale import LossScaling
from triaxis.engine.run.counters import Counters
from triaxis.engine.step import StepResult, TrainingStep
from triaxis.parallel.places.legal_values import first_of
from triaxis.parallel.worlds.agreement import gather_json

MOST_SKIPPED_IN_A_ROW = 10
RANKS_NAMED = 8
SETTLED_NORMS = 10
"""Updates before a gradient norm can be called a spike."""
KEPT_SHARE = 0.9
"""Of the average, where a new norm joins it."""


def most_norm(counters: Counters, spike_factor: float | None) -> float:
    """The largest gradient norm that is no spike."""
    if spike_factor is None or counters.norms < SETTLED_NORMS:
        return math.inf
    return spike_factor * counters.norm_average


def judge(result: StepResult, counters: Counters, training: TrainingStep, limit: float) -> str | None:
    """What to say of an update that was left out, which is counted; None if there is nothing to say. Collective.

    limit: `most_norm` before the step. Raises FloatingPointError where the run must not go on.
    """
    finite = math.isfinite(result.loss) and math.isfinite(result.grad_norm)
    scaling = training.plan.loss_scaling
    if scaling is not None and not finite:
        return _overflow(result, counters, training, scaling)
    if finite and result.grad_norm <= limit:
        counters.skipped_in_a_row = 0
        if scaling is not None and counters.scale is not None:
            counters.scale = scaling.after_update(counters.scale)
        share = KEPT_SHARE if counters.norms else 0.0
        counters.norm_average = share * counters.norm_average + (1 - share) * result.grad_norm
        counters.norms += 1
        return None
    cause = f"more than {limit:.4g}, see --spike-factor" if finite else _origin(training, result)
    found = f"step {counters.step + 1}: loss {result.loss}, gradient norm {result.grad_norm} ({cause})"
    way_out = "lower --learning_rate, lengthen the warm-up, or check the data"
    if not result.skipped:
        raise FloatingPointError(f"{found}; {way_out}, or use --on-nan skip")
    counters.skipped_steps += 1
    counters.skipped_in_a_row += 1
    if counters.skipped_in_a_row >= MOST_SKIPPED_IN_A_ROW:
        raise FloatingPointError(f"{found}, for the {MOST_SKIPPED_IN_A_ROW}th time in a row; {way_out}")
    return f"{found}; the update is skipped"


def _overflow(result: StepResult, counters: Counters, training: TrainingStep, scaling: LossScaling) -> str:
    """What to say of a step whose numbers have left fp16's range; the scale falls. Collective."""
    scale = counters.scale or scaling.begin()
    counters.skipped_steps += 1
    counters.skipped_in_a_row += 1
    counters.overflows += 1
    found = (
        f"step {counters.step + 1}: numbers leave the range of fp16 at a loss scale of {scale.value:,.10g} "
        f"({_origin(training, result)})"
    )
    way_out = "lower --learning_rate, check the data, or use --dtype bf16, which has the range of fp32"
    if scaling.at_its_floor(scale):
        raise FloatingPointError(f"{found}, the least that --min-loss-scale allows; {way_out}")
    if counters.skipped_in_a_row >= scaling.most_in_a_row(MOST_SKIPPED_IN_A_ROW):
        raise FloatingPointError(f"{found}, for the {counters.skipped_in_a_row}th time in a row; {way_out}")
    counters.scale = scaling.after_overflow(scale)
    fallen = counters.scale.value < scale.value
    return f"{found}; the update is left out" + (
        f", and the scale is now {counters.scale.value:,.10g}" * fallen
    )


def _origin(training: TrainingStep, result: StepResult) -> str:
    """The ranks whose own losses of this step are not finite, or the parameters whose gradients are not.

    Collective, and only when something is wrong.
    """
    everyone = training.mesh.everyone
    losses = training.losses
    bad = torch.zeros(everyone.size, dtype=torch.int32, device=training.mesh.world.device)
    bad[everyone.rank] = int(bool(losses) and not bool(torch.isfinite(torch.stack(list(losses))).all()))
    everyone.all_reduce(bad)
    ranks = [rank for rank, flag in enumerate(bad.tolist()) if flag]
    if not ranks:
        return f"every rank's loss is finite: it comes from {_bad_gradients(training, result)}"
    named = ", ".join(map(str, ranks[:RANKS_NAMED])) + (", …" if len(ranks) > RANKS_NAMED else "")
    return f"from the loss of rank{'s' * (len(ranks) > 1)} {named}"


def _bad_gradients(training: TrainingStep, result: StepResult) -> str:
    """A parameter whose gradient is not finite, as late in the model as any, and how many others. Collective."""
    if not result.skipped:  # the update has scaled them all by what the norm was
        return "a gradient"
    own = [
        segment.layout.name
        for shard in training.data_parallel.buckets
        for segment in shard.segments
        if not bool(torch.isfinite(shard.gradient_shard[segment.start : segment.stop]).all())
    ]
    told = gather_json(training.mesh.everyone, own, training.mesh.world.device)
    names = list(dict.fromkeys(name for rank in told for name in cast(list[str], rank)))
    if not names:
        return "a gradient"
    return f"the gradient of {first_of(names[::-1], 1, separator=', ')}"
