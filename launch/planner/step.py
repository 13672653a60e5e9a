"""The time of one step as its parts. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step and their parts, each as it lengthens the step, on the slowest stage."""

    compute: float
    recompute: float
    tensor: float
    context: float
    expert: float
    pipeline: float
    bubble: float
    data: float
    optimizer: float
    tokens: float
    gpus: int

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return (
            self.compute
            + self.recompute
            + self.tensor
            + self.context
            + self.expert
            + self.pipeline
            + self.bubble
            + self.data
            + self.optimizer
        )

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Throughput."""
        return self.tokens / self.seconds / self.gpus
