"""The table of kernels: what is asked for is found or explained; packages are looked for and never imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from triaxis.parallel.kernels.table import (
    DEFAULT,
    TABLE,
    Facts,
    Operation,
    choose,
    missing_packages,
    read_choice,
    rows_of,
    told_kernels,
)

GPU = Facts(device="cuda", dtype="bf16", capability=(9, 0), missing={})
CPU = Facts(device="cpu", dtype="fp32", missing={})


def test_every_operation_has_torchs_own_first_and_it_is_never_refused() -> None:
    for operation in Operation:
        rows = rows_of(operation)
        assert next(iter(rows)) == DEFAULT
        assert rows[DEFAULT].refusal(CPU) is None and rows[DEFAULT].refusal(GPU) is None
    assert len({(row.operation, row.name) for row in TABLE}) == len(TABLE)
    assert choose({}, CPU) == dict.fromkeys(Operation, DEFAULT)


def test_a_choice_is_read() -> None:
    chosen = read_choice("norm=compile, attention=flash,")
    assert chosen == {Operation.NORM: "compile", Operation.ATTENTION: "flash"}
    assert read_choice("") == {}
    everything = choose({Operation.NORM: "plain"}, CPU)
    assert everything[Operation.NORM] == "plain" and everything[Operation.LOSS] == DEFAULT
    assert told_kernels(everything) == "kernels: norm plain, the rest torch"
    assert told_kernels(choose({}, CPU)) == "kernels: all torch"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("norms=plain", "has norms; nearest: norm"),
        ("attention=flsh", "has attention=flsh; nearest: attention=flash"),
        ("flash", "`kernels` must be OPERATION=NAME"),
    ],
)
def test_what_is_misspelled_gets_the_nearest(text: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_choice(text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("wish", "facts", "why"),
    [
        ("attention=flash", CPU, "needs cuda, and this is cpu"),
        (
            "attention=flash",
            Facts(device="cuda", dtype="fp32", capability=(9, 0), missing={}),
            "needs bf16 or fp16",
        ),
        (
            "attention=flash",
            Facts(device="cuda", dtype="bf16", capability=(7, 5), missing={}),
            "needs compute capability 8.0",
        ),
        (
            "norm=liger",
            Facts(
                device="cuda",
                dtype="bf16",
                capability=(9, 0),
                missing={"liger-kernel": "not installed: pip install liger-kernel"},
            ),
            "pip install liger-kernel",
        ),
        ("loss=liger", GPU, "not called: it wants the whole vocabulary's logits on one rank"),
        (
            "block=compile",
            Facts(device="cpu", dtype="fp32", missing={"torch.compile": "no compiler"}),
            "no compiler",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(wish: str, facts: Facts, why: str) -> None:
    with pytest.raises(ValueError) as caught:
        choose(read_choice(wish), facts)
    assert f"`kernels` {wish} cannot be used" in str(caught.value) and why in str(caught.value)


def test_all_refusals_are_told_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        choose(read_choice("attention=flash,norm=liger"), CPU)
    assert str(caught.value).count("cannot be used") == 2


@pytest.fixture
def folder_of_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def make_apex(folder: Path, *parts: str) -> None:
    (folder / "apex").mkdir()
    (folder / "apex" / "__init__.py").write_text("raise AssertionError('apex was imported')\n")
    for part in parts:
        path = folder / part
        path.mkdir(parents=True)
        (path / "__init__.py").write_text("raise AssertionError('a part was imported')\n")


def test_another_project_called_apex_is_told_from_nvidias(folder_of_packages: Path) -> None:
    assert "pip install apex brings another project" in missing_packages("cuda")["apex"]
    make_apex(folder_of_packages)
    why = missing_packages("cuda")["apex"]
    assert "another project of that name" in why and "pip uninstall apex" in why
    wished = Facts(device="cuda", dtype="bf16", capability=(9, 0), missing=missing_packages("cuda"))
    with pytest.raises(ValueError, match="another project of that name"):
        choose(read_choice("norm=apex"), wished)
    assert "apex" not in sys.modules


def test_nvidias_apex_is_taken_where_its_extensions_are(folder_of_packages: Path) -> None:
    make_apex(folder_of_packages, "apex/normalization")
    assert "without its CUDA extensions" in missing_packages("cuda")["apex"]
    (folder_of_packages / "fused_layer_norm_cuda.py").write_text("raise AssertionError('imported')\n")
    assert "apex" not in missing_packages("cuda")
    assert choose(read_choice("norm=apex"), GPU)[Operation.NORM] == "apex"
