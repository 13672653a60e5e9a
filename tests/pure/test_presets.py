"""Models by name: parameters and FLOPs against published values and transformers' own models."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from triaxis.models.config import NormKind
from triaxis.models.fields import PositionKind, dense_model, fields_of, with_fields
from triaxis.models.kinds import ActivationKind
from triaxis.models.positions import LinearScaling, Rope
from triaxis.models.presets import PRESETS, load_config

PUBLISHED_PARAMETERS = {
    "gpt2-124m": 124_439_808,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED_PARAMETERS.items())
def test_parameters_are_those_published(name: str, parameters: int) -> None:
    assert PRESETS[name].parameters() == parameters


def test_own_sizes() -> None:
    assert PRESETS["tiny"].parameters() == 861_984
    assert PRESETS["small"].parameters() == 6_034_176
    assert PRESETS["dense-671b"].parameters() == 670_970_531_840
    dense = {name for name, model in PRESETS.items() if not model.experts()}
    assert dense == {"tiny", "small", "dense-671b", *PUBLISHED_PARAMETERS}


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_parameters_are_those_transformers_makes(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = PRESETS[name]
    fields = fields_of(config)
    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": fields.ffn_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": fields.heads,
        "num_key_value_heads": fields.kv_heads,
        "tie_word_embeddings": config.tied,
    }
    family = name.partition("-")[0]
    with torch.device("meta"):
        if family == "gpt2":
            model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
        elif family == "qwen2.5":
            model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))
        elif family == "qwen3":
            model = transformers.Qwen3ForCausalLM(
                transformers.Qwen3Config(**sizes, head_dim=config.rotary_size())
            )
        else:
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    assert config.parameters() == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "flops"), [("llama3-8b", 5.147e10), ("llama3-70b", 4.492e11), ("llama3-405b", 2.524e12)]
)
def test_flops_per_token(name: str, flops: float) -> None:
    assert PRESETS[name].flops_per_token(8192) == pytest.approx(flops, rel=2e-4)


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"but is 'llama3_8b'; nearest presets: llama3-8b"):
        load_config("llama3_8b")


@pytest.mark.parametrize("suffix", [".json", ".toml"])
def test_config_from_a_file(tmp_path: Path, suffix: str) -> None:
    config = dataclasses.replace(PRESETS["gpt2-124m"], name="mine")
    fields = {key: value for key, value in dataclasses.asdict(fields_of(config)).items() if key != "name"}
    fields = {**fields, "head_dim": 64, "rope_scaling": {"rope_type": "linear", "factor": 2}}
    fields |= {"positions": "rope"}
    scaling = 'rope_scaling = { rope_type = "linear", factor = 2 }'
    lines = [f"{key} = {json.dumps(value)}" for key, value in fields.items() if key != "rope_scaling"] + [
        scaling
    ]
    path = tmp_path / f"mine{suffix}"
    path.write_text(json.dumps(fields) if suffix == ".json" else "\n".join(lines))
    loaded = load_config(str(path))
    assert loaded == dataclasses.replace(config, positions=Rope(scaling=LinearScaling(factor=2)))
    assert isinstance(loaded.norm, NormKind)
    assert isinstance(fields_of(loaded).activation, ActivationKind)
    assert with_fields(loaded, rope_scaling=None, positions=PositionKind.LEARNED) == config


SIZES: dict[str, object] = {
    "vocab_size": 257,
    "hidden_size": 64,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "ffn_size": 96,
    "max_positions": 64,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hiden_size": 64}, r"`hiden_size` must be a model field, but is none; allowed: name, vocab_size"),
        ({"attention_dropout": 0.1}, "`attention_dropout` must be a model field, but is none"),
        ({"experts": 8}, "`experts` must be a model field, but is none"),
        ({"norm": "batchnorm"}, r"`norm` must be one of rmsnorm, layernorm, but is 'batchnorm'"),
        ({"layers": "2"}, r"`layers` must be of type int, but is '2'"),
        ({"layers": True}, r"`layers` must be of type int, but is True"),
        ({"layers": 0}, r"`layers` must be at least 1, but is 0"),
        ({"kv_heads": 3}, r"`kv_heads` must divide `heads` \(4\), but is 3; these do: 1, 2, 4"),
        ({"heads": 6, "kv_heads": 6}, r"`heads` must divide `hidden_size` \(64\) .* but is 6"),
        ({"head_dim": 15}, r"`head_dim` must be even and positive for rotary positions, but is 15"),
    ],
)
def test_bad_fields(tmp_path: Path, change: dict[str, object], message: str) -> None:  # B20, B21
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({**SIZES, **change}))
    with pytest.raises(ValueError, match=message):
        load_config(str(path))


def test_missing_fields_and_files(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps({key: SIZES[key] for key in SIZES if key != "layers"}))
    with pytest.raises(ValueError, match="a model must have `layers`"):
        load_config(str(path))
    path.write_text("[1]")
    with pytest.raises(ValueError, match="must hold one object of model fields, but holds list"):
        load_config(str(path))
    path.write_text("{")
    with pytest.raises(ValueError, match="must be valid JSON, but"):
        load_config(str(path))
    with pytest.raises(ValueError, match=r"nothing\.toml: No such file"):
        load_config(str(tmp_path / "nothing.toml"))


def test_integers_are_taken_for_floats(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps({**SIZES, "rope_theta": 10000}))
    config = load_config(str(path))
    assert config == dense_model(name="model", **SIZES)
    assert isinstance(fields_of(config).rope_theta, float)
