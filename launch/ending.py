"""How a command ends: its exit code, the one opening of a refusal, and what Ctrl-C or a closed pipe does. No torch."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import NoReturn

from triaxis.launch.environment import speaks

LONGEST_WORD, SHOWN = 600, 200
"""Characters of a word, a path for example, that a refusal shows whole, and of a longer one."""


class Exit(IntEnum):
    """The exit codes of every command; docs/recovery.md has the same table.

    FAILED: it ran, and the answer is no: a run that failed, a plan that does not fit, files that differ
    REFUSED: it did not start, or has not understood
    REQUEUE: EX_TEMPFAIL of sysexits.h: the run saved itself on request; start it again and it goes on
    """

    DONE = 0
    FAILED = 1
    REFUSED = 2
    REQUEUE = 75
    INTERRUPTED = 130


def printable(text: str) -> str:
    """The text with what would move a terminal's cursor, or change its colours, written out: `\\x1b[31m`."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii") for c in text
    )


def refusal(command: str, reason: object) -> str:
    """`triaxis plan: reason`; several reasons stand below it, a line each."""
    text = re.sub(rf"\S{{{LONGEST_WORD},}}", lambda found: f"{found[0][:SHOWN]}…", str(reason))
    lines = printable(text).strip().splitlines() or ["no reason was given"]
    return (
        f"triaxis {command}: " + lines[0] if len(lines) == 1 else "\n  ".join([f"triaxis {command}:", *lines])
    )


def refuse(command: str, error: Exception) -> Exit:
    """Says on standard error why the command does not go on. A reader who has gone is no refusal: it is raised."""
    if isinstance(error, BrokenPipeError):
        raise error
    print(refusal(command, _reason(error)), file=sys.stderr, flush=True)
    return Exit.REFUSED


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        name = (
            error.filename.decode(errors="replace") if isinstance(error.filename, bytes) else error.filename
        )
        return f"{error.strerror}: {str(name)[:200]}"
    return str(error) or type(error).__name__


def run_command(
    command: str, main: Callable[[Sequence[str]], int], arguments: Sequence[str] | None = None
) -> int:
    """The command's exit code, also where a person stops it or has stopped to read."""
    try:
        return int(main(list(sys.argv[1:] if arguments is None else arguments)))
    except KeyboardInterrupt:
        if speaks(os.environ):
            print(f"\n{refusal(command, 'interrupted')}", file=sys.stderr, flush=True)
        return Exit.INTERRUPTED
    except BrokenPipeError:  # whoever read has heard enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.DONE


def end_at_once(code: int) -> NoReturn:
    """Ends without waiting for another rank, or for a library's threads, while the interpreter is torn down."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def catch_early_requests() -> None:
    """SIGTERM and SIGUSR1 while `train` still loads end it as a run that has nothing to save yet."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _end_early)


def _end_early(number: int, frame: object) -> None:
    if speaks(os.environ):
        print(f"{signal.Signals(number).name} before the first step: nothing to save", file=sys.stderr)
    end_at_once(Exit.REQUEUE)
