"""Whole runs of models that `transformers` builds: from a folder or a config.json to a folder, saved, gone on from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.ranks.test_guests import values_of
from tests.ranks.test_huggingface_runs import add_tokenizer, flags
from tests.runs import names, rows, run, step
from triaxis.engine.advice import dropout_warning
from triaxis.engine.config import ConfigError, RunConfig
from triaxis.engine.rules import resolve
from triaxis.launch.convert import main as convert
from triaxis.launch.generate import main as generate
from triaxis.launch.plan import main as plan
from triaxis.launch.simulate import main as simulate
from triaxis.models.huggingface.families import CONFIG, FAMILIES
from triaxis.models.huggingface.guest import GuestModel
from triaxis.models.huggingface.guest_module import guest_module
from triaxis.models.huggingface.reader import ImportRefused

pytestmark = pytest.mark.usefixtures("no_picture")


def make(family: str, folder: Path, **more: Any) -> Any:
    """A random model of transformers, saved with a tokenizer; norms are random too, or an exchange would hide."""
    config = transformers.CONFIG_MAPPING[family].from_dict(values_of(family, **more))
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    model.save_pretrained(folder)
    add_tokenizer(folder)
    return model.eval()


def losses(output: Path) -> list[tuple[float, float]]:
    return [(row["loss"], row["grad_norm"]) for row in rows(output)]


def loaded(folder: Path) -> Any:
    """By transformers, which finds every tensor and no other."""
    model, told = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def test_chats_and_a_folder_in_a_folder_out(tmp_path: Path) -> None:
    """dp 4, ZeRO-3, as one rank; exported, reloaded, generating: and the engine's own generation says the same."""
    make("gemma", tmp_path / "in")
    found = {}
    for name, layout in (
        ("one", {"zero": 0}),
        ("four", {"dp": 4, "zero": 3, "save_hf": str(tmp_path / "out")}),
    ):
        given = flags(tmp_path, model_name_or_path=str(tmp_path / "in"), **layout)
        run(given | {"output_dir": str(tmp_path / name)})
        found[name] = losses(tmp_path / name)
    for one, four in zip(found["one"], found["four"], strict=True):
        assert four == pytest.approx(one, rel=1e-5)
    assert found["four"][-1][0] < found["four"][0][0] - 0.5
    model, tokenizer = loaded(tmp_path / "out"), transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "what is 3?"}], tokenize=True, return_tensors="pt", return_dict=True
    )
    assert model.generate(**prompt, max_new_tokens=4, do_sample=False).shape[1] > prompt["input_ids"].shape[1]


