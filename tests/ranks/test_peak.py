"""The memory that a CPU rank reports is its own, and what it frees is given back."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from triaxis.engine.run.peak import give_back_freed_memory, peak_memory_bytes

MIB = 1 << 20
ON_GLIBC = sys.platform == "linux" and not torch.cuda.is_available()
CHURN = """
import re, sys, torch
from pathlib import Path
from triaxis.engine.run.peak import give_back_freed_memory

def resident():
    return int(re.search(r"VmRSS:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

if sys.argv[1] == "settled":
    assert give_back_freed_memory({})
torch.ones(7 << 20)  # freed: from now on glibc would cut what is smaller from its heap
before = resident()
made, kept = [], []
for _ in range(40):
    made.append(torch.ones(1 << 20))
    kept.append(torch.ones(16 << 10))  # pins the heap above
made.clear()
print(resident() - before)
"""


def grown(mode: str) -> int:
    """Bytes that a process has more after 40 tensors of 4 MiB came and went among small ones that stay."""
    command = [sys.executable, "-c", CHURN, mode]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(not ON_GLIBC, reason="a CPU rank's allocator is glibc's")
def test_what_is_freed_is_given_back() -> None:
    assert grown("settled") < 10 * MIB
    assert grown("as it is") > 100 * MIB, "then nothing needs to be settled"


def test_an_environment_that_settles_it_has_the_last_word() -> None:
    assert not give_back_freed_memory({"MALLOC_ARENA_MAX": "2"})
    assert not give_back_freed_memory({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"})


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is getrusage alone")
def test_a_rank_does_not_report_what_its_parent_held() -> None:
    large = torch.ones(600 * MIB // 4)
    own = peak_memory_bytes(torch.device("cpu"))
    assert own > 600 * MIB
    told = subprocess.run(
        [
            sys.executable,
            "-c",
            "import torch; from triaxis.engine.run.peak import peak_memory_bytes as p; print(p(torch.device('cpu')))",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(told.stdout) < own - large.nbytes / 2
