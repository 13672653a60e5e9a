"""The model against transformers in float64, several ranks against one, kernels against plain twins."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triaxis.models.batch import IGNORED, Batch, Inputs
from triaxis.models.builder import Stage, build_model
from triaxis.models.config import ModelConfig, NormKind
from triaxis.models.fields import PositionKind, dense_model, fields_of, with_fields
from triaxis.models.kinds import ActivationKind
from triaxis.models.positions import Rope
from triaxis.models.rotary import rotary_tables
from triaxis.parallel.kernels.activation import plain_swiglu, swiglu, swiglu_keeping_sigmoid
from triaxis.parallel.kernels.attention import documents_of
from triaxis.parallel.kernels.norm import fused_rms_norm, plain_rms_norm, rms_norm
from triaxis.parallel.kernels.rotary import rotate_
from triaxis.parallel.layers.build import Build
from triaxis.parallel.layers.declare import named_layouts
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.replicas.initialize import initialize
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import Mesh, build_mesh
from triaxis.parallel.worlds.thread import run_threads

LLAMA = dense_model(
    name="llama",
    vocab_size=67,
    hidden_size=32,
    layers=2,
    heads=4,
    kv_heads=2,
    ffn_size=48,
    max_positions=32,
    init_std=0.2,
)
MODELS = {
    "llama": LLAMA,
    "qwen2": with_fields(LLAMA, name="qwen2", attention_bias=True, tied=True, norm_eps=1e-6),
    "qwen3": with_fields(LLAMA, name="qwen3", qk_norm=True, head_dim=12, norm_eps=1e-6),
    "gpt2": with_fields(
        LLAMA,
        name="gpt2",
        kv_heads=4,
        norm=NormKind.LAYERNORM,
        positions=PositionKind.LEARNED,
        activation=ActivationKind.GELU,
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        tied=True,
    ),
}


def on_one_rank(config: ModelConfig, *, recompute: bool = False, dtype: torch.dtype = torch.float64) -> Stage:
    return run_threads(1, lambda world: make_stage(world, config, recompute=recompute, dtype=dtype))[0]


def make_stage(
    world: World,
    config: ModelConfig,
    *,
    dtype: torch.dtype = torch.float64,
    part: Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    **choices: Any,
) -> Stage:
    mesh = mesh or build_mesh(world, Topology(tp=world.size))
    stage = build_model(config, Build.on(mesh, dtype=dtype, **choices), **(part or {}))
    initialize(stage, seed=7)
    return stage


def make_batch(
    config: ModelConfig, rows: int = 2, length: int = 16, documents: Tensor | None = None
) -> Batch:
    generator = torch.Generator().manual_seed(3)
    labels_BL = torch.randint(config.vocab_size, (rows, length), generator=generator)
    labels_BL[0, 3] = IGNORED
    positions_BL = torch.arange(length).repeat(rows, 1)
    if documents is not None:
        starts_BL = torch.stack([torch.searchsorted(row, row) for row in documents])
        positions_BL = positions_BL - starts_BL
    return Batch(
        tokens_BL=torch.randint(config.vocab_size, (rows, length), generator=generator),
        labels_BL=labels_BL,
        positions_BL=positions_BL,
        documents=None if documents is None else documents_of(documents),
    )


def run_step(stage: Stage, batch: Batch) -> Tensor:
    scale = torch.tensor(1 / batch.trained_tokens(), dtype=next(stage.parameters()).dtype)
    loss: Tensor = stage(None, Inputs(batch=batch, token_scale=scale, row_scale=1.0)).loss
    loss.backward()
    return loss.detach()


def whole_tensors(stage: Stage, pick: Callable[[nn.Parameter], Tensor]) -> dict[str, Tensor]:
    """Each piece under its name in the whole model, for a single rank."""
    return {
        layout.name: pick(parameter).view(-1)[first : first + layout.elements].view(layout.local_shape)
        for parameter, layout, first in named_layouts(stage)
    }


GPT2_NAMES = {
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
    "model.embed_tokens": "transformer.wte",
    "model.embed_positions": "transformer.wpe",
    "model.norm": "transformer.ln_f",
    "model.layers": "transformer.h",
}


def to_gpt2(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """GPT-2's names: q, k and v side by side, and projections stored transposed."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".k_proj" in name or ".v_proj" in name:
            continue
        if ".q_proj" in name:
            tensor = torch.cat([tensor, *(tensors[name.replace(".q_", f".{part}_")] for part in "kv")])
            name = name.replace("self_attn.q_proj", "attn.c_attn")
        if "_proj.weight" in name or "c_attn.weight" in name:
            tensor = tensor.t()
        for ours, theirs in GPT2_NAMES.items():
            name = name.replace(ours, theirs)
        result[name] = tensor
    return result


