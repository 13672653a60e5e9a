"""Which checkpoint a run goes on from, and whether it is the same run. No torch.

What decides the numbers must stay as it was saved (`facts`); layout, saving and showing may change.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from triaxis.engine.checkpoint.folder import FOLDER, complete_checkpoints
from triaxis.engine.checkpoint.manifest import CheckpointError, RunState, read_manifest
from triaxis.engine.config import ConfigError, ResolvedRun, RunConfig, run_directory
from triaxis.engine.run.counters import check_run_state
from triaxis.models.fields import config_from_fields, model_facts
from triaxis.parallel.places.legal_values import divisors, listed, nearest

KEPT_FLAGS = ("seed", "seq", "pack", "on_bad_sample", "optimizer", "dtype")
"""Data and tokenizer are compared by content, wherever they lie: see `triaxis.engine.run.inputs`."""
TOLD_FLAGS = (
    *("steps", "num_train_epochs", "learning_rate", "lr_scheduler_type", "warmup_ratio", "warmup_steps"),
    *("warmup_type", "mtp_weight", "router_bias_rate", "kernels"),
    *("min_learning_rate_ratio", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How a run begins: `config.resume` settled to None, "auto" or a checkpoint, and the state found there."""

    config: RunConfig
    path: Path | None = None
    state: RunState | None = None


def find_start(config: RunConfig, *, restarted: bool) -> Start:
    """How the run begins, as `_find_start` says, with the day that chat templates write: a checkpoint's, else today."""
    start = _find_start(config, restarted=restarted)
    held = start.state.config.get("chat_template_date") if start.state is not None else None
    day = config.chat_template_date or str(held or date.today().isoformat())
    return dataclasses.replace(start, config=dataclasses.replace(start.config, chat_template_date=day))


def _find_start(config: RunConfig, *, restarted: bool) -> Start:
    """What `--resume` means in this folder; `restarted`: by a launcher, after a failure of the same run.

    Raises ConfigError where an older run's checkpoints are in the way, CheckpointError where none can be read.
    """
    directory = run_directory(config)
    own = complete_checkpoints(directory)
    asked = config.resume
    if asked == "auto" or (restarted and asked != "never" and (asked is None or own)):
        state, path = _newest_readable(own)
        return Start(config=dataclasses.replace(config, resume="auto"), path=path, state=state)
    if asked in (None, "never"):
        if (fault := in_the_way(config)) is not None:
            raise ConfigError((fault,))
        return Start(config=dataclasses.replace(config, resume=None))
    path = named_checkpoint(asked)
    if own and not any(path.samefile(other) for other in own):
        raise ConfigError(
            (
                f"`resume` {path} is not of this `output_dir`, which has checkpoints of its own up to {own[-1].name}; "
                "use --resume auto, or one of its own, or another --output-dir to branch off",
            )
        )
    return Start(config=dataclasses.replace(config, resume=str(path)), path=path, state=_state_at(path))


def in_the_way(config: RunConfig) -> str | None:
    """Why a run that starts anew must not write to its folder: an older run's checkpoints are there."""
    directory = run_directory(config)
    own = complete_checkpoints(directory)
    if not own:
        return None
    return (
        f"`output_dir` {directory} has checkpoints up to {own[-1].name}; use --resume auto to go on from there, or "
        "another --output-dir to start anew"
    )


def newer_in(directory: Path, path: Path) -> list[Path]:
    """The complete checkpoints of a run's folder that are newer than one of them; none where it is not of them."""
    own = complete_checkpoints(directory)
    places = [place for place, other in enumerate(own) if other.samefile(path)]
    return own[places[0] + 1 :] if places else []


def continues_here(config: RunConfig) -> bool:
    """Whether what is resumed is of this run's own folder, whose rows and picture then go on."""
    own = (run_directory(config) / FOLDER).resolve()
    return config.resume == "auto" or named_checkpoint(str(config.resume)).resolve().parent == own


def named_checkpoint(name: str) -> Path:
    """The checkpoint that `--resume DIR` means: itself, or the newest in it. Raises ConfigError if there is none."""
    folder = Path(name)
    siblings = complete_checkpoints(folder.parent.parent) if folder.parent.name == FOLDER else []
    found = [path for path in siblings if path.name == folder.name] or complete_checkpoints(
        folder.parent if folder.name == FOLDER else folder
    )
    if not found:
        raise ConfigError(
            (f"`resume` must be auto, never, or a folder that holds a checkpoint, but {folder} has none",)
        )
    return found[-1]


def _newest_readable(own: list[Path]) -> tuple[RunState | None, Path | None]:
    """The trainer reads files through, and says what it passes over; here only a manifest must be whole."""
    for path in reversed(own):
        try:
            return _state_at(path), path
        except CheckpointError:
            if path == own[0]:
                raise
    return None, None


