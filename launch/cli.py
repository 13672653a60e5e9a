"""`triaxis COMMAND …`: one name for the programs of this folder; `triaxis plan` is `python -m triaxis.launch.plan`."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

from triaxis.launch.command_line import shown
from triaxis.launch.ending import Exit, catch_early_requests, end_at_once, refusal, run_command

COMMANDS = {
    "doctor": "what this machine has and how fast it is",
    "plan": "model and cluster in, layout and start command out",
    "script": "start scripts for torchrun, Slurm and Kubernetes",
    "config": "what a command line and its files come to, and where each value is from",
    "train": "train a model",
    "run": "train on several processes",
    "compare": "ways of sharing and switches, measured with your run on this machine",
    "simulate": "the whole cluster's program on this machine, without its GPUs",
    "schedule": "draw a pipeline schedule",
    "preprocess": "text into token files",
    "generate": "what a trained model writes",
    "convert": "a checkpoint as a Hugging Face folder, or as one file",
    "checkpoint": "list, verify, reshard and compare checkpoints",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; its exit code. 2 for a command that there is none of."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(
            "usage: triaxis COMMAND …\n\n"
            + "\n".join(f"  {name:<12}{text}" for name, text in COMMANDS.items())
        )
        print("\ntriaxis COMMAND --help says more.")
        return Exit.DONE if given else Exit.REFUSED
    name, *rest = given
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; nearest: {near[0]}" if near else ""
        text = f"a command must be one of {', '.join(COMMANDS)}, but is {shown(name)}{hint}"
        print(refusal("", text).replace(" :", ":", 1), file=sys.stderr)
        return Exit.REFUSED
    if name == "train":  # before the second or two that its modules take to load
        catch_early_requests()
    return run_command(
        name, lambda words: importlib.import_module(f"triaxis.launch.{name}").main(words), rest
    )


def command() -> None:
    """The console script."""
    code = main()
    if sys.argv[1:2] == ["train"]:
        end_at_once(code)
    sys.exit(code)


if __name__ == "__main__":
    command()
