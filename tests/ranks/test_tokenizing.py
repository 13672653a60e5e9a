"""Tokenizing by processes: the numbers of one process, its faults, and what a death leaves."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from triaxis.engine.data import tokenizing
from triaxis.engine.data.tokenizing import Reading, tokenize, tokenize_apart

READING = Reading(tokenizer_path=None, on_bad_sample="skip")


def corpus(folder: Path) -> list[Path]:
    """Texts, chats, empty and bad lines in two files."""
    first, second = folder / "a.jsonl", folder / "b.jsonl"
    answer = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes"}]
    lines = [json.dumps({"text": f"number {n} " * (n % 7)}) for n in range(60)]
    lines[17] = "{"
    first.write_text("\n".join(lines))
    second.write_text(
        "\n".join([json.dumps({"messages": answer}), "[]", json.dumps({"text": "z", "k": 1})] * 9)
    )
    return [first, second]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "PIECE_RECORDS", 7)


def test_two_processes_write_what_one_writes(tmp_path: Path, short: None) -> None:
    files = corpus(tmp_path)
    told: list[tuple[int, int]] = []
    for name, processes in (("one", 1), ("two", 2)):
        (tmp_path / name).mkdir()
        tokenize(
            files, READING, tmp_path / name, processes=processes, tell=lambda *so_far: told.append(so_far)
        )
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    sizes = sum(path.stat().st_size for path in files)
    assert told[-1] == (87, sizes) and told == sorted(told[: len(told) // 2]) * 2
    entry = json.loads((tmp_path / "one" / "entry.json").read_text())
    assert "read 87, kept 68, empty 9, bad 10" in entry["told"] and "a.jsonl:18: is not JSON" in entry["told"]
    assert (
        not entry["all_trained"]
        and "9 conversations" in entry["notes"][0]
        and "`text`: k" in entry["notes"][1]
    )
    places = np.fromfile(tmp_path / "one" / "places.bin", np.int64).reshape(-1, 2)
    assert places[0].tolist() == [0, 2] and places[-1].tolist() == [1, 27]
    assert sorted(places.tolist()) == places.tolist() and len(places) == 68


def test_the_first_fault_in_the_order_of_lines_is_told(tmp_path: Path, short: None) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n' * 30 + "{\n" + '{"text": "a"}\n' * 30 + "[\n")
    strict = Reading(tokenizer_path=None, on_bad_sample="error")
    for processes in (1, 2):
        with pytest.raises(ValueError, match=r"x\.jsonl:31: is not JSON"):
            tokenize([path], strict, tmp_path, processes=processes, tell=lambda *_: None)
    with pytest.raises(ValueError, match=r"x\.jsonl:31: is not JSON"):
        tokenize_apart([path], strict, tmp_path, lambda *_: None)


def test_a_file_without_a_document_is_named(tmp_path: Path) -> None:
    files = corpus(tmp_path)
    files[1].write_text("\n[]\n")
    with pytest.raises(
        ValueError, match=r"b\.jsonl must hold at least one document, but has none \(read 61,"
    ):
        tokenize(files, READING, tmp_path, processes=1, tell=lambda *_: None)


def test_a_process_that_dies_is_a_fault_with_its_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizing, "START", f"import os; os.kill(os.getpid(), {signal.SIGKILL})")
    with pytest.raises(ValueError, match=r"ended with code -9"):
        tokenize_apart(corpus(tmp_path), READING, tmp_path, lambda *_: None)


CALLER = """
import os, signal, sys
from pathlib import Path
from triaxis.engine.data.tokenizing import Reading, tokenize_apart

def tell(documents, done):
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    print(children, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

tokenize_apart([Path(sys.argv[1])], Reading(tokenizer_path=None, on_bad_sample="error"), Path(sys.argv[2]), tell)
"""


def test_it_ends_with_the_rank_that_asked_for_it(tmp_path: Path) -> None:
    """The rank is killed at the first word. There are more to come than a pipe holds, so the end is never reached."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text":"a"}\n' * 2_500_000)
    caller = subprocess.run(
        [sys.executable, "-c", CALLER, str(path), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert caller.returncode == -signal.SIGKILL
    # Those of its pool, which are not ours to wait for, are looked for by their parent.
    child = Path("/proc") / caller.stdout.split()[0] / "stat"
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    assert not (tmp_path / "entry.json").exists()
