"""What "the same on every topology" means, as a check that can fail (docs/architecture.md, "Agreement").

The reference is one rank with the whole global batch by accumulation. A layout agrees only if the first loss, the
first gradient of every parameter, 20 gradient norms, 20 losses and all replicas agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from triaxis.engine.plan import Recompute, StepPlan, UpdateRule
from triaxis.engine.step import TrainingStep
from triaxis.models.batch import IGNORED, Batch
from triaxis.models.config import ModelConfig
from triaxis.models.fields import dense_model
from triaxis.parallel.kernels.attention import documents_of
from triaxis.parallel.places.layout import ParameterLayout
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import Mesh, build_mesh
from triaxis.parallel.worlds.thread import run_threads

LENGTH = 16
LEARNING_RATE = 1e-3

MODEL = dense_model(
    name="agreement",
    vocab_size=67,  # a prime
    hidden_size=32,
    layers=4,
    heads=8,
    kv_heads=2,  # fewer than tp=4
    ffn_size=48,
    max_positions=64,
    init_std=0.15,  # as large as a hidden size of 32 asks for: attention is not uniform
)


TIED = replace(MODEL, name="agreement-tied", tied=True)


def model_for(layout: Layout, *, tied: bool = False) -> ModelConfig:
    """The agreement model, with as many layers as the layout has stages if four are too few."""
    layers = max(MODEL.layers, layout.pp * layout.virtual_stages)
    kind = "tied" if tied else "untied"
    return replace(MODEL, name=f"{kind}, {layers} layers", layers=layers, tied=tied)


RULES = {
    "adamw, clip 1": (UpdateRule(name="adamw", weight_decay=0.1), 1.0),
    "sgd, no clip": (UpdateRule(name="sgd"), 0.0),
    "sgd, clip 0.1": (UpdateRule(name="sgd"), 0.1),  # AdamW would cancel a wrong coefficient
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One layout under test."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    zero: int = 0
    data_parallel: str = "zero"
    sp: bool = False
    schedule: str = "1f1b"
    virtual_stages: int = 1
    recompute: bool = False
    bucket_elements: int = 3000
    order: str = "tp-pp-dp"

    @property
    def size(self) -> int:
        return self.tp * self.pp * self.dp

    def topology(self) -> Topology:
        return Topology(tp=self.tp, pp=self.pp, dp=self.dp, ep=self.ep, order=self.order)

    def global_batch(self) -> int:
        return self.dp * -(-8 // self.dp)

    def __str__(self) -> str:
        parts = [f"tp{self.tp} pp{self.pp} dp{self.dp} {self.data_parallel}{self.zero} {self.schedule}"]
        parts += [f"ep{self.ep}"] * (self.ep > 1)
        parts += ["sp"] * self.sp + [f"v{self.virtual_stages}"] * (self.virtual_stages > 1)
        return " ".join(parts + ["recompute"] * self.recompute + [self.order] * (self.order != "tp-pp-dp"))


def sequences(step: int, count: int, vocab_size: int) -> list[Batch]:
    """`count` rows for one step; the number of trained tokens runs from none to all; some rows hold two documents."""
    random = np.random.default_rng(1000 + step)
    rows = []
    for index in range(count):
        tokens_L = random.integers(0, vocab_size, LENGTH)
        labels_L = random.integers(0, vocab_size, LENGTH)
        trained = round(LENGTH * index / max(count - 1, 1))
        labels_L[trained:] = IGNORED
        border = int(random.integers(1, LENGTH)) if index % 3 == 1 else LENGTH
        positions_L = np.concatenate([np.arange(border), np.arange(LENGTH - border)])
        documents_L = (np.arange(LENGTH) >= border).astype(np.int64)
        rows.append(
            Batch(
                tokens_BL=torch.from_numpy(tokens_L)[None],
                labels_BL=torch.from_numpy(labels_L)[None],
                positions_BL=torch.from_numpy(positions_L)[None],
                documents=documents_of(torch.from_numpy(documents_L)[None]) if border < LENGTH else None,
            )
        )
    return rows


Piece = tuple[ParameterLayout, Tensor]


@dataclass(slots=True)
class Run:
    """What one run showed: per step, and the first step's gradients and last weights by parameter name."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    replicas_equal: bool


