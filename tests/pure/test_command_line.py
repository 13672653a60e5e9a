"""One way to read a command line: options, values as people write them, and what is said of a mistake."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from triaxis.engine.config import RunConfig
from triaxis.launch import checkpoint, doctor, plan, preprocess, schedule, script, simulate
from triaxis.launch.cli import COMMANDS, main
from triaxis.launch.command_line import claim
from triaxis.launch.ending import Exit, printable, refusal
from triaxis.launch.flags import parse_flags


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What is said of a command line that is not understood."""
    try:
        code = main(words)
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr()
    assert code == 2 and not said.out
    return said.err


@pytest.mark.parametrize(
    ("text", "meant"), [("True", True), ("no", False), ("1", True), ("OFF", False), ("yes", True)]
)
def test_booleans_are_read_as_people_write_them(text: str, meant: bool) -> None:
    assert claim(text) is meant
    assert parse_flags(["--pack", text, "--sp", text], True) == RunConfig(pack=meant, sp=meant)
    assert parse_flags([f"--async_save={text}"], True).async_save is meant


def test_a_boolean_alone_or_denied() -> None:
    assert parse_flags(["--sp", "--no-pack", "--tp", "2"], True) == RunConfig(sp=True, pack=False, tp=2)


def test_ranks_are_threads_under_either_name() -> None:
    assert parse_flags(["--threads"], True) == parse_flags(["--simulate"], True) == RunConfig(simulate=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "--recompute", "selective"], "must be True or False (yes or no, 1 or 0), but is 'selective'"),
        (["train", "--gradient_cliping", "1.0"], "_cliping'; --gradient-clipping is --max-grad-norm here"),
        (["train", "--learning_rte", "1"], "there is no option '--learning_rte'; nearest: --learning-rate"),
        (["train", "--lr", "1"], "--lr is --learning-rate here"),
        (["train", "--dtype", "bf32"], "`--dtype` must be one of fp32, fp64, bf16, fp16, but is 'bf32'; nearest: "),
        (["train", "--steps", "1e3"], "`--steps` must be a whole number, but is '1e3'"),
        (["train", "--steps"], "`--steps` needs a value, but has none"),
        (["train", "--tp", "2", "extra"], "there is nothing that takes 'extra'"),
        (["simulate", "--hardwear", "h200"], "nearest: --hardware"),
        (["plan", "--gpu", "8"], "there is no option '--gpu'; nearest: --gpus"),
        (["plan", "--price", "nan"], "`--price` must be a finite number, but is 'nan'"),
        (["script", "slurm", "--node", "2"], "nearest: --nodes"),
        (["checkpoint", "reshard", ".", "--file", "2"], "nearest: --files"),
        (["schedule", "--schedule", "1f2b"], "nearest: 1f1b"),
        (["preprocess", "--imput", "x"], "nearest: --input"),
        (["doctor", "--rank", "2"], "nearest: --ranks"),
        (["trian"], "triaxis: a command must be one of"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_mistake_is_named_in_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refused(words, capsys)
    assert said in told and len(told.splitlines()) == 1
    assert told.startswith("triaxis" if words == ["trian"] else f"triaxis {words[0]}")


def test_a_flag_of_the_plan_and_one_of_train_are_read_alike(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["train", "--seed", "9" * 400], ["plan", "--gpus", "9" * 400]):
        told = refused(words, capsys)
        assert "must be a whole number of at most 18 digits, but is '9999" in told and len(told) < 200


def test_ranks_that_do_not_speak_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_flags(["--nonsense"], False)
    assert ended.value.code == 2 and capsys.readouterr() == ("", "")


def test_a_refusal_cannot_play_with_the_terminal() -> None:
    assert refusal("plan", "no file \x1b[31mred\x07") == "triaxis plan: no file \\x1b[31mred\\x07"
    assert refusal("train", "one\ntwo") == "triaxis train:\n  one\n  two"
    assert printable("4 × 2\n") == "4 × 2\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_of_one_form(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: triaxis {command} ")


MODULES = {"checkpoint": checkpoint, "doctor": doctor, "plan": plan, "preprocess": preprocess,
           "schedule": schedule, "script": script, "simulate": simulate}  # fmt: skip


@pytest.mark.parametrize("command", MODULES)
def test_ctrl_c_ends_any_command_in_a_line(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(MODULES[command], "main", stopped)
    assert main([command]) == Exit.INTERRUPTED == 130
    assert capsys.readouterr().err == f"\ntriaxis {command}: interrupted\n"


@pytest.mark.parametrize("command", MODULES)
def test_a_reader_who_has_gone_is_no_error(command: str) -> None:
    program = (
        "import sys\nfrom triaxis.launch import cli, ending\n"
        f"import triaxis.launch.{command} as one\n"
        "def closed(words):\n"
        "    try: raise BrokenPipeError(32, 'Broken pipe')\n"
        f"    except OSError as error: return ending.refuse({command!r}, error)\n"
        f"one.main = closed\nsys.exit(cli.main([{command!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_triaxis_train_is_the_program_that_torchrun_starts() -> None:
    """A SIGTERM while it loads: code 75 and a line, not 143 in silence."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        program = (
            "import os, sys, time\nfrom triaxis.launch import cli\nimport triaxis.launch.train as train\n"
            f"def loading(words):\n    os.kill(os.getpid(), {int(number)})\n    time.sleep(60)\n"
            "train.main = loading\nsys.argv = ['triaxis', 'train']\ncli.command()"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=False, env={**os.environ}
        )
        assert done.returncode == Exit.REQUEUE == 75
        assert done.stderr == f"{number.name} before the first step: nothing to save\n"
