"""What a run does about a loss or a gradient norm that is not finite: the same on all ranks, in the same step."""

from __future__ import annotations

import math

import torch

from triaxis.engine.faults.saving import Counters
from triaxis.engine.step import StepResult, TrainingStep

MOST_SKIPPED_IN_A_ROW = 10
RANKS_NAMED = 8


def judge(result: StepResult, counters: Counters, training: TrainingStep) -> str | None:
    """What to say of an update that was left out, which is counted; None if there is nothing to say. Collective.

    Raises FloatingPointError where the run must not go on.
    """
    if math.isfinite(result.loss) and math.isfinite(result.grad_norm):
        counters.skipped_in_a_row = 0
        return None
    found = f"step {counters.step + 1}: loss {result.loss}, gradient norm {result.grad_norm} ({_origin(training)})"
    way_out = "lower --learning_rate, lengthen --warmup_ratio, or check the data"
    if not result.skipped:
        raise FloatingPointError(f"{found}; {way_out}, or use --on-nan skip")
    counters.skipped_steps += 1
    counters.skipped_in_a_row += 1
    if counters.skipped_in_a_row >= MOST_SKIPPED_IN_A_ROW:
        raise FloatingPointError(f"{found}, for the {MOST_SKIPPED_IN_A_ROW}th time in a row; {way_out}")
    return f"{found}; the update is skipped"


def _origin(training: TrainingStep) -> str:
    """The ranks whose own losses of this step are not finite. Collective, and only when something is wrong."""
    everyone = training.mesh.everyone
    losses = training.losses
    bad = torch.zeros(everyone.size, dtype=torch.int32, device=training.mesh.world.device)
    bad[everyone.rank] = int(bool(losses) and not bool(torch.isfinite(torch.stack(list(losses))).all()))
    everyone.all_reduce(bad)
    ranks = [rank for rank, flag in enumerate(bad.tolist()) if flag]
    if not ranks:
        return "every rank's loss is finite: it comes from a gradient"
    named = ", ".join(map(str, ranks[:RANKS_NAMED])) + (", …" if len(ranks) > RANKS_NAMED else "")
    return f"from the loss of rank {named}"
