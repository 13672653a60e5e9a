"""Words: one is one, jokes of libraries stay out of our lines, commands that are named exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.runs import prepare, run
from triaxis.launch.cli import COMMANDS
from triaxis.parallel.places.legal_values import counted, first_of
from triaxis.parallel.worlds.process_group import plain_reason

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("parallel", "models", "engine", "launch")


def test_one_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (counted(1, "rank"), counted(2, "rank"), counted(1000, "process", "processes")) == (
        "1 rank", "2 ranks", "1,000 processes",
    )  # fmt: skip
    flags = prepare(tmp_path) | {
        "steps": 1,
        "warmup_steps": 0,
        "microbatches": 1,
        "output_dir": str(tmp_path / "o"),
    }
    run(flags)
    said = capsys.readouterr().err
    assert (
        "parameters on 1 rank (" in said
        and "1 step of 1 sequence of 24 tokens (1 microbatch of 1 a rank)" in said
    )
    assert not re.search(r"(?<![\d,.])1 (steps|ranks|microbatches|sequences|files)\b", said)


def test_the_first_are_told_and_how_many_more() -> None:
    assert first_of(["a", "b"], 2) == "a; b"
    assert first_of(["a", "b", "c"], 2) == "a; b; and 1 more"
    assert first_of(["a", "b"], 1, separator=", ", noun="rank") == "a, and 1 rank more"


def test_nobody_counts_the_rest_by_themselves() -> None:
    """`… and N more` is `first_of`'s to write."""
    texts = {path: path.read_text() for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    counts = re.compile(r"and \{[^{}]*(\{[^{}]*\})?[^{}]*\} more\b(?! kinds)")
    assert [path.name for path, text in texts.items() if counts.search(text)] == []


def test_the_groups_of_weight_decay_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Embeddings are among what decays, on every stage's parameters, by name."""
    flags = prepare(tmp_path) | {"pp": 2, "steps": 1, "warmup_steps": 0, "output_dir": str(tmp_path / "o")}
    run(flags)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("weight decay")]
    decayed, _, free = line.partition("; none on ")
    assert decayed.startswith("weight decay 0.1 on ") and "embed_tokens" in decayed and "lm_head" in decayed
    assert "norm" in free and "norm" not in decayed and "every layer's" in decayed


def test_updates_that_were_left_out_are_counted_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from triaxis.engine.step import _Chunk

    forward, calls = _Chunk.forward, [0]

    def spoils(self: _Chunk, hidden: object, microbatch: int) -> object:
        calls[0] += 1
        output = forward(self, hidden, microbatch)  # type: ignore[arg-type]
        return output * float("nan") if calls[0] == 2 else output

    monkeypatch.setattr(_Chunk, "forward", spoils)
    flags = prepare(tmp_path) | {"steps": 4, "microbatches": 1, "on_nan": "skip", "eval_batches": 0}
    run(flags | {"output_dir": str(tmp_path / "o")})
    assert "; 1 update left out" in capsys.readouterr().err


def test_jokes_stay_out() -> None:
    theirs = (
        "[/__w/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:13953: Connection reset by peer. "
        "This is typically caused by a remote worker hanging or bugs in the application. Check the logs of the remote "
        "worker before reporting an error. GLHF! 🏖️"
    )
    assert plain_reason(RuntimeError(theirs)) == "Read error [127.0.0.1]:13953: Connection reset by peer"
    assert plain_reason(RuntimeError("")) == "RuntimeError"


def test_commands_that_are_named_exist() -> None:
    """In docstrings, help, messages and documents: `triaxis word`, and modules after `-m`."""
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    texts += [
        path for room in ("engine", "launch", "parallel", "models") for path in (ROOT / room).rglob("*.py")
    ]
    for path in texts:
        text = path.read_text(encoding="utf-8")
        for module in re.findall(r"-m (triaxis\.[a-z_.]*[a-z_])", text):
            room, *rest = module.removeprefix("triaxis.").split(".")
            target = ROOT.joinpath(room, *rest)
            assert target.with_suffix(".py").exists() or target.is_dir(), f"{path}: {module}"
        for command in re.findall(r"`triaxis ([a-z]+)\b", text):
            assert command in COMMANDS, f"{path}: triaxis {command}"
