"""Bad inputs over every command: each is refused at once, in words that name what is wrong, and leaves nothing behind.

The table grows: add a row for whatever is found. A command runs in this process, with an alarm that ends one that
waits (for a pipe, say), and its answer must be code 2 (or 1, where the command answers "no"), on standard error, short,
printable, and without a traceback.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from triaxis.launch.cli import main
from triaxis.launch.published.score import SHIPPED
from triaxis.models.presets import PRESETS

HUGE = "9" * 400
PLANT = "x\ntouch planted"
ESCAPE = "\x1b[31mred\x1b[0m[/red][bold]"
LONG = "n" * 5000
WAITS_SECONDS = 20

WHOLE = ("", "x", "1.5", "1e3", "nan", "inf", "-inf", HUGE, "-" + HUGE, "0x10", "١", "1 2", ESCAPE, PLANT)
REAL = ("", "x", "nan", "inf", "-inf", "1e400", "-1e400", "1,5", ESCAPE, PLANT)
POSITIVE = (*WHOLE, "0", "-1", "-9999999999", "10000000000000000")
WORD = ("", "x", ESCAPE, PLANT, LONG, "None")
FILES = ("missing", "folder", "pipe", "null", "long", "escape", "binary", "empty", "loop", "deep", "nul")
"""Names of what `places` makes: a file that is not what it should be."""

TRAIN_WHOLE = (
    *("seq", "tp", "pp", "dp", "cp", "ep", "virtual-stages", "microbatches", "global-batch", "steps"),
    *("per-device-train-batch-size", "gradient-accumulation-steps", "logging-steps", "save-steps"),
    *(
        "save-total-limit",
        "eval-steps",
        "bucket-elements",
        "loss-scale-window",
    ),
)
TRAIN_REAL = (
    *("learning-rate", "weight-decay", "adam-epsilon", "max-grad-norm", "timeout-seconds", "hang-timeout"),
    *("warmup-ratio", "min-learning-rate-ratio", "adam-beta1", "adam-beta2", "save-minutes", "spike-factor"),
    *("num-train-epochs", "mtp-weight", "loss-scale", "min-loss-scale", "router-bias-rate"),
)
TRAIN_WORDS = (
    *("schedule", "data-parallel", "optimizer", "lr-scheduler-type", "dtype", "accumulate-dtype", "order"),
    *(
        "report-to",
        "save-strategy",
        "on-save-error",
        "on-nan",
        "on-bad-sample",
        "pack",
        "sp",
        "recompute",
        "threads",
        "kernels",
        "transport",
        "save-hf-checkpoints",
        "offload-optimizer",
        "offload-param",
    ),
)


def rows() -> Iterator[tuple[str, ...]]:
    """The table: command lines, in which `@name` stands for a place."""
    for flag, value in itertools.product(TRAIN_WHOLE, POSITIVE):
        if not (
            value == "10000000000000000"
            and flag in ("logging-steps", "save-steps", "save-total-limit", "eval-steps", "bucket-elements")
        ):
            yield "train", f"--{flag}={value}"
    for flag, value in itertools.product(TRAIN_REAL, (*REAL, "-1")):
        yield "train", f"--{flag}={value}"
    for flag, value in itertools.product(TRAIN_WORDS, WORD):
        if not (value == "" and flag == "pack"):
            yield "train", f"--{flag}={value}"
    yield from (("train", "--seed", HUGE), ("train", "--seed", "-1"), ("train", "--zero", "4"))
    yield from (
        ("train", "--nonsense"),
        ("train", "word"),
        ("train", ESCAPE),
        ("train", "--tp"),
        ("train", "--model"),
    )
    for flag, value in itertools.product(("mtp-depths", "min-num-params"), POSITIVE):
        if (flag, value) not in (("mtp-depths", "0"), ("min-num-params", "10000000000000000")):
            yield "train", f"--{flag}={value}"
    yield from (("train", "--wrap="), ("train", "--wrap=,"), ("train", "--wrap=A", "--min-num-params=9"))
    for rest in ("nonsense", "norm=", "=compile", "norm=nonsense", "norm=compile,norm=torch", ",", ESCAPE):
        yield "train", f"--kernels={rest}"
    for weight in ("0", "-1", "nan", "inf", "1.5", "x", HUGE, ESCAPE):
        yield "train", "--data", f"{weight}:stdlib", "1:stdlib"
    for flag in ("loss-scale=8", "min-loss-scale=2", "loss-scale-window=5"):
        yield "train", f"--{flag}"  # of fp16 alone
    yield from (
        ("train", "--fp16", "--bf16"),
        ("train", "--fp16", "--dtype=fp32"),
    )
    yield "train", "--mtp-depths=1", "--pp=9", "--threads"
    for flag, value in itertools.product(("ranks", "steps", "tp", "mtp-depths"), (*WHOLE, "-1")):
        yield "config", f"--{flag}={value}"
    for name in FILES:
        yield from (
            ("config", f"--{flag}", f"@{name}") for flag in ("deepspeed", "accelerate-config", "model")
        )
    for name in FILES:
        for flag in ("model", "data", "tokenizer", "resume"):
            if (flag, name) not in (("resume", "folder"),):
                yield "train", f"--{flag}", f"@{name}"
    for flag, value in itertools.product(("gpus", "seq", "global-batch", "top"), POSITIVE):
        yield "plan", "--model=tiny", "--gpus=2", f"--{flag}={value}"
    for flag, value in itertools.product(("price", "tokens"), (*REAL, "-1")):
        yield "plan", "--model=tiny", "--gpus=2", f"--{flag}={value}"
    for flag in ("dtype", "policy", "hardware", "model", "explain"):
        yield from (("plan", "--model=tiny", "--gpus=2", f"--{flag}={value}") for value in WORD)
    for name in FILES:
        yield "plan", "--model", f"@{name}", "--gpus", "2"
        yield "plan", "--model", "tiny", "--gpus", "2", "--hardware", f"@{name}"
        yield "plan", "--score", f"@{name}"
        if name not in ("escape", "empty", "deep"):  # texts that start nothing, which is said
            yield "script", "slurm", "--check", f"@{name}"
        yield "checkpoint", "ls", f"@{name}"
        yield "checkpoint", "verify", f"@{name}"
        yield "checkpoint", "show", f"@{name}"
    for name in ("folder", "pipe", "null", "long", "there"):
        yield "schedule", "--svg", f"@{name}"
        yield "script", "torchrun", "--out", f"@{name}", "--"
        yield "plan", "--model=tiny", "--gpus=1", "--seq=64", "--global-batch=8", "--report", f"@{name}"
        yield "simulate", "--report", f"@{name}"
        yield "simulate", "--trace", f"@{name}"
        yield "doctor", "--out", f"@{name}"
    for flag, value in itertools.product(("pp", "microbatches", "virtual-stages", "forward-time"), POSITIVE):
        yield "schedule", f"--{flag}={value}"
    yield from (("schedule", f"--schedule={value}") for value in WORD)
    yield "schedule", "--pp=4096", "--microbatches=1000000"
    for flag, value in itertools.product(("nodes", "gpus-per-node", "warning", "cpus-per-gpu"), POSITIVE):
        yield "script", "slurm", f"--{flag}={value}", "--"
    for flag in ("time", "partition", "account", "name", "env", "setup"):
        yield "script", "slurm", f"--{flag}={PLANT}", "--"
    yield "script", "cron"
    yield from (("script", "kubernetes", "--image", PLANT, "--claim", "c", "--"), ("script", "kubernetes"))
    for flag, value in itertools.product(("gpus", "tp", "pp"), (*WHOLE, "0", "-1", "10000000000")):
        yield "simulate", f"--{flag}={value}"
    for value in ("x", "=", "0", "0=", "0=nan", "0=inf", "0=-1", "-1=2", f"{HUGE}=2", "5=2", "0=0", ESCAPE):
        yield "simulate", "--straggler", value
        yield "simulate", "--slow-link", value
    for flag, value in itertools.product(("ranks", "seconds"), (*WHOLE[:2], "nan", "inf", HUGE, "0", "-1")):
        yield "doctor", f"--{flag}={value}"
    yield from (
        ("run",),
        ("run", "-n", "0"),
        ("run", "-n", HUGE),
        ("run", "-n", "2", "--master-port", "70000"),
    )
    yield from (
        ("checkpoint",),
        ("checkpoint", "eat"),
        ("checkpoint", "reshard", ".", "--files", "0", "--out", "o"),
    )
    yield from (
        ("preprocess",),
        ("preprocess", "--input", "a"),
        ("preprocess", "--skip-bad=maybe", "--output", "x"),
    )
    yield from (
        ("convert",),
        ("convert", "@missing"),
        ("convert", "@missing", "--to", "hf"),
        (ESCAPE,),
        (LONG,),
    )
    yield from (("simulate", f"--{flag}={ESCAPE}") for flag in ("hardware", "model", "gpus", "documents"))


TABLE = list(dict.fromkeys(rows()))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Files that are not what they should be, by name; all of them end as a model, a CSV file and data would."""
    folder = tmp_path_factory.mktemp("places")
    found = {name: str(folder / f"{name}.toml") for name in FILES}
    found |= {
        "null": "/dev/null",
        "long": str(folder / ("n" * 300 + ".toml")),
        "there": str(folder / "there.svg"),
    }
    found |= {"escape": str(folder / f"{ESCAPE.replace('/', '')}.toml"), "nul": str(folder / "a\0b.toml")}
    Path(found["folder"]).mkdir()
    os.mkfifo(found["pipe"])
    Path(found["escape"]).write_text(f"x = '{ESCAPE[5:8]}'")
    Path(found["binary"]).write_bytes(bytes(range(256)))
    Path(found["empty"]).touch()
    Path(found["loop"]).symlink_to(found["loop"])
    Path(found["deep"]).write_text("x = " + "[" * 5000)
    Path(found["there"]).write_text("precious")
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("here"))
    yield found
    assert Path(found["there"]).read_text() == "precious"
    assert not os.path.exists("planted")
    os.chdir(before)


