"""Every implementation that runs here gives the plain twin's numbers, alone and in a run; a run says which it has."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.runs import MODEL, prepare, rows, run
from triaxis.engine.checkpoint.folder import complete_checkpoints
from triaxis.engine.checkpoint.manifest import read_manifest
from triaxis.engine.config import RunConfig
from triaxis.engine.rules import resolve
from triaxis.engine.run.progress import Progress
from triaxis.parallel.kernels.activation import plain_swiglu
from triaxis.parallel.kernels.attention import Documents, attend_masked
from triaxis.parallel.kernels.kernels import Kernels, facts_of, kernels_for
from triaxis.parallel.kernels.norm import plain_rms_norm
from triaxis.parallel.kernels.table import DEFAULT, TABLE, Operation

CPU = torch.device("cpu")
HERE = [row for row in TABLE if row.refusal(facts_of(CPU, torch.float32)) is None and row.name != DEFAULT]


def of(operation: Operation) -> Any:
    """What is compiled takes seconds, Megatron's when it is imported."""
    slow = {"megatron-core", "compile"} if operation is not Operation.ACTIVATION else {"megatron-core"}
    marks = {name: [pytest.mark.full] if name in slow else [] for name in (row.name for row in HERE)}
    names = [row.name for row in HERE if row.operation is operation]
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks[name]) for name in names])


def chosen(operation: Operation, name: str) -> Kernels:
    return kernels_for(CPU, torch.float32, {operation: name})


def gradients(output: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Of a sum with weights, so that no gradient is the same everywhere."""
    weights = torch.linspace(-1, 2, output.numel()).view(output.shape)
    return torch.autograd.grad((output * weights).sum(), inputs)


def same(ours: tuple[Tensor, ...], plain: tuple[Tensor, ...]) -> None:
    for one, other in zip(ours, plain, strict=True):
        assert float((one - other).detach().norm() / other.detach().norm()) < 1e-6


@of(Operation.NORM)
def test_norms(name: str) -> None:
    input, weight = torch.randn(6, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    ours = chosen(Operation.NORM, name).rms_norm(input, weight, 1e-5)
    plain = plain_rms_norm(input, weight, 1e-5)
    same((ours, *gradients(ours, input, weight)), (plain, *gradients(plain, input, weight)))


@of(Operation.ACTIVATION)
def test_activations(name: str) -> None:
    input = torch.randn(6, 32, requires_grad=True)
    ours = chosen(Operation.ACTIVATION, name).swiglu(input)
    same((ours, *gradients(ours, input)), (plain_swiglu(input), *gradients(plain_swiglu(input), input)))


@of(Operation.ATTENTION)
def test_attention(name: str) -> None:
    parts = [torch.randn(12, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    documents = Documents(borders=(0, 2, 6, 11, 12))
    ours = chosen(Operation.ATTENTION, name).attend(*parts, 2, documents)
    plain = attend_masked(*parts, 2, documents)
    same((ours, *gradients(ours, *parts)), (plain, *gradients(plain, *parts)))


WIDE = {"hidden_size": 64, "heads": 4, "kv_heads": 4, "ffn_size": 176}
"""Smaller models do not show what torch's compiler makes of positions that are turned in place."""
LAYOUTS: list[Any] = [
    {},
    pytest.param({"tp": 2, "zero": 3, "dp": 2}, marks=pytest.mark.full),
    pytest.param({"recompute": True, "dtype": "bf16"}, marks=pytest.mark.full),
    pytest.param(
        {
            "pp": 2,
            "tp": 2,
            "schedule": "interleaved",
            "recompute": True,
            "microbatches": 4,
            "layers": 4,
        },
        marks=pytest.mark.full,
    ),
    pytest.param({"pp": 2, "schedule": "zb-h1", "microbatches": 4}, marks=pytest.mark.full),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_compiled_layers_train_the_same(layout: dict[str, Any], tmp_path: Any) -> None:
    """N73 among them: an interleaved pipeline, recompute, tp 2."""
    losses = []
    for kernels in (None, "block=compile"):
        folder = tmp_path / str(kernels)
        flags = prepare(folder) | {"steps": 4, "eval_batches": 0, "seq": 64, "microbatches": 1} | layout
        model = folder / "model.json"
        model.write_text(json.dumps(MODEL | WIDE | {"layers": flags.pop("layers", MODEL["layers"])}))
        run(flags | {"kernels": kernels, "output_dir": str(folder / "out")})
        losses.append([row["loss"] for row in rows(folder / "out")])
    wide = layout.get("dtype") != "bf16"
    assert losses[1] == pytest.approx(losses[0], rel=1e-5 if wide else 5e-3)


def test_a_run_says_and_keeps_which_kernels_it_has(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(Progress, "announce", lambda self, text: said.append(text))
    flags = prepare(tmp_path) | {
        "steps": 1,
        "warmup_steps": 0,
        "save_strategy": "steps",
        "output_dir": str(tmp_path / "out"),
    }
    run(flags | {"kernels": "norm=plain,attention=plain"})
    assert "kernels: norm plain, attention plain, the rest torch" in said[0]
    state = read_manifest(complete_checkpoints(tmp_path / "out")[-1]).state
    assert state.extra["kernels"] == {str(name): DEFAULT for name in Operation} | {
        "norm": "plain",
        "attention": "plain",
    }


def test_what_this_machine_cannot_use_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="`kernels` attention=flash cannot be used: needs cuda"):
        run(prepare(tmp_path) | {"kernels": "attention=flash", "output_dir": str(tmp_path / "out")})
    with pytest.raises(ValueError, match=r"`kernels` must be OPERATION=NAME .* nearest: attention"):
        resolve(RunConfig(kernels="atention=flash"), 1)