def _state_at(path: Path) -> RunState:
    """The state of a checkpoint that a run can go on from. Raises CheckpointError."""
    state = read_manifest(path).state
    check_run_state(state, path)
    return state


def facts_of(config: RunConfig, resolved: ResolvedRun) -> dict[str, object]:
    """What a resumed run must have in common with the saved one, by flag; JSON."""
    model = model_facts(resolved.model)
    kept = {name: getattr(config, name) for name in KEPT_FLAGS}
    facts = {"model": model, **kept, "accumulate_dtype": resolved.accumulate_dtype}
    found: dict[str, object] = json.loads(json.dumps({**facts, "global_batch": resolved.global_batch}))
    return found


def _as_now(model: object) -> object:
    """The facts of a model as this version would write them: one `head_dim` may be told in two ways."""
    if not isinstance(model, dict) or "kinds" in model:
        return model
    try:
        found: object = json.loads(
            json.dumps(model_facts(config_from_fields({"name": "saved", **model}, "saved")))
        )
    except ValueError:  # of a version with other fields: told as changed, with its values
        return model
    return found


def check_same_run(state: RunState, config: RunConfig, resolved: ResolvedRun) -> None:
    """Raises a ConfigError that names everything that must not change, and does."""
    facts = state.extra["facts"]
    assert isinstance(facts, dict)
    saved = {**facts, "model": _as_now(facts.get("model"))}
    faults = [
        _changed(name, saved.get(name), value)
        for name, value in facts_of(config, resolved).items()
        if name != "global_batch" and saved.get(name) != value
    ]
    batch = saved.get("global_batch")
    if batch != resolved.global_batch and config.global_batch is None:
        faults.append(
            f"`global_batch` must stay {batch}, but the flags make {resolved.global_batch}; use --elastic to keep it "
            f"with this number of ranks, or --global_batch {resolved.global_batch} to change it"
        )
    if resolved.total_steps is not None and resolved.total_steps < state.step:
        faults.append(
            f"`steps` must be at least the {state.step} that are done, but is {resolved.total_steps}: "
            "it is the total, also of a resumed run"
        )
    if faults:
        raise ConfigError(tuple(faults))


def _changed(name: str, saved: object, value: object) -> str:
    if isinstance(saved, dict) and isinstance(value, dict):
        fields = [f"{f} {saved.get(f)} became {v}" for f, v in value.items() if saved.get(f) != v]
        return (
            f"`{name}` must stay as it was saved, but {', '.join(fields)}; start anew in another --output-dir"
        )
    return (
        f"`{name}` must stay {saved}, as it was saved, but is {value}; give --{name} {saved}, "
        "or start anew in another --output-dir"
    )


def told_changes(state: RunState, config: RunConfig, resolved: ResolvedRun) -> list[str]:
    """What may change, and does: a line for each, and what follows from it."""
    saved = state.config
    left_out = RunConfig()  # what a flag was before there was one
    changes = [(name, saved.get(name, getattr(left_out, name)), getattr(config, name)) for name in TOLD_FLAGS]
    told = [f"changed since it was saved: {name} {old} → {new}" for name, old, new in changes if old != new]
    facts = state.extra["facts"]
    assert isinstance(facts, dict)
    batch, samples = facts.get("global_batch"), state.sampler.get("samples")
    if batch != resolved.global_batch:
        told.append(
            f"changed since it was saved: global_batch {batch} → {resolved.global_batch}: the data goes on at sample "
            f"{samples}, each step takes {resolved.global_batch} from here on, and the learning rate stays as the "
            "flags say, by steps"
        )
    return told


def adapt(config: RunConfig, state: RunState, world_size: int) -> RunConfig:
    """The flags under --elastic: the saved global batch (or the one asked for) on another number of ranks.

    dp follows from the ranks; a microbatch keeps its size if that divides, else has the next smaller that does.
    Example: 24 sequences, microbatches of 4: dp 3 has 2 of them, dp 2 has 3, dp 4 has 2 of size 3.
    Raises ConfigError where no dp fits.
    """
    model_ranks = config.tp * config.pp
    dp = max(1, world_size // model_ranks)
    facts = state.extra["facts"]
    assert isinstance(facts, dict)
    total = config.global_batch or int(facts["global_batch"])
    if total % dp:
        works = [count * model_ranks for count in nearest(divisors(total), dp)]
        raise ConfigError(
            (
                f"`dp` must divide the global batch {total} under --elastic, but {world_size} ranks make it {dp}; "
                f"start {listed(works)} ranks",
            )
        )
    size = config.per_device_train_batch_size
    if size is not None:
        size = max(d for d in divisors(total // dp) if d <= size)
    return dataclasses.replace(
        config,
        dp=dp if world_size % model_ranks == 0 else None,
        global_batch=total,
        per_device_train_batch_size=size,
        microbatches=None,
        gradient_accumulation_steps=None,
    )
