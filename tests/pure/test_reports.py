"""tests/reports.csv: where each public report that was tried is answered, and by what.

how: by a `test` of the right behaviour, by a `refusal` of what is not there (with its test), `not-applicable` with the
reason, or `open` with what does not hold yet. answer: the tests by their names below tests/, or the reason.
"""

from __future__ import annotations

import ast
import csv
import re
from collections import Counter
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
WITH_TESTS = ("test", "refusal")
OPEN = {"N52"}
"""Known not to hold. A row leaves when its test comes; none is added in passing."""


def rows() -> list[dict[str, str]]:
    with (TESTS / "reports.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@cache
def names_in(file: str) -> frozenset[str]:
    path = TESTS / file
    assert path.is_file(), f"tests/{file} is named in reports.csv, but is not there"
    return frozenset(
        node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)
    )


def test_every_report_stands_once() -> None:
    counts = Counter(row["id"] for row in rows())
    assert len(counts) == 67 + 57 and set(counts.values()) == {1}
    assert all(re.fullmatch(r"[BN]\d{2,3}", number) for number in counts)
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", row["report"]) for row in rows())


def test_every_test_that_a_report_names_exists() -> None:
    missing = [
        (row["id"], name)
        for row in rows()
        if row["how"] in WITH_TESTS
        for name in row["answer"].split(" ")
        if name.partition("::")[2] not in names_in(name.partition("::")[0])
    ]
    assert not missing


def test_what_has_no_test_says_why() -> None:
    others = [row for row in rows() if row["how"] not in WITH_TESTS]
    assert {row["how"] for row in others} <= {"not-applicable", "open"}
    assert all(len(row["answer"].split()) >= 5 for row in others)
    assert {row["id"] for row in others if row["how"] == "open"} == OPEN
