"""An independent oracle: megatron-core's tensor-parallel layers give our outputs and gradients on the same weights."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.forked import run_processes
from triaxis.parallel.layers.build import Build
from triaxis.parallel.layers.linear import ColumnParallelLinear, Part, RowParallelLinear
from triaxis.parallel.layers.vocabulary import VocabParallelEmbedding, VocabParallelHead
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import Mesh, build_mesh

TP = 2
TOKENS, INPUTS, OUTPUTS, VOCABULARY = 6, 8, 12, 66

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]

Pair = tuple[dict[str, Tensor], dict[str, Tensor]]  # ours, theirs


def seeded(*shape: int, seed: int) -> Tensor:
    """The same values on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def cut(whole: Tensor, dim: int, rank: int) -> Tensor:
    return whole.chunk(TP, dim)[rank].contiguous()


def megatron_config(sp: bool = False) -> Any:  # ModelParallelConfig: megatron is untyped
    from megatron.core.model_parallel_config import ModelParallelConfig

    return ModelParallelConfig(
        tensor_model_parallel_size=TP,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        sequence_parallel=sp,
    )


@torch.no_grad()
def set_weights(module: nn.Module, weight: Tensor, bias: Tensor | None = None) -> None:
    for parameter, value in ((module.weight, weight), (module.bias if bias is not None else None, bias)):
        if parameter is not None and value is not None:
            parameter.copy_(value)  # type: ignore[operator]


def shown(output: Tensor, input_: Tensor | None, module: nn.Module) -> dict[str, Tensor]:
    """The output, and the gradients of its weighted sum."""
    (output * seeded(*output.shape, seed=9)).sum().backward()
    results = {"output": output.detach()}
    if input_ is not None and input_.grad is not None:
        results["gradient of the input"] = input_.grad
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        results[f"gradient of {name}"] = parameter.grad
    return results


def column(mesh: Mesh, *, bias: bool, sp: bool = False) -> Pair:
    from megatron.core.tensor_parallel import ColumnParallelLinear as Theirs

    weight = cut(seeded(OUTPUTS, INPUTS, seed=1), 0, mesh.tp_rank)
    shift = cut(seeded(OUTPUTS, seed=2), 0, mesh.tp_rank) if bias else None
    tokens = seeded(TOKENS, INPUTS, seed=3)
    inputs = [(cut(tokens, 0, mesh.tp_rank) if sp else tokens.clone()).requires_grad_() for _ in range(2)]
    build = Build.on(mesh, sequence_parallel=sp)
    ours = ColumnParallelLinear(build, [Part("w", OUTPUTS)], INPUTS, bias=bias)
    theirs = Theirs(
        INPUTS,
        OUTPUTS,
        config=megatron_config(sp),
        init_method=nn.init.zeros_,
        bias=bias,
        gather_output=False,
    )
    for module in (ours, theirs):
        set_weights(module, weight, shift)
    return shown(ours(inputs[0]), inputs[0], ours), shown(theirs(inputs[1])[0], inputs[1], theirs)


def row(mesh: Mesh, *, bias: bool, sp: bool = False) -> Pair:
    from megatron.core.tensor_parallel import RowParallelLinear as Theirs

    weight = cut(seeded(OUTPUTS, INPUTS, seed=1), 1, mesh.tp_rank)
    shift = seeded(OUTPUTS, seed=2) if bias else None
    inputs = [cut(seeded(TOKENS, INPUTS, seed=3), 1, mesh.tp_rank).requires_grad_() for _ in range(2)]
    ours = RowParallelLinear(Build.on(mesh, sequence_parallel=sp), "w", INPUTS, OUTPUTS, bias=bias)
    theirs = Theirs(
        INPUTS,
        OUTPUTS,
        config=megatron_config(sp),
        init_method=nn.init.zeros_,
        bias=bias,
        input_is_parallel=True,
        skip_bias_add=False,
    )
    for module in (ours, theirs):
        set_weights(module, weight, shift)
    return shown(ours(inputs[0]), inputs[0], ours), shown(theirs(inputs[1])[0], inputs[1], theirs)


