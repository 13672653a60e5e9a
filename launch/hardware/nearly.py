"""Hardware that is a preset but for its network, as a flag says it."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from typing import Final

from triaxis.launch.hardware.hardware import Hardware

REACHED: Final = 0.94
"""Of a network card's line rate."""
_UNITS: Final = {
    "Gb/s": 1e9 / 8,
    "GB/s": 1e9,
    "Mb/s": 1e6 / 8,
    "MB/s": 1e6,
    "Gbit/s": 1e9 / 8,
    "Gbps": 1e9 / 8,
}


def line_rate(text: str) -> float:
    """`100Gb/s` or `12.5GB/s` as bytes a second, for a command line."""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([A-Za-z/]+)", text, re.ASCII)
    rate = float(found[1]) * _UNITS.get(found[2], 0.0) if found else 0.0
    if rate <= 0:
        raise argparse.ArgumentTypeError(
            f"must be a network card's line rate such as 100Gb/s or 12.5GB/s, but is {text[:40]!r}"
        )
    return rate


def with_network(hardware: Hardware, bytes_per_s: float | None) -> Hardware:
    """The same accelerators behind network cards of this line rate; None: as they are."""
    if bytes_per_s is None:
        return hardware
    return replace(hardware, inter=replace(hardware.inter, bytes_per_s=REACHED * bytes_per_s))
