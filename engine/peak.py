"""What the device could do at most: the denominator of MFU.

GPU figures are the makers' dense 16-bit tensor-core peaks (data sheets of A100, H100/H800/H200, B200, MI300X).
"""

from __future__ import annotations

import time

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


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this rank had at once: allocated on a GPU, resident of the process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource  # noqa: PLC0415  (not on every platform)

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
