"""How a file of another program is read: key by key, each honoured, of no effect here, or refused by name.

Standard library only.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from triaxis.engine.config import RunConfig
from triaxis.engine.loss_scale import SETTINGS
from triaxis.engine.plain_files import read_plain

AUTO = "auto"
IN_OUTPUT = "{output_dir}"
"""What stands for --output-dir in a value that a file implies."""


@dataclass(slots=True)
class Reading:
    """What a file comes to, filled while its keys are read.

    path: the file, or whatever else has keys, as people know it
    values, keys: fields of RunConfig, and the key that said each; notes, faults: lines for people
    others: files that this one names
    implied: fields that a file decides without saying them; a flag or another file that says one is no conflict
    """

    path: str
    values: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    implied: set[str] = field(default_factory=set)
    others: list[Reading] = field(default_factory=list)

    def put(self, key: str, name: str, value: Any) -> None:  # noqa: ANN401 (JSON)
        """The key decides the field `name`; "auto" leaves it to the flags."""
        if value != AUTO:
            self.values[name], self.keys[name] = value, key
            self.implied.discard(name)

    def imply(self, key: str, name: str, value: Any) -> None:  # noqa: ANN401
        """A value that follows from the key, or from its being left out, unless something else says one."""
        if name not in self.values:
            self.values[name], self.keys[name] = value, key
            self.implied.add(name)

    def refuse(self, key: str, value: Any, why: str) -> None:  # noqa: ANN401
        self.faults.append(f"{self.path}: `{key}` is {json.dumps(value)}, which cannot be honoured: {why}")

    def must(self, key: str, value: Any, rule: str) -> None:  # noqa: ANN401
        self.faults.append(f"{self.path}: `{key}` must be {rule}, but is {json.dumps(value)}")


Reader = Callable[[Reading, str, Any], None]


def number(name: str, *, whole: bool = False, least: float = 0) -> Reader:
    """A number that is the field `name`; a whole one may be written 5e8."""

    def read(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
        if value == AUTO:
            return
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= least
        if not fits or (whole and value != int(value)):
            kind = f"a whole number of at least {least:g}" if whole else f"a number of at least {least:g}"
            found.must(key, value, kind)
            return
        found.put(key, name, int(value) if whole else float(value))

    return read


def same(why: str) -> Reader:
    """A key that changes no number of a run here."""

    def read(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
        if value not in (AUTO, None):
            found.notes.append(f"`{key}`: {why}")

    return read


def only(neutral: tuple[Any, ...], why: str) -> Reader:
    """A key whose feature is not here: only the values that leave it off are taken."""

    def read(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
        if value != AUTO and value not in neutral:
            found.refuse(key, value, why)

    return read


def block(readers: Mapping[str, Reader]) -> Reader:
    """An object whose own keys are read; an unknown one gets the nearest known one."""

    def read(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
        if not isinstance(value, dict):
            found.must(key, value, "an object")
            return
        read_keys(found, value, readers, f"{key}.")

    return read


def read_keys(found: Reading, values: Mapping[str, Any], readers: Mapping[str, Reader], prefix: str) -> None:
    for key, value in values.items():
        if key not in readers:
            near = difflib.get_close_matches(key, readers, n=1)
            hint = f"; nearest: `{prefix}{near[0]}`" if near else ""
            found.faults.append(f"{found.path}: `{prefix}{key}` is no key that is known{hint}; leave it out")
            continue
        readers[key](found, prefix + key, value)


def switch(name: str, value_if_on: object) -> Reader:
    def read(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
        if value == AUTO:
            return
        if not isinstance(value, bool):
            found.must(key, value, 'true, false or "auto"')
        elif value:
            found.put(key, name, value_if_on)

    return read


def truth(name: str) -> Reader:
    """A boolean that is the field `name`."""

    def read(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
        if value != AUTO and not isinstance(value, bool):
            found.must(key, value, 'true, false or "auto"')
            return
        found.put(key, name, value)

    return read


def off(why: str) -> Reader:
    """An object (or a boolean) with a switch of its own, whose feature is not here: taken only where it is off."""

    def read(found: Reading, key: str, value: Any) -> None:  # noqa: ANN401
        is_on = value.get("enabled", False) if isinstance(value, dict) else bool(value)
        if is_on and is_on != AUTO:
            found.refuse(key, value, why)

    return read


def read_json(path: str, option: str) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError."""
    try:
        with read_plain(Path(path)) as file:
            text = file.read().decode("utf-8")
    except OSError as error:
        raise ValueError(
            f"`{option}` must be a JSON file, but {path}: {error.strerror}; check the path"
        ) from error
    return parse_json(text, path)


def parse_json(text: str, path: str) -> dict[str, Any]:
    """The object in a text; `path` says where it stands. Raises ValueError."""
    try:
        values = json.loads(text, object_pairs_hook=_without_duplicates)
    except ValueError as error:
        raise ValueError(f"{path} must be JSON, but: {error}; comments are not part of it") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold an object, but holds {type(values).__name__}")
    return values


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"`{twice[0]}` stands there twice")
    return dict(pairs)


def settled(readings: Iterable[Reading]) -> Reading:
    """All that several files ask for; their keys are named with the file. ValueError lists the faults of all.

    Where two files differ over one value both are named; equal values are no fault.
    """
    all_of = Reading("")
    for found in (each for one in readings for each in (one, *one.others)):
        all_of.faults += found.faults
        all_of.notes += found.notes
        for name, value in found.values.items():
            key = f"`{found.keys[name]}` of {found.path}"
            if name in found.implied:
                all_of.imply(key, name, value)
                continue
            if name in all_of.values and name not in all_of.implied and all_of.values[name] != value:
                told = f"{all_of.values[name]} ({all_of.keys[name]}) and {value} ({key})"
                all_of.faults.append(f"{told} must not differ; leave one out")
            all_of.put(key, name, value)
    if all_of.faults:
        raise ValueError("\n".join(all_of.faults))
    return all_of


def combined(
    found: Reading, given: Mapping[str, Any], spelled: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The fields of a run out of files and of the flags that were given. ValueError names both where they differ.

    spelled: fields whose flag people wrote otherwise, as they wrote it
    """
    faults = [
        f"{(spelled or {}).get(name, flag_of(name))} {given[name]} and {found.values[name]} ({found.keys[name]}) "
        "must not differ; leave one out"
        for name in found.values
        if name in given and name not in found.implied and given[name] != found.values[name]
    ]
    if faults:
        raise ValueError("\n".join(faults))
    values = {**found.values, **given}
    if "save_hf" in found.implied and values.get("save_strategy") == "no" and "save_hf" not in given:
        del values["save_hf"]  # an export is made from the last checkpoint, of which there is none
    if values.get("dtype") != "fp16":  # files have the settings of fp16 beside a switch that is off
        values = {name: value for name, value in values.items() if name in given or name not in SETTINGS}
    folder = str(values.get("output_dir", RunConfig().output_dir))
    return {
        name: value.replace(IN_OUTPUT, folder) if isinstance(value, str) else value
        for name, value in values.items()
    }


def flag_of(name: str) -> str:
    """The flag of a field: `--max-grad-norm` of max_grad_norm."""
    return f"--{name.replace('_', '-')}"
