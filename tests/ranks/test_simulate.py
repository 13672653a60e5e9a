"""`simulate` as people start it: the answer, the numbers behind it, its cost, and what it refuses."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from tests.yardstick import yardsticks
from triaxis.engine.step import TrainingStep
from triaxis.launch.plan import main as plan
from triaxis.launch.simulate import main
from triaxis.launch.simulator.memory import CachingAllocator, memory_use, reserved_bytes
from triaxis.models.presets import load_config
from triaxis.parallel.programs.program import KINDS, MemoryCurve, MemoryKind, Program, Segment, Step

SMALL = "--model tiny --dp 2 --tp 2 --pp 2 --microbatches 4 --seq 64".split()  # noqa: SIM905
MEBIBYTE = 1 << 20


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "triaxis.launch.simulate", *flags], capture_output=True, text=True, check=False
    )


def test_the_answer_for_people_and_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SMALL) == 0
    told = capsys.readouterr().out.replace("\n", " ")
    for word in ("proved over 8 ranks", "memory: fits", "tokens/s", "the step's length is made of"):
        assert word in told, told
    files = ["--trace", str(tmp_path / "t.json"), "--report", str(tmp_path / "r.html")]
    assert main([*SMALL, "--json", *files]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["proof"]["holds"]
    assert values["proof"]["ranks"] == 8
    assert 0 < values["time"]["mfu"] <= values["time"]["hfu"] < 1
    assert sum(part["seconds"] for part in values["time"]["critical_path"]) == pytest.approx(
        values["time"]["step_seconds"], rel=1e-6
    )
    for entry in values["memory"]["ranks"]:
        assert sum(entry["breakdown"].values()) == entry["peak_bytes"] <= entry["reserved_bytes"]
    assert json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))["traceEvents"]
    assert "<html" in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_a_hugging_face_folder_with_documents_is_planned_and_simulated_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # N74
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 8}
    LlamaConfig(**sizes, vocab_size=509, max_position_embeddings=1024).save_pretrained(tmp_path)

    def said(command: Callable[[list[str]], int], *flags: str) -> dict[str, Any]:
        assert command(["--json", "--gpus", "4", "--seq", "1024", "--global-batch", "8", *flags]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    for model in (str(tmp_path), str(tmp_path / "config.json")):
        asked = ["--model", model, "--document-tokens", "128"]
        assert plan([*asked, "--gpus", "4", "--seq", "1024", "--global-batch", "8"]) == 0
        assert "8 documents in each sequence" in " ".join(capsys.readouterr().out.split())
        best = said(plan, *asked)["best"]
        layout = [text for axis in ("dp", "tp", "pp", "zero") for text in (f"--{axis}", str(best[axis]))]
        layout += ["--per-device-train-batch-size", str(best["microbatch"]), "--dtype", "bf16"]
        packed, whole = said(main, *asked, *layout), said(main, *asked[:2], *layout)
        assert packed["run"]["documents_a_row"] == 8
        assert packed["time"]["step_seconds"] == pytest.approx(best["step_seconds"], rel=0.05)
        assert packed["time"]["model_flops_per_token"] < whole["time"]["model_flops_per_token"]


def test_recompute_costs_hardware_flops_and_saves_activations(
    capsys: pytest.CaptureFixture[str],
) -> None:  # B165
    found = []
    for more in ([], ["--recompute"]):
        assert main([*SMALL, "--dp", "1", *more, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    plain, again = found
    assert again["time"]["hfu"] / again["time"]["mfu"] > 1.2 * plain["time"]["hfu"] / plain["time"]["mfu"]
    kept = [values["memory"]["ranks"][0]["breakdown"]["activations"] for values in (plain, again)]
    assert kept[1] < kept[0] / 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--model nosuch", "`model` must be a preset"),
        ("--hardware h10", "`hardware` must be a TOML file or one of"),
        ("--gpus 12 --tp 5", "`world_size` must be a multiple"),
        ("--dp 2 --straggler 9=2", "`straggler` must read like"),
        ("--simulate", "`--threads` must not be given"),
        ("--data-parallel fsdp --dp 2", "`data_parallel` must be zero"),
        ("--report /dev/null/folder/r.html", "`--report` must be a place that can be written"),
    ],
)
def test_what_cannot_be_simulated_is_named(flags: str, said: str) -> None:
    refused = run(*flags.split())
    assert refused.returncode == 2
    assert said in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_misspelt_key_of_a_hardware_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("memory_bites = 8e10\n", encoding="utf-8")
    refused = run("--hardware", str(file))
    assert refused.returncode == 2
    assert "memory_bites" in refused.stderr


def test_a_fault_is_shown_with_the_smallest_run_that_has_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A planted one: the last stage sums its gradients once too often."""
    synchronize = TrainingStep.accumulate

    def twice(self: TrainingStep, *given: Any) -> Any:
        result = synchronize(self, *given)
        if self.mesh.pp.rank == self.mesh.pp.size - 1 and self.mesh.pp.size > 1:
            self.mesh.everyone.all_reduce(result[0])
        return result

    monkeypatch.setattr(TrainingStep, "accumulate", twice)
    assert main([*SMALL, "--pp", "3"]) == 1
    told = capsys.readouterr()
    assert "do not fit together" in told.out
    assert "agreement" in told.out or "progress" in told.out
    assert "pp 2 and microbatches 1" in told.err


