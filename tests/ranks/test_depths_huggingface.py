"""DeepSeek-V3's extra prediction depths in and out of files; `transformers`' own drafting model is the reference."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.modeling_layers import MtpModel

from tests.ranks.test_huggingface import DEEPSEEK, GROUPS, MSCALES, batch_of
from triaxis.engine.advice import depths_warning
from triaxis.engine.config import ConfigError, RunConfig
from triaxis.engine.rules import resolve
from triaxis.models.batch import IGNORED, Inputs
from triaxis.models.builder import Stage, build_model
from triaxis.models.config import ModelConfig
from triaxis.models.huggingface.families import CONFIG
from triaxis.models.huggingface.folder import export, open_weights
from triaxis.models.huggingface.reader import ImportRefused
from triaxis.models.presets import load_config
from triaxis.models.weights import filler
from triaxis.parallel.layers.build import Build
from triaxis.parallel.layers.declare import named_layouts, states_of
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.replicas.initialize import fill_module
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.thread import run_threads

LAYERS = 3
FURTHER = f"model.layers.{LAYERS}."
OWN = {"mtp_block.": "", "post_norm.": "shared_head.norm."}


def make(folder: Path, *, stacked: bool = False) -> tuple[nn.Module, MtpModel]:
    """A random DeepSeek-V3 with a drafting layer, saved in the form of the hub or with experts as one tensor."""
    import transformers

    torch.manual_seed(3)
    fields = DEEPSEEK | GROUPS | {"rope_parameters": MSCALES, "num_mtp_layers": 1}
    config = transformers.DeepseekV3Config(**fields)
    main = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    further = MtpModel(main, 1)
    for part in (main, further):
        for parameter in part.parameters():
            nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
        for name, buffer in part.named_buffers():
            if name.endswith("e_score_correction_bias"):
                nn.init.normal_(buffer, 0.0, 0.2)
    main.save_pretrained(folder, save_original_format=not stacked)
    tensors = load_file(folder / "model.safetensors")
    tensors |= named(dict(further.layers.state_dict()), stacked=stacked)
    tensors[f"{FURTHER}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{FURTHER}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return main.eval(), further.eval()


def named(tensors: dict[str, Tensor], *, stacked: bool) -> dict[str, Tensor]:
    """A drafting model's tensors by the names of a checkpoint."""
    found = {}
    for name, tensor in tensors.items():
        name = FURTHER + name.removeprefix("0.")
        for theirs, ours in OWN.items():
            name = name.replace(theirs, ours)
        experts, _, part = name.rpartition(".experts.")
        if stacked or part not in ("gate_up_proj", "down_proj"):
            found[name] = tensor.contiguous().clone()
            continue
        for number, expert in enumerate(tensor):
            halves = zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True)
            for half, weight in halves if part == "gate_up_proj" else (("down_proj", expert),):
                found[f"{experts}.experts.{number}.{half}.weight"] = weight.contiguous().clone()
    return found


def read_model(folder: Path) -> ModelConfig:
    return replace(load_config(str(folder)), depths=1)


def loaded(world: World, folder: Path, *, sp: bool = False) -> Stage:
    model = read_model(folder)
    stage = build_model(model, Build.on(build_mesh(world, Topology(tp=world.size)), sequence_parallel=sp))
    weights = filler(open_weights(folder, model))
    fill_module(stage, weights)
    for layout, state in states_of(stage):
        weights(layout, state.view(-1), 0)
    return stage


