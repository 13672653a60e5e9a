"""What a layout costs, whoever priced it: the parts of a step's time and of a rank's memory. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step and their parts, each as it lengthens the step, on the slowest stage.

    stage: the pipeline rank that computes longest; tokens: of the step, on all ranks
    """

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
    stage: int = 0

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one rank at its peak, by category.

    buffers: gathered parameters, gradients under way, messages; temporaries: of the layer in backward, or of the
    update where it takes more than backward did
    fragments: what the allocator holds besides; context: the device's context and communicators
    stage: the pipeline rank that it is
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    temporaries: float
    fragments: float
    context: float
    stage: int

    @property
    def model_states(self) -> float:
        """Parameters, gradients and optimizer states."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def allocated(self) -> float:
        """Bytes of tensors: what torch.cuda.max_memory_allocated shows."""
        return self.model_states + self.activations + self.logits + self.buffers + self.temporaries

    @property
    def reserved(self) -> float:
        """Bytes that the allocator takes from the device for them."""
        return self.allocated + self.fragments

    @property
    def total(self) -> float:
        """Bytes of the device: what must fit."""
        return self.reserved + self.context

    def by_category(self) -> dict[str, float]:
        """Every category and its bytes."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "stage"}
