"""One way to read a command line, for every command: argparse, with values and messages for people. No torch.

Options may be written with hyphens or underscores; one that there is none of is answered with the nearest there is.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from triaxis.launch.ending import Exit, refusal

MOST_DIGITS = 18
SHOWN_CHARACTERS = 60
YES, NO = ("true", "yes", "1", "on"), ("false", "no", "0", "off")

Value = TypeVar("Value")


class Parser(argparse.ArgumentParser):
    """A command's parser. A mistake ends the process with code 2 and a line that names the option.

    speaks: False prints nothing (a rank that leaves the talking to rank 0)
    elsewhere: options of other programs, and the option here that means the same
    """

    def __init__(
        self, *, prog: str, speaks: bool = True, elsewhere: Mapping[str, str] | None = None, **more: Any
    ) -> None:
        more.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(prog=prog, allow_abbrev=False, **more)
        self._speaks, self._elsewhere = speaks, dict(elsewhere or {})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # as argparse declares it
        """Reads all, and refuses what is left over, in a command's part of the line too."""
        found, rest = super().parse_known_args(self._spelled(args), namespace)
        if rest:
            self.error(f"there is nothing that takes {shown(rest[0])}; see {self.prog} --help")
        return found, rest

    def error(self, message: str) -> NoReturn:
        text = re.sub(r"^argument ([^:]+): ", lambda found: f"`{found[1].split('/')[0]}` ", message)
        text = re.sub(r"invalid choice: (.*) \(choose from (.*)\)$", r"must be one of \2, but is \1", text)
        text = re.sub(
            r"expected (one argument|at least one argument|\d+ arguments)$",
            "needs a value, but has none",
            text,
        )
        text = re.sub(r"^the following arguments are required: (.*)$", r"\1 must be given", text)
        if self._speaks:
            self.exit(Exit.REFUSED, refusal(self.prog.removeprefix("triaxis "), text) + "\n")
        sys.exit(Exit.REFUSED)

    def _print_message(self, message: str, file: Any = None) -> None:
        if self._speaks:
            super()._print_message(message, file)

    def _spelled(self, arguments: Sequence[str] | None) -> list[str]:
        """The arguments with each option as it was declared, up to a lone `--`."""
        words = list(sys.argv[1:] if arguments is None else arguments)
        if self._subparsers is not None:  # the part that is chosen reads its own
            return words
        border = words.index("--") if "--" in words else len(words)
        return [self._option(word) for word in words[:border]] + words[border:]

    def _option(self, word: str) -> str:
        name, sign, value = word.partition("=")
        if not re.match("--[A-Za-z]", name):
            return word
        spelled = name.replace("_", "-")
        if spelled not in self._option_string_actions:
            self.error(f"there is no option {shown(name)}{self._nearest(spelled)}; see {self.prog} --help")
        return spelled + sign + value

    def _nearest(self, name: str) -> str:
        known = [option for option in self._option_string_actions if option.startswith("--")]
        near = difflib.get_close_matches(name, [*known, *self._elsewhere], n=1)
        if not near:
            return ""
        return (
            f"; {near[0]} is {self._elsewhere[near[0]]} here"
            if near[0] in self._elsewhere
            else f"; nearest: {near[0]}"
        )


class Claim(argparse.Action):
    """`--sp`, `--no-sp`, `--sp False`, `--sp=yes`: a boolean as people write it."""

    def __init__(self, option_strings: Sequence[str], dest: str, **more: Any) -> None:
        names = [*option_strings, *(f"--no-{name.removeprefix('--')}" for name in option_strings)]
        more.setdefault("default", False)
        super().__init__(names, dest, nargs="?", const=True, type=claim, metavar="BOOL", **more)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, bool(values) != (option_string or "").startswith("--no-"))


class Listed(argparse.Action):
    """`--kernels norm=plain --kernels block=compile` is `--kernels norm=plain,block=compile`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, values if before is None else f"{before},{values}")


def claim(text: str) -> bool:
    if text.lower() in (*YES, *NO):
        return text.lower() in YES
    raise argparse.ArgumentTypeError(f"must be True or False (yes or no, 1 or 0), but is {shown(text)}")


def whole(text: str) -> int:
    """A whole number that a machine can hold."""
    if re.fullmatch(rf"[+-]?[0-9]{{1,{MOST_DIGITS}}}", text, re.ASCII):
        return int(text)
    size = f" of at most {MOST_DIGITS} digits" if re.fullmatch(r"[+-]?[0-9]+", text) else ""
    raise argparse.ArgumentTypeError(f"must be a whole number{size}, but is {shown(text)}")


def number(text: str) -> float:
    """A finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a finite number, but is {shown(text)}")
    return value


def within(read: Callable[[str], Value], least: Value, most: Value) -> Callable[[str], Value]:
    """A reader of values from `least` to `most`."""

    def bounded(text: str) -> Value:
        value = read(text)
        if not least <= value <= most:  # type: ignore[operator]  # numbers
            raise argparse.ArgumentTypeError(
                f"must be from {_plain(least)} to {_plain(most)}, but is {shown(text)}"
            )
        return value

    return bounded


def one_of(values: Iterable[str]) -> Callable[[str], str]:
    """A reader of one of a few words."""
    words = [str(value) for value in values]

    def chosen(text: str) -> str:
        if text in words:
            return text
        near = difflib.get_close_matches(text.lower(), words, n=1)
        hint = f"; nearest: {near[0]}" if near else ""
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(words)}, but is {shown(text)}{hint}")

    return chosen


def shown(text: str) -> str:
    """A value as a message shows it: quoted, without control characters, and not longer than a line."""
    return repr(text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…")


def _plain(value: object) -> str:
    return (
        f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)
    )