def test_the_engine_generates_what_transformers_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, prompt = make("gemma2", tmp_path), "what"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    written = theirs.generate(ids, max_new_tokens=9, do_sample=False)[0, ids.shape[1] :].tolist()
    written = (
        written[: written.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in written else written
    )
    generate([str(tmp_path), "--prompt", prompt, "--tokens", "9", "--temperature", "0"])
    assert capsys.readouterr().out.rstrip("\n") == prompt + tokenizer.decode(written)


@pytest.mark.parametrize("family", ["stablelm", "cohere"])
def test_learning_rate_zero_gives_back_every_tensor(family: str, tmp_path: Path) -> None:
    make(family, tmp_path / "in")
    more = {"learning_rate": 0.0, "weight_decay": 0.0, "steps": 1, "save_hf": str(tmp_path / "out")}
    run(flags(tmp_path, model_name_or_path=str(tmp_path / "in"), dp=4, zero=3, **more))
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    told = [json.loads((tmp_path / name / CONFIG).read_text()) for name in ("in", "out")]
    assert {**told[0], "dtype": 0} == {**told[1], "dtype": 0}


def test_experts_that_files_hold_one_by_one_come_and_go(tmp_path: Path) -> None:
    """Files name each expert; the model of transformers holds them stacked."""
    make("olmoe", tmp_path / "in")
    files = load_file(tmp_path / "in" / "model.safetensors")
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in files
    more = {"learning_rate": 0.0, "weight_decay": 0.0, "steps": 1, "save_hf": str(tmp_path / "out")}
    run(flags(tmp_path, model_name_or_path=str(tmp_path / "in"), dp=2, zero=3, **more))
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert files.keys() == after.keys()
    assert all(torch.equal(files[name], after[name]) for name in files)


def test_from_a_config_alone_on_any_layout_and_further_on_another(tmp_path: Path) -> None:
    """From scratch; saved at dp 4 and ZeRO-3, gone on from at dp 2 and ZeRO-1; converted with its tokenizer."""
    (tmp_path / "tokenizer").mkdir()
    add_tokenizer(tmp_path / "tokenizer")
    (tmp_path / CONFIG).write_text(json.dumps(values_of("stablelm")))
    given = flags(tmp_path, model=str(tmp_path / CONFIG), tokenizer=str(tmp_path / "tokenizer"), dtype="fp64")
    given |= {"save_strategy": "steps", "eval_batches": 0}
    run(given | {"zero": 0, "output_dir": str(tmp_path / "one")})
    moved = given | {"output_dir": str(tmp_path / "moved")}
    run(moved | {"dp": 4, "zero": 3, "steps": 3, "lr_scheduler_type": "constant"})
    run(given | {"zero": 0, "lr_scheduler_type": "constant", "output_dir": str(tmp_path / "constant")})
    run(moved | {"dp": 2, "zero": 1, "resume": "auto", "lr_scheduler_type": "constant"})
    for one, other in zip(losses(tmp_path / "constant"), losses(tmp_path / "moved"), strict=True):
        assert other == pytest.approx(one, rel=1e-10)
    assert losses(tmp_path / "constant")[0] == losses(tmp_path / "one")[0]
    assert convert([str(tmp_path / "moved"), "--to", "hf", str(tmp_path / "out")]) == 0
    loaded(tmp_path / "out")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").chat_template


@pytest.mark.parametrize(
    ("family", "layout"),
    [("stablelm", {"dp": 2, "zero": 3}), ("qwen3", {"tp": 2, "pp": 2, "dp": 2})],
    ids=["guest", "family"],
)
def test_a_folder_with_each_checkpoint_as_long_as_it_stays(
    family: str, layout: dict[str, Any], tmp_path: Path
) -> None:
    make(family, tmp_path / "in")
    more = {"save_steps": 1, "save_total_limit": 2, "save_hf_checkpoints": True, "steps": 4, **layout}
    run(flags(tmp_path, model_name_or_path=str(tmp_path / "in"), **more))
    out = tmp_path / "run" / "hf"
    assert sorted(path.name for path in out.iterdir()) == names(tmp_path / "run") == [step(3), step(4)]
    assert transformers.AutoTokenizer.from_pretrained(out / step(3)).chat_template
    newest, before = (loaded(out / name).state_dict() for name in (step(4), step(3)))
    assert not torch.equal(newest["lm_head.weight"], before["lm_head.weight"])
    assert convert([str(tmp_path / "run"), "--to", "hf", str(tmp_path / "late")]) == 0
    late = loaded(tmp_path / "late").state_dict()
    assert all(torch.equal(newest[name], held) for name, held in late.items())
    assert convert([str(tmp_path / "run"), "--to", "file", str(tmp_path / "all")]) == 0
    whole = load_file(tmp_path / "all")
    assert all(torch.equal(whole[name], late[name].bfloat16()) for name in whole)
    assert len(whole) == len(load_file(tmp_path / "late" / "model.safetensors"))


def test_units_by_class_and_by_size_train_alike(tmp_path: Path) -> None:
    make("stablelm", tmp_path / "in")
    found = []
    for name, more in (
        ("layers", {}),
        ("class", {"wrap": "StableLmMLP, StableLmAttention"}),
        ("size", {"min_num_params": 3000}),
    ):
        given = flags(tmp_path, model_name_or_path=str(tmp_path / "in"), dtype="fp64", dp=2, zero=3, **more)
        run(given | {"output_dir": str(tmp_path / name), "steps": 2})
        found.append(losses(tmp_path / name))
    assert found[1] == [pytest.approx(row, rel=1e-10) for row in found[0]]
    assert found[2] == [pytest.approx(row, rel=1e-10) for row in found[0]]
    own = {**flags(tmp_path, dtype="fp64", dp=2, zero=3), "steps": 2, "model": "tiny"}
    for name, more in (("own", {}), ("leaves", {"min_num_params": 1})):
        run(own | {"output_dir": str(tmp_path / name)} | more)
    assert losses(tmp_path / "leaves") == [pytest.approx(row, rel=1e-10) for row in losses(tmp_path / "own")]
    with pytest.raises(
        ConfigError, match=r"`wrap` must name classes .* Nothing is none; these are: .*StableLmMLP"
    ):
        run(flags(tmp_path, model_name_or_path=str(tmp_path / "in"), dp=2, zero=3, wrap="Nothing"))


@pytest.mark.parametrize("family", ["opt", "bloom"])
def test_packing_is_refused_where_documents_would_see_each_other(family: str, tmp_path: Path) -> None:
    make(family, tmp_path / "in")
    given = flags(tmp_path, model_name_or_path=str(tmp_path / "in"), steps=1, dp=2, zero=3)
    with pytest.raises(ConfigError, match=f"`pack` must be off for {family}.*--no-pack"):
        run(given)
    run(given | {"pack": False})
    assert len(losses(tmp_path / "run")) == 1


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"sp": True}, {"ep": 2, "dp": 2}], ids=str)
def test_a_layout_that_would_cut_it_is_refused_with_the_families(
    layout: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / CONFIG).write_text(json.dumps(values_of("gemma")))
    config = RunConfig(model=str(tmp_path / CONFIG), seq=32, **layout)
    with pytest.raises(ConfigError) as refused:
        resolve(config, 2)
    assert next(iter(layout)) in str(refused.value)
    assert all(name in str(refused.value) for name in FAMILIES)


def test_dropout_is_told_left_out_and_kept_in_the_file(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(json.dumps(values_of("opt")))
    config = RunConfig(model=str(tmp_path / CONFIG), seq=32)
    resolved = resolve(config, 1)
    assert "without dropout; its config.json, which is kept, has dropout 0.1" in str(
        dropout_warning(config, resolved)
    )
    assert isinstance(resolved.model, GuestModel)
    assert guest_module(resolved.model).config.dropout == 0
    assert guest_module(resolved.model, with_dropout=True).config.dropout == 0.1


def test_what_is_missing_in_a_folder_is_listed(tmp_path: Path) -> None:
    make("gemma", tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    held = load_file(file)
    held["model.layers.7.other.weight"] = held.pop("model.layers.1.mlp.up_proj.weight")
    save_file(held, file, metadata={"format": "pt"})
    with pytest.raises(ImportRefused) as refused:
        run(flags(tmp_path, model_name_or_path=str(tmp_path / "in")))
    assert "model.layers.1.mlp.up_proj.weight" in str(refused.value)
    assert "model.layers.7.other.weight" in str(refused.value)


def test_planning_and_simulation_refuse_it_and_say_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / CONFIG).write_text(json.dumps(values_of("gemma")))
    assert simulate(["--model", str(tmp_path / CONFIG), "--seq", "32"]) == 2
    assert "built by transformers" in capsys.readouterr().err
    assert plan(["--model", str(tmp_path / CONFIG), "--gpus", "8"]) == 2
    assert "--model sizes.toml" in capsys.readouterr().err
