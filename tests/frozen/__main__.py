"""Nothing changed that should not have: `python -m tests.frozen compare FILE` against `record FILE` of another commit.

    python -m tests.frozen record FILE         writes what every layout of rows.py does, as hashes and numbers
    python -m tests.frozen compare FILE        prints each difference by layout and field; exit code 1 if there is one
    python -m tests.frozen show NAME [RANK]    the program of a rank, a line for each event, to compare two commits by

`--only NAME` takes one layout (and records it among the others of the file). Floats are compared bit for bit where
torch computes here as it did there; `--rounding` takes losses and norms to rounding, and no hashes of floats.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from tests.frozen.portrait import arithmetic, portrait, programs_of
from tests.frozen.record import differences, read_record, write_record
from tests.frozen.rows import ROWS, Row


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.frozen", description=__doc__)
    parser.add_argument("what", choices=["record", "compare", "show"])
    parser.add_argument("subject", help="the record's file, or the layout's name")
    parser.add_argument("rank", nargs="?", type=int, default=0, help="whose program is shown")
    parser.add_argument("--only", help="one layout's name")
    parser.add_argument("--rounding", action="store_true", help="do not compare floats bit for bit")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.what == "show":
        print("\n".join(programs_of(_chosen(given.subject)[0])[given.rank].lines))
        return 0
    rows = _chosen(given.only)
    path = Path(given.subject)
    if given.what == "record":
        earlier = read_record(path)[1] if given.only else {}
        write_record(path, arithmetic(), earlier | {row.name: _drawn(row) for row in rows})
        return 0
    return _compare(path, rows, rounding=given.rounding)


def _chosen(name: str | None) -> tuple[Row, ...]:
    rows = tuple(row for row in ROWS if name in (None, row.name))
    if not rows:
        sys.exit(f"a layout must be one of these, but is {name!r}:\n" + "\n".join(row.name for row in ROWS))
    return rows


def _drawn(row: Row) -> dict[str, object]:
    print(f"{row.name} …", file=sys.stderr, flush=True)
    return portrait(row)


def _compare(path: Path, rows: tuple[Row, ...], *, rounding: bool) -> int:
    computed, recorded = read_record(path)
    exact = computed == arithmetic() and not rounding
    if not exact and not rounding:
        print(
            "torch computes differently here: losses and norms are compared to rounding, hashes of floats not"
        )
    found = 0
    for row in rows:
        lines = differences(recorded.get(row.name, {}), _drawn(row), exact=exact)
        found += len(lines)
        for line in lines:
            print(f"{row.name}: {line}", flush=True)
    print(f"{len(rows)} layouts, {found} differences")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
