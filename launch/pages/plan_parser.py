"""The command line of `plan`. No torch."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from triaxis.launch.command_line import Claim, Parser, number, one_of, shown, whole, within
from triaxis.launch.hardware.hardware import hardware_names
from triaxis.launch.hardware.nearly import line_rate
from triaxis.launch.writing import add_overwrite

DESCRIPTION = """Which layout, will it fit, how fast, how long, for how much, and the command that starts it.

  triaxis plan --model llama2-70b --gpus 64 --hardware a100-80g --seq 4096 --global-batch 1024
  triaxis plan --model llama2-70b --gpus 64 --tokens 2T --price 2.50 --report plan.html --write start/
  triaxis plan --model llama2-70b --gpus 64 --explain dp=8,tp=8,pp=1
  triaxis plan --table                     the four classic sizes, by the rule and by search
  triaxis plan --memory                    model states under DDP, ZeRO and FSDP; GPUs that models need
  triaxis plan --score runs.csv            predictions against published runs

Prices are closed forms; the ranges beside them held nine of ten published runs (docs/accuracy.md)."""

SUFFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}

MOST_GPUS, MOST_TOKENS, MOST_SHOWN = 1_000_000, 100_000_000, 1000
MOST_DEPTHS = 1000
MOST_PRICE, MOST_TOKENS_IN_ALL = 1e6, 1e18


def plan_parser() -> Parser:
    parser = Parser(prog="triaxis plan", description=DESCRIPTION)
    what = parser.add_argument_group("other questions").add_mutually_exclusive_group()
    what.add_argument("--table", action=Claim, help="the decision table: 7B, 13B, 70B, 671B")
    what.add_argument("--memory", action=Claim, help="the memory tables; of --model on --gpus, if given")
    what.add_argument(
        "--score", type=Path, metavar="FILE", help="predict every row of a file of published runs"
    )
    what.add_argument("--presets", action=Claim, help="the models and accelerators that have a name")
    run = parser.add_argument_group("the run")
    run.add_argument(
        "--model",
        help="a preset, 1.8B, 7B, 13B, 70B or 671B, a .toml or .json file of model fields, or a Hugging Face folder",
    )
    run.add_argument("--gpus", type=within(whole, 1, MOST_GPUS), help="how many")
    run.add_argument(
        "--hardware",
        default="h100-80g",
        help=f"{', '.join(hardware_names())}, or a TOML file (triaxis doctor writes one); default: %(default)s",
    )
    run.add_argument(
        "--network",
        type=line_rate,
        metavar="RATE",
        help="another line rate of each network card, such as 100Gb/s",
    )
    run.add_argument(
        "--seq",
        type=within(whole, 1, MOST_TOKENS),
        default=4096,
        help="tokens in a sequence (default: %(default)s)",
    )
    run.add_argument(
        "--document-tokens",
        type=within(whole, 1, MOST_TOKENS),
        metavar="N",
        help="mean length of the documents packed into a sequence; default: it is one",
    )
    run.add_argument(
        "--mtp-depths",
        type=within(whole, 0, MOST_DEPTHS),
        metavar="N",
        default=0,
        help="extra prediction depths behind the layers; default: none",
    )
    run.add_argument(
        "--global-batch",
        type=within(whole, 1, MOST_TOKENS),
        default=1024,
        help="sequences a step (default: %(default)s)",
    )
    run.add_argument(
        "--dtype",
        type=one_of(("bf16", "fp16", "fp32", "fp64")),
        metavar="TYPE",
        default="bf16",
        help="bf16, fp16, fp32 or fp64; default: %(default)s",
    )
    run.add_argument(
        "--tokens", type=_tokens, help="tokens to train on, such as 300B or 2T: gives days and steps"
    )
    run.add_argument(
        "--price", type=within(number, 0.0, MOST_PRICE), help="of one GPU for one hour: gives the cost"
    )
    how = parser.add_argument_group("the answer")
    how.add_argument(
        "--policy",
        type=one_of(("search", "table")),
        metavar="NAME",
        default="search",
        help="search or table: the best of all layouts, or the decision table's rule (default: %(default)s)",
    )
    how.add_argument(
        "--explain",
        action="append",
        default=[],
        metavar="dp=8,tp=4,pp=2",
        help="why a layout lost or does not fit (also zero, microbatch, virtual_stages, recompute); repeatable",
    )
    how.add_argument(
        "--top",
        type=within(whole, 1, MOST_SHOWN),
        default=12,
        help="alternatives to show (default: %(default)s)",
    )
    how.add_argument(
        "--simulate",
        type=within(whole, 0, MOST_SHOWN),
        nargs="?",
        const=3,
        default=0,
        metavar="N",
        help="price the best on N topologies (3) again by the engine's own program, proved and timed: "
        "seconds for each; then the fastest of these is chosen",
    )
    how.add_argument("--json", action=Claim, help="one JSON object instead of tables")
    how.add_argument("--report", type=Path, metavar="FILE", help="write a page that explains it all")
    how.add_argument(
        "--write", type=Path, metavar="DIR", help="write start scripts and manifests (also triaxis script)"
    )
    add_overwrite(parser)
    how.add_argument("--image", default="triaxis:latest", help="of the manifests (default: %(default)s)")
    how.add_argument(
        "--claim", default="triaxis-data", help="their persistent volume claim (default: %(default)s)"
    )
    return parser


def _tokens(text: str) -> float:
    """`300B` is 3e11."""
    found = re.fullmatch(
        r"([0-9]{1,15}(?:\.[0-9]{1,15})?(?:e[0-9]{1,2})?)([KMBT]?)", text, re.IGNORECASE | re.ASCII
    )
    tokens = float(found[1]) * SUFFIXES[found[2].upper()] if found else 0.0
    if not 1 <= tokens <= MOST_TOKENS_IN_ALL:
        raise argparse.ArgumentTypeError(f"must be a number such as 300B or 2T, but is {shown(text)}")
    return tokens
