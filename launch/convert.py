"""`triaxis convert`: a checkpoint of any layout as a Hugging Face folder, or as one file."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from triaxis.launch.command_line import Parser
from triaxis.launch.ending import Exit, refuse, run_command
from triaxis.launch.environment import read_launch

DESCRIPTION = """A checkpoint as other programs load it, whatever layout it was trained in.

    triaxis convert OUTPUT/checkpoints/step-00000500 --to hf DIR      the newest, if OUTPUT alone is given
    triaxis convert OUTPUT --to file weights.safetensors --dtype bf16

    torchrun --nproc-per-node 8 -m triaxis.launch.convert OUTPUT --to hf DIR    each process writes some of the files

hf: a folder with config.json, safetensors and what came with the model (tokenizer, chat template, generation settings).
file: all weights in one file, under this engine's names.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 2 for what cannot be converted."""
    options = _parser().parse_args(arguments)
    launch = read_launch(os.environ)
    try:
        from triaxis.engine.checkpoint.folder import checkpoints_at  # imports torch
        from triaxis.engine.checkpoint.manifest import CheckpointError
        from triaxis.engine.run.export import export_checkpoint, exported_text, write_file

        found = checkpoints_at(options.checkpoint)
        if not found:
            raise CheckpointError(
                f"`CHECKPOINT` must be a complete checkpoint or a run's output directory, but {options.checkpoint} is "
                "neither; triaxis checkpoint ls shows what a directory has"
            )
        kind, target = options.to
        path = Path(target)
        if kind == "hf" and launch.size > 1:
            told = _convert_together(found[-1], path, options)
            if launch.rank == 0:
                print(told)
        elif launch.rank > 0:
            return Exit.DONE
        elif kind == "hf":
            print(
                exported_text(export_checkpoint(found[-1], path, dtype=options.dtype, source=options.source))
            )
        elif kind == "file":
            print(write_file(found[-1], path, dtype=options.dtype or "bf16"))
        else:
            raise ValueError(f"`--to` must be hf DIR or file FILE, but is {kind}")
    except (ValueError, OSError) as error:
        return refuse("convert", error) if launch.rank == 0 else Exit.REFUSED
    return Exit.DONE


def _convert_together(checkpoint: Path, folder: Path, options: argparse.Namespace) -> str:
    """The same on the processes that a launcher started, each writing its share of the files."""
    from triaxis.engine.run.hub_copies import export_together
    from triaxis.launch.world import open_world
    from triaxis.parallel.places.topology import Topology
    from triaxis.parallel.worlds.mesh import build_mesh

    with open_world(device="cpu") as world:
        return export_together(
            build_mesh(world, Topology(dp=world.size)),
            checkpoint,
            folder,
            dtype=options.dtype,
            source=options.source,
            still=lambda: None,
        )


def _parser() -> Parser:
    parser = Parser(prog="triaxis convert", description=DESCRIPTION)
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="a checkpoint, or a run's output directory"
    )
    parser.add_argument(
        "--to",
        nargs=2,
        required=True,
        metavar=("KIND", "TARGET"),
        help="hf and a new folder, or file and a new file",
    )
    parser.add_argument(
        "--dtype",
        choices=["fp32", "bf16", "fp16"],
        help="of what is written; by default the run's (file: bf16)",
    )
    parser.add_argument(
        "--source", type=Path, metavar="DIR",
        help="the Hugging Face folder that the run began with, if it has moved since",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(run_command("convert", main))
