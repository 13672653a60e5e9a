"""README and its Chinese twin say the same commands and tables, and every page that they name is there."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

import pytest

from triaxis.launch.cli import COMMANDS
from triaxis.launch.flags import train_parser

ROOT = Path(__file__).resolve().parents[2]
TWINS = ("README.md", "README.zh.md")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def commands(text: str) -> list[list[str]]:
    """Code blocks, line by line, without comments."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return [
        [line for line in (re.sub(r"(^|\s+)# .*", "", raw).rstrip() for raw in block.splitlines()) if line]
        for block in blocks
    ]


def tables(text: str) -> list[list[str]]:
    """What is in code in each row."""
    return [re.findall(r"`([^`]+)`", line) for line in text.splitlines() if line.startswith("| ")]


def links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)]+)\)", text)


def test_the_twins_have_the_same_commands_tables_and_links() -> None:
    english, chinese = map(text_of, TWINS)
    assert commands(english) == commands(chinese)
    assert tables(english) == tables(chinese)
    assert sorted({*links(english), *TWINS}) == sorted({*links(chinese), *TWINS})


@pytest.mark.parametrize("name", TWINS)
def test_every_page_is_there(name: str) -> None:
    assert [link for link in links(text_of(name)) if not (ROOT / link).exists()] == []


def test_no_example_starts_where_an_earlier_one_left_checkpoints() -> None:
    text = text_of("README.md")
    examples = re.findall(r"(?:launch\.train|triaxis run)(?: .*\\\n)* .*", text)
    taken = {"output"}  # of `make train`, away from which the examples are told to go
    place = re.findall(r"^mkdir .*&& cd (\S+)$", text, flags=re.MULTILINE)[0]
    kept = 0
    for example in examples:
        named = re.search(r"--output[-_]dir (\S+)", example)
        folder = posixpath.normpath(f"{place}/{named[1] if named else 'output'}")
        assert folder not in taken or "--resume" in example, example
        if "--save" in example:
            taken.add(folder)
            kept += 1
    assert kept == 4


def test_every_flag_and_command_exists() -> None:
    text = text_of("README.md")
    known = set(train_parser("triaxis train", "")._option_string_actions)
    cells = [cell for row in tables(text) for cell in row]
    named = {flag.replace("_", "-") for cell in cells for flag in re.findall(r"--[\w-]+", cell)}
    assert named and named <= known, named - known
    assert set(re.findall(r"^triaxis (\w+)", text, flags=re.MULTILINE)) <= set(COMMANDS)