def assemble(ranks: list[list[Piece]]) -> tuple[dict[str, Tensor], bool]:
    """Whole parameters from all ranks' pieces; whether all who hold an element hold the same bits."""
    whole: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    equal = True
    for pieces in ranks:
        for layout, local in pieces:
            target = whole.setdefault(layout.name, torch.zeros(layout.shape, dtype=local.dtype))
            mask = filled.setdefault(layout.name, torch.zeros(layout.shape, dtype=torch.bool))
            local, target, mask = local[layout.unpadded], target[layout.place], mask[layout.place]
            equal = equal and torch.equal(target[mask], local[mask])
            target.copy_(local)
            mask.fill_(True)
    missing = [name for name, mask in filled.items() if not mask.all()]
    assert not missing, f"no rank holds all of {missing}"
    return whole, equal


Fault = Callable[[TrainingStep], None]


def plan_of(layout: Layout, model: ModelConfig, rule: str, dtype: str) -> StepPlan:
    update, clip = RULES[rule]
    return StepPlan(
        model=model,
        microbatch_size=1,
        microbatches=layout.global_batch() // layout.dp,
        sequence_length=LENGTH,
        schedule=layout.schedule,
        virtual_stages=layout.virtual_stages,
        sequence_parallel=layout.sp,
        recompute=Recompute.FULL if layout.recompute else Recompute.NONE,
        data_parallel=layout.data_parallel,
        zero=layout.zero,
        bucket_elements=layout.bucket_elements,
        dtype=dtype,
        max_grad_norm=clip,
        rule=update,
    )


def held_weights(step: TrainingStep) -> list[Piece]:
    """The weights that this rank computes with (in stage 3, its data-parallel group's masters)."""
    return [(segment.layout, tensor.clone()) for segment, tensor in step.data_parallel.gathered_masters()]


def train_rank(
    mesh: Mesh,
    layout: Layout,
    *,
    model: ModelConfig,
    rule: str,
    dtype: str,
    steps: int,
    fault: Fault | None = None,
) -> tuple[list[float], list[float], list[Piece], list[list[Piece]]]:
    """One rank's run: losses, norms, first gradients, weights after every step."""
    step = TrainingStep(plan_of(layout, model, rule, dtype), mesh)
    if fault is not None:
        fault(step)
    gradients: list[Piece] = []
    synchronize = step.data_parallel.synchronize_gradients

    def keep_first_gradients() -> None:
        synchronize()
        if not gradients:
            gradients.extend((s.layout, t.clone()) for s, t in step.data_parallel.gathered_gradients())

    step.data_parallel.synchronize_gradients = keep_first_gradients  # type: ignore[method-assign]
    share = layout.global_batch() // layout.dp
    losses, norms, weights = [], [], []
    for number in range(steps):
        rows = sequences(number, layout.global_batch(), model.vocab_size)
        result = step.train(rows[mesh.dp.rank * share : (mesh.dp.rank + 1) * share], LEARNING_RATE)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        weights.append(held_weights(step))
    return losses, norms, gradients, weights


def rank_main(
    layout: Layout,
    *,
    model: ModelConfig,
    rule: str = "adamw, clip 1",
    dtype: str = "fp64",
    steps: int = 20,
    fault: Fault | None = None,
) -> Callable[[World], tuple[list[float], list[float], list[Piece], list[list[Piece]]]]:
    """`train_rank` in a world of threads or of processes."""

    def main(world: World) -> tuple[list[float], list[float], list[Piece], list[list[Piece]]]:
        mesh = build_mesh(world, layout.topology())
        return train_rank(mesh, layout, model=model, rule=rule, dtype=dtype, steps=steps, fault=fault)

    return main


