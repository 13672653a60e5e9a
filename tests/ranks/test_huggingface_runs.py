"""Whole runs that begin with a Hugging Face folder and end with one; and with the weights of another run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.ranks.test_huggingface import FAMILY_CASES, make
from tests.runs import rows, run
from triaxis.engine.config import ConfigError, RunConfig
from triaxis.engine.rules import resolve
from triaxis.launch.convert import main as convert
from triaxis.launch.hub import local_model
from triaxis.models.huggingface.families import CONFIG
from triaxis.models.huggingface.reader import ImportRefused
from triaxis.models.presets import load_config

MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
)


def add_tokenizer(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:90]
    tokens = [*alphabet, *MARKS]
    made = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(MARKS)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def chats(path: Path, count: int = 64) -> Path:
    """Questions with answers that are short enough for a row."""
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"what is {number}?"},
                {"role": "assistant", "content": f"it is {number * number}."},
            ]
        }
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def flags(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "data": str(chats(folder / "chats.jsonl")),
        "seq": 64,
        "per_device_train_batch_size": 1,
        "global_batch": 8,
        "steps": 5,
        "learning_rate": 1e-2,
        "output_dir": str(folder / "run"),
        **more,
    }


CUBE = {"tp": 2, "pp": 2, "dp": 2}


def test_chats_and_a_folder_in_a_folder_out(tmp_path: Path) -> None:
    make("qwen2-tied", tmp_path / "in")
    add_tokenizer(tmp_path / "in")
    out = tmp_path / "out"
    run(flags(tmp_path, model_name_or_path=str(tmp_path / "in"), save_hf=str(out), zero=3, **CUBE))
    losses = [row["loss"] for row in rows(tmp_path / "run")]
    assert losses[-1] < losses[0] - 0.5
    model, told = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "what is 3?"}], tokenize=True, return_tensors="pt", return_dict=True
    )
    assert model.generate(**prompt, max_new_tokens=4, do_sample=False).shape[1] > prompt["input_ids"].shape[1]
    trained = load_file(out / "model.safetensors")
    assert not torch.equal(
        trained["model.norm.weight"], load_file(tmp_path / "in" / "model.safetensors")["model.norm.weight"]
    )


OFTEN = ["llama3.2", "gpt2", "phi3", "qwen3"]
RARELY = [pytest.param(case, marks=pytest.mark.full) for case in FAMILY_CASES if case not in OFTEN]


@pytest.mark.parametrize("case", [*OFTEN, *RARELY])
@pytest.mark.parametrize(
    "layout",
    [{"zero": 0}, {**CUBE, "sp": True, "zero": 1}, {"dp": 4, "zero": 3}],
    ids=["one", "cube-sp", "dp4-zero3"],
)
def test_learning_rate_zero_gives_back_every_tensor(
    case: str, layout: dict[str, Any], tmp_path: Path
) -> None:
    make(case, tmp_path / "in")
    add_tokenizer(tmp_path / "in")
    out = tmp_path / "out"
    more = {"learning_rate": 0.0, "weight_decay": 0.0, "steps": 2, "save_hf": str(out), **layout}
    more |= {"router_bias_rate": 0.0} if case == "deepseek-v3" else {}
    run(flags(tmp_path, model_name_or_path=str(tmp_path / "in"), **more))
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "in", out))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_any_layout_begins_with_the_same_weights(tmp_path: Path) -> None:
    make("qwen3", tmp_path / "in")
    add_tokenizer(tmp_path / "in")
    found = []
    for number, layout in enumerate(({"zero": 0}, {**CUBE, "zero": 2})):
        given = flags(tmp_path, model_name_or_path=str(tmp_path / "in"), dtype="fp64", **layout)
        run(given | {"output_dir": str(tmp_path / f"run{number}"), "steps": 3})
        found.append([(row["loss"], row["grad_norm"]) for row in rows(tmp_path / f"run{number}")])
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, rel=1e-10)


def test_weights_alone_begin_another_run(tmp_path: Path) -> None:
    make("llama", tmp_path / "in")
    add_tokenizer(tmp_path / "in")
    run(flags(tmp_path, model_name_or_path=str(tmp_path / "in"), save_steps=5, dp=2, zero=1))
    given = flags(tmp_path, model=str(tmp_path / "in" / CONFIG), tokenizer=str(tmp_path / "in"))
    again = given | {"output_dir": str(tmp_path / "next"), "optimizer": "sgd", "tp": 2, "steps": 1}
    run(again | {"init_from": str(tmp_path / "run")})
    fresh = given | {"output_dir": str(tmp_path / "fresh"), "steps": 1}
    run(fresh)
    first, resumed = rows(tmp_path / "fresh")[0]["loss"], rows(tmp_path / "next")[0]["loss"]
    assert resumed < rows(tmp_path / "run")[0]["loss"] - 0.5 and resumed < first - 0.5
    bad = {"model": "tiny", "tokenizer": None, "data": "stdlib"}
    with pytest.raises(ConfigError, match="`init_from` must be a checkpoint of this model, but"):
        run(again | bad | {"init_from": str(tmp_path / "run"), "output_dir": str(tmp_path / "y")})
    with pytest.raises(ConfigError, match="must hold a complete checkpoint"):
        run(again | {"init_from": str(tmp_path / "in"), "output_dir": str(tmp_path / "z")})


def test_a_checkpoint_is_converted_by_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make("llama3.2", tmp_path / "in")
    add_tokenizer(tmp_path / "in")
    run(flags(tmp_path, model_name_or_path=str(tmp_path / "in"), save_steps=5, **CUBE))
    assert convert([str(tmp_path / "run"), "--to", "hf", str(tmp_path / "hf"), "--dtype", "bf16"]) == 0
    assert "exported LlamaForCausalLM" in capsys.readouterr().out
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.dtype == torch.bfloat16
    assert convert([str(tmp_path / "run"), "--to", "file", str(tmp_path / "w.safetensors")]) == 0
    held = load_file(tmp_path / "w.safetensors")
    assert {tensor.dtype for tensor in held.values()} == {torch.bfloat16}
    assert torch.equal(held["model.norm.weight"], model.model.norm.weight)
    for target, words in (
        ("hf", "must be a new or an empty folder"),
        ("w.safetensors", "must be a new file"),
    ):
        kind = "hf" if target == "hf" else "file"
        assert convert([str(tmp_path / "run"), "--to", kind, str(tmp_path / target)]) == 2
        assert words in capsys.readouterr().err
    assert convert([str(tmp_path / "in"), "--to", "hf", str(tmp_path / "n")]) == 2
    assert "must be a complete checkpoint" in capsys.readouterr().err


def test_a_model_from_scratch_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make("llama", tmp_path / "in")
    given = flags(tmp_path, model=str(tmp_path / "in" / CONFIG), save_steps=5, seq=32)
    given["data"] = str(chats(tmp_path / "c.jsonl"))
    add_tokenizer(tmp_path / "in")
    run(given | {"tokenizer": str(tmp_path / "in"), "seq": 64})
    assert convert([str(tmp_path / "run"), "--to", "hf", str(tmp_path / "hf")]) == 0
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")


def test_nothing_is_trained_from_a_checkpoint_that_does_not_fit(tmp_path: Path) -> None:
    make("llama", tmp_path / "in")
    add_tokenizer(tmp_path / "in")
    values = json.loads((tmp_path / "in" / CONFIG).read_text())
    (tmp_path / "in" / CONFIG).write_text(json.dumps(values | {"num_hidden_layers": 3}))
    with pytest.raises(ImportRefused, match=r"model\.layers\.2\.input_layernorm\.weight is missing"):
        run(flags(tmp_path, model_name_or_path=str(tmp_path / "in"), tp=2))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def refused(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(RunConfig(**changes), 1)
    return str(caught.value)


def test_flags_that_do_not_go_together(tmp_path: Path) -> None:
    make("mistral", tmp_path)
    folder = str(tmp_path)
    assert "`model` must be left out with model_name_or_path" in refused(
        model_name_or_path=folder, model="small"
    )
    assert "`init_from` must be left out" in refused(model_name_or_path=folder, init_from=folder)
    assert f"`save_hf` must be a new folder, but {folder} exists" in refused(save_hf=folder)
    assert "`save_hf` must be left out with save_strategy no" in refused(
        save_hf=str(tmp_path / "new"), save_strategy="no"
    )
    values = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(values | {"sliding_window": 16}))
    assert "`seq` must be at most 16, the `sliding_window`" in refused(model_name_or_path=folder, seq=32)
    assert resolve(RunConfig(model_name_or_path=folder, seq=16), 1).model.layers == 2


def test_a_name_is_found_in_the_hubs_cache_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants as hub

    snapshot = tmp_path / "models--some--model" / "snapshots" / "abc"
    make("llama", snapshot)
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("abc")
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    assert local_model("some/model") == str(snapshot)
    assert load_config(local_model("some/model")).layers == 2
    (snapshot / "model.safetensors").rename(tmp_path / "later")
    with pytest.raises(ValueError, match=r"has not all of its safetensors.* hf download some/model"):
        local_model("some/model")
    (tmp_path / "later").rename(snapshot / "model.safetensors")
    with pytest.raises(ValueError, match="hf download some/other"):
        local_model("some/other")
    with pytest.raises(ValueError, match="which is neither"):
        local_model("nowhere")
