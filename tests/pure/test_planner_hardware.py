"""Hardware presets, files and their refusals."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from triaxis.launch.hardware import hardware
from triaxis.launch.hardware.hardware import constants_of, hardware_names, load_hardware
from triaxis.launch.hardware.nearly import line_rate, with_network
from triaxis.launch.planner.waiting import microbatches_for, waiting_text

FILE = """
name = "desk"
source = "measured"
memory_bytes = 16e9
memory_bytes_per_s = 40e9
launch_overhead_s = 4e-6
gpus_per_node = 2
nics_per_node = 1
peak_flops = { fp32 = 1e11, bf16 = 2e10 }
efficiency = [[1e6, 0.2], [1e8, 0.6], [1e10, 0.9]]
intra = { latency_s = 1e-5, bytes_per_s = 5e9 }
inter = { latency_s = 5e-5, bytes_per_s = 1e9 }
"""


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "desk.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", hardware_names())
def test_every_preset_is_sound(name: str) -> None:
    hardware = load_hardware(name)
    constants = constants_of(hardware.generation)
    assert hardware.name == name and hardware.source
    assert hardware.intra.bytes_per_s >= hardware.inter.bytes_per_s > 1e9
    assert 0 < constants.matmul_fraction <= 1 and 0 < constants.memory_fraction <= 1
    shares = [share for _, share in hardware.efficiency]
    assert shares == sorted(shares) and shares[-1] <= constants.matmul_fraction
    sixteen = "bf16" if "bf16" in hardware.peak_flops else "fp16"
    assert hardware.matmul_seconds(1e15, sixteen) >= 1e15 / hardware.peak_flops[sixteen]


def test_the_presets_that_people_ask_for_are_there() -> None:
    assert {"a100-40g", "a100-80g", "h100-80g", "h800-80g", "h200", "b200", "mi300x", "v100-32g"} <= set(
        hardware_names()
    )
    assert load_hardware("h100-80g").peak("bf16") == 989e12


def test_a_curve_is_linear_in_the_logarithm_and_flat_outside(tmp_path: Path) -> None:
    hardware = load_hardware(written(tmp_path, FILE))
    assert hardware.matmul_fraction(1e7) == pytest.approx(0.4)
    assert hardware.matmul_fraction(1e9) == pytest.approx(0.75)
    assert hardware.matmul_fraction(1e14) == 0.9
    assert hardware.matmul_fraction(1e5) == pytest.approx(
        0.02
    )  # a product costs no less than the smallest known
    assert hardware.matmul_seconds(1e9, "fp32") == pytest.approx(1e9 / (1e11 * 0.75))
    assert hardware.matmul_seconds(0, "fp32") == 0
    assert hardware.memory_seconds(4e9) == pytest.approx(0.1)
    assert math.isclose(hardware.constants.matmul_fraction, 1)  # a file holds what is reached


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            FILE.replace("memory_bytes =", "memory_byte ="),
            r"`memory_byte` must be a field.*nearest: memory_bytes",
        ),
        (FILE.replace("nics_per_node = 1\n", ""), r"`nics_per_node` must be given, but is missing"),
        (FILE.replace("40e9", "-1"), r"`memory_bytes_per_s` must be a number above 0, but is -1"),
        (FILE.replace("latency_s = 1e-5", "latency = 1e-5"), r"`intra`: `latency` must be a field of link"),
        (FILE.replace("[1e8, 0.6]", "[1e5, 0.6]"), r"`efficiency` must be a list .* ascending"),
        (FILE.replace("gpus_per_node = 2", "gpus_per_node = 2.5"), r"`gpus_per_node` must be a whole number"),
        (FILE.replace("fp32 = 1e11", "float32 = 1e11"), r"`peak_flops` must have keys out of bf16"),
        (FILE + 'generation = "hoper"', r"`generation` must be one of .*'hoper'; nearest: hopper"),
        (FILE + "context_bytes = -1", r"`context_bytes` must be a number at least 0, but is -1"),
        ("name = ", r"`hardware` must name a readable TOML file"),
    ],
)
def test_a_wrong_file_says_which_field_and_what_it_must_be(tmp_path: Path, wrong: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_hardware(written(tmp_path, wrong))


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"`hardware` must be a TOML file or one of .*nearest: h100-80g"):
        load_hardware("h100-80gb")
    with pytest.raises(ValueError, match=r"`dtype` must be one of .* on a100-80g, but is 'fp8'"):
        load_hardware("a100-80g").peak("fp8")


def test_the_memory_of_a_process_is_measured_or_left_to_the_software(tmp_path: Path) -> None:
    assert load_hardware(written(tmp_path, FILE + "context_bytes = 3.7e8")).context_bytes == 3.7e8
    (tmp_path / "presets").mkdir()
    assert load_hardware(written(tmp_path / "presets", FILE)).context_bytes is None
    assert all(load_hardware(name).context_bytes is None for name in hardware_names())


def test_a_preset_that_is_copied_or_changed_is_priced_as_the_preset(tmp_path: Path) -> None:
    """A file of a data sheet's figures is cut to what its generation reaches, as a preset is."""
    sheet = hardware._table("hardware.toml")["a100-40g"]
    copied, based = tmp_path / "copied.toml", tmp_path / "based.toml"
    lines = [f"{key} = {_toml(value)}" for key, value in sheet.items()]
    copied.write_text("\n".join(lines), encoding="utf-8")
    based.write_text(
        'base = "a100-40g"\nmemory_bytes = 64e9\ninter = { bytes_per_s = 1e9 }\n', encoding="utf-8"
    )
    preset = load_hardware("a100-40g")
    assert replace(load_hardware(str(copied)), name=preset.name) == preset
    found = load_hardware(str(based))
    assert found.inter == replace(preset.inter, bytes_per_s=1e9)
    same = replace(found, name=preset.name, source=preset.source, memory_bytes=40e9, inter=preset.inter)
    assert same == preset
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('base = "a100-40"\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"`base` must be one of .* but is 'a100-40'; nearest: a100-40g"):
        load_hardware(str(wrong))


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {one}" for key, one in value.items()) + " }"
    return json.dumps(value)


def test_a_network_is_told_by_its_line_rate() -> None:
    preset = load_hardware("a100-80g")
    found = with_network(preset, line_rate("100Gb/s"))
    assert found.inter.bytes_per_s == pytest.approx(0.94 * 12.5e9)
    assert line_rate("12.5GB/s") == line_rate("100Gb/s") and with_network(preset, None) is preset
    for wrong in ("100", "fast", "-1Gb/s", "0Gb/s", "1e400Gb/s"):
        with pytest.raises(argparse.ArgumentTypeError, match="line rate such as 100Gb/s"):
            line_rate(wrong)


def test_a_pipeline_that_waits_is_told_how_not_to() -> None:
    assert (
        microbatches_for(0.6, 4) == 2 and microbatches_for(0.2, 4) == 12 and microbatches_for(0.2, 4, 2) == 6
    )
    assert "waits about 60% of the step; with 12 microbatches" in str(waiting_text(4, 2))
    assert waiting_text(4, 12) is None and waiting_text(1, 1) is None


def test_a_name_that_was_begun_is_completed() -> None:
    with pytest.raises(ValueError, match=r"but is .H100.; nearest: h100-80g or h100-96g$"):
        load_hardware("H100")
