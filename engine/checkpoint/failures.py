"""What ranks say when a save or a load fails on one of them: the same error on all, with the way out."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from triaxis.engine.checkpoint.manifest import CheckpointError, SaveError, damaged
from triaxis.parallel.places.legal_values import first_of
from triaxis.parallel.worlds.agreement import gather_json
from triaxis.parallel.worlds.mesh import Mesh

T = TypeVar("T")
FAILURES_NAMED = 4
ELSEWHERE = "choose another `output_dir`"
WAYS_OUT = {
    errno.ENOSPC: f"Free space there, or {ELSEWHERE}",
    errno.EDQUOT: f"Free space there (a quota is used up), or {ELSEWHERE}",
    errno.EACCES: f"Let this account write there, or {ELSEWHERE}",
    errno.EPERM: f"Let this account write there, or {ELSEWHERE}",
    errno.EROFS: f"Mount it so that it can be written, or {ELSEWHERE}",
    errno.ENOENT: "Choose an `output_dir` that all nodes share",  # where rank 0 had made the folder
}


def told_cause(name: str, error: OSError) -> tuple[str, str, int]:
    """A failure as it is sent: the rank's name, the words, the number of the operating system."""
    return name, str(error), error.errno or 0


def save_failure(step: int, name: str, cause: str, number: int) -> SaveError:
    """The error of a save that failed for a cause of the operating system."""
    way_out = WAYS_OUT.get(number, f"See to it, or {ELSEWHERE}")
    return SaveError(
        f"the checkpoint of step {step} was not saved, by {name}: {cause}; earlier checkpoints are as they were. "
        f"{way_out}",
        step,
    )


def together(mesh: Mesh, name: str, work: Callable[[], T], path: Path) -> T:
    """This rank's result, if no rank failed to read `path`; else CheckpointError on all. Collective.

    name: of this rank, for the message
    """
    result: list[T] = []
    failure: tuple[str, str, str] | None = None
    try:
        result.append(work())
    except CheckpointError as error:
        failure = name, str(error), str(error.previous or "")
    except OSError as cause:
        unread = damaged(path, "", f"cannot be read ({cause})")
        failure = name, str(unread), str(unread.previous or "")
    mesh.world.wait_for_all("checkpoint read")
    failures: list[Any] = gather_json(mesh.everyone, failure, mesh.world.device)
    told = [answer for answer in failures if answer is not None]
    if told:
        _, text, previous = told[0]
        if any(answer is None or answer[1] != text for answer in failures):
            text = first_of([f"{name}: {text}" for name, text, _ in told], FAILURES_NAMED, noun="rank")
        raise CheckpointError(text, Path(previous) if previous else None)
    return result[0]