LARGE = {
    "671B on 256": "--model dense-671b --dp 16 --tp 8 --pp 2 --zero 3 --microbatches 64 --seq 4096",
    "405B on 16,384": "--model llama3-405b --dp 128 --tp 8 --pp 16 --zero 1 --microbatches 32 --seq 8192",
}


@pytest.mark.parametrize(
    ("name", "limit"), [("671B on 256", 120), pytest.param("405B on 16,384", 720, marks=pytest.mark.full)]
)
def test_a_large_cluster_is_traced_proved_and_priced_in_time(name: str, limit: float) -> None:
    """Some 15 and 90 seconds of CPU on a machine of 2024, and less than 4 GiB."""
    given = [*LARGE[name].split(), "--sp", "--dtype", "bf16", "--per-device-train-batch-size", "1", "--json"]
    runs = []
    spent = yardsticks(lambda: runs.append(run(*given)))
    (found,) = runs
    values = json.loads(found.stdout)
    assert found.returncode == (0 if values["memory"]["fits"] else 1), found.stderr
    assert values["proof"]["holds"]
    assert not values["proof"]["warnings"]
    assert values["proof"]["ranks"] == values["topology"]["world_size"]
    assert spent <= limit
    most_mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    assert most_mib < 4096


def test_parameters_and_flops_are_the_published_ones() -> None:
    flops = {"llama3-8b": (8192, 5.147e10), "llama3-70b": (8192, 4.492e11), "llama3-405b": (8192, 2.524e12)}
    counts = {"llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496, "llama3-405b": 405_853_388_800}
    for name, (length, per_token) in flops.items():
        model = load_config(name)
        assert model.parameters() == counts[name]
        assert model.flops_per_token(length) == pytest.approx(per_token, rel=1e-3)


def test_the_peak_is_the_highest_point_and_its_breakdown() -> None:
    activations, temporaries = KINDS.index(MemoryKind.ACTIVATIONS), KINDS.index(MemoryKind.TEMPORARIES)
    forward = Segment((), MemoryCurve((0, 1, 2), (activations, temporaries, temporaries), (10, 7, -7)))
    backward = Segment((), MemoryCurve((0, 1), (temporaries, activations), (3, -10)))
    end = Segment((), MemoryCurve((0,), (temporaries,), (-6,)))
    program = Program(
        (
            Step("0F0", forward),
            Step("0F1", forward),
            Step("0B0", backward),
            Step("0B1", backward),
            Step("u", end),
        ),
        held={MemoryKind.PARAMETERS: 100},
    )
    use = memory_use(program)
    assert (use.peak_bytes, use.label) == (127, "0F1")
    assert use.breakdown == {
        MemoryKind.PARAMETERS: 100,
        MemoryKind.ACTIVATIONS: 20,
        MemoryKind.TEMPORARIES: 7,
    }


@pytest.mark.parametrize(("ahead", "microbatches"), [(1, 40), (15, 40), (40, 40)])
def test_what_is_reserved_holds_the_peak(ahead: int, microbatches: int) -> None:
    """1F1B with so many forwards ahead, its repeats one segment each: repeats that are left out change nothing."""
    size = 30 * MEBIBYTE
    activations = KINDS.index(MemoryKind.ACTIVATIONS)
    forward = Segment((), MemoryCurve((0,), (activations,), (size,)))
    backward = Segment((), MemoryCurve((0,), (activations,), (-size,)))
    steps = [Step(f"0F{number}", forward) for number in range(ahead)]
    for number in range(microbatches - ahead):
        steps += [Step(f"0F{ahead + number}", forward), Step(f"0B{number}", backward)]
    steps += [Step(f"0B{number}", backward) for number in range(microbatches - ahead, microbatches)]
    program = Program(tuple(steps), held={MemoryKind.PARAMETERS: 64 * MEBIBYTE})
    high = min(ahead + 1, microbatches)
    assert memory_use(program).peak_bytes == 64 * MEBIBYTE + high * size
    assert reserved_bytes(program) == 64 * MEBIBYTE + high * size


def test_the_allocator_rounds_splits_merges_and_keeps() -> None:
    allocator = CachingAllocator()
    allocator.change(1)
    assert allocator.reserved_bytes == 2 * MEBIBYTE
    allocator.change(5 * MEBIBYTE)
    assert allocator.reserved_bytes == 22 * MEBIBYTE
    allocator.change(5 * MEBIBYTE)  # the rest of the same segment
    assert allocator.reserved_bytes == 22 * MEBIBYTE
    allocator.change(-5 * MEBIBYTE)
    allocator.change(-5 * MEBIBYTE)
    allocator.change(15 * MEBIBYTE)  # only if the freed neighbours were merged
    assert allocator.reserved_bytes == 22 * MEBIBYTE
    allocator.change(11 * MEBIBYTE + 1)
    assert allocator.reserved_bytes == 34 * MEBIBYTE


def test_what_does_not_fit_ends_so_and_says_what_to_ask(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "llama2-7b", "--seq", "512", "--dtype", "bf16", "--hardware", "v100-16g"]
    assert main([*flags, "--microbatches", "1", "--per-device-train-batch-size", "1"]) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "does not fit" in told
    assert "what fits: triaxis plan --model llama2-7b --gpus 1 --hardware v100-16g --seq 512" in told


def test_a_pipeline_with_few_microbatches_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "small", "--pp", "4", "--microbatches", "2"]) == 0
    assert "with 12 microbatches or more on each rank" in " ".join(capsys.readouterr().out.split())
