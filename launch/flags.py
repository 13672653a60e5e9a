"""The command line of `train`: the fields of RunConfig in groups, each with a line of help. Read by tyro."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, get_type_hints

import tyro

from triaxis.engine.config import RunConfig

DESCRIPTION = """Train a language model on tp × pp × dp ranks.

One process: `python -m triaxis.launch.train --steps 20`

Eight processes: `torchrun --nproc-per-node 8 -m triaxis.launch.train --tp 2 --pp 2 --dp 2`

Eight threads: `python -m triaxis.launch.train --simulate --tp 2 --pp 2 --dp 2`

Flags may be written with hyphens or underscores. A run that cannot work is refused before anything starts."""

MORE = "more"

GROUPS: dict[str, dict[str, str]] = {
    "model and data": {
        "model": "A preset (tiny, small, llama3-8b, …) or a .toml or .json file of model fields.",
        "data": "stdlib (the text of Python's own library, as bytes), a .jsonl file, or a Megatron .bin/.idx prefix.",
        "data_path": "Another name for --data.",
        "eval_data": "Held-out data of the same kind as --data; stdlib holds some of its own back.",
        "tokenizer": "A tokenizer.json or its directory, for .jsonl; bytes without one.",
        "seq": "Tokens in a sequence.",
        "pack": "Fill sequences with several documents; none attends to another.",
        "on_bad_sample": "What a line that cannot be read does: end the run, or be skipped and counted.",
    },
    "layout": {
        "tp": "Tensor parallelism: ranks that share every layer.",
        "pp": "Pipeline parallelism: stages that the layers are cut into.",
        "dp": "Data parallelism: replicas; left out, what the number of processes leaves.",
        "cp": "Context parallelism (not available yet).",
        "ep": "Expert parallelism (dense models have none).",
        "order": "Which axis is innermost, that is, nearest in rank.",
        "sp": "Split sequences over the tp ranks between layers (less activation memory).",
        "data_parallel": "This engine's ZeRO, or torch's fully_shard.",
        "zero": "What replicas shard: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters. Default 1.",
        "bucket_elements": "Elements in a bucket of parameters; by default one block's.",
        "schedule": "The order of forward and backward on the stages; python -m triaxis.launch.schedule draws it.",
        "virtual_stages": "Chunks of layers per stage, for interleaved; 2 there by default.",
        "simulate": "Run every rank as a thread of this process.",
    },
    "batch and length": {
        "per_device_train_batch_size": "Sequences in a microbatch.",
        "microbatches": "Microbatches per step and replica; by default 2 × pp, or 1 without a pipeline.",
        "gradient_accumulation_steps": "Another name for --microbatches.",
        "global_batch": "Sequences per step: batch size × microbatches × dp. Any two of the three decide.",
        "steps": "Optimizer steps; 100 by default.",
        "num_train_epochs": "Length in passes over the data, instead of --steps.",
    },
    "optimizer": {
        "optimizer": "AdamW, or plain gradient descent.",
        "learning_rate": "The peak.",
        "lr_scheduler_type": "Decay after the warm-up.",
        "warmup_ratio": "Warm-up as a part of all steps.",
        "warmup_steps": "Warm-up in steps.",
        "min_learning_rate_ratio": "What is left of the peak at the last step.",
        "weight_decay": "Decoupled; matrices only, not norms or biases.",
        "adam_beta1": "Decay of the first moment.",
        "adam_beta2": "Decay of the second moment.",
        "adam_epsilon": "Added to the root of the second moment.",
        "max_grad_norm": "Clip the global gradient norm to this; 0 is off.",
    },
    "precision, memory and repeatability": {
        "dtype": "bf16 keeps fp32 master weights.",
        "accumulate_dtype": "What gradients are summed in; auto is fp32, and fp64 with fp64.",
        "recompute": "Run each block's forward again in backward, instead of keeping its activations.",
        "seed": "Decides initial values and the order of the data, whatever the layout.",
    },
    "output": {
        "output_dir": "Gets metrics.jsonl and loss.png.",
        "logging_steps": "Steps between lines on the terminal; metrics.jsonl has every step.",
        "eval_steps": "Steps between evaluations; at the end only, by default.",
        "eval_batches": "Global batches per evaluation; 0 is none.",
        "report_to": "Where else the metrics go.",
        "timeout_seconds": "How long a rank waits for another.",
    },
    "checkpoints": {
        "save_strategy": "When to save: by steps, epochs or time, and at the end. Left out, --save_steps or "
        "--save_minutes decides; without either, only SIGTERM and SIGUSR1 save.",
        "save_steps": "Steps between checkpoints; 500 with --save_strategy steps.",
        "save_minutes": "Minutes between checkpoints; 30 with --save_strategy time.",
        "save_total_limit": "Checkpoints that are kept, beside the best; by default all.",
        "save_best": "Save, and keep, whenever an evaluation is the best so far.",
        "async_save": "Write while training goes on; the step waits for a copy only.",
        "on_save_error": "What a save that fails (a full disk) does. Earlier checkpoints stay.",
        "resume": "auto: go on from the newest checkpoint in --output-dir, if there is one. never: start anew. "
        "Or a checkpoint, or a folder of them. Left out: auto after a restart by torchrun, else never.",
    },
    "faults": {
        "hang_timeout": "Seconds without progress after which every rank's position is written to OUT/hang and the "
        "run ends; more than the longest pause between communications.",
        "on_nan": "What a loss or gradient norm that is not finite does: end the run, or skip the update (ten in a "
        "row end the run).",
        "spike_factor": "A gradient norm above this many times its average of late counts as not finite.",
        "elastic": "Keep the checkpoint's global batch with another number of ranks: dp and microbatches follow.",
    },
}


def parse_flags(arguments: Sequence[str], speaks: bool) -> RunConfig:
    """The run that the command line asks for. Ends the process on --help (0) and on flags it cannot read (2)."""
    return parse_with(arguments, speaks, "triaxis.launch.train", DESCRIPTION)[0]


def parse_with(
    arguments: Sequence[str], speaks: bool, program: str, description: str, more: type | None = None
) -> tuple[RunConfig, Any]:
    """The run, and an instance of the dataclass `more`, whose flags stand before the run's in the help."""
    parsed: Any = tyro.cli(
        _grouped(more),
        prog=program,
        description=description,
        args=list(arguments),
        console_outputs=speaks,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.EnumChoicesFromValues),
    )
    values: dict[str, Any] = {}
    for group, helps in GROUPS.items():
        values |= {name: getattr(getattr(parsed, _attribute(group)), name) for name in helps}
    return RunConfig(**values), getattr(parsed, MORE, None)


def _attribute(group: str) -> str:
    return group.replace(",", "").replace(" ", "_")


def _grouped(more: type | None) -> type:
    """A dataclass with a field for each group, which tyro shows as one box of help each."""
    hints = get_type_hints(RunConfig)
    defaults = {field.name: field.default for field in dataclasses.fields(RunConfig)}
    outer: list[Any] = [] if more is None else [(MORE, more, dataclasses.field(default_factory=more))]
    for group, helps in GROUPS.items():
        inner = [
            (
                name,
                Annotated[hints[name], tyro.conf.arg(help=text)],
                dataclasses.field(default=defaults[name]),
            )
            for name, text in helps.items()
        ]
        made = dataclasses.make_dataclass(_attribute(group), inner, kw_only=True, frozen=True)
        made.__doc__ = group
        outer.append((_attribute(group), made, dataclasses.field(default_factory=made)))
    return dataclasses.make_dataclass("Train", outer, kw_only=True, frozen=True)
