"""A network cut into stages has the gradients of the whole network, under every schedule."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from triaxis.parallel.pipeline.executor import PipelineExecutor
from triaxis.parallel.pipeline.lowering import lower
from triaxis.parallel.pipeline.orders import make_schedule
from triaxis.parallel.pipeline.schedule import Action
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.thread import run_threads

TOKENS, WIDTH, LAYERS = 3, 5, 8
LAYOUTS = [
    *itertools.product(["gpipe", "1f1b"], [1, 2, 4], [1]),
    *itertools.product(["interleaved"], [2, 4], [2]),
    ("interleaved", 2, 4),
    ("interleaved", 3, 2),
]


def make_layers() -> list[nn.Linear]:
    generator = torch.Generator().manual_seed(7)
    layers = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(LAYERS)]
    for parameter in (parameter for layer in layers for parameter in layer.parameters()):
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return layers


def make_input(microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + microbatch)
    return torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)


class Stage:
    """Some of the layers, with a tanh after each; the last stage's loss is a mean square."""

    def __init__(self, layers: list[nn.Linear], *, last: bool, microbatches: int) -> None:
        self.layers, self.last, self.microbatches = layers, last, microbatches
        self.hooks: list[str] = []
        self.outputs: list[weakref.ref[Tensor]] = []
        self.most_outputs_alive = 0

    def forward(self, hidden: Tensor | None, microbatch: int) -> Tensor:
        hidden = make_input(microbatch) if hidden is None else hidden
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        output = hidden.square().mean() / self.microbatches if self.last else hidden * 2
        self.outputs.append(weakref.ref(output))
        self.most_outputs_alive = max(
            self.most_outputs_alive, sum(alive() is not None for alive in self.outputs)
        )
        return output

    def before_backward(self, action: Action, *, last: bool) -> None:
        self.hooks.append(f"before {action.microbatch}{' (last)' * last}")

    def after_backward(self, action: Action) -> None:
        self.hooks.append(f"after {action.microbatch}")

    def add_weight_gradients(self, action: Action, *, last: bool) -> None:
        raise AssertionError("no schedule here splits its backward passes")


Gradients = dict[str, Tensor]


def gradients_of(stages: list[list[nn.Linear]], chunk_stages: list[int]) -> Gradients:
    return {
        f"{stage}.{index}.{name}": parameter.grad
        for stage in chunk_stages
        for index, layer in enumerate(stages[stage])
        for name, parameter in layer.named_parameters()
        if parameter.grad is not None
    }


def cut(stages: int) -> list[list[nn.Linear]]:
    layers = make_layers()
    bounds = [LAYERS * stage // stages for stage in range(stages + 1)]
    return [layers[start:stop] for start, stop in itertools.pairwise(bounds)]


def reference(stages: int, microbatches: int) -> tuple[Gradients, list[Tensor]]:
    """All stages on one rank, microbatch by microbatch."""
    parts = cut(stages)
    losses = []
    for microbatch in range(microbatches):
        hidden: Tensor | None = None
        for stage, layers in enumerate(parts):
            hidden = Stage(layers, last=stage == stages - 1, microbatches=microbatches).forward(
                hidden, microbatch
            )
        assert hidden is not None
        torch.autograd.backward(hidden)
        losses.append(hidden.detach())
    return gradients_of(parts, list(range(stages))), losses


@pytest.mark.parametrize(("name", "pp", "virtual_stages"), LAYOUTS)
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 5])
def test_gradients_and_losses_equal_one_rank(
    name: str, pp: int, virtual_stages: int, microbatches: int
) -> None:  # B46
    schedule = make_schedule(name, pp, microbatches, virtual_stages)
    programs = lower(schedule)
    stages = pp * virtual_stages

    def main(world: World) -> tuple[Gradients, list[Tensor], list[Tensor]]:
        group = world.new_group("pp", [range(pp)])
        parts = cut(stages)
        mine = [chunk * pp + group.rank for chunk in range(virtual_stages)]
        chunks = [Stage(parts[stage], last=stage == stages - 1, microbatches=microbatches) for stage in mine]
        executor = PipelineExecutor(
            group,
            programs[group.rank],
            chunks,
            placement=schedule.placement,
            activation_shape=[TOKENS, WIDTH],
            dtype=torch.float64,
            device=world.device,
        )
        evaluated = executor.run_forward(microbatches)
        assert gradients_of(parts, mine) == {}
        losses = executor.run()
        for chunk in chunks:
            order = [
                f"{when} {microbatch}" for microbatch in range(microbatches) for when in ("before", "after")
            ]
            order[-2] += " (last)"
            assert chunk.hooks == order
        return gradients_of(parts, mine), losses, evaluated

    results = run_threads(pp, main)
    expected_gradients, expected_losses = reference(stages, microbatches)
    gradients: Gradients = {}
    for rank, (rank_gradients, losses, evaluated) in enumerate(results):
        gradients |= rank_gradients
        assert len(losses) == len(evaluated) == (microbatches if rank == pp - 1 else 0)
    assert gradients.keys() == expected_gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[key], rtol=1e-12, atol=1e-14)
    for losses in results[-1][1:]:
        torch.testing.assert_close(torch.stack(losses), torch.stack(expected_losses), rtol=1e-12, atol=0)
    assert not any(loss.requires_grad for loss in results[-1][1])


