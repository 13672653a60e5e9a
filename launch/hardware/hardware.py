"""What an accelerator and its links can do: presets by name, or a TOML file. Standard library only."""

from __future__ import annotations

import difflib
import itertools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

from triaxis.models.reading import read_small_file

_FOLDER = Path(__file__).parent
_CURVE_FLOPS = tuple(10.0**exponent for exponent in range(6, 16))
MEASURED = "measured"

MOST_PER_NODE = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection. latency_s: seconds a hop; bytes_per_s: in each direction, as reached."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What training reaches of a generation's data sheet; meanings are in constants.toml."""

    matmul_fraction: float
    matmul_half_flops: float
    attention_fraction: float
    memory_fraction: float
    exposed_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One accelerator and the node around it.

    memory_bytes: capacity; memory_bytes_per_s: as reached by kernels
    peak_flops: dense FLOP/s by "bf16", "fp16", "fp32", "fp64", "fp8", "fp4" (those that it has)
    launch_overhead_s: per kernel
    intra: per accelerator inside the node; inter: per network card (nics_per_node of them)
    efficiency: (FLOPs of a matrix product, share of the peak reached), ascending
    generation, constants: what training reaches of it; switched: False where a pair inside a node has only its link
    sustained: share of the peaks' clock that its power allows in long runs
    context_bytes: what a rank's process holds besides its model's tensors (the interpreter, torch, data, groups), where
    that was measured: on CPUs, by doctor; None: the software's own account
    """

    name: str
    source: str
    memory_bytes: float
    memory_bytes_per_s: float
    peak_flops: Mapping[str, float]
    launch_overhead_s: float
    gpus_per_node: int
    nics_per_node: int
    intra: Link
    inter: Link
    efficiency: tuple[tuple[float, float], ...]
    constants: Constants
    generation: str = MEASURED
    sustained: float = 1.0
    switched: bool = True
    context_bytes: float | None = None

    def peak(self, dtype: str) -> float:
        """Dense FLOP/s in `dtype`; ValueError where the accelerator has no such unit."""
        if dtype not in self.peak_flops:
            raise ValueError(
                f"`dtype` must be one of {', '.join(self.peak_flops)} on {self.name}, but is {dtype!r}"
            )
        return self.peak_flops[dtype]

    def matmul_seconds(self, flops: float, dtype: str) -> float:
        """Time of a matrix product of `flops` FLOPs, launch excluded."""
        if flops <= 0:
            return 0.0
        return flops / (self.rate(dtype) * self.matmul_fraction(flops))

    def rate(self, dtype: str) -> float:
        """FLOP/s in `dtype` at the clock of long runs."""
        return self.peak(dtype) * self.sustained

    def matmul_fraction(self, flops: float) -> float:
        """Share of the peak that a product of `flops` FLOPs reaches: the curve, linear in log FLOPs."""
        curve = self.efficiency
        if flops <= curve[0][0]:
            return curve[0][1] * flops / curve[0][0]
        for (low, at_low), (high, at_high) in itertools.pairwise(curve):
            if flops <= high:
                share = math.log(flops / low) / math.log(high / low)
                return at_low + share * (at_high - at_low)
        return curve[-1][1]

    def memory_seconds(self, nbytes: float) -> float:
        """Time to move `nbytes` between the memory and the cores."""
        return nbytes / self.memory_bytes_per_s


@cache
def _table(name: str) -> dict[str, dict[str, object]]:
    return tomllib.loads((_FOLDER / name).read_text(encoding="utf-8"))


def hardware_names() -> tuple[str, ...]:
    """The presets."""
    return tuple(_table("hardware.toml"))


@cache
def constants_of(generation: str) -> Constants:
    """The constants of a generation; ValueError if there is none of that name."""
    table = _table("constants.toml")
    if generation not in table:
        raise ValueError(
            f"`generation` must be one of {', '.join(table)}, but is {generation!r}{_nearest(generation, table)}"
        )
    return Constants(**{key: _number(value, key, generation) for key, value in table[generation].items()})


@cache
def load_hardware(name_or_path: str) -> Hardware:
    """A preset by name, or a TOML file's hardware; ValueError for an unknown name or a wrong file."""
    presets = _table("hardware.toml")
    if name_or_path in presets:
        return _of_sheet({**presets[name_or_path], "name": name_or_path}, f"hardware {name_or_path}")
    path = Path(name_or_path)
    if path.suffix != ".toml":
        raise ValueError(
            f"`hardware` must be a TOML file or one of {', '.join(presets)}, "
            f"but is {name_or_path!r}{_nearest(name_or_path, presets)}"
        )
    try:
        values = tomllib.loads(read_small_file(path, "hardware"))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"`hardware` must name a readable TOML file, but is {name_or_path!r}: {error}; "
            "write one with `triaxis doctor`"
        ) from error
    values.setdefault("name", path.stem)
    values.setdefault("source", str(path))
    base = values.pop("base", None)
    if base is not None:
        if base not in presets:
            raise ValueError(
                f"{name_or_path}: `base` must be one of {', '.join(presets)}, "
                f"but is {base!r}{_nearest(str(base), presets)}"
            )
        values = _over(values, presets[str(base)])
    if values.get("generation", MEASURED) != MEASURED and "efficiency" not in values:
        return _of_sheet(values, name_or_path)  # a preset, copied or changed: its figures are a data sheet's
    return _hardware(values, name_or_path)


