"""What the device could do at most, the denominator of MFU; the most memory a rank had, and what keeps it small.

GPU figures are the makers' dense 16-bit tensor-core peaks (data sheets of A100, H100/H800/H200, B200, MI300X).
"""

from __future__ import annotations

import ctypes
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch

GPU_PEAK_FLOPS = {
    "A100": 312e12,
    "H100": 989e12,
    "H800": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "MI300X": 1307e12,
}
MEASURED_SIZE = 512
MEASURED_SECONDS = 0.2
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # numbers of mallopt's options in glibc's malloc.h
OWN_MAPPING_BYTES, KEPT_FREE_BYTES = 1 << 20, 1 << 24


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s of one rank's device: from the table for a GPU (None if unknown), measured by products on a CPU."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return next((peak for key, peak in GPU_PEAK_FLOPS.items() if key in name), None)
    a = torch.ones(MEASURED_SIZE, MEASURED_SIZE, dtype=dtype)
    out = a @ a
    best = 0.0
    stop = time.perf_counter() + MEASURED_SECONDS
    while time.perf_counter() < stop:
        start = time.perf_counter()
        torch.mm(a, a, out=out)
        best = max(best, 2 * MEASURED_SIZE**3 / (time.perf_counter() - start))
    return best


def give_back_freed_memory(environment: Mapping[str, str]) -> bool:
    """Has glibc map every tensor of 1 MiB or more by itself, so that a CPU rank holds what its tensors take.

    By default glibc raises the limit up to 32 MiB and cuts tensors from a heap that aligned blocks fragment: a rank
    held up to 40% more, and other bytes in each run. Pages are made again: steps take 0 to 4% longer, with recompute
    and large microbatches 7 to 14%. False, and nothing is done, where ranks are on GPUs, where there is no glibc, or
    where the environment settles it (MALLOC_…, GLIBC_TUNABLES).
    """
    settled_outside = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in environment)
    if settled_outside or torch.cuda.is_available():
        return False
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is None or not hasattr(library, "gnu_get_libc_version"):
        return False
    settled = library.mallopt(MMAP_THRESHOLD, OWN_MAPPING_BYTES)
    return bool(settled and library.mallopt(TRIM_THRESHOLD, KEPT_FREE_BYTES))


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this rank had at once: allocated on a GPU, resident of the process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    # getrusage would count what a parent held before it became this program
    status = Path("/proc/self/status")
    peak = re.search(r"^VmHWM:\s*(\d+) kB", status.read_text(), re.MULTILINE) if status.exists() else None
    if peak is not None:
        return int(peak[1]) * 1024
    import resource  # noqa: PLC0415  (not on every platform)

    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held if sys.platform == "darwin" else held * 1024
