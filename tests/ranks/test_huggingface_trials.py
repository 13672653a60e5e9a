"""What others reported of imports and exports, tried here: each test names its report of ../shared/public_reports*."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.ranks.test_huggingface import LLAMA, batch_of, edit, loaded, make, read_model, refused, whole
from tests.ranks.test_huggingface_runs import CUBE, MARKS, add_tokenizer, chats, flags
from tests.runs import rows, run
from triaxis.engine.advice import dropout_warning
from triaxis.engine.config import ConfigError, RunConfig
from triaxis.engine.rules import resolve
from triaxis.launch.convert import main as convert
from triaxis.launch.generate import main as generate
from triaxis.models.huggingface.families import CONFIG
from triaxis.models.huggingface.reader import ImportRefused, SafetensorsFolder
from triaxis.models.positions import Llama3Scaling, Rope
from triaxis.models.rotary import rotary_tables
from triaxis.parallel.worlds.thread import run_threads

STILL = {"learning_rate": 0.0, "weight_decay": 0.0, "steps": 2}


def random_model(folder: Path, family: str = "Llama", **fields: Any) -> nn.Module:
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**(LLAMA | fields))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.save_pretrained(folder)
    add_tokenizer(folder)
    return model.eval()  # type: ignore[no-any-return]


def held(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors."""
    return {name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}


