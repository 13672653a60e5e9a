"""Draws a pipeline schedule: python -m triaxis.launch.schedule --schedule 1f1b --pp 4 --microbatches 8"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from triaxis.launch.command_line import Parser, one_of, whole, within
from triaxis.launch.ending import Exit, refuse, run_command
from triaxis.launch.writing import add_overwrite, write_text
from triaxis.parallel.pipeline.check import check
from triaxis.parallel.pipeline.draw import draw, summary, svg
from triaxis.parallel.pipeline.orders import make_schedule
from triaxis.parallel.pipeline.schedule import SCHEDULES, ScheduleName

MOST_RANKS, MOST_TIME = 4096, 1000
MOST_CELLS = 1_000_000
"""A picture beyond that takes minutes, and nobody can read it."""


def _parser() -> Parser:
    parser = Parser(
        prog="triaxis schedule",
        description="Draws which pipeline rank computes what and when, with the time lost to waiting "
        "(the bubble) and the microbatches whose activations each rank holds at once. Needs no GPU.",
    )
    names = [str(name) for name in ScheduleName]
    parser.add_argument(
        "--schedule",
        type=one_of(names),
        metavar="NAME",
        default="1f1b",
        help=f"{', '.join(names)} (default: %(default)s)",
    )
    parser.add_argument(
        "--pp", type=within(whole, 1, MOST_RANKS), default=4, help="pipeline ranks (default: %(default)s)"
    )
    parser.add_argument(
        "--microbatches",
        type=within(whole, 1, MOST_CELLS),
        default=8,
        help="microbatches of one optimizer step (default: %(default)s)",
    )
    parser.add_argument(
        "--virtual-stages",
        type=within(whole, 1, MOST_RANKS),
        help="chunks of layers per rank (default: 2 for interleaved, zb-v and v-half, else 1)",
    )
    parser.add_argument(
        "--forward-time",
        type=within(whole, 1, MOST_TIME),
        default=1,
        help="time of a chunk's forward (default: %(default)s)",
    )
    parser.add_argument(
        "--backward-time",
        type=within(whole, 1, MOST_TIME),
        default=2,
        help="time of its backward (default: %(default)s)",
    )
    parser.add_argument(
        "--colour",
        type=one_of(("auto", "always", "never")),
        metavar="WHEN",
        default="auto",
        help="colours in the terminal: auto, always or never (default: %(default)s)",
    )
    parser.add_argument(
        "--svg", type=Path, nargs="?", const=Path("schedule.svg"), metavar="FILE",
        help="also write the picture to FILE (schedule.svg if no FILE is given)",
    )  # fmt: skip
    add_overwrite(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    virtual_stages = options.virtual_stages
    if virtual_stages is None:
        virtual_stages = SCHEDULES[ScheduleName(options.schedule)].chunks
    coloured = sys.stdout.isatty() if options.colour == "auto" else options.colour == "always"
    forward, backward = options.forward_time, options.backward_time
    cells = options.pp * options.microbatches * virtual_stages * (forward + backward)
    try:
        if cells > MOST_CELLS:
            raise ValueError(
                f"pp × microbatches × virtual stages × (forward + backward time) must be at most {MOST_CELLS:,} to be "
                f"drawn, but is {cells:,}; draw fewer"
            )
        schedule = make_schedule(options.schedule, options.pp, options.microbatches, virtual_stages)
        check(schedule)
        print(draw(schedule, coloured=coloured, forward=forward, backward=backward))
        print(summary(schedule, forward=forward, backward=backward))
        if options.svg is not None:
            picture = svg(schedule, forward=forward, backward=backward)
            write_text(options.svg, picture, "svg", overwrite=options.overwrite)
            print(f"wrote {options.svg.resolve()}")
    except (ValueError, OSError) as error:
        return refuse("schedule", error)
    return Exit.DONE


if __name__ == "__main__":
    sys.exit(run_command("schedule", main))
