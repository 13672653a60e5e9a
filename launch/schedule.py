"""Draws a pipeline schedule: python -m triaxis.launch.schedule --schedule 1f1b --pp 4 --microbatches 8"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from triaxis.parallel.pipeline.check import check
from triaxis.parallel.pipeline.draw import draw, summary, svg
from triaxis.parallel.pipeline.schedule import ScheduleName, make_schedule


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        """One line, without the usage."""
        self.exit(2, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m triaxis.launch.schedule",
        description="Draws which pipeline rank computes what and when, with the time lost to waiting "
        "(the bubble) and the microbatches whose activations each rank holds at once. Needs no GPU.",
    )
    names = [str(name) for name in ScheduleName]
    parser.add_argument(
        "--schedule", choices=names, default="1f1b", help="the schedule (default: %(default)s)"
    )
    parser.add_argument("--pp", type=int, default=4, help="pipeline ranks (default: %(default)s)")
    parser.add_argument(
        "--microbatches",
        type=int,
        default=8,
        help="microbatches of one optimizer step (default: %(default)s)",
    )
    parser.add_argument(
        "--virtual-stages",
        "--virtual_stages",
        type=int,
        help="chunks of layers per rank (default: 2 if interleaved)",
    )
    parser.add_argument(
        "--forward-time",
        "--forward_time",
        type=int,
        default=1,
        help="time of a chunk's forward (default: %(default)s)",
    )
    parser.add_argument(
        "--backward-time",
        "--backward_time",
        type=int,
        default=2,
        help="time of its backward (default: %(default)s)",
    )
    parser.add_argument(
        "--colour",
        choices=("auto", "always", "never"),
        default="auto",
        help="colours in the terminal (default: %(default)s)",
    )
    parser.add_argument(
        "--svg", type=Path, nargs="?", const=Path("schedule.svg"), metavar="FILE",
        help="also write the picture to FILE (schedule.svg if no FILE is given)",
    )  # fmt: skip
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if min(options.forward_time, options.backward_time) < 1:
        parser.error("`--forward-time` and `--backward-time` must be at least 1")
    virtual_stages = options.virtual_stages
    if virtual_stages is None:
        virtual_stages = 2 if options.schedule == ScheduleName.INTERLEAVED else 1
    coloured = sys.stdout.isatty() if options.colour == "auto" else options.colour == "always"
    forward, backward = options.forward_time, options.backward_time
    try:
        schedule = make_schedule(options.schedule, options.pp, options.microbatches, virtual_stages)
        check(schedule)
        print(draw(schedule, coloured=coloured, forward=forward, backward=backward))
        print(summary(schedule, forward=forward, backward=backward))
        if options.svg is not None:
            options.svg.write_text(svg(schedule, forward=forward, backward=backward), encoding="utf-8")
            print(f"wrote {options.svg.resolve()}")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
