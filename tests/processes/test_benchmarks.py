"""The benchmark asks every stack for the same work, and compares runs round by round."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import agreeing, corpus, packed, run  # noqa: E402
from benchmarks.cases import LAYOUTS, SIZES, Case, Layout, parse_layout  # noqa: E402
from benchmarks.report import QUANTITIES, Rounds, case_report, case_table, draw, ratios  # noqa: E402
from benchmarks.stacks import STACKS, Measurement, Stack  # noqa: E402
from tests.patience import PATIENCE_SECONDS  # noqa: E402

CASE = Case(size=SIZES[256], layout=Layout(tp=2, dp=2), steps=4)
BY_NAME = {stack.name: stack for stack in STACKS}


def measurement(cpu_seconds: float) -> Measurement:
    return Measurement(
        step_seconds=1.0, cpu_seconds=cpu_seconds, peak_rss_bytes=2**20, first_loss=6.2, last_loss=5.0
    )


def flag(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_cases_are_those_promised() -> None:
    cases = run.make_cases(run.parse_arguments([]))
    assert len(cases) == 2 * len(SIZES) * len(LAYOUTS) == 20  # fp32 and bf16
    assert [SIZES[hidden].ffn for hidden in (256, 1024)] == [704, 2752]
    assert CASE.tokens_per_step == 8 * 2 * 128 * 2


@pytest.mark.parametrize("text", ["2,2", "a,b,c", "0,1,1"])
def test_a_wrong_layout_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=f"`layout` must .*{text}"):
        parse_layout(text)


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.name)
def test_every_stack_is_asked_for_the_same_work(stack: Stack) -> None:
    size = CASE.size
    command = stack.command("python", Path("peers"), CASE, Path("answer"))
    assert flag(command, "--nproc-per-node") == "4"
    for name, value in (("--layers", size.layers), ("--hidden", size.hidden), ("--heads", size.heads)):
        assert flag(command, name) == str(value)
    counts = {"megatron": ("--micro", "--num-micro"), "deepspeed": ("--mbs", "--accum")}
    rows, microbatches = counts.get(stack.name, ("--mbs", "--microbatches"))
    assert (flag(command, rows), flag(command, microbatches)) == ("2", "8")


def test_deepspeed_refuses_tensor_parallelism() -> None:
    assert BY_NAME["deepspeed"].refusal(CASE)
    assert BY_NAME["deepspeed"].refusal(Case(size=SIZES[256], layout=Layout(pp=2), steps=1)) is None


def test_ratios_pair_the_runs_of_a_round() -> None:
    rounds: Rounds = {
        "ours": [measurement(1.0), None, measurement(2.0)],
        "native": [measurement(c) for c in (2, 9, 8)],
    }
    found = ratios(CASE, rounds, "native", QUANTITIES[0])
    assert found is not None
    assert (found.least, found.median, found.most) == (2.0, 3.0, 4.0)


def test_reports_survive_a_failed_stack(tmp_path: Path) -> None:
    rounds: Rounds = {"ours": [measurement(1.0)], "native": [measurement(2.0)], "megatron": [None]}
    assert "megatron   failed" in case_table(CASE, rounds)
    report = case_report(CASE, rounds)
    assert (
        json.loads(json.dumps(report))["stacks"]["native"]["ours_over_it"]["tokens_per_cpu_second"]["median"]
        == 2
    )
    draw([(CASE, rounds)], tmp_path / "ratios.png")
    assert (tmp_path / "ratios.png").stat().st_size > 0


def test_a_missing_peer_is_explained(tmp_path: Path) -> None:
    assert "--peers-dir" in (run.why_not(BY_NAME["native"], sys.executable, tmp_path) or "")
    (tmp_path / "deepspeed_cpu.py").touch()
    reason = run.why_not(BY_NAME["deepspeed"], str(tmp_path / "none"), tmp_path)
    assert reason is not None
    assert "does not start" in reason
    assert run.find_python("native", ["native=/x"], {}) == "/x"
    assert run.find_python("native", [], {"TRIAXIS_PEER_PYTHON_NATIVE": "/y"}) == "/y"


def test_packed_and_unpacked_rows_are_the_same_work() -> None:  # N74
    """Each kind trains as many tokens of 2,048 a row, in documents of the lengths that it says."""
    whole, equal, unequal, apart = (
        packed.make_batch(packed.make_plan(16, 1, 2, kind), lengths) for kind, lengths in packed.KINDS.items()
    )
    assert whole.tokens_BL.shape == equal.tokens_BL.shape == unequal.tokens_BL.shape == (2, 2048)
    assert apart.tokens_BL.shape == (16, 256)
    assert whole.documents is None and apart.documents is None
    assert equal.documents is not None and equal.documents.borders == tuple(range(0, 4097, 256))
    assert unequal.documents is not None and unequal.documents.longest() == max(packed.UNEVEN)
    assert equal.trained_tokens() == unequal.trained_tokens() == apart.trained_tokens() == 4096 - 16


def test_the_texts_of_a_corpus_are_as_large_as_asked(tmp_path: Path) -> None:
    path = corpus.write_texts(tmp_path / "x.jsonl", 1)
    lines = path.read_text().splitlines()
    assert 2**20 <= path.stat().st_size < 2**20 + 2000 and len(set(lines)) == len(lines)


def test_the_cost_of_agreeing_is_told_against_what_is_promised() -> None:
    cost = agreeing.Cost(parameters=14_500_000, step_seconds=0.3, comparing_seconds=0.06, start_seconds=0.13)
    assert cost.share == pytest.approx(0.06 / 150)
    assert "0.0400% of training (promised: below 1%)" in agreeing.told(cost) and "0.13 s" in agreeing.told(
        cost
    )
    small = agreeing.measure(hidden=16, length=16, tokens=1000, rounds=1)
    assert (
        small.parameters < 500_000
        and min(small.step_seconds, small.comparing_seconds, small.start_seconds) > 0
    )


@pytest.mark.processes
def test_ours_runs(tmp_path: Path) -> None:
    arguments = ["--steps", "1", "--hidden", "64", "--layers", "1", "--heads", "2", "--ffn", "64"]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        str(ROOT / "benchmarks/ours.py"),
    ]
    answer = tmp_path / "answer.json"
    subprocess.run([*command, *arguments, "--json", str(answer)], check=True, timeout=PATIENCE_SECONDS)
    found = BY_NAME["ours"].read(answer)
    assert found.cpu_seconds > 0
    assert 5 < found.first_loss < 7
