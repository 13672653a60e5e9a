"""A run as it will be: every value, where it came from, and the learning rate of its steps. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triaxis.engine.config import (
    DataParallel,
    ResolvedRun,
    RunConfig,
    SaveStrategy,
    learning_rate_of,
    warmup_steps_of,
)
from triaxis.launch.flags import GROUPS
from triaxis.launch.foreign.keys import flag_of
from triaxis.models.config import ModelConfig
from triaxis.parallel.places.legal_values import counted

DEFAULT = "default"
CURVE_POINTS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value of a run.

    name: its flag's field; origin: a flag, a file's key, a folder, a default, or what it follows from
    """

    section: str
    name: str
    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class Followed:
    """A value that the flags leave open: what it comes to, and from what."""

    value: Any
    origin: str


Rule = Callable[[RunConfig, ResolvedRun], Followed | None]


def settings_of(
    config: RunConfig, resolved: ResolvedRun, sources: Mapping[str, str], total_steps: int | None
) -> list[Setting]:
    """Every value in the order of the flags' groups; sources: what decided a field, where something did."""
    found = []
    for section, helps in GROUPS.items():
        for name in helps:
            if name in _SECOND_NAMES:
                continue
            found.append(_setting(section, name, config, resolved, sources))
    if total_steps is None or resolved.total_steps is not None:
        return found
    told_batch = counted(resolved.global_batch, "sequence")
    epochs = f"{resolved.epochs:g} epoch{'s' * (resolved.epochs != 1)} of the data, {told_batch} a step"
    followed = {"steps": (total_steps, epochs)}
    if config.warmup_ratio is not None:
        followed["warmup_steps"] = (warmup_steps_of(config, total_steps), _part_of(config.warmup_ratio))
    return [
        dataclasses.replace(each, value=followed[each.name][0], origin=followed[each.name][1])
        if each.name in followed
        else each
        for each in found
    ]


def _part_of(ratio: float) -> str:
    return f"warmup_ratio {ratio:g} of all steps"


def _setting(
    section: str, name: str, config: RunConfig, resolved: ResolvedRun, sources: Mapping[str, str]
) -> Setting:
    value = getattr(config, name)
    rule = FOLLOWS.get(name)
    given = next((sources[each] for each in (name, *_BOTH.get(name, ())) if each in sources), None)
    if given is not None:
        if rule is not None and (value is None or name not in sources):
            followed = rule(config, resolved)
            value = value if followed is None else followed.value
        return Setting(section=section, name=name, value=value, origin=given)
    followed = None if rule is None else rule(config, resolved)
    if followed is not None:
        return Setting(section=section, name=name, value=followed.value, origin=followed.origin)
    return Setting(section=section, name=name, value=value, origin=DEFAULT)


_SECOND_NAMES = ("data_path", "microbatches")
"""Shown under the name that people know better."""
_BOTH = {"data": ("data_path",), "gradient_accumulation_steps": ("microbatches",)}


def _data(config: RunConfig, resolved: ResolvedRun) -> Followed | None:
    return None if config.data_path is None else Followed(resolved.data, "--data-path")


def _tokenizer(config: RunConfig, resolved: ResolvedRun) -> Followed:
    if resolved.tokenizer is None:
        return Followed("bytes", DEFAULT)
    return Followed(resolved.tokenizer, f"the folder {config.model_name_or_path}")


def _model(config: RunConfig, resolved: ResolvedRun) -> Followed | None:
    folder = config.model_name_or_path
    return None if folder is None else Followed(resolved.model.name, f"config.json of {folder}")


def _dp(config: RunConfig, resolved: ResolvedRun) -> Followed:
    topology = resolved.topology
    rest = f"{counted(topology.world_size, 'rank')} / (tp {topology.tp} × pp {topology.pp})"
    return Followed(topology.dp, rest)


def _zero(config: RunConfig, resolved: ResolvedRun) -> Followed:
    fsdp = config.data_parallel == DataParallel.FSDP
    return Followed(resolved.zero, "--data-parallel fsdp shards all" if fsdp else DEFAULT)


