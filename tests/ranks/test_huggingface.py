"""Models of `transformers` in and out: logits, loss, gradients, and every tensor bit for bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from triaxis.engine.advice import depths_warning
from triaxis.engine.config import RunConfig
from triaxis.models.batch import IGNORED, Batch, Inputs
from triaxis.models.builder import Stage, build_model
from triaxis.models.config import ModelConfig
from triaxis.models.huggingface.families import CONFIG, model_of, read_config
from triaxis.models.huggingface.fields import Unsupported
from triaxis.models.huggingface.folder import Export, export, open_weights
from triaxis.models.huggingface.reader import ImportRefused, SafetensorsFolder
from triaxis.models.weights import filler, whole_shapes
from triaxis.parallel.layers.build import Build
from triaxis.parallel.layers.declare import named_layouts, states_of
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.replicas.initialize import fill_module
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.thread import run_threads

LLAMA = {
    "vocab_size": 101,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
GPT2 = {
    "vocab_size": 101,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DEEPSEEK = LLAMA | {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 16,
    "routed_scaling_factor": 1.5,
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
}
GROUPS = {"n_group": 4, "topk_group": 2}
MSCALES = YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}
V2_GROUPS = GROUPS | {"topk_method": "group_limited_greedy", "rope_parameters": MSCALES}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA),
    "llama-biases": ("Llama", LLAMA | {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "llama3.2": ("Llama", LLAMA | {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-yarn": ("Llama", LLAMA | {"rope_parameters": YARN}),
    "mistral": ("Mistral", LLAMA | {"sliding_window": None}),
    "qwen2": ("Qwen2", LLAMA),
    "qwen2-tied": ("Qwen2", LLAMA | {"tie_word_embeddings": True}),
    "qwen2.5-yarn": ("Qwen2", LLAMA | {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", LLAMA | {"head_dim": 16}),
    "phi3": ("Phi3", LLAMA | {"pad_token_id": 0, "sliding_window": None}),
    "gpt2": ("GPT2", GPT2),
    "mixtral": ("Mixtral", LLAMA | {"num_local_experts": 4, "sliding_window": None}),
    "qwen2-moe": ("Qwen2Moe", LLAMA | MOE | {"shared_expert_intermediate_size": 24}),
    "qwen3-moe": ("Qwen3Moe", LLAMA | MOE | {"head_dim": 16, "norm_topk_prob": True}),
    "deepseek-v2": ("DeepseekV2", DEEPSEEK | V2_GROUPS),
    "deepseek-v2-lite": ("DeepseekV2", DEEPSEEK | {"q_lora_rank": None}),
    "deepseek-v3": ("DeepseekV3", DEEPSEEK | GROUPS | {"rope_parameters": MSCALES, "num_mtp_layers": 0}),
    "kimi-k2": ("DeepseekV3", DEEPSEEK | {"n_group": 1, "topk_group": 1, "num_mtp_layers": 0}),
    "qwen3-moe-plain": ("Qwen3Moe", LLAMA | MOE | {"head_dim": 16, "mlp_only_layers": [0]}),
}
FAMILY_CASES = ["llama3.2", "mistral", "qwen2", "qwen3", "phi3", "gpt2", "mixtral", "qwen2-moe", "qwen3-moe"]
FAMILY_CASES += ["deepseek-v2", "deepseek-v3"]


def make(case: str, folder: Path, **more: Any) -> nn.Module:
    """A random model of transformers, saved in `folder`; norms and biases are random too, or an exchange would hide."""
    name, fields = CASES[case]
    config = getattr(transformers, f"{name}Config")(**(fields | more))
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 1.0, 0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            nn.init.normal_(buffer, 0.0, 0.2)
    model.save_pretrained(folder)
    return model.eval()  # type: ignore[no-any-return]


def batch_of(model: ModelConfig, length: int = 16) -> Batch:
    generator = torch.Generator().manual_seed(5)
    tokens_BL = torch.randint(model.vocab_size, (2, length), generator=generator)
    labels_BL = tokens_BL.roll(-1, dims=1)
    labels_BL[:, -1] = IGNORED
    labels_BL[0, :5] = IGNORED
    return Batch(
        tokens_BL=tokens_BL,
        labels_BL=labels_BL,
        positions_BL=torch.arange(length).repeat(2, 1),
        documents=None,
    )


def read_model(folder: Path) -> ModelConfig:
    return model_of(read_config(folder / CONFIG), str(folder / CONFIG))


def loaded(world: World, folder: Path, *, sequence_parallel: bool = False) -> Stage:
    model = read_model(folder)
    build = Build.on(build_mesh(world, Topology(tp=world.size)), sequence_parallel=sequence_parallel)
    stage = build_model(model, build)
    weights = filler(open_weights(folder, model))
    fill_module(stage, weights)
    for layout, state in states_of(stage):
        weights(layout, state.view(-1), 0)
    return stage


def pieces(stage: Stage, gradients: bool) -> list[tuple[Any, Tensor]]:
    return [
        (layout, ((p.grad if gradients else p.data).view(-1)[first : first + layout.elements]).clone())
        for p, layout, first in named_layouts(stage)
    ]


def their_gradients(theirs: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits, mean loss, and gradients as a saved checkpoint would name and shape them."""
    logits = theirs(input_ids=batch.tokens_BL).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels_BL.flatten(), ignore_index=IGNORED)
    loss.backward()
    return logits.detach(), loss.detach(), {n: p.grad for n, p in theirs.named_parameters()}


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients_are_theirs(case: str, tmp_path: Path) -> None:
    theirs = make(case, tmp_path)
    (stage,) = run_threads(1, lambda world: loaded(world, tmp_path))
    model = read_model(tmp_path)
    batch = batch_of(model)
    logits, loss, gradients = their_gradients(theirs, batch)
    torch.testing.assert_close(stage.logits(None, batch).view(logits.shape), logits, rtol=0, atol=1e-5)
    scale = torch.tensor(1 / batch.trained_tokens(), dtype=torch.float64)
    ours = loss_of(stage, batch, scale)
    ours.backward()
    assert abs(float(ours.detach()) - float(loss)) <= 1e-5 * float(loss)
    holder = tmp_path / "gradients"
    holder.mkdir()
    (holder / CONFIG).write_text((tmp_path / CONFIG).read_text())
    biases = {n: b for n, b in theirs.named_buffers() if n.endswith("e_score_correction_bias")}
    save_file(biases | {n: g.contiguous() for n, g in gradients.items()}, holder / "model.safetensors")
    expected = open_weights(holder, model)
    norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
    for layout, gradient in pieces(stage, gradients=True):
        whole = expected.read(layout.name, (0,) * len(layout.shape), layout.shape)
        difference = float((gradient.view(layout.shape) - whole).norm())
        assert difference <= max(1e-4 * float(whole.norm()), 1e-7 * norm), layout.name


