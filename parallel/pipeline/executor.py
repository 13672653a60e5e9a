"""Carries out one rank's program of a pipeline schedule, whichever schedule it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from triaxis.parallel.pipeline.limits import SENDS_UNDER_WAY
from triaxis.parallel.pipeline.schedule import (
    Action,
    Compute,
    Kind,
    Program,
    Receive,
    lower,
    make_forward_schedule,
)
from triaxis.parallel.worlds.group import Group, Work


class PipelineChunk(Protocol):
    """A model stage as the pipeline sees it."""

    def forward(self, hidden: Tensor | None, microbatch: int) -> Tensor:
        """The hidden state after this stage; after the last, the microbatch's scalar loss, scaled."""

    def before_backward(self, microbatch: int) -> None: ...
    def after_backward(self, microbatch: int) -> None: ...


@dataclass(slots=True)
class _Step:
    """What is in flight during one run."""

    received: dict[Action, tuple[Tensor, Work]] = field(default_factory=dict)
    made: dict[Action, Tensor] = field(default_factory=dict)  # waiting for their send
    graphs: dict[tuple[int, int], tuple[Tensor | None, Tensor | GradientEdge]] = field(default_factory=dict)
    sends: deque[tuple[Tensor, Work]] = field(default_factory=deque)
    losses: list[Tensor] = field(default_factory=list)

    def take_input(self, action: Action) -> Tensor:
        tensor, work = self.received.pop(action)
        work.wait()
        return tensor

    def finish_sends(self, under_way: int) -> None:
        """Waits for the oldest sends; a send's tensor is kept until then."""
        while len(self.sends) > under_way:
            _, work = self.sends[0]
            work.wait()
            self.sends.popleft()


class PipelineExecutor:
    """Runs the chunks of this rank by its lowered program. Communicates on pp.

    activation_shape: of the hidden state between stages, the same for every microbatch
    chunks: chunk c is model stage c * pp + rank
    """

    def __init__(
        self,
        group: Group,
        program: Program,
        chunks: Sequence[PipelineChunk],
        *,
        activation_shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.group = group
        self.program = program
        self.chunks = tuple(chunks)
        self.activation_shape = tuple(activation_shape)
        self.dtype = dtype
        self.device = device
        self._forward_programs: dict[int, Program] = {}

    def run(self) -> list[Tensor]:
        """One optimizer step's forwards and backwards; the detached losses, on the rank of the last stage."""
        return self._run(self.program, trains=True)

    @torch.no_grad()
    def run_forward(self, microbatches: int) -> list[Tensor]:
        """Forward passes without gradients, of microbatches 0, 1, …; the losses, where the last stage is."""
        if microbatches not in self._forward_programs:
            schedule = make_forward_schedule(self.group.size, microbatches, len(self.chunks))
            self._forward_programs[microbatches] = lower(schedule)[self.group.rank]
        return self._run(self._forward_programs[microbatches], trains=False)

    def _run(self, program: Program, *, trains: bool) -> list[Tensor]:
        step = _Step()
        for instruction in program:
            action = instruction.action
            if isinstance(instruction, Compute):
                if action.kind is Kind.FORWARD:
                    self._forward(step, action, trains)
                else:
                    self._backward(step, action)
            elif isinstance(instruction, Receive):
                buffer = torch.empty(self.activation_shape, dtype=self.dtype, device=self.device)
                work = self.group.irecv(buffer, instruction.from_rank, label=self._label(action))
                step.received[action] = buffer, work
            else:
                tensor = step.made.pop(action)
                label = self._label(action, further=1 if action.kind is Kind.FORWARD else -1)
                step.sends.append((tensor, self.group.isend(tensor, instruction.to_rank, label=label)))
                step.finish_sends(under_way=SENDS_UNDER_WAY)
        step.finish_sends(under_way=0)
        return step.losses

    def _forward(self, step: _Step, action: Action, trains: bool) -> None:
        hidden = None if self._is_first(action) else step.take_input(action).requires_grad_(trains)
        output = self.chunks[action.chunk].forward(hidden, action.microbatch)
        root: Tensor | GradientEdge = output
        if self._is_last(action):
            step.losses.append(output.detach())
        else:
            self._keep_for_send(step, action, output)
            if trains:
                root = get_gradient_edge(output)  # the edge, not the tensor: the activation may go once sent
        if trains:
            step.graphs[action.chunk, action.microbatch] = hidden, root

    def _backward(self, step: _Step, action: Action) -> None:
        chunk = self.chunks[action.chunk]
        hidden, root = step.graphs.pop((action.chunk, action.microbatch))
        gradient = None if self._is_last(action) else step.take_input(action)
        chunk.before_backward(action.microbatch)
        torch.autograd.backward(root, gradient)
        chunk.after_backward(action.microbatch)
        if hidden is not None:
            assert hidden.grad is not None, f"{action}: the stage does not use its input"
            self._keep_for_send(step, action, hidden.grad)

    def _keep_for_send(self, step: _Step, action: Action, tensor: Tensor) -> None:
        if tensor.shape != self.activation_shape or tensor.dtype != self.dtype:
            raise ValueError(
                f"the tensor of {action} on pp rank {self.group.rank} must have shape "
                f"{list(self.activation_shape)} and {self.dtype}, "
                f"but has {list(tensor.shape)} and {tensor.dtype}"
            )
        step.made[action] = tensor.detach().contiguous()

    def _label(self, action: Action, further: int = 0) -> str:
        """What a message is, the same for both sides: the action that uses it, and where (`F3 for stage 2`)."""
        stage = action.chunk * self.group.size + self.group.rank + further
        return f"{action.kind}{action.microbatch} for stage {stage}"

    def _is_first(self, action: Action) -> bool:
        return action.chunk == 0 and self.group.rank == 0

    def _is_last(self, action: Action) -> bool:
        return action.chunk == len(self.chunks) - 1 and self.group.rank == self.group.size - 1
