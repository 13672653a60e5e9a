"""Measured rates as hardware: the links' latency and bandwidth that explain them, and a TOML file of it all."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy

from triaxis.launch.hardware.collectives import BASE_SECONDS
from triaxis.launch.hardware.hardware import Link

ONE_RANK_LINK = Link(latency_s=0.0, bytes_per_s=1e12)
"""Where a rank is alone there is nobody to talk to; never used, but a file of hardware must have a link."""


def fit_link(collectives: Mapping[tuple[str, float], float], ranks: int) -> Link:
    """The α and β of collectives.py's ring that come nearest to the measured seconds, each weighed by its own size.

    all-gather and reduce-scatter cost (n-1)·α + (n-1)/n·S/β, all-reduce twice that, each after a fixed start.
    """
    if not collectives:
        return ONE_RANK_LINK
    rows, weights = [], []
    for (operation, nbytes), seconds in collectives.items():
        passes = 2.0 if operation == "all_reduce" else 1.0
        rows.append([passes * (ranks - 1), passes * (ranks - 1) / ranks * nbytes])
        weights.append(1.0 / seconds)
    matrix = numpy.array(rows) * numpy.array(weights)[:, None]
    target = 1.0 - BASE_SECONDS * numpy.array(weights)
    alpha, inverse = numpy.linalg.lstsq(matrix, target, rcond=None)[0]
    if alpha <= 0:  # latency below the fixed start: bandwidth alone
        alpha, inverse = 0.0, float(matrix[:, 1] @ target / (matrix[:, 1] @ matrix[:, 1]))
    return Link(latency_s=float(alpha), bytes_per_s=1.0 / max(float(inverse), 1e-15))


def curve(products: Mapping[tuple[str, float], float], dtype: str) -> tuple[float, list[tuple[float, float]]]:
    """The best FLOP/s in `dtype`, and the share of it that products reach, never falling with their FLOPs."""
    rates = sorted((flops, rate) for (kind, flops), rate in products.items() if kind == dtype)
    peak = max(rate for _, rate in rates)
    shares, best = [], 0.0
    for flops, rate in rates:
        best = max(best, rate / peak)
        shares.append((flops, best))
    return peak, shares


def hardware_toml(
    *,
    name: str,
    source: str,
    memory_bytes: float,
    memory_bytes_per_s: float,
    launch_overhead_s: float,
    products: Mapping[tuple[str, float], float],
    collectives: Mapping[tuple[str, float], float],
    ranks: int,
    context_bytes: float | None = None,
) -> str:
    """A file that load_hardware takes. The network between machines is not measured: it gets the links inside."""
    dtypes = list(dict.fromkeys(dtype for dtype, _ in products))
    link = fit_link(collectives, ranks)
    peaks = ", ".join(f"{dtype} = {_text(curve(products, dtype)[0])}" for dtype in dtypes)
    efficiency = curve(products, dtypes[0])[1]
    written = f"{{ latency_s = {_text(link.latency_s)}, bytes_per_s = {_text(link.bytes_per_s)} }}"
    lines = [
        "# Written by `triaxis doctor`; `plan` and `simulate` take it with --hardware.",
        f"name = {_quoted(name)}",
        f"source = {_quoted(source)}",
        f"memory_bytes = {_text(memory_bytes)}",
        *_context(context_bytes),
        f"memory_bytes_per_s = {_text(memory_bytes_per_s)}",
        f"launch_overhead_s = {_text(launch_overhead_s)}",
        f"gpus_per_node = {ranks}",
        f"nics_per_node = {ranks}",
        "# best FLOP/s seen; dtype of the curve below first",
        f"peak_flops = {{ {peaks} }}",
        "# [FLOPs of a product, share of the best]",
        "efficiency = [",
        *(f"    [{_text(flops)}, {_text(share)}]," for flops, share in efficiency),
        "]",
        f"intra = {written}",
        "# not measured: the links inside, until you write your network's here (per card and direction)",
        f"inter = {written}",
    ]
    return "\n".join(lines) + "\n"


def _context(nbytes: float | None) -> tuple[str, ...]:
    if nbytes is None:
        return ()
    return (
        "# of a rank's process besides its model's tensors: a run of a model that is next to nothing",
        f"context_bytes = {_text(nbytes)}",
    )


def _text(value: float) -> str:
    """Four digits, as TOML reads floats: 1.234e+09."""
    if value == 0 or not math.isfinite(value):
        return "0.0"
    return f"{value:.4g}" if 0.01 <= abs(value) < 1e4 and value != int(value) else f"{value:.3e}"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
