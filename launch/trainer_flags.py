"""Flags of the Hugging Face Trainer as flags of a run, so that a launch line that people have runs unchanged.

Each is translated, or left out with a line that says why it changes nothing, or refused with what to use instead; none
is swallowed. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

YES, NO = ("true", "yes", "1", "on"), ("false", "no", "0", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class Meant:
    """What a flag comes to: words in its place, and a line for people; or a refusal."""

    words: tuple[str, ...] = ()
    note: str = ""
    fault: str = ""


Translation = Callable[[str], Meant]


def _value(name: str, **words: str) -> Translation:
    """Another name, and other words for some values."""
    return lambda value: Meant(words=(name, words.get(value.lower(), value)))


def _nothing(why: str) -> Translation:
    return lambda value: Meant(note=why)


def _if(on: Meant, off: Meant | None = None) -> Translation:
    return lambda value: on if value.lower() in YES else off or Meant()


def _steps(value: str) -> Meant:
    return Meant() if value == "-1" else Meant(words=("--steps", value))  # its "not given"


def _resume(value: str) -> Meant:
    if value.lower() in (*YES, *NO):
        return Meant(words=("--resume", "auto" if value.lower() in YES else "never"))
    return Meant(words=("--resume", value))


_OPTIMIZERS = dict.fromkeys(
    ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "adamw"
)


def _optim(value: str) -> Meant:
    if value in _OPTIMIZERS or value == "sgd":
        return Meant(words=("--optimizer", _OPTIMIZERS.get(value, value)))
    return Meant(fault=f"is {value}, which is not available; use adamw_torch (moments in fp32) or sgd")


def _evaluation(value: str) -> Meant:
    if value == "no":
        return Meant(words=("--eval-batches", "0"))
    if value == "steps":
        return Meant()
    return Meant(fault=f"must be no or steps, but is {value}; give the steps of an epoch with --eval-steps")


def _fsdp(value: str) -> Meant:
    parts = value.replace(",", " ").split()
    unknown = [part for part in parts if part not in ("full_shard", "auto_wrap")]
    if unknown:
        return Meant(
            fault=f"has {unknown[0]}, which is not available; use full_shard auto_wrap, or --zero 1, 2 or 3"
        )
    return Meant(words=("--data-parallel", "fsdp")) if "full_shard" in parts else Meant()


_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}


def _dtype(value: str) -> Meant:
    if value == "auto":
        return Meant(note="weights are read in --dtype, whatever they are stored in")
    if value in _DTYPES:
        return Meant(words=("--dtype", _DTYPES[value]))
    return Meant(
        fault=f"must be float32, bfloat16 or auto, but is {value}; there is no loss scaling for float16 yet"
    )


VALUES: dict[str, Translation] = {
    "--max-steps": _steps,
    "--max-seq-length": _value("--seq"),
    "--model-max-length": _value("--seq"),
    "--resume-from-checkpoint": _resume,
    "--optim": _optim,
    "--eval-strategy": _evaluation,
    "--evaluation-strategy": _evaluation,
    "--torch-dtype": _dtype,
    "--ddp-timeout": _value("--timeout-seconds"),
    "--fsdp": _fsdp,
    "--lr-scheduler-type": _value("--lr-scheduler-type", constant_with_warmup="constant"),
    "--attn-implementation": _nothing("the attention kernel is chosen by the device and the data"),
    "--local-rank": _nothing("a launcher's; the rank is read from the environment"),
    "--logging-strategy": _nothing("metrics.jsonl has every step; --logging-steps is for the terminal"),
    "--logging-dir": _nothing("events go to --output-dir"),
    "--per-device-eval-batch-size": _nothing("evaluation takes the microbatches of training"),
    "--run-name": _nothing("a run is its --output-dir"),
}
"""Flags with a value."""

SWITCHES: dict[str, Translation] = {
    "--bf16": _if(Meant(words=("--dtype", "bf16"))),
    "--fp16": _if(Meant(fault="must be left out: there is no loss scaling yet; use --bf16")),
    "--gradient-checkpointing": _if(Meant(words=("--recompute",)), Meant(words=("--no-recompute",))),
    "--tf32": _nothing("products of fp32 are as torch has them set; --dtype bf16 is the fast one"),
    "--do-train": _nothing("training is what this command does"),
    "--overwrite-output-dir": _nothing("--resume decides what becomes of an older run in the folder"),
    "--ddp-find-unused-parameters": _nothing("a parameter without a gradient has a gradient of zero"),
    "--save-safetensors": _nothing("checkpoints are this engine's; --save-hf writes safetensors"),
    "--save-on-each-node": _nothing("a checkpoint is one, on storage that all nodes see"),
}
"""Flags that are booleans, alone or with a value."""


class TrainerFlagError(ValueError):
    """A flag of the Trainer that cannot be honoured."""


def translated(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command line in this engine's flags, and a line for each flag that changes nothing here."""
    found: list[str] = []
    notes: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, sign, value = word.partition("=")
        spelled = name.replace("_", "-")
        translate = VALUES.get(spelled) or SWITCHES.get(spelled)
        if word == "--" or translate is None:
            found.append(word)
            continue
        if not sign:
            takes = spelled in VALUES or (bool(rest) and rest[0].lower() in (*YES, *NO))
            value = rest.pop(0) if takes and rest else "true"
        meant = translate(value)
        if meant.fault:
            raise TrainerFlagError(f"`{spelled}` {meant.fault}")
        found += meant.words
        notes += [f"{spelled}: {meant.note}"] if meant.note else []
    return found, notes