def collect(ranks: list[tuple[list[float], list[float], list[Piece], list[list[Piece]]]]) -> Run:
    losses, norms, _, weights = ranks[0]
    gradients, equal = assemble([rank[2] for rank in ranks])
    final: dict[str, Tensor] = {}
    for number in range(len(weights)):
        final, same = assemble([rank[3][number] for rank in ranks])
        equal = equal and same
    equal = equal and all(rank[0] == losses and rank[1] == norms for rank in ranks)
    return Run(losses, norms, gradients, final, equal)


def run(
    layout: Layout,
    *,
    model: ModelConfig,
    rule: str = "adamw, clip 1",
    dtype: str = "fp64",
    steps: int = 20,
    fault: Fault | None = None,
) -> Run:
    """The layout's run on the thread world."""
    main = rank_main(layout, model=model, rule=rule, dtype=dtype, steps=steps, fault=fault)
    return collect(run_threads(layout.size, main))


def reference_layout(layout: Layout) -> Layout:
    """One rank with the same global batch."""
    return Layout(dp=1) if layout.global_batch() == 8 else _Reference(count=layout.global_batch())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reference(Layout):
    count: int = 8

    def global_batch(self) -> int:
        return self.count


def disagreements(found: Run, reference: Run, dtype: str) -> list[str]:
    """What does not agree, in words; empty if the layout trains the same model."""
    tight, loose, tiny = (1e-10, 1e-10, 1e-10) if dtype == "fp64" else (1e-6, 1e-5, 1e-7)
    faults = []

    def relative(name: str, a: float, b: float, bound: float) -> None:
        if not abs(a - b) <= bound * abs(b):
            faults.append(f"{name}: {a!r} is not {b!r} ({abs(a - b) / abs(b):.2e} > {bound})")

    relative("first loss", found.losses[0], reference.losses[0], tight)
    for number, (a, b) in enumerate(zip(found.norms, reference.norms, strict=True)):
        relative(f"gradient norm of step {number}", a, b, loose)
    for number, (a, b) in enumerate(zip(found.losses, reference.losses, strict=True)):
        relative(f"loss of step {number}", a, b, loose)
    if found.gradients.keys() != reference.gradients.keys():
        faults.append(f"parameters differ: {sorted(found.gradients.keys() ^ reference.gradients.keys())}")
    for name in sorted(found.gradients.keys() & reference.gradients.keys()):
        expected = reference.gradients[name]
        difference = float((found.gradients[name] - expected).norm())
        if not (difference <= loose * float(expected.norm()) or difference <= tiny * reference.norms[0]):
            faults.append(
                f"gradient of {name}: off by {difference:.2e}, its norm is {float(expected.norm()):.2e}"
            )
    if not found.replicas_equal:
        faults.append("replicas are not bit-identical")
    return faults


def legal_layouts(limit: int) -> list[Layout]:
    """Every (tp, pp, dp, zero, sp, schedule) of at most `limit` ranks that the agreement model allows."""
    layouts = []
    for tp in (1, 2, 4, 8):
        for pp in range(1, limit // tp + 1):
            for dp in range(1, limit // (tp * pp) + 1):
                schedules = [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1)]
                if 1 < pp <= 4:
                    schedules += [("interleaved", 2), ("zb-v", 2), ("v-half", 2)]
                for schedule, virtual_stages in schedules:
                    for zero in range(4):
                        for sp in (False, True):
                            layouts.append(
                                Layout(
                                    tp=tp,
                                    pp=pp,
                                    dp=dp,
                                    zero=zero,
                                    sp=sp,
                                    schedule=schedule,
                                    virtual_stages=virtual_stages,
                                )
                            )
    return layouts