def same(one: Path, other: Path) -> bool:
    before, after = held(one), held(other)
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_a_source_in_several_files_comes_out_whole(tmp_path: Path) -> None:  # N25
    """As one file, or as several whose index lists each tensor once and sums their bytes."""
    make("qwen3", tmp_path / "one")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    theirs.save_pretrained(tmp_path / "in", max_shard_size="20KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 3
    add_tokenizer(tmp_path / "in")
    out = tmp_path / "out"
    run(flags(tmp_path, model_name_or_path=str(tmp_path / "in"), save_hf=str(out), **STILL, dp=2, zero=3))
    assert [path.name for path in out.glob("*.safetensors*")] == ["model.safetensors"]
    assert same(tmp_path / "one", out)


@pytest.mark.parametrize("head", ["left out", "equal"])
def test_a_tied_head_is_one_weight_over_two_stages(head: str, tmp_path: Path) -> None:  # N26
    make("qwen2-tied", tmp_path / "in")
    add_tokenizer(tmp_path / "in")
    before = held(tmp_path / "in")
    if head == "equal":
        embedding = before["model.embed_tokens.weight"]
        edit(tmp_path / "in", lambda tensors: tensors.update({"lm_head.weight": embedding.clone()}))
    out = tmp_path / "out"
    run(flags(tmp_path, model_name_or_path=str(tmp_path / "in"), save_hf=str(out), **STILL, pp=2))
    after = held(out)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_a_tied_head_that_differs_is_told_with_the_difference(tmp_path: Path) -> None:  # N26
    make("qwen2-tied", tmp_path)
    embedding = held(tmp_path)["model.embed_tokens.weight"]
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": embedding + 0.25}))
    told = refused(tmp_path)
    assert "lm_head.weight must equal model.embed_tokens.weight" in told and "by up to 0.25" in told


@pytest.mark.parametrize("held_as", ["embedding", "head", "neither"])
def test_either_name_of_a_tied_weight_is_enough(held_as: str, tmp_path: Path) -> None:  # B80
    theirs = make("qwen2-tied", tmp_path)
    embedding = "model.embed_tokens.weight"
    if held_as != "embedding":
        edit(
            tmp_path,
            lambda tensors: (
                tensors.update({"lm_head.weight": tensors.pop(embedding)})
                if held_as == "head"
                else tensors.pop(embedding)
            ),
        )
    if held_as == "neither":
        assert f"{embedding} is missing" in refused(tmp_path)
        return
    (stage,) = run_threads(1, lambda world: loaded(world, tmp_path))
    batch = batch_of(read_model(tmp_path))
    logits = theirs(input_ids=batch.tokens_BL).logits
    torch.testing.assert_close(stage.logits(None, batch).view(logits.shape), logits, rtol=0, atol=1e-5)


def test_llama3_frequencies_are_the_published_ones() -> None:  # N28
    def frequencies(size: int, theta: float, original: int) -> list[float]:
        scaling = Llama3Scaling(
            factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=original
        )
        rope = Rope(theta=theta, scaling=scaling)
        _, sin = rotary_tables(2, size, rope, dtype=torch.float64, device=torch.device("cpu"))
        return [float(value) for value in sin[1].asin()]

    found = frequencies(8, 1e4, 64)
    assert found[0] == pytest.approx(1.0) and found[1:] == pytest.approx([0.0130422560, 0.00125, 0.000125])
    llama = frequencies(128, 500_000.0, 8192)
    plain = [500_000.0 ** (-2 * index / 128) for index in range(64)]
    assert llama[28] == pytest.approx(3.21145e-3, rel=1e-5) == pytest.approx(plain[28], rel=1e-5)
    assert llama[29] == pytest.approx(2.16657e-3, rel=1e-5)
    assert llama[35:] == pytest.approx([frequency / 8 for frequency in plain[35:]])


@pytest.mark.parametrize("kind", ["llama3", "linear", "yarn", "dynamic"])
def test_scaled_rotary_positions_are_theirs_far_out(kind: str, tmp_path: Path) -> None:  # N28
    scaling: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 8.0}
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    if kind == "yarn":
        scaling |= {"original_max_position_embeddings": 64}
    theirs = random_model(tmp_path, max_position_embeddings=256, rope_parameters=scaling)
    if kind == "dynamic":
        with pytest.raises(ValueError, match=r"`rope_parameters` is .*dynamic"):
            read_model(tmp_path)
        return
    (stage,) = run_threads(1, lambda world: loaded(world, tmp_path))
    batch = batch_of(read_model(tmp_path), 256)
    logits = theirs(input_ids=batch.tokens_BL).logits
    found = stage.logits(None, batch).view(logits.shape)
    for position in (0, 63, 255):
        torch.testing.assert_close(found[:, position], logits[:, position], rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", ["llama3.2", "qwen3", pytest.param("gpt2", marks=pytest.mark.full)])
def test_the_exported_configuration_is_the_sources(case: str, tmp_path: Path) -> None:  # N28, N29
    """With the size of a head that is no part of the hidden size, and the scaling of positions."""
    make(case, tmp_path / "in")
    add_tokenizer(tmp_path / "in")
    out = tmp_path / "out"
    run(flags(tmp_path, model_name_or_path=str(tmp_path / "in"), save_hf=str(out), **STILL, tp=2))
    one, other = (json.loads((folder / CONFIG).read_text()) for folder in (tmp_path / "in", out))
    assert {name: other.get(name) for name in one} == one and set(other) - set(one) <= {"torch_dtype"}
    assert same(tmp_path / "in", out)
    if case == "qwen3":
        assert one["head_dim"] == 16 != one["hidden_size"] // one["num_attention_heads"]


def test_the_files_of_the_tokenizer_are_those_of_training(tmp_path: Path) -> None:  # N31
    make("qwen2", tmp_path / "in")
    add_tokenizer(tmp_path / "in")
    two_ends = json.dumps({"eos_token_id": [91, 92], "max_new_tokens": 7})
    (tmp_path / "in" / "generation_config.json").write_text(two_ends)
    other = tmp_path / "other"
    add_tokenizer(other)
    template = (other / "chat_template.jinja").read_text()
    (other / "chat_template.jinja").write_text("{# another #}" + template)
    for number, more in enumerate(({}, {"tokenizer": str(other)})):
        out, source = tmp_path / f"out{number}", other if more else tmp_path / "in"
        given = flags(tmp_path, model_name_or_path=str(tmp_path / "in"), save_hf=str(out), **STILL, **more)
        run(given | {"output_dir": str(tmp_path / f"run{number}")})
        files = {path.name for path in out.iterdir()} - {"config.json", "model.safetensors"}
        assert files == {
            *("chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
        }
        assert (out / "generation_config.json").read_text() == two_ends
        for name in files - {"generation_config.json"}:
            assert (out / name).read_bytes() == (source / name).read_bytes(), name
        asked = [{"role": "user", "content": "what is 3?"}]
        ids = [
            transformers.AutoTokenizer.from_pretrained(at).apply_chat_template(asked) for at in (source, out)
        ]
        assert ids[0] == ids[1]


@pytest.mark.parametrize("fault", ["renamed", "left out", "of another shape"])
def test_experts_that_do_not_fit_are_named_and_nothing_is_trained(fault: str, tmp_path: Path) -> None:  # N32
    make("mixtral", tmp_path / "in")
    add_tokenizer(tmp_path / "in")
    name = next(name for name in held(tmp_path / "in") if "experts.2" in name and "layers.1" in name)

    def change(tensors: dict[str, Tensor]) -> None:
        tensor = tensors.pop(name)
        if fault == "renamed":
            tensors[name.replace("experts.2", "expert.2")] = tensor
        if fault == "of another shape":
            tensors[name] = tensor[:-1].contiguous()

    edit(tmp_path / "in", change)
    with pytest.raises(ImportRefused) as told:
        run(flags(tmp_path, model_name_or_path=str(tmp_path / "in")))
    said = f"{name} must have shape" if fault == "of another shape" else f"{name} is missing"
    assert said in str(told.value)
    assert ("is not a tensor of this model" in str(told.value)) == (fault == "renamed")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_after_an_import_no_expert_has_its_first_values(tmp_path: Path) -> None:  # N32
    from triaxis.models.builder import build_model
    from triaxis.parallel.layers.build import Build
    from triaxis.parallel.places.topology import Topology
    from triaxis.parallel.replicas.initialize import initialize
    from triaxis.parallel.worlds.mesh import build_mesh

    make("mixtral", tmp_path)

    def fresh(world: Any) -> dict[str, Tensor]:
        stage = build_model(read_model(tmp_path), Build.on(build_mesh(world, Topology())))
        initialize(stage, seed=0)
        return whole(stage)

    (before,) = run_threads(1, fresh)
    (after,) = run_threads(1, lambda world: whole(loaded(world, tmp_path)))
    assert before.keys() == after.keys()
    assert not [name for name in before if bool((before[name] == after[name]).all())]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_queries_keys_and_values_in_three_files_are_read_at_any_tp(tp: int, tmp_path: Path) -> None:  # N34
    theirs = make("llama", tmp_path)
    tensors = held(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    places = {name: f"model-{number:05}.safetensors" for number, name in enumerate(tensors)}
    for name, file in places.items():
        save_file({name: tensors[name]}, tmp_path / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    batch = batch_of(read_model(tmp_path))
    logits = theirs(input_ids=batch.tokens_BL).logits
    for found in run_threads(tp, lambda world: loaded(world, tmp_path).logits(None, batch)):
        torch.testing.assert_close(found.reshape(logits.shape), logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_first_loss_is_theirs_and_is_said_beside_chance(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # N35
    make("llama3.2", tmp_path / "in")
    add_tokenizer(tmp_path / "in")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "in")
    lines = [json.loads(line) for line in chats(tmp_path / "few.jsonl", 8).read_text().splitlines()]
    total, count = 0.0, 0
    for line in lines:
        ids = torch.tensor(tokenizer.apply_chat_template(line["messages"], return_dict=False))[None]
        begins = int((ids[0] == tokenizer.convert_tokens_to_ids(MARKS[1])).nonzero()[-1])
        answer = begins + 1 + len(tokenizer("assistant\n")["input_ids"])
        end = int((ids[0] == tokenizer.convert_tokens_to_ids(MARKS[2])).nonzero()[-1])
        logits = theirs(input_ids=ids).logits[0, answer - 1 : end].detach()
        total += float(nn.functional.cross_entropy(logits, ids[0, answer : end + 1], reduction="sum"))
        count += end + 1 - answer
    layouts = {"one": {}, "tp": {"tp": 2}, "pp": {"pp": 2}, "zero": {"dp": 2, "zero": 3}}
    for name, layout in layouts.items() if dtype == "fp32" else [("pp", layouts["pp"])]:
        given = flags(tmp_path, model_name_or_path=str(tmp_path / "in"), **STILL | {"steps": 1}, **layout)
        more = {"dtype": dtype, "pack": False, "output_dir": str(tmp_path / name)}
        run(given | more | {"data": str(tmp_path / "few.jsonl")})
        loss = rows(tmp_path / name)[0]["loss"]
        assert loss == pytest.approx(total / count, rel=1e-5 if dtype == "fp32" else 2e-2), name
        said = f"loss of the weights that were read: {loss:.4f}; of a guess, ln 101: 4.6151\n"
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "fields", "seq", "told"),
    [
        ("Mistral", {"sliding_window": 16}, 64, "`seq` must be at most 16, the `sliding_window`"),
        ("Mistral", {"sliding_window": 16}, 16, None),
        ("Mistral", {"sliding_window": None}, 64, None),
        ("Mistral", {"sliding_window": 0}, 64, None),
        ("Qwen2", {"sliding_window": 16, "use_sliding_window": False}, 64, None),
        ("Qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0}, 64, "`seq`"),
    ],
    ids=str,
)
def test_a_window_in_use_is_obeyed_or_refused(
    family: str, fields: dict[str, Any], seq: int, told: str | None, tmp_path: Path
) -> None:  # N37
    getattr(transformers, f"{family}Config")(**LLAMA).save_pretrained(tmp_path)
    values = json.loads((tmp_path / CONFIG).read_text())
    values = {name: value for name, value in values.items() if name != "layer_types"}
    (tmp_path / CONFIG).write_text(json.dumps(values | fields))
    config = RunConfig(model=str(tmp_path / CONFIG), seq=seq)
    if told is None:
        assert resolve(config, 1).model.layers == 2
        return
    with pytest.raises(ConfigError, match=told):
        resolve(config, 1)


def test_quantized_weights_are_refused_but_8_bit_blocks_which_come_out_whole(tmp_path: Path) -> None:
    make("deepseek-v3", tmp_path / "in")
    add_tokenizer(tmp_path / "in")
    path = tmp_path / "in" / CONFIG
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    with pytest.raises(
        ValueError, match=r"`quantization_config` is .* only fp8 in blocks of 128 × 128 is read"
    ):
        read_model(tmp_path / "in")
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    path.write_text(json.dumps(values | {"quantization_config": blocks}))
    name = "model.layers.1.self_attn.o_proj.weight"
    whole_OI = held(tmp_path / "in")[name]
    scale = whole_OI.abs().max() / 448
    small = (whole_OI / scale).to(torch.float8_e4m3fn)
    in_blocks = {name: small, f"{name}_scale_inv": scale[None, None]}
    edit(tmp_path / "in", lambda tensors: tensors.update(in_blocks))
    out = tmp_path / "out"
    run(flags(tmp_path, model_name_or_path=str(tmp_path / "in"), save_hf=str(out), **STILL, tp=2))
    assert "quantization_config" not in json.loads((out / CONFIG).read_text())
    assert torch.equal(held(out)[name], small.float() * scale)
    transformers.AutoModelForCausalLM.from_pretrained(out)


def test_dropout_of_a_family_is_told(tmp_path: Path) -> None:
    transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=101).save_pretrained(tmp_path)
    config = RunConfig(model=str(tmp_path / CONFIG), seq=64)
    assert "has attn_pdrop 0.1, embd_pdrop 0.1, resid_pdrop 0.1" in str(
        dropout_warning(config, resolve(config, 1))
    )


@pytest.mark.parametrize("rate", [None, 0.0])
def test_the_bias_that_chooses_experts_is_exported_as_it_is(
    rate: float | None, tmp_path: Path
) -> None:  # N38
    make("deepseek-v3", tmp_path / "in")
    add_tokenizer(tmp_path / "in")
    given = flags(tmp_path, model_name_or_path=str(tmp_path / "in"), save_hf=str(tmp_path / "out"), steps=3)
    run(given | {"tp": 2, "dp": 2, "dtype": "bf16", "router_bias_rate": rate, "save_steps": 3})
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    before, after = held(tmp_path / "in")[name], held(tmp_path / "out")[name]
    assert (
        after.dtype == torch.float32 and held(tmp_path / "out")["model.norm.weight"].dtype == torch.bfloat16
    )
    file = tmp_path / "w.safetensors"
    assert convert([str(tmp_path / "run"), "--to", "file", str(file), "--dtype", "fp32"]) == 0
    assert torch.equal(load_file(file)[name], after)
    assert generate([str(tmp_path / "run"), "--prompt", "what", "--tokens", "2"]) == 0
    if rate is None:
        moves = (after - before).double() / 1e-3
        assert moves.abs().max() > 0.9 and torch.allclose(moves, moves.round(), atol=1e-3)
    else:
        assert torch.equal(before, after)


def test_the_rate_of_a_bias_that_is_not_there_is_refused(tmp_path: Path) -> None:
    make("mixtral", tmp_path)
    with pytest.raises(ConfigError, match=r"`router_bias_rate` must be left out for .* but is 0"):
        resolve(RunConfig(model_name_or_path=str(tmp_path), router_bias_rate=0.0), 1)


@pytest.mark.parametrize("tp", [pytest.param(2, marks=pytest.mark.full), 4])
def test_a_vocabulary_that_tp_does_not_divide_comes_out_as_it_went_in(
    tp: int, tmp_path: Path
) -> None:  # B56, B86
    random_model(tmp_path / "in", num_attention_heads=4, num_key_value_heads=4, vocab_size=509)
    out = tmp_path / "out"
    run(flags(tmp_path, model_name_or_path=str(tmp_path / "in"), save_hf=str(out), **STILL, tp=tp))
    assert held(out)["lm_head.weight"].shape == (509, 32) and same(tmp_path / "in", out)
    assert json.loads((out / CONFIG).read_text())["vocab_size"] == 509


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.full), 3])
def test_one_file_of_weights_is_the_model_whatever_shares_of_it_ranks_held(
    zero: int, tmp_path: Path
) -> None:  # B76
    make("qwen2-tied", tmp_path / "in")
    add_tokenizer(tmp_path / "in")
    given = flags(tmp_path, model_name_or_path=str(tmp_path / "in"), save_hf=str(tmp_path / "out"))
    run(given | {"dp": 3, "zero": zero, "global_batch": 6, "save_steps": 5})
    command = [str(tmp_path / "run"), "--to", "file", str(tmp_path / "w.safetensors"), "--dtype", "fp32"]
    assert convert(command) == 0
    masters, exported = load_file(tmp_path / "w.safetensors"), held(tmp_path / "out")
    assert sum(tensor.numel() for tensor in masters.values()) == read_model(tmp_path / "in").parameters()
    assert all(torch.equal(tensor, masters[name]) for name, tensor in exported.items())
    assert not same(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize(
    "more", [pytest.param({"recompute": True}, marks=pytest.mark.full), {**CUBE, "zero": 2}], ids=str
)
def test_exported_names_are_the_hubs_however_the_model_was_wrapped(
    more: dict[str, Any], tmp_path: Path
) -> None:  # B81
    make("llama", tmp_path / "in")
    add_tokenizer(tmp_path / "in")
    out = tmp_path / "out"
    run(flags(tmp_path, model_name_or_path=str(tmp_path / "in"), save_hf=str(out), **STILL, **more))
    assert same(tmp_path / "in", out)


@pytest.mark.parametrize(
    ("layout", "share"),
    [({"tp": 4}, 4), ({"dp": 4, "zero": 3}, 4), ({"pp": 2, "tp": 2}, 4), ({"dp": 2, "zero": 1}, 2)],
    ids=str,
)
def test_a_rank_reads_its_own_part_and_a_tensor_at_a_time(
    layout: dict[str, int], share: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # N34
    """What is read is the rank's shard, but for what all ranks hold: of tp, norms."""
    theirs = random_model(tmp_path / "in", num_key_value_heads=4)
    read, plain = dict[int, int](), SafetensorsFolder.read
    largest = max(parameter.numel() for parameter in theirs.parameters())

    def counted(self: SafetensorsFolder, name: str, index: tuple[slice, ...]) -> Tensor:
        part = plain(self, name, index)
        assert part.numel() <= largest
        read[threading.get_ident()] = read.get(threading.get_ident(), 0) + part.numel()
        return part

    monkeypatch.setattr(SafetensorsFolder, "read", counted)
    run(flags(tmp_path, model_name_or_path=str(tmp_path / "in"), **STILL, **layout, save_strategy="no"))
    total = sum(parameter.numel() for parameter in theirs.parameters())
    assert len(read) == share
    assert max(read.values()) <= 1.1 * total / share
