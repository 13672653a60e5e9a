"""The record's file, and what differs between two portraits of a layout, in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Portrait = dict[str, Any]
ROUNDING = {"fp64": 1e-10, "fp32": 1e-5}
"""How far losses and norms may be off where torch itself rounds differently; bf16 is not compared there."""
ROUNDED = ("first loss", "last loss", "evaluation", "norms", "gradients", "weights")
HASHED = "hashed"


def write_record(path: Path, arithmetic: str, portraits: dict[str, Portrait]) -> None:
    """One line for each layout. Hashes by name are stored as one text, with the names once for all layouts."""
    names: list[list[str]] = []
    lines = [
        f"{json.dumps(name)}: {json.dumps({key: _packed(value, names) for key, value in drawn.items()})}"
        for name, drawn in portraits.items()
    ]
    layouts = ",\n".join(lines)
    path.write_text(
        f'{{"arithmetic": "{arithmetic}", "names": {json.dumps(names)}, "layouts": {{\n{layouts}\n}}}}\n'
    )


def read_record(path: Path) -> tuple[str, dict[str, Portrait]]:
    """How the recording machine computed, and the layouts' portraits."""
    document = json.loads(path.read_text())
    names = document["names"]
    layouts = {
        name: {key: _unpacked(value, names) for key, value in drawn.items()}
        for name, drawn in document["layouts"].items()
    }
    return document["arithmetic"], layouts


def _packed(value: object, names: list[list[str]]) -> object:
    if not isinstance(value, dict) or not all(len(h) == 8 for h in value.values()):
        return value
    keys = list(value)
    if keys not in names:
        names.append(keys)
    return {HASHED: names.index(keys), "": " ".join(value.values())}


def _unpacked(value: object, names: list[list[str]]) -> object:
    if not isinstance(value, dict) or HASHED not in value:
        return value
    return dict(zip(names[value[HASHED]], value[""].split(), strict=True))


def differences(recorded: Portrait, found: Portrait, *, exact: bool) -> list[str]:
    """What is not as recorded, a line each. exact: floats are compared bit for bit, else to rounding."""
    lines = []
    for key in sorted((recorded.keys() | found.keys()) - {"digests"}):
        before, now = recorded.get(key), found.get(key)
        dtype, _, field = key.partition(" ")
        if not exact and field in ROUNDED:
            if _near(field, before, now, ROUNDING.get(dtype)):
                continue
        elif before == now:
            continue
        if key == "program" and before and now:
            lines += _programs(recorded, found)
        else:
            lines.append(f"{key}: {_told(before, now)}")
    return lines


def _near(field: str, before: Any, now: Any, bound: float | None) -> bool:  # noqa: ANN401  (any field)
    if bound is None or field in ("gradients", "weights"):
        return True
    pairs = zip(before, now, strict=True) if isinstance(before, list) else [(before, now)]
    for a, b in pairs:
        x, y = (float.fromhex(text.split()[0]) for text in (a, b))
        if not abs(x - y) <= bound * abs(x):
            return False
    return True


def _programs(recorded: Portrait, found: Portrait) -> list[str]:
    """For each changed program: which ranks', and what it does more or less often."""
    ranks: dict[str, list[int]] = {}
    for rank, (before, now) in enumerate(zip(recorded["program"], found["program"], strict=True)):
        if before != now:
            old, new = (set(told["digests"][h].split(", ")) for told, h in ((recorded, before), (found, now)))
            what = f"no more {sorted(old - new)}, now {sorted(new - old)}" if old != new else "order or sizes"
            ranks.setdefault(what, []).append(rank)
    return [f"program of ranks {of}: {what}" for what, of in ranks.items()]


def _told(before: Any, now: Any) -> str:  # noqa: ANN401  (any field)
    if isinstance(before, dict) and isinstance(now, dict):
        changed = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
        missing = [name for name in changed if name not in before or name not in now]
        told = f"{len(changed)} of {len(before)} differ: {', '.join(changed[:3])}" + " …" * (len(changed) > 3)
        return told + (f"; only on one side: {', '.join(missing[:3])}" if missing else "")
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        places = [place for place in range(len(now)) if before[place] != now[place]]
        first = places[0]
        return f"at {places}, first {before[first]} → {now[first]}"
    return f"{before} → {now}"
