"""Flags of the Hugging Face Trainer as flags of a run, so that a launch line that people have runs unchanged.

Each is translated, or left out with a line that says why it changes nothing, or refused with what to use instead; none
is swallowed. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from triaxis.launch.foreign.meaning import (
    NO,
    YES,
    Meant,
    Translation,
    nothing,
    renamed,
    switched,
)
from triaxis.launch.foreign.trainer_rest import REST_SWITCHES, REST_VALUES


def _steps(value: str) -> Meant:
    return Meant() if value == "-1" else Meant(words=("--steps", value))  # its "not given"


def _resume(value: str) -> Meant:
    if value.lower() in (*YES, *NO):
        return Meant(words=("--resume", "auto" if value.lower() in YES else "never"))
    return Meant(words=("--resume", value))


def _warm_up(value: str) -> Meant:
    """Newer versions of transformers take a part of all steps under the same name."""
    try:
        part = 0 < float(value) < 1
    except ValueError:
        part = False
    return Meant(words=("--warmup-ratio" if part else "--warmup-steps", value))


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


_FSDP_PARTS: dict[str, tuple[str, ...]] = {
    "full_shard": ("--data-parallel", "fsdp"),
    "shard_grad_op": ("--zero", "2"),
    "no_shard": ("--zero", "0"),
    "auto_wrap": (),
    **dict.fromkeys(YES, ("--data-parallel", "fsdp")),
    **dict.fromkeys(NO, ()),
}
_FSDP_OFFLOAD = ("--zero", "3", "--offload-param", "cpu", "--offload-optimizer", "cpu")


def _fsdp(value: str) -> Meant:
    parts = value.lower().replace(",", " ").split()
    unknown = [part for part in parts if part not in (*_FSDP_PARTS, "offload")]
    if unknown:
        return Meant(
            fault=f"has {unknown[0]}, which is not available; use full_shard auto_wrap, or --zero 0, 1, 2 or 3"
        )
    words = [word for part in parts for word in _FSDP_PARTS.get(part, ())]
    if "offload" in parts:  # of everything where parameters are sharded, else of what is
        words += _FSDP_OFFLOAD if "fsdp" in words else _FSDP_OFFLOAD[4:]
    return Meant(words=tuple(words))


def _report(value: str) -> Meant:
    if value in ("none", "tensorboard"):
        return Meant(words=("--report-to", value))
    return Meant(
        fault=f"must be none or tensorboard, but is {value}, which is not available; metrics.jsonl has every step"
    )


_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def _dtype(value: str) -> Meant:
    if value == "auto":
        return Meant(note="weights are read in --dtype, whatever they are stored in")
    if value in _DTYPES:
        return Meant(words=("--dtype", _DTYPES[value]))
    return Meant(fault=f"must be float32, bfloat16, float16 or auto, but is {value}")


VALUES: dict[str, Translation] = {
    "--max-steps": _steps,
    "--max-seq-length": renamed("--seq"),
    "--model-max-length": renamed("--seq"),
    "--resume-from-checkpoint": _resume,
    "--warmup-steps": _warm_up,
    "--optim": _optim,
    "--eval-strategy": _evaluation,
    "--evaluation-strategy": _evaluation,
    "--torch-dtype": _dtype,
    "--ddp-timeout": renamed("--timeout-seconds"),
    "--fsdp": _fsdp,
    "--lr-scheduler-type": renamed("--lr-scheduler-type", constant_with_warmup="constant"),
    "--attn-implementation": nothing("the attention kernel is chosen by the device and the data"),
    "--local-rank": nothing("a launcher's; the rank is read from the environment"),
    "--logging-strategy": nothing("metrics.jsonl has every step; --logging-steps is for the terminal"),
    "--logging-dir": nothing("events go to --output-dir"),
    "--per-device-eval-batch-size": nothing("evaluation takes the microbatches of training"),
    "--run-name": nothing("a run is its --output-dir"),
    "--report-to": _report,
    **REST_VALUES,
}
"""Flags with a value."""

PRECISIONS = {"--bf16", "--fp16"}
SWITCHES: dict[str, Translation] = {
    "--bf16": switched(Meant(words=("--dtype", "bf16"))),
    "--fp16": switched(Meant(words=("--dtype", "fp16"))),
    "--gradient-checkpointing": switched(Meant(words=("--recompute",)), Meant(words=("--no-recompute",))),
    "--tf32": nothing("products of fp32 are as torch has them set; --dtype bf16 is the fast one"),
    "--do-train": nothing("training is what this command does"),
    "--overwrite-output-dir": nothing("--resume decides what becomes of an older run in the folder"),
    "--ddp-find-unused-parameters": nothing("a parameter without a gradient has a gradient of zero"),
    "--save-safetensors": nothing("checkpoints are this engine's; --save-hf writes safetensors"),
    "--save-on-each-node": nothing("a checkpoint is one, on storage that all nodes see"),
    **REST_SWITCHES,
}
"""Flags that are booleans, alone or with a value."""


OPTIONAL = ("--fsdp",)
"""Flags whose value may be left out."""


class TrainerFlagError(ValueError):
    """A flag of the Trainer that cannot be honoured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Translated:
    """A command line in this engine's flags.

    notes: a line for each flag that changes nothing here; spelled: a flag here, and what people wrote for it
    """

    words: tuple[str, ...]
    notes: tuple[str, ...]
    spelled: Mapping[str, str]


def translated(line: Sequence[str]) -> Translated:
    """The command line in this engine's flags. Raises TrainerFlagError."""
    words: list[str] = []
    notes: list[str] = []
    spelled: dict[str, str] = {}
    on: set[str] = set()
    rest = list(line)
    while rest:
        word = rest.pop(0)
        name, sign, value = word.partition("=")
        flag = name.replace("_", "-")
        translate = VALUES.get(flag) or SWITCHES.get(flag)
        if word == "--" or translate is None:
            words.append(word)
            continue
        if not sign:
            value = rest.pop(0) if _takes_value(flag, rest) else "true"
        meant = translate(value)
        if meant.fault:
            raise TrainerFlagError(f"`{flag}` {meant.fault}")
        on |= {flag} if meant.words else set()
        if on >= PRECISIONS:
            raise TrainerFlagError("`--bf16` and `--fp16` must not both be given; leave one out")
        words += meant.words
        notes += [f"{flag}: {meant.note}"] if meant.note else []
        spelled |= {here: name for here in meant.words if here.startswith("--") and here != flag}
    _check_precision(on & PRECISIONS, words)
    return Translated(words=tuple(words), notes=tuple(notes), spelled=spelled)


def _check_precision(switched_on: set[str], words: Sequence[str]) -> None:
    """Raises TrainerFlagError where --dtype and a switch differ: the last one would win in silence."""
    pairs = zip(words, [*words, ""][1:], strict=True)
    types = [
        following if word == "--dtype" else word.removeprefix("--dtype=")
        for word, following in pairs
        if word == "--dtype" or word.startswith("--dtype=")
    ]
    if switched_on and len(set(types)) > 1:
        (flag,) = switched_on
        raise TrainerFlagError(
            f"`{flag}` and `--dtype` must not differ, but are {' and '.join(types)}; leave one out"
        )


def _takes_value(flag: str, rest: Sequence[str]) -> bool:
    """Whether the next word is the flag's value."""
    if not rest:
        return False
    if flag in OPTIONAL:
        return not rest[0].startswith("--")
    return flag in VALUES or rest[0].lower() in (*YES, *NO)
