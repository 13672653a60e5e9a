"""One step from a checkpoint of `transformers`, in many layouts: its loss and all its gradients are theirs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.agreement import Piece, assemble
from tests.ranks.test_huggingface import FAMILY_CASES, make, read_model, their_gradients
from triaxis.engine.plan import StepPlan
from triaxis.engine.step import TrainingStep
from triaxis.models.batch import IGNORED, Batch
from triaxis.models.config import ModelConfig
from triaxis.models.huggingface.families import CONFIG
from triaxis.models.huggingface.folder import open_weights
from triaxis.models.weights import filler, whole_shapes
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.thread import run_threads

ROWS = 4
LAYOUTS: dict[str, tuple[Topology, dict[str, object]]] = {
    "one": (Topology(), {}),
    "cube": (Topology(tp=2, pp=2, dp=2), {"zero": 0}),
    "cube-sp-zero3": (Topology(tp=2, pp=2, dp=2), {"zero": 3, "sequence_parallel": True}),
    "tp4-dp2-sp": (Topology(tp=4, dp=2), {"zero": 0, "sequence_parallel": True}),
    "pp2-dp4-zero3": (Topology(pp=2, dp=4), {"zero": 3}),
}


def rows_of(model: ModelConfig) -> list[Batch]:
    """Rows of a global batch, of which not every one trains equally many tokens."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for number in range(ROWS):
        # Not 0: Phi-3's padding, whose embedding transformers gives no gradient.
        tokens_BL = torch.randint(1, model.vocab_size, (1, 16), generator=generator)
        labels_BL = tokens_BL.roll(-1, dims=1)
        labels_BL[:, 16 - number - 1 :] = IGNORED
        rows.append(
            Batch(
                tokens_BL=tokens_BL,
                labels_BL=labels_BL,
                positions_BL=torch.arange(16)[None],
                documents=None,
            )
        )
    return rows


def whole_batch(rows: list[Batch]) -> Batch:
    return Batch(
        tokens_BL=torch.cat([row.tokens_BL for row in rows]),
        labels_BL=torch.cat([row.labels_BL for row in rows]),
        positions_BL=torch.cat([row.positions_BL for row in rows]),
        documents=None,
    )


def one_step(
    world: World, folder: Path, topology: Topology, choices: dict[str, object]
) -> tuple[float, list[Piece]]:
    """The loss of the first step, and the rank's gradients."""
    model, mesh = read_model(folder), build_mesh(world, topology)
    count = ROWS // topology.dp
    plan = StepPlan(model=model, microbatch_size=1, microbatches=count, sequence_length=16, **choices)  # type: ignore[arg-type]
    step = TrainingStep(plan, mesh, filler(open_weights(folder, model)))
    rows = rows_of(model)[mesh.dp.rank * count : (mesh.dp.rank + 1) * count]
    loss = float(step.accumulate(rows)[0])
    return loss, [(one.layout, tensor.clone()) for one, tensor in step.data_parallel.gathered_gradients()]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", FAMILY_CASES)
def test_a_step_from_a_checkpoint_is_theirs(case: str, layout: str, tmp_path: Path) -> None:
    theirs = make(case, tmp_path)
    model = read_model(tmp_path)
    _, loss, gradients = their_gradients(theirs, whole_batch(rows_of(model)))
    topology, choices = LAYOUTS[layout]
    ranks = run_threads(topology.world_size, lambda world: one_step(world, tmp_path, topology, choices))
    assert all(found == pytest.approx(float(loss), rel=1e-5) for found, _ in ranks)
    found, equal = assemble([pieces for _, pieces in ranks])
    assert equal, "replicas differ"
    (tmp_path / "gradients").mkdir()
    (tmp_path / "gradients" / CONFIG).write_text((tmp_path / CONFIG).read_text())
    biases = {n: b for n, b in theirs.named_buffers() if n.endswith("e_score_correction_bias")}
    save_file(
        biases | {n: g.contiguous() for n, g in gradients.items()},
        tmp_path / "gradients" / "model.safetensors",
    )
    expected = open_weights(tmp_path / "gradients", model)
    norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
    # A router's correction bias is a state that no gradient reaches.
    assert found.keys() == {
        name for name in whole_shapes(model) if not name.endswith("e_score_correction_bias")
    }
    for name, gradient in found.items():
        whole = expected.read(name, (0,) * gradient.dim(), tuple(gradient.shape))
        assert float((gradient - whole).norm()) <= max(1e-4 * float(whole.norm()), 1e-7 * norm), name