def _batch_of(config: RunConfig, resolved: ResolvedRun) -> str:
    given = [
        name
        for name in (
            *("global_batch", "per_device_train_batch_size", "gradient_accumulation_steps", "microbatches"),
        )
        if getattr(config, name) is not None
    ]
    return f"{' and '.join(given)}, dp {resolved.topology.dp}" if given else DEFAULT


def _steps(config: RunConfig, resolved: ResolvedRun) -> Followed:
    if resolved.total_steps is not None:
        return Followed(resolved.total_steps, DEFAULT)
    return Followed(None, f"{resolved.epochs:g} epochs, as long as the data is")


def _warmup_steps(config: RunConfig, resolved: ResolvedRun) -> Followed | None:
    if config.warmup_ratio is None:
        return Followed(0, DEFAULT)
    steps = None if resolved.total_steps is None else warmup_steps_of(config, resolved.total_steps)
    return Followed(steps, _part_of(config.warmup_ratio))


def _save_strategy(config: RunConfig, resolved: ResolvedRun) -> Followed:
    by = next(
        (
            flag_of(name)
            for name in ("save_steps", "save_minutes", "save_hf", "save_hf_checkpoints")
            if getattr(config, name)
        ),
        None,
    )
    return Followed(str(resolved.save_strategy), DEFAULT if by is None else by)


def _save_steps(config: RunConfig, resolved: ResolvedRun) -> Followed | None:
    return Followed(500, DEFAULT) if resolved.save_strategy == SaveStrategy.STEPS else None


FOLLOWS: dict[str, Rule] = {
    "model": _model,
    "data": _data,
    "tokenizer": _tokenizer,
    "dp": _dp,
    "zero": _zero,
    "virtual_stages": lambda config, resolved: Followed(
        resolved.virtual_stages,
        DEFAULT if resolved.virtual_stages == 1 else f"schedule {config.schedule}",
    ),
    "per_device_train_batch_size": lambda config, resolved: Followed(
        resolved.microbatch_size, _batch_of(config, resolved)
    ),
    "gradient_accumulation_steps": lambda config, resolved: Followed(
        resolved.microbatches, _batch_of(config, resolved)
    ),
    "global_batch": lambda config, resolved: Followed(resolved.global_batch, _batch_of(config, resolved)),
    "steps": _steps,
    "warmup_steps": _warmup_steps,
    "accumulate_dtype": lambda config, resolved: Followed(resolved.accumulate_dtype, f"dtype {config.dtype}"),
    "save_strategy": _save_strategy,
    "save_steps": _save_steps,
}
"""How a value that nothing says comes about."""


def model_settings(model: ModelConfig, origin: str) -> list[Setting]:
    """What the model is, in a few numbers."""
    values = {
        "name": model.name,
        "parameters": model.parameters(),
        "layers": model.layers,
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "max_positions": model.max_positions,
        "norm": f"{model.norm}, epsilon {model.norm_eps:g}",
        "tied": model.tied,
    }
    return [
        Setting(section="the model", name=name, value=value, origin=origin) for name, value in values.items()
    ]


def model_origin(config: RunConfig) -> str:
    """Where the architecture is from."""
    if config.model_name_or_path is not None:
        return f"config.json of {config.model_name_or_path}"
    return f"the file {config.model}" if Path(config.model).suffix else f"preset {config.model}"


def curve_of(config: RunConfig, total_steps: int) -> list[tuple[int, float]]:
    """(step from 1, learning rate) of all steps, or of evenly spaced ones with the last of the warm-up among them."""
    warmup = warmup_steps_of(config, total_steps)
    gap = max(1, total_steps / CURVE_POINTS)
    even = {1 + int(number * gap) for number in range(min(CURVE_POINTS, total_steps))}
    steps = sorted(even | {total_steps} | ({warmup} if warmup else set()))
    return [(step, learning_rate_of(config, step - 1, total_steps)) for step in steps]


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as a row of bars of eight heights, the highest one full: ▁▄█▆▅."""
    bars = "▁▂▃▄▅▆▇█"
    most = max(values, default=0.0) or 1.0
    count = min(width, len(values))
    chosen = [values[round(place * (len(values) - 1) / max(1, count - 1))] for place in range(count)]
    return "".join(bars[min(7, int(value / most * 8))] for value in chosen)
