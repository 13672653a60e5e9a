"""How fast this machine is: matrix products, memory, launches and collectives, on all its ranks at once."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import torch

from triaxis.launch.hardware.context import measure_context
from triaxis.parallel.worlds.group import Group
from triaxis.parallel.worlds.process import open_process_world

GPU_SIZES = (256, 512, 1024, 2048, 4096, 8192)
CPU_SIZES = (32, 64, 128, 256, 512, 1024)
GPU_DTYPES = ("bf16", "fp16", "fp32", "fp64")
CPU_DTYPES = ("fp32", "fp64", "bf16")
TORCH_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
MIN_REPEATS = 3
TRIES = 5
LONGEST = 0.5
"""Seconds of one product that are worth their while, however short the measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What one rank reaches while all others work too.

    products: (dtype, FLOPs of a square product) → FLOP/s; the first dtype is the one trained in
    collectives: (operation, bytes of the whole tensor) → seconds; empty for a rank alone
    context_bytes: of a rank's process besides its model's tensors; None on GPUs
    """

    device: str
    ranks: int
    memory_bytes: float
    memory_bytes_per_s: float
    launch_overhead_s: float
    products: dict[tuple[str, float], float]
    collectives: dict[tuple[str, float], float]
    context_bytes: float | None = None


def default_ranks() -> int:
    """One a GPU, or without GPUs one a core, eight at most."""
    return torch.cuda.device_count() or min(8, os.cpu_count() or 1)


def measure_machine(ranks: int, seconds: float) -> Rates:
    """Starts a process for each rank and measures for about `seconds`. Raises RuntimeError if a rank fails.

    Without GPUs also the memory that a rank has before it has a model, by a short run (some seconds more).
    """
    rates = _measure_rates(ranks, seconds)
    return rates if torch.cuda.is_available() else replace(rates, context_bytes=measure_context(ranks))


def _measure_rates(ranks: int, seconds: float) -> Rates:
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, ranks, f"file://{folder}/store", seconds) for rank in range(ranks)]
        if ranks == 1:
            return _measure_rank(*arguments[0])
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(max_workers=ranks, mp_context=context) as pool:
            return _mean(
                [future.result() for future in [pool.submit(_measure_rank, *each) for each in arguments]]
            )


def _mean(found: list[Rates]) -> Rates:
    """Rates of all ranks as one: the mean of each."""
    first = found[0]
    return Rates(
        device=first.device,
        ranks=first.ranks,
        memory_bytes=min(rates.memory_bytes for rates in found),
        memory_bytes_per_s=statistics.fmean(rates.memory_bytes_per_s for rates in found),
        launch_overhead_s=statistics.fmean(rates.launch_overhead_s for rates in found),
        products={key: statistics.fmean(rates.products[key] for rates in found) for key in first.products},
        collectives={
            key: statistics.fmean(rates.collectives[key] for rates in found) for key in first.collectives
        },
    )


def _measure_rank(rank: int, size: int, store: str, seconds: float) -> Rates:
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    world = open_process_world(
        rank=rank,
        size=size,
        local_rank=rank,
        timeout_seconds=60,
        init_method=store if size > 1 else None,
    )
    try:
        group = world.new_group("world", [range(size)])
        sizes, dtypes = (GPU_SIZES, GPU_DTYPES) if on_gpu else (CPU_SIZES, CPU_DTYPES)
        slot = seconds / 2 / (len(sizes) * len(dtypes) + 2)
        products = {}
        for dtype in dtypes:
            for n in sizes:
                taken = _slowest(group, _product_seconds(n, dtype, world.device, slot))
                products[dtype, 2.0 * n**3] = 2.0 * n**3 / taken
                if 8 * taken > max(slot, LONGEST):  # the next size takes eight times as long
                    break
        group.barrier()
        bandwidth = _copy_rate(world.device, slot)
        group.barrier()
        launch = _launch_seconds(world.device, slot)
        return Rates(
            device=_device_name(world.device),
            ranks=size,
            memory_bytes=_memory_bytes(world.device, size),
            memory_bytes_per_s=bandwidth,
            launch_overhead_s=launch,
            products=products,
            collectives=_collectives(group, world.device, seconds / 2),
        )
    finally:
        world.close()


def _slowest(group: Group, seconds: float) -> float:
    """The longest of all ranks' times, so that all go on alike."""
    longest = torch.tensor([seconds], dtype=torch.float64)
    longest = longest.to("cuda") if torch.cuda.is_available() else longest
    group.all_reduce(longest, largest=True)
    return float(longest)


def _product_seconds(n: int, dtype: str, device: torch.device, slot: float) -> float:
    one = torch.randn(n, n, device=device).to(TORCH_DTYPES[dtype])
    other, result = one.clone(), torch.empty_like(one)
    return _seconds(lambda: torch.mm(one, other, out=result), device, slot)


def _copy_rate(device: torch.device, slot: float) -> float:
    """Bytes read and written in a second by a copy that no cache holds."""
    count = (1 << 28) if device.type == "cuda" else (1 << 24)
    source = torch.zeros(count, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source), device, slot)


def _launch_seconds(device: torch.device, slot: float) -> float:
    """Time of an operation on next to nothing."""
    tiny = torch.zeros(8, device=device)

    def many() -> None:
        for _ in range(200):
            tiny.add_(1.0)

    return _seconds(many, device, slot) / 200


def _collectives(group: Group, device: torch.device, seconds: float) -> dict[tuple[str, float], float]:
    if group.size == 1:
        return {}
    largest = 1 << 28 if device.type == "cuda" else 1 << 24
    byte_counts = [largest >> shift for shift in (16, 10, 6, 3, 0)]
    slot = seconds / (len(byte_counts) * len(COLLECTIVES))
    found = {}
    for nbytes in byte_counts:
        share = nbytes // 4 // group.size
        whole = torch.zeros(share * group.size, device=device)
        shard = torch.zeros(share, device=device)
        for operation, run in (
            ("all_reduce", lambda whole=whole: group.all_reduce(whole)),
            ("all_gather", lambda whole=whole, shard=shard: group.all_gather(whole, shard)),
            ("reduce_scatter", lambda whole=whole, shard=shard: group.reduce_scatter(shard, whole)),
        ):
            found[operation, float(whole.nbytes)] = _agreed_seconds(group, run, device, slot)
    return found


def _agreed_seconds(group: Group, run: Callable[[], object], device: torch.device, slot: float) -> float:
    """Mean seconds of a collective, repeated as often as rank 0 finds fits the slot: all must repeat alike."""
    run()
    group.barrier()
    once = _timed(run, device, MIN_REPEATS)
    count = torch.tensor([float(max(MIN_REPEATS, min(500, int(slot / max(once, 1e-6)))))], device=device)
    group.broadcast(count, 0)
    return min(_timed(run, device, max(1, int(count) // 3)) for _ in range(3))


def _seconds(run: Callable[[], object], device: torch.device, slot: float) -> float:
    """Seconds of one call: the best of several tries over the slot, as what else runs can only add to it."""
    first = _timed(run, device, 1)
    once = min(_timed(run, device, 1) for _ in range(1 if first > slot else 5))
    repeats = max(1, int(slot / TRIES / max(once, 1e-7)))
    return min(once, *(_timed(run, device, repeats) for _ in range(TRIES if TRIES * once < slot else 1)))


def _timed(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    _synchronize(device)
    return (time.perf_counter() - start) / repeats


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _memory_bytes(device: torch.device, ranks: int) -> float:
    """Of the device, or this rank's part of the machine's."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