def test_activations_sent_are_not_kept_until_their_backward() -> None:
    """Eight microbatches under gpipe: a stage keeps a few outputs for their sends, not all eight."""
    microbatches = 8
    schedule = make_schedule("gpipe", 2, microbatches)
    programs = lower(schedule)

    def main(world: World) -> int:
        group = world.new_group("pp", [range(2)])
        stage = Stage(cut(2)[group.rank], last=group.rank == 1, microbatches=microbatches)
        PipelineExecutor(
            group, programs[group.rank], [stage], placement=schedule.placement,
            activation_shape=[TOKENS, WIDTH], dtype=torch.float64, device=world.device,
        ).run()  # fmt: skip
        return stage.most_outputs_alive

    assert run_threads(2, main)[0] <= 2


@dataclass(slots=True)
class Clock:
    """What time it is on a rank, and for how long it has computed, in units of a chunk's forward pass."""

    now: int = 0
    busy: int = 0


class TimedStage(Stage):
    """Computes as a stage does, and says that it took 1, a backward pass 2: no real time is measured.

    Its work begins when its rank is free and the stage before it in that direction (`finished`) is done.
    """

    def __init__(
        self,
        layers: list[nn.Linear],
        *,
        place: int,
        stages: int,
        microbatches: int,
        clock: Clock,
        finished: dict[tuple[int, int, int], int],
    ) -> None:
        super().__init__(layers, last=place == stages - 1, microbatches=microbatches)
        self.place, self.clock, self.finished = place, clock, finished

    def forward(self, hidden: Tensor | None, microbatch: int) -> Tensor:
        self.compute(1, microbatch)
        return super().forward(hidden, microbatch)

    def before_backward(self, action: Action, *, last: bool) -> None:
        self.compute(-2, action.microbatch)
        super().before_backward(action, last=last)

    def compute(self, length: int, microbatch: int) -> None:
        """length: negative backward."""
        direction = 1 if length > 0 else -1
        before = self.finished.get((direction, self.place - direction, microbatch), 0)
        self.clock.now = max(self.clock.now, before) + abs(length)
        self.clock.busy += abs(length)
        self.finished[direction, self.place, microbatch] = self.clock.now


@pytest.mark.parametrize(
    ("name", "virtual_stages", "bubble"), [("1f1b", 1, 3 / (8 + 3)), ("interleaved", 2, 3 / (2 * 8 + 3))]
)
def test_the_bubble_of_what_is_executed_is_the_formulas(
    name: str, virtual_stages: int, bubble: float
) -> None:  # B166
    """(p-1)/(v·m+p-1) for 4 ranks and 8 microbatches, of the work that the executor really does in its order."""
    pp, microbatches = 4, 8
    schedule = make_schedule(name, pp, microbatches, virtual_stages)
    programs = lower(schedule)
    stages = pp * virtual_stages
    finished: dict[tuple[int, int, int], int] = {}

    def main(world: World) -> Clock:
        group = world.new_group("pp", [range(pp)])
        parts, clock = cut(stages), Clock()
        chunks = [
            TimedStage(
                parts[place],
                place=place,
                stages=stages,
                microbatches=microbatches,
                clock=clock,
                finished=finished,
            )
            for place in range(group.rank, stages, pp)
        ]
        PipelineExecutor(
            group, programs[group.rank], chunks, placement=schedule.placement,
            activation_shape=[TOKENS, WIDTH], dtype=torch.float64, device=world.device,
        ).run()  # fmt: skip
        return clock

    clocks = run_threads(pp, main)
    length = max(clock.now for clock in clocks)
    assert 1 - sum(clock.busy for clock in clocks) / (pp * length) == pytest.approx(bubble)


def test_a_tensor_of_the_wrong_shape_is_refused() -> None:
    schedule = make_schedule("1f1b", 2, 1)
    programs = lower(schedule)

    def main(world: World) -> None:
        group = world.new_group("pp", [range(2)])
        stage = Stage(cut(2)[group.rank], last=group.rank == 1, microbatches=1)
        PipelineExecutor(
            group,
            programs[group.rank],
            [stage],
            placement=schedule.placement,
            activation_shape=[TOKENS, 4],
            dtype=torch.float64,
            device=world.device,
        ).run()

    with pytest.raises(Exception, match=r"0F0 on pp rank 0 must have shape \[3, 4\].*has \[3, 5\]"):
        run_threads(2, main)
