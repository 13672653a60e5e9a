"""What a check is: a question to one machine, with figures and a verdict."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

Figures = dict[str, float | str]


class CheckFailed(AssertionError):
    """The machine does not do what it must; the message has the figure and its bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check. limit_seconds: its process is ended then; gpus: the fewest that it needs; cpu: whether it has a CPU form

    ask: (device, small) → figures; small is the size for CPUs. Raises CheckFailed.
    """

    name: str
    limit_seconds: float
    ask: Callable[[torch.device, bool], Figures]
    gpus: int = 1
    cpu: bool = True


def require(holds: bool, what: str) -> None:
    """Raises CheckFailed with `what` if it does not hold."""
    if not holds:
        raise CheckFailed(what)


def within(figures: Figures, name: str, found: float, bound: float) -> None:
    """Notes a figure that must be at most `bound`."""
    figures[name] = found
    require(found <= bound, f"{name} must be at most {bound:g}, but is {found:g}")


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference over that of what is expected, in float64 on the host."""
    one, other = found.detach().double().cpu(), expected.detach().double().cpu()
    return float((one - other).norm() / other.norm().clamp_min(1e-300))


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """The best of some repeats, with the device's own end."""

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work()
    finish()
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        finish()
        best = min(best, time.perf_counter() - started)
    return best
