"""How fp16's loss scale moves: as DeepSpeed's does, with its six settings."""

from __future__ import annotations

import pytest

from triaxis.engine.loss_scale import LossScaling


def values(scaling: LossScaling, story: str) -> list[float]:
    """The scale behind each step of a story: `.` an update, `x` an overflow."""
    scale, found = scaling.begin(), []
    for letter in story:
        scale = scaling.after_update(scale) if letter == "." else scaling.after_overflow(scale)
        found.append(scale.value)
    return found


def test_it_begins_at_two_to_the_power_and_falls_at_the_second_overflow() -> None:
    assert LossScaling().begin().value == 65536
    assert values(LossScaling(initial_power=4), "xxx") == [16, 8, 4]


def test_it_doubles_behind_so_many_updates_and_counts_anew_from_an_overflow() -> None:
    scaling = LossScaling(initial_power=4, window=3, hysteresis=1)
    assert values(scaling, "...") == [16, 16, 32]
    assert values(scaling, "..x...") == [16, 16, 8, 8, 8, 16]
    assert values(scaling, "......") == [16, 16, 32, 32, 32, 64]


def test_patience_comes_back_where_it_rises_or_with_any_update() -> None:
    scaling = LossScaling(initial_power=4, window=3, hysteresis=2)
    assert values(scaling, "x.x") == [16, 16, 8]
    assert values(scaling, "x...x") == [16, 16, 16, 32, 32]
    consecutive = LossScaling(initial_power=4, window=9, hysteresis=2, consecutive=True)
    assert values(consecutive, "x.x") == [16, 16, 16]
    assert values(consecutive, "x.xx") == [16, 16, 16, 8]


def test_it_ends_to_fall_at_its_least() -> None:
    scaling = LossScaling(initial_power=2, hysteresis=1, least=2)
    assert values(scaling, "xxx") == [2, 2, 2]
    assert not scaling.at_its_floor(scaling.begin())
    assert scaling.at_its_floor(scaling.after_overflow(scaling.begin()))
    assert LossScaling(initial_power=2, least=100).begin().value == 100


@pytest.mark.parametrize("story", ["....", "xxxx", ".x.x"])
def test_a_fixed_one_stays(story: str) -> None:
    scaling = LossScaling(fixed=128, window=2, hysteresis=1)
    assert values(scaling, story) == [128] * 4
    assert not scaling.at_its_floor(scaling.begin())


def test_a_scale_that_begins_high_may_fall_for_longer() -> None:
    assert LossScaling().most_in_a_row(10) == 10
    assert LossScaling(initial_power=32).most_in_a_row(10) == 26
