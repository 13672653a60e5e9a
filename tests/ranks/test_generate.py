"""What a model writes is what `transformers` writes with it; drawing is the same for the same seed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ranks.test_huggingface import make
from tests.ranks.test_huggingface_runs import add_tokenizer
from tests.runs import prepare, run
from triaxis.engine.run.generate import bytes_codec, open_codec, open_model, write
from triaxis.launch.generate import main
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.thread import run_threads

PROMPT = [5, 17, 40]


def written(folder: Path, ranks: int, **choices: float) -> list[list[int]]:
    def main(world: World) -> list[int]:
        stage, _ = open_model(folder, build_mesh(world, Topology(tp=world.size)))
        return list(write(stage, PROMPT, tokens=12, **choices))  # type: ignore[arg-type]

    return run_threads(ranks, main)


@pytest.mark.parametrize("case", ["llama3.2", "gpt2", "mixtral"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_likeliest_tokens_are_those_of_transformers(case: str, ranks: int, tmp_path: Path) -> None:
    theirs = make(case, tmp_path)
    expected = theirs.generate(  # type: ignore[operator]
        torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(PROMPT) :].tolist()
    assert written(tmp_path, ranks, temperature=0) == [expected] * ranks


def test_a_seed_draws_the_same_again(tmp_path: Path) -> None:
    make("llama", tmp_path)
    first, other = written(tmp_path, 1, seed=1), written(tmp_path, 1, seed=2)
    assert written(tmp_path, 2, seed=1) == first * 2 and first != other
    assert written(tmp_path, 1, seed=2, top_k=1) == written(tmp_path, 1, temperature=0)


def test_a_run_writes_from_its_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = prepare(tmp_path / "files")
    run(flags | {"steps": 4, "save_steps": 4, "output_dir": str(tmp_path / "run")})
    assert main([str(tmp_path / "run"), "--prompt", "abc", "--tokens", "5", "--lines", "2"]) == 0
    lines = capsys.readouterr().out
    assert lines.startswith("abc") and lines.count("abc") >= 2
    assert main([str(tmp_path / "files")]) == 2
    assert (
        "`MODEL` must be a Hugging Face folder, a checkpoint or a run's output directory"
        in capsys.readouterr().err
    )


def test_text_goes_in_and_comes_out(tmp_path: Path) -> None:
    codec = bytes_codec()
    assert codec.decode([*codec.encode("né"), 256]) == "né"
    make("qwen2-tied", tmp_path)
    add_tokenizer(tmp_path)
    folder = open_codec(str(tmp_path))
    assert folder.decode(folder.encode("itis4.")) == "itis4." and folder.end == 92
    file = open_codec(str(tmp_path / "tokenizer.json"))
    assert file.decode(file.encode("itis4.")) == "itis4."