def loss_of(stage: Stage, batch: Batch, scale: Tensor) -> Tensor:
    loss: Tensor = stage(None, Inputs(batch=batch, token_scale=scale, row_scale=1.0)).loss
    return loss


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("case", FAMILY_CASES)
def test_each_rank_reads_its_own_slices(case: str, tp: int, sequence_parallel: bool, tmp_path: Path) -> None:
    theirs = make(case, tmp_path)
    batch = batch_of(read_model(tmp_path))

    def main(world: World) -> Tensor:
        return loaded(world, tmp_path, sequence_parallel=sequence_parallel).logits(None, batch)

    logits = theirs(input_ids=batch.tokens_BL).logits
    for found in run_threads(tp, main):
        torch.testing.assert_close(found.reshape(logits.shape), logits, rtol=0, atol=1e-5)


def whole(stage: Stage) -> dict[str, Tensor]:
    parameters = {layout.name: piece.view(layout.shape) for layout, piece in pieces(stage, gradients=False)}
    return parameters | {layout.name: state.clone() for layout, state in states_of(stage)}


@pytest.mark.parametrize("case", CASES)
def test_a_round_trip_gives_back_every_tensor(case: str, tmp_path: Path) -> None:
    theirs = make(case, tmp_path / "in")
    (stage,) = run_threads(1, lambda world: loaded(world, tmp_path / "in"))
    tensors = whole(stage)
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    done = export(
        tmp_path / "out",
        read_model(tmp_path / "in"),
        lambda name, offsets, sizes: tensors[name][
            tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        ],
        dtype=torch.float32,
        source=tmp_path / "in",
        file_bytes=20_000,
    )
    assert done.carried == ("generation_config.json", "tokenizer.json")
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    back, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = dict(theirs.state_dict())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in back.state_dict().items())
    (again,) = run_threads(1, lambda world: loaded(world, tmp_path / "out"))
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in whole(again).items())


