"""`triaxis generate`: what a trained model writes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from triaxis.launch.command_line import Parser, number, whole, within
from triaxis.launch.ending import Exit, refuse, run_command
from triaxis.launch.environment import read_launch

DESCRIPTION = """Text from a run's checkpoint or a Hugging Face folder, a token at a time, to see what was learnt.

    triaxis generate output --prompt "def "                        a run's newest checkpoint, on one process
    torchrun --nproc-per-node 2 -m triaxis.launch.generate DIR     cut over two tensor-parallel ranks
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 2 for a model that cannot be read."""
    options = _parser().parse_args(arguments)
    launch = read_launch(os.environ)
    speaks = launch.rank == 0
    try:
        from triaxis.engine.run.generate import open_codec, open_model, write  # imports torch
        from triaxis.launch.world import open_world
        from triaxis.parallel.places.topology import Topology
        from triaxis.parallel.worlds.mesh import build_mesh

        with open_world() as world:
            stage, tokenizer = open_model(options.model, build_mesh(world, Topology(tp=world.size)))
            codec = open_codec(options.tokenizer or tokenizer)
            for line in range(options.lines):
                ids = write(
                    stage,
                    codec.encode(options.prompt),
                    tokens=options.tokens,
                    end=codec.end,
                    temperature=options.temperature,
                    top_k=options.top_k,
                    seed=options.seed + line,
                )
                text = options.prompt + codec.decode(list(ids))
                if speaks:
                    print(text, flush=True)
    except (ValueError, OSError) as error:
        return refuse("generate", error) if speaks else Exit.REFUSED
    return Exit.DONE


def _parser() -> Parser:
    parser = Parser(prog="triaxis generate", description=DESCRIPTION)
    parser.add_argument(
        "model",
        type=Path,
        metavar="MODEL",
        help="a run's output directory, a checkpoint, or a Hugging Face folder",
    )
    parser.add_argument("--prompt", default="", help="what the text begins with")
    parser.add_argument("--tokens", type=within(whole, 1, 1_000_000), default=100, help="how many at most")
    parser.add_argument(
        "--temperature", type=within(number, 0, 100), default=0.8, help="0: the likeliest token each time"
    )
    parser.add_argument("--top-k", type=within(whole, 1, 10_000_000), help="draw among the likeliest so many")
    parser.add_argument("--seed", type=whole, default=0, help="of the drawing")
    parser.add_argument(
        "--lines", type=within(whole, 1, 1000), default=1, help="how many texts, each drawn anew"
    )
    parser.add_argument("--tokenizer", help="a tokenizer.json or its folder, where the model does not say")
    return parser


if __name__ == "__main__":
    sys.exit(run_command("generate", main))
