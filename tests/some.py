"""Rows of a table of layouts: some are tried always, all in the full tests."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from _pytest.mark.structures import ParameterSet


def some(rows: Iterable[str], *always: str) -> list[ParameterSet]:
    """Each row, under its name; those that are not `always` tried are marked `full`."""
    names = list(rows)
    assert {*always} <= {*names}
    return [pytest.param(name, marks=[] if name in always else [pytest.mark.full], id=name) for name in names]