@pytest.mark.parametrize("case", CASES)
def test_a_model_from_scratch_is_said_by_a_family(case: str, tmp_path: Path) -> None:
    theirs = make(case, tmp_path / "in")
    (stage,) = run_threads(1, lambda world: loaded(world, tmp_path / "in"))
    tensors = whole(stage)
    model = read_model(tmp_path / "in")
    export(tmp_path / "out", model, lambda name, offsets, sizes: tensors[name], dtype=torch.float32)
    batch = batch_of(model)
    back, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    torch.testing.assert_close(
        back(input_ids=batch.tokens_BL).logits, theirs(input_ids=batch.tokens_BL).logits, rtol=0, atol=1e-5
    )


def edit(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


EXCHANGES = {
    "gate and up": ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"),
    "k and v": ("model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.v_proj.weight"),
    "q and k": ("model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"),
    "norms": ("model.layers.0.input_layernorm.weight", "model.layers.0.post_attention_layernorm.weight"),
}


@pytest.mark.parametrize("pair", EXCHANGES)
def test_a_planted_exchange_is_seen(pair: str, tmp_path: Path) -> None:
    theirs = make("llama", tmp_path, num_key_value_heads=4)
    batch = batch_of(read_model(tmp_path))
    logits = theirs(input_ids=batch.tokens_BL).logits

    def change(tensors: dict[str, Tensor]) -> None:
        one, other = EXCHANGES[pair]
        tensors[one], tensors[other] = tensors[other], tensors[one]

    edit(tmp_path, change)
    (stage,) = run_threads(1, lambda world: loaded(world, tmp_path))
    assert (stage.logits(None, batch).view(logits.shape) - logits).abs().max() > 1e-3


def refused(folder: Path) -> str:
    model = read_model(folder)
    with pytest.raises(ImportRefused) as caught:
        open_weights(folder, model)
    return str(caught.value)


def test_everything_that_does_not_fit_is_listed(tmp_path: Path) -> None:
    make("llama", tmp_path)

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.mlp.gate_prej.weight"] = tensors.pop("model.layers.0.mlp.gate_proj.weight")
        tensors["model.norm.weight"] = torch.ones(31)
        tensors["model.layers.7.input_layernorm.weight"] = torch.ones(32)

    edit(tmp_path, change)
    told = refused(tmp_path)
    assert (
        "model.layers.0.mlp.gate_proj.weight is missing (there is model.layers.0.mlp.gate_prej.weight)"
        in told
    )
    assert "model.norm.weight must have shape [32], but has [31]" in told
    assert "model.layers.7.input_layernorm.weight is not a tensor of this model" in told


def test_a_stale_tied_head_is_refused(tmp_path: Path) -> None:
    make("qwen2-tied", tmp_path)
    edit(
        tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    )
    assert "lm_head.weight must equal model.embed_tokens.weight" in refused(tmp_path)
    edit(
        tmp_path,
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}),
    )
    assert open_weights(tmp_path, read_model(tmp_path))


