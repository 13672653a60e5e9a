"""`triaxis convert`: a checkpoint of any layout as a Hugging Face folder, or as one file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from triaxis.launch.command_line import Parser
from triaxis.launch.ending import Exit, refuse, run_command

DESCRIPTION = """A checkpoint as other programs load it, by one process, whatever layout it was trained in.

    triaxis convert OUTPUT/checkpoints/step-00000500 --to hf DIR      the newest, if OUTPUT alone is given
    triaxis convert OUTPUT --to file weights.safetensors --dtype bf16

hf: a folder with config.json, safetensors and what came with the model (tokenizer, chat template, generation settings).
file: all weights in one file, under this engine's names.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 2 for what cannot be converted."""
    options = _parser().parse_args(arguments)
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
        if kind == "hf":
            print(
                exported_text(export_checkpoint(found[-1], path, dtype=options.dtype, source=options.source))
            )
        elif kind == "file":
            print(write_file(found[-1], path, dtype=options.dtype or "bf16"))
        else:
            raise ValueError(f"`--to` must be hf DIR or file FILE, but is {kind}")
    except (ValueError, OSError) as error:
        return refuse("convert", error)
    return Exit.DONE


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