def embedding(mesh: Mesh, *, sp: bool = False) -> Pair:
    from megatron.core.tensor_parallel import VocabParallelEmbedding as Theirs

    weight = cut(seeded(VOCABULARY, INPUTS, seed=1), 0, mesh.tp_rank)
    ids_T = torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(4))
    ours = VocabParallelEmbedding(Build.on(mesh, sequence_parallel=sp), "w", VOCABULARY, INPUTS)
    theirs = Theirs(
        VOCABULARY,
        INPUTS,
        init_method=nn.init.zeros_,
        config=megatron_config(sp),
        reduce_scatter_embeddings=sp,
    )
    for module in (ours, theirs):
        set_weights(module, weight)
    expected = theirs(ids_T[None]).squeeze(1) if sp else theirs(ids_T)  # with sp, of a batch: [S, B, D]
    return shown(ours(ids_T), None, ours), shown(expected, None, theirs)


def cross_entropy(mesh: Mesh) -> Pair:
    """Our head with its loss, against megatron's column-parallel head followed by its loss."""
    from megatron.core.tensor_parallel import ColumnParallelLinear as Theirs
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    weight = cut(seeded(VOCABULARY, INPUTS, seed=1), 0, mesh.tp_rank)
    labels_T = torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(5))
    inputs = [seeded(TOKENS, INPUTS, seed=3).requires_grad_() for _ in range(2)]
    ours = VocabParallelHead(Build.on(mesh), "w", VOCABULARY, INPUTS)
    theirs = Theirs(
        INPUTS,
        VOCABULARY,
        config=megatron_config(),
        init_method=nn.init.zeros_,
        bias=False,
        gather_output=False,
    )
    for module in (ours, theirs):
        set_weights(module, weight)
    loss = ours(inputs[0], labels_T, torch.tensor(1.0 / TOKENS))
    logits_TV, _ = theirs(inputs[1])
    expected = vocab_parallel_cross_entropy(logits_TV, labels_T).sum() / TOKENS
    return shown(loss, inputs[0], ours), shown(expected, inputs[1], theirs)


LAYERS: dict[str, Callable[[Mesh], Pair]] = {
    "ColumnParallelLinear": lambda mesh: column(mesh, bias=False),
    "ColumnParallelLinear with bias": lambda mesh: column(mesh, bias=True),
    "RowParallelLinear": lambda mesh: row(mesh, bias=False),
    "RowParallelLinear with bias": lambda mesh: row(mesh, bias=True),
    "VocabParallelEmbedding": embedding,
    "sequence-parallel ColumnParallelLinear": lambda mesh: column(mesh, bias=True, sp=True),
    "sequence-parallel RowParallelLinear": lambda mesh: row(mesh, bias=True, sp=True),
    "sequence-parallel VocabParallelEmbedding": lambda mesh: embedding(mesh, sp=True),
    "vocab_parallel_cross_entropy": cross_entropy,
}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Pair]]:
    """Both ranks' results of every layer, from one pair of processes."""

    def main(world: World) -> dict[str, Pair]:
        from megatron.core import parallel_state

        # Where megatron's sequence-parallel regions allocate. This is a process of its own.
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
        mesh = build_mesh(world, Topology(tp=TP))
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=TP)
        return {name: make(mesh) for name, make in LAYERS.items()}

    ranks = run_processes(TP, tmp_path_factory.mktemp("megatron"), main)
    for rank in ranks:
        assert isinstance(rank, dict), rank
    return ranks


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_equals_megatrons(layer: str, compared: list[dict[str, Pair]]) -> None:
    for rank in compared:
        ours, theirs = rank[layer]
        assert ours.keys() == theirs.keys()
        assert len(ours) >= 2
        for name, expected in theirs.items():
            assert torch.allclose(ours[name], expected, rtol=1e-5, atol=1e-6), name