def test_names_without_their_prefix_are_read(tmp_path: Path) -> None:
    make("gpt2", tmp_path)

    def change(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)  # a mask: carries nothing

    edit(tmp_path, change)
    assert open_weights(tmp_path, read_model(tmp_path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "relu"}, "`hidden_act` is 'relu', which is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "`rope_parameters` is"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "sine": 1}}, "has `sine`"),
        ({"num_hidden_layers": "two"}, "`num_hidden_layers` must be a whole number"),
        ({"tie_word_embeddings": 1}, "`tie_word_embeddings` must be true or false"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_not_supported_is_refused_by_name(
    changes: Mapping[str, Any], words: str, tmp_path: Path
) -> None:
    make("llama", tmp_path)
    values = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(values | changes))
    with pytest.raises((Unsupported, ValueError)) as caught:
        read_model(tmp_path)
    assert words in str(caught.value)


def test_old_names_of_rotary_fields_are_read(tmp_path: Path) -> None:
    make("qwen2.5-yarn", tmp_path)
    values = json.loads((tmp_path / CONFIG).read_text())
    new = read_model(tmp_path)
    told = dict(values.pop("rope_parameters"))
    values |= {"rope_theta": told.pop("rope_theta")}
    values["rope_scaling"] = {**told, "type": told.pop("rope_type")} | {}
    values["rope_scaling"].pop("rope_type", None)
    (tmp_path / CONFIG).write_text(json.dumps(values))
    assert read_model(tmp_path) == new


def test_pickled_weights_and_missing_files_are_refused(tmp_path: Path) -> None:
    make("llama", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "is pickled and can run code" in refused(tmp_path)
    index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "must name files beside it, but ../elsewhere.safetensors" in refused(tmp_path)


def test_shapes_come_without_allocating(tmp_path: Path) -> None:
    make("llama", tmp_path)
    model = read_model(tmp_path)
    shapes = whole_shapes(model)
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == model.parameters()


@pytest.mark.parametrize("fault", ["a head's pairs", "the shared head's pairs", "the bias"])
def test_a_fault_in_latent_tensors_is_seen(fault: str, tmp_path: Path) -> None:
    theirs = make("deepseek-v3", tmp_path)
    batch = batch_of(read_model(tmp_path))
    logits = theirs(input_ids=batch.tokens_BL).logits

    def change(tensors: dict[str, Tensor]) -> None:
        layer = "model.layers.1."
        if fault == "the bias":
            tensors[f"{layer}mlp.gate.e_score_correction_bias"].neg_()
        elif fault == "the shared head's pairs":
            weight = tensors[f"{layer}self_attn.kv_a_proj_with_mqa.weight"]
            weight[12:] = weight[12:][[0, 2, 4, 1, 3, 5]]
        else:
            weight = tensors[f"{layer}self_attn.q_b_proj.weight"]
            weight[8:14] = weight[8:14][[0, 2, 4, 1, 3, 5]]

    edit(tmp_path, change)
    (stage,) = run_threads(1, lambda world: loaded(world, tmp_path))
    assert (stage.logits(None, batch).view(logits.shape) - logits).abs().max() > 1e-3


def test_layers_for_extra_depths_are_read_over(tmp_path: Path) -> None:
    make("deepseek-v3", tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"model.layers.3.eh_proj.weight": torch.ones(32, 64)}))
    assert "model.layers.3.eh_proj.weight is not a tensor of this model" in refused(tmp_path)
    values = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(values | {"num_nextn_predict_layers": 1}))
    assert open_weights(tmp_path, read_model(tmp_path))
    config = RunConfig(model_name_or_path=str(tmp_path))
    assert "has 1 layer(s) for extra prediction depths" in str(depths_warning(config))


def test_8_bit_blocks_are_widened(tmp_path: Path) -> None:
    """Blocks are cut at 128 rows and columns of the whole tensor, wherever a slice begins."""
    whole_OI = torch.randn(300, 200).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2) + 0.5
    save_file({"a": whole_OI, "a_scale_inv": scales}, tmp_path / "model.safetensors")
    files = SafetensorsFolder(tmp_path)
    expected = whole_OI.float()
    for row in range(3):
        for column in range(2):
            expected[128 * row : 128 * row + 128, 128 * column : 128 * column + 128] *= scales[row, column]
    assert torch.equal(files.read("a", ()), expected)
    assert torch.equal(files.read("a", (slice(100, 290), slice(50, 200))), expected[100:290, 50:200])


@pytest.mark.parametrize("case", ["mixtral", "qwen2-moe", "qwen3-moe", "deepseek-v2", "deepseek-v3"])
def test_experts_in_one_tensor_are_read_too(case: str, tmp_path: Path) -> None:
    theirs = make(case, tmp_path / "hub")
    theirs.save_pretrained(tmp_path / "stacked", save_original_format=False)  # type: ignore[operator]
    held = load_file(tmp_path / "stacked" / "model.safetensors")
    assert any(tensor.dim() == 3 for tensor in held.values())
    (one,) = run_threads(1, lambda world: loaded(world, tmp_path / "hub"))
    (other,) = run_threads(1, lambda world: loaded(world, tmp_path / "stacked"))
    expected = whole(one)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in whole(other).items())


def test_ranks_write_the_files_of_one_export_between_them(tmp_path: Path) -> None:
    make("qwen3", tmp_path / "in")
    model = model_of(read_config(tmp_path / "in" / CONFIG), "in")
    weights = open_weights(tmp_path / "in", model)
    done = export(tmp_path / "alone", model, weights.read, dtype=torch.float32, file_bytes=20_000)
    to = Export(tmp_path / "out", model, dtype=torch.float32)
    to.begin()
    sizes = {to.write(weights.read, share=(rank, 3), file_bytes=20_000) for rank in (2, 0, 1)}
    to.finish(done.size_bytes)
    assert sizes == {done.size_bytes}
    names = sorted(path.name for path in (tmp_path / "alone").iterdir())
    assert len(names) > 4
    assert names == sorted(path.name for path in (tmp_path / "out").iterdir())
    assert all((tmp_path / "alone" / n).read_bytes() == (tmp_path / "out" / n).read_bytes() for n in names)
