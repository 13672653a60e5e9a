"""What would start instead of a run that is refused: each line is put to every rule before it is printed. No torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from triaxis.engine.config import ConfigError, DataParallel, ResolvedRun, RunConfig
from triaxis.engine.rules import DEFAULT_MICROBATCH_SIZE, model_of, range_faults, resolve
from triaxis.models.config import ModelConfig
from triaxis.models.huggingface.guest import dropouts
from triaxis.models.presets import depths_in, hub_values
from triaxis.parallel.pipeline.schedule import SCHEDULES, ScheduleName
from triaxis.parallel.places.legal_values import counted, divisors

TRIED = 300
"""Layouts that are put to the rules, nearest first."""
ON_ONE_MACHINE = 16
LAYOUT = {
    *("tp", "pp", "dp", "cp", "ep", "sp", "schedule", "virtual_stages", "zero", "data_parallel", "order"),
    *("microbatches", "global_batch", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("seq", "bucket_elements"),
}
FLAGS = {"simulate": "threads"}
TORCHRUN = "torchrun --nproc-per-node {} -m triaxis.launch.train"
"""How ranks are started on one machine, where nothing else is said."""


def resolve_or_advise(config: RunConfig, world_size: int, launcher: str = TORCHRUN) -> ResolvedRun:
    """`resolve`, whose ConfigError also says what would start, by this launcher."""
    try:
        return resolve(config, world_size)
    except ConfigError as error:
        raise ConfigError((*error.faults, *advice(config, world_size, error.faults, launcher))) from error


def advice(
    config: RunConfig, world_size: int, faults: tuple[str, ...], launcher: str = TORCHRUN
) -> tuple[str, ...]:
    """Lines for people: starts that pass every rule, the nearest to what was asked; none if there is none.

    Where faults remain that no layout can mend (a missing file), it is only said which layout would pass.
    """
    if range_faults(config):  # no layout mends a number that is none, or makes a model of 10^16 depths
        return ()
    try:
        model = model_of(config)
    except ValueError:
        return ()
    rest = tuple(fault for fault in _faults(_plain(config), 1, model) if fault in faults)
    if len(rest) == len(faults):
        return ()
    starts = list(dict.fromkeys(_starts(config, world_size, model, rest, launcher)))
    if not starts:
        return ()
    if rest:
        return (f"a layout that passes, once the rest is mended: {starts[0]}",)
    return ("checked against every rule, this would start:", *(f"  {start}" for start in starts))


def start_line(config: RunConfig, world_size: int, launcher: str = TORCHRUN) -> str:
    """The command that starts this run on so many processes of one machine."""
    flags = " ".join(flags_of(config))
    if world_size == 1 or config.simulate:
        return f"triaxis train {flags}".rstrip()
    if world_size > ON_ONE_MACHINE:
        return f"torchrun … -m triaxis.launch.train {flags}".rstrip()
    return f"{launcher.format(world_size)} {flags}".rstrip()


def flags_of(config: RunConfig) -> list[str]:
    """The flags that differ from what is left out, as `train` reads them."""
    words: list[str] = []
    for field in fields(config):
        value, name = getattr(config, field.name), FLAGS.get(field.name, field.name)
        if value == field.default:
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", str(value)]
    return words


def depths_warning(config: RunConfig) -> str | None:
    """Says so where a Hugging Face folder has layers for extra prediction depths, which are not trained."""
    count = depths_in(config.model_name_or_path) if config.model_name_or_path is not None else 0
    count -= config.mtp_depths
    if count < 1:
        return None
    return (
        f"warning: {config.model_name_or_path} has {count} layer(s) for extra prediction depths "
        f"(`num_nextn_predict_layers`), which are read over and not trained; "
        f"--mtp-depths {count + config.mtp_depths} trains them"
    )


def dropout_warning(config: RunConfig, resolved: ResolvedRun) -> str | None:
    """Says so where a Hugging Face configuration asks for dropout, which no model has here."""
    values = hub_values(config.model_name_or_path or config.model) or {}
    found = dropouts(values)
    if not found:
        return None
    told = ", ".join(f"{name} {value:g}" for name, value in found.items())
    return f"warning: {resolved.model.name} is trained without dropout; its config.json, which is kept, has {told}"


def bubble_warning(config: RunConfig, resolved: ResolvedRun) -> str | None:
    """Says so where a pipeline waits more than a third of its time, and how many microbatches would mend that.

    Of schedules that fill their waiting with gradients of weights nothing is said.
    """
    if SCHEDULES[config.schedule].splits:
        return None
    stages, chunks, count = resolved.topology.pp, resolved.virtual_stages, resolved.microbatches
    share = (stages - 1) / (chunks * count + stages - 1)
    enough = math.ceil(2 * (stages - 1) / chunks)
    if share <= 1 / 3 or enough <= count:
        return None
    few = counted(count, "microbatch", "microbatches")
    told = f"warning: the pipeline of {stages} stages waits {share:.0%} of the time with {few} a step"
    other: dict[str, Any] = {
        "microbatches": enough,
        "gradient_accumulation_steps": None,
        "global_batch": None,
    }
    other["per_device_train_batch_size"] = config.per_device_train_batch_size and resolved.microbatch_size
    if _faults(replace(config, **other), resolved.topology.world_size, resolved.model):
        return told
    return f"{told}; --microbatches {enough} makes that a third, with a global batch of " + str(
        resolved.microbatch_size * enough * resolved.topology.dp
    )


def _faults(config: RunConfig, world_size: int, model: ModelConfig) -> tuple[str, ...]:
    try:
        resolve(config, world_size, model)
    except ConfigError as error:
        return error.faults
    return ()


def _plain(config: RunConfig) -> RunConfig:
    """The run without what a layout decides: what is wrong with it, no layout mends."""
    defaults: dict[str, Any] = {field.name: field.default for field in fields(config) if field.name in LAYOUT}
    return replace(config, **defaults)


def _starts(
    config: RunConfig, world_size: int, model: ModelConfig, rest: tuple[str, ...], launcher: str
) -> Iterator[str]:
    """The layout as it is on as many ranks as it needs, the nearest on the ranks there are, and threads."""
    product = config.tp * config.pp * (config.dp or 1)
    worlds = [world_size] if product == world_size or config.simulate else [product, world_size]
    for size in worlds:
        found = _nearest(config, size, model, rest, moves=size == world_size)
        if found is not None:
            yield " ".join(flags_of(_plain_but_layout(found))) if rest else start_line(found, size, launcher)
    threads = replace(config, simulate=True)
    if (
        product > world_size == 1
        and not config.simulate
        and not rest
        and not _faults(threads, product, model)
    ):
        yield start_line(threads, product)


def _plain_but_layout(config: RunConfig) -> RunConfig:
    return RunConfig(
        tp=config.tp, pp=config.pp, dp=config.dp, seq=config.seq, global_batch=config.global_batch
    )


def _nearest(
    config: RunConfig, world_size: int, model: ModelConfig, rest: tuple[str, ...], *, moves: bool
) -> RunConfig | None:
    """The run that changes least and passes; `moves`: tp and pp may change."""
    layouts = [(config.tp, config.pp)]
    if moves:
        each = divisors(world_size)
        pairs = ((tp, pp) for tp, pp in itertools.product(each, each) if world_size % (tp * pp) == 0)
        layouts = sorted(pairs, key=lambda pair: _distance(config, pair))[:TRIED]
    best: tuple[float, RunConfig] | None = None
    for tp, pp in layouts:
        distance = _distance(config, (tp, pp))
        if best is not None and distance >= best[0]:
            break
        dp = config.dp if config.dp is not None and tp * pp * config.dp == world_size else None
        tried = _mended(replace(config, tp=tp, pp=pp, dp=dp, cp=1, ep=1), world_size // (tp * pp), model)
        if tried is None or _faults(tried, world_size, model) != rest:
            continue
        distance += sum(
            getattr(tried, name) != getattr(config, name) for name in ("seq", "global_batch", "schedule")
        )
        if best is None or distance < best[0]:
            best = distance, tried
    return None if best is None else best[1]


def _distance(config: RunConfig, layout: tuple[int, int]) -> float:
    """How far tp and pp are from what was asked, in doublings; of two as far, the one with more of both is nearer."""
    tp, pp = layout
    steps = abs(math.log2(tp / config.tp)) + abs(math.log2(pp / config.pp))
    return steps - 1e-6 * math.log2(tp * pp)


def _mended(config: RunConfig, dp: int, model: ModelConfig) -> RunConfig | None:
    """The run with its schedule, sharding, lengths and batch made to suit its layout."""
    changes: dict[str, Any] = {}
    rule = SCHEDULES[config.schedule]
    chunks = config.virtual_stages or rule.chunks
    if rule.turns and model.layers < 2 * config.pp:
        changes |= {"schedule": ScheduleName.ZB_H1, "virtual_stages": None}
    elif not rule.several:
        changes["virtual_stages"] = None
    elif config.pp < 2 or model.layers < 2 * config.pp:
        changes |= {"schedule": ScheduleName.ONE_F_ONE_B, "virtual_stages": None}
    elif chunks < 2 or chunks * config.pp > model.layers:
        changes["virtual_stages"] = max(2, min(chunks, model.layers // config.pp))
    if config.data_parallel == DataParallel.FSDP:
        changes |= {"zero": None, "bucket_elements": None}
        if config.simulate:
            changes |= {"data_parallel": DataParallel.ZERO, "zero": 3}
    size = config.per_device_train_batch_size or (
        DEFAULT_MICROBATCH_SIZE if config.global_batch is None else 1
    )
    unit = config.tp // math.gcd(size, config.tp) if config.sp else 1
    longest = model.max_positions // unit * unit
    seq = min(longest, max(unit, round(config.seq / unit) * unit))
    if seq < 1:
        return None
    if seq != config.seq:
        changes["seq"] = seq
    return replace(config, **changes, **_batch(config, dp))


def _batch(config: RunConfig, dp: int) -> dict[str, Any]:
    """The global batch nearest to the one asked for that the other sizes make."""
    count = config.microbatches or config.gradient_accumulation_steps
    if config.global_batch is None:
        return {}
    unit = (config.per_device_train_batch_size or 1) * (count or 1) * dp
    exact = config.per_device_train_batch_size is not None and count is not None
    total = unit if exact else max(1, round(config.global_batch / unit)) * unit
    return {"global_batch": total}