def _over(values: Mapping[str, object], base: Mapping[str, object]) -> dict[str, object]:
    """A preset's fields with those of a file in their place; of a link or the peaks, with those that are given."""
    merged = dict(base)
    for key, value in values.items():
        before = merged.get(key)
        merged[key] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    return merged


def _of_sheet(values: Mapping[str, object], origin: str) -> Hardware:
    """Hardware whose figures are a data sheet's, cut to what its generation reaches."""
    generation = _text(values["generation"], "generation", origin)
    return reach(_hardware({**values, "efficiency": [[1.0, 1.0]]}, origin), constants_of(generation))


def reach(sheet: Hardware, constants: Constants) -> Hardware:
    """Hardware as its data sheet has it, cut to what `constants` say that training reaches."""
    return replace(
        sheet,
        memory_bytes_per_s=sheet.memory_bytes_per_s * constants.memory_fraction,
        efficiency=tuple(
            (flops, constants.matmul_fraction * flops / (flops + constants.matmul_half_flops))
            for flops in _CURVE_FLOPS
        ),
        constants=constants,
    )


def _hardware(values: Mapping[str, object], origin: str) -> Hardware:
    _check_keys(values, Hardware, origin)
    generation = _text(values.get("generation", MEASURED), "generation", origin)
    switched = values.get("switched", True)
    if not isinstance(switched, bool):
        raise ValueError(f"{origin}: `switched` must be true or false, but is {switched!r}")
    context = values.get("context_bytes")
    return Hardware(
        name=_text(values["name"], "name", origin),
        source=_text(values["source"], "source", origin),
        memory_bytes=_number(values["memory_bytes"], "memory_bytes", origin, positive=True),
        memory_bytes_per_s=_number(values["memory_bytes_per_s"], "memory_bytes_per_s", origin, positive=True),
        peak_flops=_peaks(values["peak_flops"], origin),
        launch_overhead_s=_number(values["launch_overhead_s"], "launch_overhead_s", origin),
        gpus_per_node=_count(values["gpus_per_node"], "gpus_per_node", origin),
        nics_per_node=_count(values["nics_per_node"], "nics_per_node", origin),
        intra=_link(values["intra"], "intra", origin),
        inter=_link(values["inter"], "inter", origin),
        efficiency=_curve(values["efficiency"], origin),
        constants=constants_of(generation),
        generation=generation,
        sustained=_number(values.get("sustained", 1.0), "sustained", origin, positive=True),
        switched=switched,
        context_bytes=None if context is None else _number(context, "context_bytes", origin),
    )