class ExactRotary(nn.Module):
    """transformers' rotary tables are float32 inside; this one is the formula in float64."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        size = self.config.rotary_size()
        frequencies = fields_of(self.config).rope_theta ** (
            -torch.arange(0, size, 2, dtype=torch.float64) / size
        )
        angles = position_ids[..., None].to(torch.float64) * torch.cat((frequencies, frequencies))
        return angles.cos(), angles.sin()


def make_oracle(config: ModelConfig) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    fields = fields_of(config)
    sizes = {
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied,
        "attn_implementation": "sdpa",
    }
    if config.name == "gpt2":
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                **sizes,
                n_embd=config.hidden_size,
                n_layer=config.layers,
                n_head=fields.heads,
                n_inner=fields.ffn_size,
                n_positions=config.max_positions,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
        )
        return model.double()  # type: ignore[no-any-return]
    family = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[config.name]
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(
            **sizes,
            hidden_size=config.hidden_size,
            intermediate_size=fields.ffn_size,
            num_hidden_layers=config.layers,
            num_attention_heads=fields.heads,
            num_key_value_heads=fields.kv_heads,
            head_dim=config.rotary_size(),
            rms_norm_eps=config.norm_eps,
            max_position_embeddings=config.max_positions,
        )
    ).double()
    model.model.rotary_emb = ExactRotary(config)
    return model  # type: ignore[no-any-return]


def float64_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' RMS norms compute in float32; let them compute in the input's precision."""
    for name in ("llama", "qwen2", "qwen3"):
        module = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
        norm = getattr(module, f"{name.capitalize()}RMSNorm")
        monkeypatch.setattr(
            norm,
            "forward",
            lambda self, x: (
                self.weight * x / (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).sqrt()
            ),
        )


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_equal_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:  # B81
    float64_norms(monkeypatch)
    config = MODELS[name]
    stage, batch, oracle = on_one_rank(config), make_batch(config), make_oracle(config)
    randomize_vectors(stage)
    rename = to_gpt2 if name == "gpt2" else dict
    values = rename(whole_tensors(stage, lambda parameter: parameter.detach()))
    missing, unexpected = oracle.load_state_dict(values, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected

    logits_BLV = oracle(input_ids=batch.tokens_BL).logits
    torch.testing.assert_close(
        stage.logits(None, batch), logits_BLV.detach().flatten(0, 1), rtol=0, atol=1e-10
    )
    expected = F.cross_entropy(logits_BLV.flatten(0, 1), batch.labels_BL.flatten())
    expected.backward()
    torch.testing.assert_close(run_step(stage, batch), expected.detach(), rtol=0, atol=1e-10)
    gradients = rename(whole_tensors(stage, gradient_of))
    for parameter_name, parameter in oracle.named_parameters():
        torch.testing.assert_close(gradients.pop(parameter_name), parameter.grad, rtol=1e-9, atol=1e-10)
    assert not gradients


def randomize_vectors(stage: Stage) -> None:
    """Norm weights and biases away from one and zero, so that a mistake in them shows."""
    generator = torch.Generator().manual_seed(5)
    for parameter in stage.parameters():
        if parameter.dim() == 1:
            noise = torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)
            parameter.data.add_(noise, alpha=0.3)


def gradient_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