@contextmanager
def alarm(seconds: int) -> Iterator[None]:
    """Ends what waits: a pipe that nobody writes to, a number that is counted up to."""

    def late(number: int, frame: object) -> None:
        raise AssertionError(f"still at work after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def answer(words: tuple[str, ...]) -> int | str | None:
    with alarm(WAITS_SECONDS):
        try:
            return main(words)
        except SystemExit as ended:
            return ended.code


def test_the_table_is_long() -> None:
    assert len(TABLE) > 900 and {row[0] for row in TABLE} >= {
        "train",
        "plan",
        "script",
        "simulate",
        "schedule",
    }


CHUNKS = [TABLE[start : start + 60] for start in range(0, len(TABLE), 60)]


@pytest.mark.parametrize("rows", CHUNKS, ids=lambda rows: f"{rows[0][0]}-{TABLE.index(rows[0])}")
def test_bad_inputs_are_answered_in_words(
    rows: list[tuple[str, ...]], places: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = []
    for row in rows:
        words = tuple(places[word[1:]] if word.startswith("@") else word for word in row)
        try:
            code = answer(words)
        except BaseException as error:  # noqa: BLE001  (told below)
            wrong.append((row, f"{type(error).__name__}: {error}"[:300]))
            capsys.readouterr()
            continue
        said = capsys.readouterr()
        plain = all(character.isprintable() or character == "\n" for character in said.err)
        if code not in (1, 2) or not said.err.startswith("triaxis") or not plain or "Traceback" in said.err:
            wrong.append((row, f"code {code}: {said.err[:300]!r} {said.out[:100]!r}"))
        elif len(said.err) > 2500:
            wrong.append((row, f"{len(said.err)} characters: {said.err[:200]}"))
    assert not wrong, (
        "\n".join(f"{str(row)[:160]}  →  {what}" for row, what in wrong[:25]) + f"\n{len(wrong)} in all"
    )


MODEL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "layers": 2,
    "heads": 2,
    "kv_heads": 2,
    "ffn_size": 24,
    "max_positions": 64,
}


@pytest.mark.parametrize("field", MODEL)
def test_numbers_of_a_model_are_refused_by_name(
    field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in (0, -1, 1.5, "x", None, True, [], 10**30, float("nan"), float("inf")):
        path = tmp_path / "m.json"
        path.write_text(json.dumps(MODEL | {field: value}))
        for words in (
            ("train", "--model", str(path), "--seq", "16"),
            ("plan", "--model", str(path), "--gpus", "1", "--seq", "16"),
        ):
            assert answer(words) in (1, 2), (words, value)
            said = capsys.readouterr().err
            assert said.startswith("triaxis") and len(said) < 1500 and (field in said or "m.json" in said), (
                value,
                said,
            )


@pytest.mark.parametrize(
    "line",
    [
        *(f"memory_bytes = {value}" for value in ("nan", "inf", "-1", "0", "true", "'x'", "[]", "1e400")),
        *(f"gpus_per_node = {value}" for value in ("0", "-8", "1.5", "'8'", "10000000000000000000000")),
        *(f"memory_bytes_per_s = {value}" for value in ("nan", "-1e12", "0")),
        *(f"launch_overhead_s = {value}" for value in ("nan", "-1", "inf")),
        *(f"efficiency = {value}" for value in ("[]", "[[1]]", "[[0, nan]]", "3", "[[1.0, -1.0]]")),
        "peak_flops = { bf16 = nan }",
        "peak_flops = { bf16 = -1 }",
        "peak_flops = {}",
        "unknown = 1",
    ],
)
def test_numbers_of_hardware_are_refused_by_name(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from triaxis.launch.hardware.hardware import load_hardware

    path = tmp_path / "h.toml"
    sheet = {
        "memory_bytes": "8e10", "memory_bytes_per_s": "2e12", "peak_flops": "{ bf16 = 3e14 }",
        "launch_overhead_s": "5e-6", "gpus_per_node": "8", "nics_per_node": "8", "efficiency": "[[1.0, 1.0]]",
        "intra": "{ bytes_per_s = 3e11, latency_s = 5e-6 }", "inter": "{ bytes_per_s = 2e10, latency_s = 1e-5 }",
    }  # fmt: skip
    name, _, value = line.partition(" = ")
    path.write_text("\n".join(f"{key} = {text}" for key, text in (sheet | {name: value}).items()))
    assert answer(("plan", "--model=tiny", "--gpus=2", "--hardware", str(path))) == 2
    said = capsys.readouterr().err
    assert said.startswith("triaxis plan: ") and name in said and "h.toml" in said
    assert load_hardware("h100-80g").memory_bytes > 0


def test_numbers_of_published_runs_leave_the_row_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with SHIPPED.open(encoding="utf-8", newline="") as file:
        row = next(iter(csv.DictReader(file)))
    path = tmp_path / "runs.csv"
    for name, value in itertools.product(row, ("0", "-1", "nan", "inf", "1e400", HUGE, ESCAPE)):
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(row))
            writer.writeheader()
            writer.writerow(row | {name: value})
        code = answer(("plan", "--score", str(path)))
        told = capsys.readouterr()
        assert code in (0, 1, 2) and "Traceback" not in told.err, (name, value)
        assert "\x1b[31m" not in told.out + told.err, (name, value)


NAMED = ("[/red]", "[bold]", "\x1b[31mred", "a\nb", "]]]")


@pytest.mark.parametrize("name", NAMED)
def test_names_are_no_markup(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps(MODEL | {"name": name}))
    assert answer(("plan", "--model", str(path), "--gpus", "1", "--seq", "64", "--global-batch", "8")) in (
        0,
        2,
    )
    told = capsys.readouterr()
    assert "\x1b[31m" not in told.out + told.err and "Traceback" not in told.err


def test_every_preset_is_left_alone() -> None:
    """What is good stays good: the table's rules refuse no model that there is."""
    assert all(model.layers >= 1 for model in PRESETS.values())