def _check_keys(values: Mapping[str, object], of: type[Hardware] | type[Link], origin: str) -> None:
    known = {field.name: field for field in fields(of) if field.name != "constants"}
    for key in values:
        if key not in known:
            raise ValueError(
                f"{origin}: `{key}` must be a field of {of.__name__.lower()}, but is none"
                f"{_nearest(key, known)}; allowed: {', '.join(known)}"
            )
    missing = [key for key, field in known.items() if field.default is MISSING and key not in values]
    if missing:
        raise ValueError(f"{origin}: `{missing[0]}` must be given, but is missing; add {', '.join(missing)}")


def _peaks(value: object, origin: str) -> Mapping[str, float]:
    if not isinstance(value, dict) or not value:
        raise ValueError(
            f"{origin}: `peak_flops` must be a table such as {{ bf16 = 312e12 }}, but is {value!r}"
        )
    allowed = ("bf16", "fp16", "fp32", "fp64", "fp8", "fp4")
    for key in value:
        if key not in allowed:
            raise ValueError(
                f"{origin}: `peak_flops` must have keys out of {', '.join(allowed)}, but has {key!r}"
            )
    return MappingProxyType(
        {key: _number(flops, f"peak_flops.{key}", origin, positive=True) for key, flops in value.items()}
    )


def _link(value: object, field: str, origin: str) -> Link:
    if not isinstance(value, dict):
        raise ValueError(
            f"{origin}: `{field}` must be a table with latency_s and bytes_per_s, but is {value!r}"
        )
    _check_keys(value, Link, f"{origin}, `{field}`")
    return Link(
        latency_s=_number(value["latency_s"], f"{field}.latency_s", origin),
        bytes_per_s=_number(value["bytes_per_s"], f"{field}.bytes_per_s", origin, positive=True),
    )


def _curve(value: object, origin: str) -> tuple[tuple[float, float], ...]:
    rule = "a list of [FLOPs, share of the peak] with FLOPs ascending and shares above 0"
    pairs = value if isinstance(value, list) else []
    if not pairs or any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
        raise ValueError(f"{origin}: `efficiency` must be {rule}, but is {value!r}")
    curve = tuple(
        (
            _number(flops, "efficiency", origin, positive=True),
            _number(share, "efficiency", origin, positive=True),
        )
        for flops, share in pairs
    )
    if any(low[0] >= high[0] for low, high in itertools.pairwise(curve)):
        raise ValueError(f"{origin}: `efficiency` must be {rule}, but is {value!r}")
    return curve


def _number(value: object, field: str, origin: str, *, positive: bool = False) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or float(value) < 0 or (positive and float(value) == 0):  # type: ignore[arg-type]
        rule = "above 0" if positive else "at least 0"
        raise ValueError(f"{origin}: `{field}` must be a number {rule}, but is {value!r}")
    return float(value)  # type: ignore[arg-type]


def _count(value: object, field: str, origin: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_PER_NODE:
        raise ValueError(
            f"{origin}: `{field}` must be a whole number from 1 to {MOST_PER_NODE:,}, but is {str(value)[:40]}"
        )
    return value


def _text(value: object, field: str, origin: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{origin}: `{field}` must be a text, but is {value!r}")
    if not value.isprintable() or (field == "name" and {*"[]"} & {*value}):
        raise ValueError(f"{origin}: `{field}` must be printable text without [ and ], but is {value[:40]!r}")
    return value


def _nearest(name: str, known: Mapping[str, object]) -> str:
    begin_so = [one for one in known if one.startswith(name.lower())]
    near = begin_so or difflib.get_close_matches(name, known, n=1)
    return f"; nearest: {' or '.join(near)}" if near else ""
