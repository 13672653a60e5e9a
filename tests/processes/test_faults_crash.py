"""A short form of `make crash-test`: three kills at drawn moments, and the run ends as if there had been none."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.crash.__main__ import crash

pytestmark = pytest.mark.processes


def test_a_run_survives_what_kills_it(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")  # shown if it fails
    assert crash(tmp_path, kills=3, seed=seed).total() == 3
