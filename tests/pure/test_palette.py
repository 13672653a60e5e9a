"""One colour, one meaning, everywhere: in schedules, on both pages, and legible."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from triaxis.launch.pages.report import TIME_NAMES
from triaxis.launch.planner.explain import PARTS
from triaxis.parallel.palette import COLOURS, ink_on, memory_name, paler, style_sheet
from triaxis.parallel.pipeline.draw import svg
from triaxis.parallel.pipeline.orders import make_schedule
from triaxis.parallel.programs.program import KINDS

ROOT = Path(__file__).resolve().parents[2]


def luminance(paint: str) -> float:
    parts = [int(paint[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("place", [0, 1], ids=["light", "dark"])
def test_no_colour_has_two_meanings(place: int) -> None:
    found = [pair[place] for name, pair in COLOURS.items() if name != "inputs"]  # a part of backward
    assert len(set(found)) == len(found)


def test_every_kind_of_memory_and_part_of_a_step_has_a_colour() -> None:
    assert [str(kind) for kind in KINDS if memory_name(kind) == "memory-other"] == ["other"]
    assert len({memory_name(kind) for kind in KINDS}) == len(KINDS)
    assert set(TIME_NAMES) == set(PARTS) and set(TIME_NAMES.values()) <= set(COLOURS)


def test_pages_take_their_colours_from_the_palette() -> None:
    sheet = style_sheet()
    defined = set(re.findall(r"--([a-z-]+):", sheet))
    css = (ROOT / "launch" / "simulator" / "page" / "page.css").read_text(encoding="utf-8")
    html = (ROOT / "launch" / "pages" / "report.html").read_text(encoding="utf-8")
    own = {
        "page",
        "card",
        "ink",
        "soft",
        "line",
        "rail",
        "good",
        "bad",
        "warn",
        "focus",
        "colour",
        "strength",
    }
    used = set(re.findall(r"var\(--([a-z-]+)\)", css + html))
    assert used <= defined | own, used - defined - own
    assert not defined & set(re.findall(r"--([a-z-]+):", css)), "a colour is said twice"


def test_a_schedule_can_be_read() -> None:
    picture = svg(make_schedule("interleaved", 4, 8, 4))
    cells = re.findall(r'fill="(#\w+)"/><text [^>]*fill="(#\w+)"', picture)
    assert len(cells) == 4 * 8 * 4 * 2
    assert min(contrast(paint, ink) for paint, ink in cells) >= 4.5
    assert contrast(COLOURS["idle"][0], "#ffffff") > 1.3  # seen on a white page
    assert {paler("forward", 0), paler("backward", 0)} <= {paint for paint, _ in cells}
    assert ink_on("#000000") == "#ffffff" and ink_on("#ffffff") == "#16181d"