PACKED = torch.tensor([[0] * 5 + [1] * 7 + [2] * 4])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tensor_size", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_packed_documents_do_not_see_each_other(
    name: str, tensor_size: int, sequence_parallel: bool, recompute: bool
) -> None:  # B125, B126
    """B125, B126: other tokens before a document change nothing in it, and it equals the document alone."""
    config = MODELS[name]
    batch = make_batch(config, 1, 16, PACKED)
    assert batch.positions_BL.tolist() == [[*range(5), *range(7), *range(4)]]
    changed_BL = batch.tokens_BL.clone()
    changed_BL[:, :5] = (changed_BL[:, :5] + 1) % config.vocab_size
    changed = dataclasses.replace(batch, tokens_BL=changed_BL)
    alone = Batch(
        tokens_BL=batch.tokens_BL[:, 12:],
        labels_BL=batch.labels_BL[:, 12:],
        positions_BL=batch.positions_BL[:, 12:],
        documents=None,
    )

    def logits(world: World) -> list[Tensor]:
        stage = make_stage(world, config, sequence_parallel=sequence_parallel, recompute=recompute)
        return [stage.logits(None, each) for each in (batch, changed, alone)]

    for packed_TV, changed_TV, alone_TV in run_threads(tensor_size, logits):
        assert not torch.equal(packed_TV[:5], changed_TV[:5])
        assert torch.equal(packed_TV[5:], changed_TV[5:])
        torch.testing.assert_close(packed_TV[12:], alone_TV, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_recompute_is_exact(name: str, dtype: torch.dtype) -> None:
    config = MODELS[name]
    for batch in (make_batch(config), make_batch(config, 1, 16, PACKED)):
        kept, again = (on_one_rank(config, recompute=recompute, dtype=dtype) for recompute in (False, True))
        assert torch.equal(run_step(kept, batch), run_step(again, batch))
        for one, other in zip(kept.parameters(), again.parameters(), strict=True):
            assert torch.equal(gradient_of(one), gradient_of(other))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tensor_size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_tensor_ranks_equal_one(name: str, tensor_size: int, sequence_parallel: bool) -> None:  # B56
    """The loss, and every gradient after its layout's sums; at tp=4 two key/value heads are copied."""
    config = MODELS[name]
    batch = make_batch(config)
    reference = on_one_rank(config)
    expected = run_step(reference, batch)
    gradients = whole_tensors(reference, gradient_of)

    def train(world: World) -> Tensor:
        mesh = build_mesh(world, Topology(tp=tensor_size))
        stage = make_stage(world, config, mesh=mesh, sequence_parallel=sequence_parallel)
        loss = run_step(stage, batch)
        for parameter, layout, first in named_layouts(stage):
            flat = gradient_of(parameter).view(-1)[first : first + layout.elements].clone()
            for group in layout.partial:
                mesh.named(group).all_reduce(flat)
            local = flat.view(layout.local_shape)[layout.unpadded]
            whole = gradients[layout.name][layout.place]
            torch.testing.assert_close(local, whole, rtol=1e-9, atol=1e-10, msg=layout.name)
        return loss

    for loss in run_threads(tensor_size, train):
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_stages_make_the_model(name: str) -> None:
    config = MODELS[name]
    batch = make_batch(config)
    expected = run_step(on_one_rank(config), batch)

    def chain(world: World) -> Tensor:
        first = make_stage(world, config, part={"layers": range(1), "last": False})
        last = make_stage(world, config, part={"layers": range(1, 2), "first": False})
        scale = torch.tensor(1 / batch.trained_tokens(), dtype=torch.float64)
        inputs = Inputs(batch=batch, token_scale=scale, row_scale=1.0)
        return last(first(None, inputs).hidden, inputs).loss  # type: ignore[no-any-return]

    assert torch.equal(run_threads(1, chain)[0].detach(), expected)


@pytest.mark.parametrize("name", MODELS)
def test_stage_holds_the_parameters_counted(name: str) -> None:
    config = MODELS[name]
    assert sum(parameter.numel() for parameter in on_one_rank(config).parameters()) == config.parameters()


def test_initial_spread_falls_with_depth_on_output_projections() -> None:
    spread = {layout.name: layout.std for _, layout, _ in named_layouts(on_one_rank(LLAMA))}
    assert spread["model.layers.0.self_attn.q_proj.weight"] == LLAMA.init_std
    assert spread["model.layers.1.self_attn.o_proj.weight"] == LLAMA.init_std / 2
    assert spread["model.layers.1.mlp.down_proj.weight"] == LLAMA.init_std / 2


def test_messages() -> None:
    stage = on_one_rank(LLAMA)
    with pytest.raises(
        ValueError, match="`sequence_length` must be at most the 32 positions of llama, but is 40"
    ):
        stage.logits(None, make_batch(LLAMA, length=40))
    with pytest.raises(ValueError, match="`tp` must divide the 4 attention heads of llama, but is 3"):
        run_threads(3, lambda world: make_stage(world, LLAMA))
    with pytest.raises(ValueError, match="`tp` must divide the 15 tokens of a microbatch under sequence"):
        run_threads(
            2,
            lambda world: make_stage(world, LLAMA, sequence_parallel=True).logits(
                None, make_batch(LLAMA, rows=1, length=15)
            ),
        )


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-5), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("shape", [(6, 16), (6, 3, 16)])
@pytest.mark.parametrize("kernel", [rms_norm, fused_rms_norm])
def test_rms_norm_equals_its_twin(
    kernel: Callable[[Tensor, Tensor, float], Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    ours = [x.requires_grad_() for x in (torch.randn(shape, dtype=dtype), torch.randn(16, dtype=dtype))]
    twin = [x.detach().double().requires_grad_() for x in ours]
    output, expected = kernel(ours[0], ours[1], 1e-5), plain_rms_norm(twin[0], twin[1], 1e-5)
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
    output.sum().backward()
    expected.sum().backward()
    for one, other in zip(ours, twin, strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=tolerance, atol=4 * tolerance)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
@pytest.mark.parametrize("kernel", [swiglu, swiglu_keeping_sigmoid])
def test_swiglu_equals_its_twin(
    kernel: Callable[[Tensor], Tensor], dtype: torch.dtype, tolerance: float
) -> None:
    ours = (3 * torch.randn(6, 16, dtype=dtype)).requires_grad_()
    twin = ours.detach().double().requires_grad_()
    output, expected = kernel(ours), plain_swiglu(twin)
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
    output.sum().backward()
    expected.sum().backward()
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad.double(), twin.grad, rtol=tolerance, atol=tolerance)


def test_rotary_turns_back() -> None:
    cos_PE, sin_PE = rotary_tables(8, 6, Rope(theta=100.0), dtype=torch.float64, device=torch.device("cpu"))
    tables = (cos_PE[:, None], sin_PE[:, None])
    fused = torch.randn(8, 18, dtype=torch.float64, requires_grad=True)
    turned = rotate_(fused.clone(), *tables, 2, 6)
    halves = fused.detach()[:, :12].view(8, 2, 2, 3)
    complex_heads = torch.complex(halves[:, :, 0], halves[:, :, 1]) * torch.complex(*tables)
    expected = torch.stack((complex_heads.real, complex_heads.imag), dim=2).reshape(8, 12)
    torch.testing.assert_close(turned.detach()[:, :12], expected)
    assert torch.equal(turned.detach()[:, 12:], fused.detach()[:, 12:])
    (gradient,) = torch.autograd.grad(turned, fused, turned.detach().clone())
    torch.testing.assert_close(gradient, fused.detach())


def test_kept_and_recomputed_logits_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimised path of small microbatches beside its plain twin, in chunks of several sizes."""
    import triaxis.parallel.layers.vocabulary as vocabulary

    def gradients(kept: int, chunk: int) -> list[torch.Tensor]:
        monkeypatch.setattr(vocabulary, "KEPT_LOGITS", kept)

        def main(world: World) -> list[torch.Tensor]:
            mesh = build_mesh(world, Topology(tp=2))
            head = vocabulary.VocabParallelHead(
                Build.on(mesh, dtype=torch.float64), "head.weight", 13, 4, std=0.5, chunk_logits=chunk
            )
            initialize(head, 0)
            generator = torch.Generator().manual_seed(0)
            hidden = torch.randn(6, 4, generator=generator, dtype=torch.float64).requires_grad_()
            labels = torch.tensor([0, 12, -100, 5, 7, 6])
            head(hidden, labels, torch.tensor(0.25)).backward()
            assert hidden.grad is not None and head.weight.grad is not None
            return [hidden.grad, head.weight.grad]

        return [tensor for rank in run_threads(2, main) for tensor in rank]

    plain = gradients(0, 10)
    for kept, chunk in ((0, 1000), (1 << 18, 1000)):
        for found, expected in zip(gradients(kept, chunk), plain, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
