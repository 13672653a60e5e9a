"""What every layout does is as it was recorded: a sample of the layouts here, all of them by `make frozen`."""

from __future__ import annotations

import os
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import frozen
from tests.frozen.portrait import arithmetic, portrait
from tests.frozen.record import differences, read_record, write_record
from tests.frozen.rows import ROWS, Row

RECORD = Path(frozen.__file__).parent / "record.json"
SAMPLE = random.Random(int(os.environ["TRIAXIS_SAMPLE_SEED"])).sample(ROWS, 3)


@cache
def record() -> tuple[str, dict[str, dict[str, Any]]]:
    return read_record(RECORD)


def test_every_layout_is_recorded_under_its_own_name() -> None:
    names = [row.name for row in ROWS]
    assert len(names) >= 40
    assert list(record()[1]) == names


@pytest.mark.parametrize("row", SAMPLE, ids=lambda row: row.name)
def test_a_layout_does_what_it_did(row: Row) -> None:
    computed, recorded = record()
    assert differences(recorded[row.name], portrait(row), exact=computed == arithmetic()) == []


def test_a_difference_is_told_by_field(tmp_path: Path) -> None:
    drawn = record()[1]["tp2 sp"]
    write_record(tmp_path / "record.json", "here", {"tp2 sp": drawn})
    assert read_record(tmp_path / "record.json") == ("here", {"tp2 sp": drawn})
    first = float.fromhex(drawn["fp64 first loss"])
    changed = drawn | {
        "fp64 first loss": (first * (1 + 1e-12)).hex(),
        "fp32 gradients": drawn["fp32 gradients"] | {"lm_head.weight": "00000000"},
        "program": ["00000000", drawn["program"][1]],
        "digests": drawn["digests"]
        | {
            "00000000": drawn["digests"][drawn["program"][0]].replace(
                "56 reduce_scatter", "57 reduce_scatter"
            )
        },
        "peak bytes": [1, drawn["peak bytes"][1]],
    }
    told = differences(drawn, changed, exact=True)
    assert [line.split(":")[0] for line in told] == [
        "fp32 gradients",
        "fp64 first loss",
        "peak bytes",
        "program of ranks [0]",
    ]
    assert "1 of 30 differ: lm_head.weight" in told[0]
    assert "57 reduce_scatter float32" in told[3]
    rounded = differences(drawn, changed, exact=False)
    assert [line.split(":")[0] for line in rounded] == ["peak bytes", "program of ranks [0]"]
    changed["fp64 first loss"] = (first * (1 + 1e-9)).hex()
    assert len(differences(drawn, changed, exact=False)) == 3
