"""What others publish for models of such sizes: facts out of data/recommended.csv, for comparison. No torch."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parent / "data" / "recommended.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """A published layout. zeros: not said; fsdp: parameters sharded over what is left"""

    source: str
    model: str
    parameters_b: float
    gpu: str
    dtype: str
    gpus: int
    seq: int
    tp: int
    pp: int
    cp: int
    ep: int
    virtual_stages: int
    microbatch: int
    fsdp: bool

    @property
    def dp(self) -> int:
        """What is left of the accelerators; experts are carved out of it."""
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def text(self) -> str:
        """`llama3 70b on h100 bf16, cp2: NVIDIA NeMo recipes`."""
        more = [f"cp{self.cp}"] * (self.cp > 1) + [f"ep{self.ep}"] * (self.ep > 1) + ["FSDP"] * self.fsdp
        where = " ".join(part for part in (self.gpu, self.dtype) if part)
        return f"{self.model}{f' on {where}' if where else ''}{', ' + ', '.join(more) if more else ''}: {self.source}"

    def as_json(self) -> dict[str, Any]:
        """Its fields and dp."""
        names = ("source", "model", "gpu", "dtype", "gpus", "seq", "tp", "pp", "cp", "ep", "virtual_stages")
        return {"dp": self.dp, **{name: getattr(self, name) for name in (*names, "microbatch", "fsdp")}}


@cache
def recommendations() -> tuple[Recommendation, ...]:
    """All of the file's rows."""
    with _FILE.open(encoding="utf-8", newline="") as file:
        return tuple(_read(row) for row in csv.DictReader(file))


def _read(row: dict[str, str]) -> Recommendation:
    numbers = {
        name: int(row[name] or 0)
        for name in ("gpus", "seq", "tp", "pp", "cp", "ep", "virtual_stages", "microbatch")
    }
    return Recommendation(
        source=row["source"],
        model=row["model"],
        parameters_b=float(row["parameters_b"]),
        gpu=row["gpu"],
        dtype=row["dtype"],
        fsdp=row["fsdp"] == "1",
        **numbers,
    )


def nearest(parameters: float, gpus: int, most: int = 3) -> tuple[Recommendation, ...]:
    """Those for models of about this size (a factor of 1.3), nearest in accelerators first; one a model and source."""
    alike = [one for one in recommendations() if 1 / 1.3 <= one.parameters_b * 1e9 / parameters <= 1.3]
    alike.sort(key=lambda one: (max(one.gpus / gpus, gpus / one.gpus), one.dtype != "bf16"))
    found: dict[tuple[str, str], Recommendation] = {}
    for one in alike:
        found.setdefault((one.source, one.model), one)
    return tuple(found.values())[:most]
