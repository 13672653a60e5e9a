"""What a flag of another program comes to here. Standard library only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

YES, NO = ("true", "yes", "1", "on"), ("false", "no", "0", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class Meant:
    """What a flag comes to: words in its place, and a line for people; or a refusal."""

    words: tuple[str, ...] = ()
    note: str = ""
    fault: str = ""


Translation = Callable[[str], Meant]


def renamed(name: str, **words: str) -> Translation:
    """Another name, and other words for some values."""
    return lambda value: Meant(words=(name, words.get(value.lower(), value)))


def nothing(why: str) -> Translation:
    return lambda value: Meant(note=why)


def switched(on: Meant, off: Meant | None = None) -> Translation:
    return lambda value: on if value.lower() in YES else off or Meant()


def fixed(values: tuple[str, ...], why: str) -> Translation:
    """A flag whose feature is not here: only what leaves it off is taken."""
    return lambda value: (
        Meant() if value.lower() in values else Meant(fault=f"is {value}, which cannot be honoured: {why}")
    )


def never(why: str) -> Translation:
    return fixed(NO, why)
