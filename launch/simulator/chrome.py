"""The simulation as a trace for Perfetto and chrome://tracing.

The format is the Trace Event Format's array of events: "M" names a process or a thread, "X" is a span
(ts, dur in microseconds), "C" a counter. A process is a rank of the timeline, a thread one of its lanes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def write_trace(simulation: Mapping[str, Any], path: Path) -> None:
    """Writes the JSON file. OSError as `Path.write_text`."""
    content = {
        "displayTimeUnit": "ms",
        "otherData": {**simulation["run"], **simulation["topology"]},
        "traceEvents": [*_spans(simulation), *_memory(simulation)],
    }
    path.write_text(json.dumps(content, allow_nan=False, separators=(",", ":")), encoding="utf-8")


def _spans(simulation: Mapping[str, Any]) -> Iterator[Event]:
    for order, row in enumerate(simulation["timeline"]["rows"]):
        rank = row["rank"]
        alike = f", and {row['ranks'] - 1:,} alike" if row["ranks"] > 1 else ""
        yield _named("process_name", rank, name=f"rank {rank} ({row['place']}){alike}")
        yield _named("process_sort_index", rank, sort_index=order)
        for thread, lane in enumerate(["compute", *row["lanes"]]):
            yield _named("thread_name", rank, thread, name=lane)
            yield _named("thread_sort_index", rank, thread, sort_index=thread)
        for start, end, action in row["compute"]:
            yield _span(rank, 0, action, "compute", start, end)
        for thread, (axis, spans) in enumerate(row["lanes"].items(), start=1):
            for start, end in spans:
                yield _span(rank, thread, axis, "communication", start, end)


def _memory(simulation: Mapping[str, Any]) -> Iterator[Event]:
    """Gigabytes by kind, where the timeline shows the rank."""
    shown = {row["rank"] for row in simulation["timeline"]["rows"]}
    for curve in simulation["memory"]["curves"]:
        if curve["rank"] not in shown:
            continue
        for at, seconds in enumerate(curve["seconds"]):
            sizes = {kind: values[at] / 1e9 for kind, values in curve["bytes"].items()}
            yield {"ph": "C", "pid": curve["rank"], "name": "memory (GB)", "ts": seconds * 1e6, "args": sizes}


def _named(what: str, process: int, thread: int = 0, **value: str | int) -> Event:
    return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": value}


def _span(process: int, thread: int, name: str, category: str, start: float, end: float) -> Event:
    """start, end: seconds."""
    times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
    return {"ph": "X", "pid": process, "tid": thread, "name": name, "cat": category, **times}
