"""Carries out one rank's program of a pipeline schedule, whichever schedule it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from triaxis.parallel.pipeline.limits import SENDS_UNDER_WAY
from triaxis.parallel.pipeline.lowering import Compute, Hand, Instruction, Program, Receive, Send, lower
from triaxis.parallel.pipeline.orders import make_forward_schedule
from triaxis.parallel.pipeline.schedule import Action, Kind, Placement
from triaxis.parallel.worlds.group import DONE, Group, Work


class PipelineChunk(Protocol):
    """A model stage as the pipeline sees it."""

    def forward(self, hidden: Tensor | None, microbatch: int) -> Tensor:
        """The hidden state after this stage; after the last, the microbatch's scalar loss, scaled."""

    def before_backward(self, action: Action, *, last: bool) -> None:
        """A backward pass begins, whole (B) or for the gradients of inputs alone (I).

        last: no later action of the step adds to the gradients of this chunk's weights
        """

    def after_backward(self, action: Action) -> None: ...

    def add_weight_gradients(self, action: Action, *, last: bool) -> None:
        """The other half of a backward pass for the gradients of inputs alone (W)."""


@dataclass(slots=True)
class _Step:
    """What is in flight during one run."""

    received: dict[Action, tuple[Tensor, Work]] = field(default_factory=dict)
    made: dict[Action, Tensor] = field(default_factory=dict)  # waiting for their send
    graphs: dict[tuple[int, int], tuple[Tensor | None, Tensor | GradientEdge]] = field(default_factory=dict)
    sends: deque[tuple[Tensor, Work]] = field(default_factory=deque)
    losses: list[Tensor] = field(default_factory=list)
    trains: bool = True

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
    placement: which model stage each chunk of each rank is
    """

    def __init__(
        self,
        group: Group,
        program: Program,
        chunks: Sequence[PipelineChunk],
        *,
        placement: Placement,
        activation_shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.group = group
        self.program = program
        self.chunks = tuple(chunks)
        self._placement = placement
        self._stages, self._last_stage = placement.stages[group.rank], placement.last
        self.activation_shape = tuple(activation_shape)
        self.dtype = dtype
        self.device = device
        self._forward_programs: dict[int, Program] = {}
        self._instructions: dict[type[Instruction], Callable[[_Step, Any], None]] = {
            Compute: self._compute,
            Receive: self._receive,
            Send: self._send,
            Hand: self._hand,
        }
        self._kinds: dict[Kind, Callable[[_Step, Compute], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT: self._backward,
            Kind.WEIGHT: self._weight,
        }

    def connect(self, links: Sequence[tuple[int, int]]) -> None:
        """A message over every link (sender, receiver) of the pipeline, one after the other; see `Mesh.connect`."""
        for sender, receiver in links:
            token = torch.zeros(1, device=self.device)
            if self.group.rank == sender:
                self.group.isend(token, receiver, label="connection").wait()
            elif self.group.rank == receiver:
                self.group.irecv(token, sender, label="connection").wait()

    def run(self) -> list[Tensor]:
        """One optimizer step's forwards and backwards; the detached losses, on the rank of the last stage."""
        return self._run(self.program, trains=True)

    @torch.no_grad()
    def run_forward(self, microbatches: int) -> list[Tensor]:
        """Forward passes without gradients, of microbatches 0, 1, …; the losses, where the last stage is."""
        if microbatches not in self._forward_programs:
            schedule = make_forward_schedule(self._placement, microbatches)
            self._forward_programs[microbatches] = lower(schedule)[self.group.rank]
        return self._run(self._forward_programs[microbatches], trains=False)

    def _run(self, program: Program, *, trains: bool) -> list[Tensor]:
        step = _Step(trains=trains)
        for instruction in program:
            self._instructions[type(instruction)](step, instruction)
        step.finish_sends(under_way=0)
        return step.losses

    def _receive(self, step: _Step, receive: Receive) -> None:
        buffer = torch.empty(self.activation_shape, dtype=self.dtype, device=self.device)
        work = self.group.irecv(buffer, receive.from_rank, label=receive.label)
        step.received[receive.action] = buffer, work

    def _send(self, step: _Step, send: Send) -> None:
        tensor = step.made.pop(send.action)
        step.sends.append((tensor, self.group.isend(tensor, send.to_rank, label=send.label)))
        step.finish_sends(under_way=SENDS_UNDER_WAY)

    def _hand(self, step: _Step, hand: Hand) -> None:
        step.received[hand.taker] = step.made.pop(hand.action), DONE

    def _compute(self, step: _Step, compute: Compute) -> None:
        self._kinds[compute.action.kind](step, compute)

    def _forward(self, step: _Step, compute: Compute) -> None:
        action = compute.action
        hidden = None if self._is_first(action) else step.take_input(action).requires_grad_(step.trains)
        output = self.chunks[action.chunk].forward(hidden, action.microbatch)
        root: Tensor | GradientEdge = output
        if self._is_last(action):
            step.losses.append(output.detach())
        else:
            self._keep_for_send(step, action, output)
            if step.trains:
                root = get_gradient_edge(output)  # the edge, not the tensor: the activation may go once sent
        if step.trains:
            step.graphs[action.chunk, action.microbatch] = hidden, root

    def _backward(self, step: _Step, compute: Compute) -> None:
        action = compute.action
        chunk = self.chunks[action.chunk]
        hidden, root = step.graphs.pop((action.chunk, action.microbatch))
        gradient = None if self._is_last(action) else step.take_input(action)
        chunk.before_backward(action, last=compute.last)
        torch.autograd.backward(root, gradient)
        chunk.after_backward(action)
        if hidden is not None:
            assert hidden.grad is not None, f"{action}: the stage does not use its input"
            self._keep_for_send(step, action, hidden.grad)

    def _weight(self, step: _Step, compute: Compute) -> None:
        self.chunks[compute.action.chunk].add_weight_gradients(compute.action, last=compute.last)

    def _keep_for_send(self, step: _Step, action: Action, tensor: Tensor) -> None:
        if tensor.shape != self.activation_shape or tensor.dtype != self.dtype:
            raise ValueError(
                f"the tensor of {action} on pp rank {self.group.rank} must have shape "
                f"{list(self.activation_shape)} and {self.dtype}, "
                f"but has {list(tensor.shape)} and {tensor.dtype}"
            )
        step.made[action] = tensor.detach().contiguous()

    def _is_first(self, action: Action) -> bool:
        return self._stages[action.chunk] == 0

    def _is_last(self, action: Action) -> bool:
        return self._stages[action.chunk] == self._last_stage