def their_losses(main: Any, further: Any, tokens_BL: Tensor, labels_BL: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of the main loss and of the depth's, by transformers' modules."""
    before_norm: list[Tensor] = []
    main.model.norm.register_forward_pre_hook(lambda _, given: before_norm.append(given[0]))
    logits = main(input_ids=tokens_BL).logits
    length = tokens_BL.shape[1] - 1
    positions_BL = torch.arange(length)[None].expand(len(tokens_BL), -1)
    hidden = further.forward_layer(0, before_norm[0][:, :-1], positions_BL, None, input_ids=tokens_BL[:, 1:])
    drafted = main.lm_head(hidden)

    def summed(logits: Tensor, labels_BL: Tensor) -> Tensor:
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), labels_BL.flatten(), ignore_index=IGNORED, reduction="sum"
        )

    return summed(logits, labels_BL), summed(drafted, labels_BL[:, 1:])


@pytest.mark.parametrize("stacked", [False, True], ids=["hub", "stacked"])
def test_losses_and_gradients_are_theirs(stacked: bool, tmp_path: Path) -> None:
    main, further = make(tmp_path, stacked=stacked)
    model = read_model(tmp_path)
    batch = batch_of(model)
    count = batch.trained_tokens()
    theirs = [one / count for one in their_losses(main, further, batch.tokens_BL, batch.labels_BL)]
    (theirs[0] + 0.3 * theirs[1]).backward()
    (stage,) = run_threads(1, lambda world: loaded(world, tmp_path))
    scale = torch.tensor(1 / count, dtype=torch.float64)
    made = stage(None, Inputs(batch=batch, token_scale=scale, row_scale=1.0, depth_weight=0.3))
    made.loss.backward()
    assert float(made.loss.detach()) == pytest.approx(float(theirs[0].detach()), rel=1e-5)
    assert float(made.depths[0]) == pytest.approx(float(theirs[1].detach()), rel=1e-5)
    ours = {layout.name: p.grad.view(-1)[f : f + layout.elements] for p, layout, f in named_layouts(stage)}
    for name, parameter in (
        ("model.embed_tokens.weight", main.get_input_embeddings().weight),
        ("lm_head.weight", main.get_output_embeddings().weight),
        (f"{FURTHER}eh_proj.weight", further.layers[0].eh_proj.weight),
        (f"{FURTHER}enorm.weight", further.layers[0].enorm.weight),
        (f"{FURTHER}hnorm.weight", further.layers[0].hnorm.weight),
        (f"{FURTHER}shared_head.norm.weight", further.layers[0].post_norm.weight),
        (f"{FURTHER}mlp.gate.weight", further.layers[0].mtp_block.mlp.gate.weight),
        (f"{FURTHER}self_attn.o_proj.weight", further.layers[0].mtp_block.self_attn.o_proj.weight),
        ("model.layers.0.mlp.down_proj.weight", main.model.layers[0].mlp.down_proj.weight),
    ):
        difference = float((ours[name].view_as(parameter) - parameter.grad).norm())
        assert difference <= 1e-4 * float(parameter.grad.norm()), name


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
def test_ranks_read_their_slices(sp: bool, tmp_path: Path) -> None:
    make(tmp_path)
    batch = batch_of(read_model(tmp_path))

    def main(world: World) -> float:
        scale = torch.ones((), dtype=torch.float64)
        inputs = Inputs(batch=batch, token_scale=scale, row_scale=1.0, depth_weight=1.0)
        return float(loaded(world, tmp_path, sp=sp)(None, inputs).depths[0])

    (alone,) = run_threads(1, main)
    assert run_threads(2, main) == pytest.approx([alone] * 2, rel=1e-5)


@pytest.mark.parametrize("stacked", [False, True], ids=["hub", "stacked"])
@pytest.mark.parametrize("known", [True, False], ids=["source", "anew"])
def test_a_round_trip_changes_no_bit(known: bool, stacked: bool, tmp_path: Path) -> None:
    """What is written is the hub's form, with the copies of embedding and head that it has."""
    make(tmp_path / "in", stacked=stacked)
    model = read_model(tmp_path / "in")
    read = open_weights(tmp_path / "in", model).read
    source = tmp_path / "in" if known else None
    done = export(tmp_path / "out", model, read, dtype=torch.float32, source=source)
    assert done.depths_left_out == 0
    make(tmp_path / "hub")
    expected = load_file(tmp_path / "hub" / "model.safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert json.loads((tmp_path / "out" / CONFIG).read_text())["num_nextn_predict_layers"] == 1


def test_transformers_drafts_with_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text with drafts is the text without them; a checkpoint without the layer, asked to draft, would be an error."""
    import transformers

    make(tmp_path / "in")
    model = read_model(tmp_path / "in")
    export(tmp_path / "out", model, open_weights(tmp_path / "in", model).read, dtype=torch.float32)
    monkeypatch.setattr(
        transformers.DeepseekV3ForCausalLM,
        "_keys_to_ignore_on_load_unexpected",
        [rf"model\.layers\.{LAYERS}\."],
    )
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    prompt = {
        "input_ids": torch.tensor([[1, 2, 3]]),
        "max_new_tokens": 8,
        "do_sample": False,
        "pad_token_id": 0,
    }
    assert torch.equal(theirs.generate(**prompt, use_mtp=True), theirs.generate(**prompt))


def test_a_family_without_place_for_them_says_so(tmp_path: Path) -> None:
    model = replace(load_config("tiny"), depths=1)
    done = export(tmp_path, model, lambda name, offsets, sizes: torch.ones(sizes), dtype=torch.float32)
    assert done.depths_left_out == 1
    written = load_file(tmp_path / "model.safetensors")
    assert not any(name.startswith(f"model.layers.{model.layers}.") for name in written)


@pytest.mark.parametrize("copy", ["embed_tokens.weight", "shared_head.head.weight"])
def test_a_copy_that_differs_is_refused(copy: str, tmp_path: Path) -> None:
    make(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[FURTHER + copy][-1, -1] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ImportRefused, match=f"{copy} must equal .* which all prediction depths share"):
        open_weights(tmp_path, read_model(tmp_path))


def test_as_many_are_read_as_are_asked_for(tmp_path: Path) -> None:
    make(tmp_path)
    plain = RunConfig(model_name_or_path=str(tmp_path), seq=16)
    assert "--mtp-depths 1 trains them" in str(depths_warning(plain))
    assert open_weights(tmp_path, resolve(plain, 1).model)
    asked = replace(plain, mtp_depths=1)
    assert depths_warning(asked) is None and resolve(asked, 1).model.depths == 1
    with pytest.raises(ConfigError, match="`mtp_depths` must be at most 1, the extra prediction depths that"):
        resolve(replace(plain, mtp_depths=2), 1)
