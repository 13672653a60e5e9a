"""What of its data a run trains on: which rows are used, left over and repeated. Pure arithmetic."""

from __future__ import annotations

import math

from triaxis.parallel.places.legal_values import counted


def told_usage(rows: int, samples: int, batch: int, epochs: float | None) -> str:
    """One line on the run as a whole.

    samples: of all its steps; batch: a step's samples; epochs: as asked for, None where steps were
    Example: 13 rows, a batch of 8, 1 epoch: "trains on 8 of 13 rows, each once; 5 are left over: …".
    """
    times, rest = divmod(samples, rows)
    if not times:
        told = f"trains on {samples:,} of {counted(rows, 'row')}, each once"
    elif not rest:
        told = f"trains on all {counted(rows, 'row')}, each {_times(times)}"
    else:
        told = f"trains on {counted(rows, 'row')}: {rest:,} of them {_times(times + 1)}, the others {_times(times)}"
    if epochs is None:
        return told
    asked = math.floor(rows * epochs + 1e-9)
    if samples < asked:
        left = asked - samples
        told += (
            f"; {counted(left, 'sample')} of {_epochs(epochs)} {'is' if left == 1 else 'are'} left over: "
            f"a step takes {batch:,}, and the last step is a whole one"
        )
    if samples > asked:
        trained = f"{samples / rows:.3g}"
        trained += " epoch" + "s" * (trained != "1")
        told += f"; that is {trained}, not {epochs:g}: a step takes {batch:,}, and there is one"
    return told


def _epochs(epochs: float) -> str:
    return "the one epoch" if epochs == 1 else f"the {epochs:g} epochs"


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number:,} times")
