"""The command line of `train`: the fields of RunConfig in groups, each with a line of help. No torch."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import EnumType
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from triaxis.engine.config import RunConfig
from triaxis.engine.data.files import SEPARATOR
from triaxis.launch.command_line import Claim, Listed, Parser, number, one_of, whole
from triaxis.launch.foreign.accelerate import read_accelerate, read_environment
from triaxis.launch.foreign.deepspeed import read_deepspeed
from triaxis.launch.foreign.fsdp import read_fsdp_config
from triaxis.launch.foreign.keys import Reading, combined, flag_of, settled
from triaxis.launch.foreign.trainer_flags import translated

DESCRIPTION = """Train a language model on tp × pp × dp ranks.

  one process       triaxis train --steps 20
  eight processes   torchrun --nproc-per-node 8 -m triaxis.launch.train --tp 2 --pp 2 --dp 2
  eight threads     triaxis train --threads --tp 2 --pp 2 --dp 2

Flags may be written with hyphens or underscores. A run that cannot work is refused before anything starts."""

ALSO = {
    "simulate": ("--threads", "--simulate"),
    "save_hf_checkpoints": ("--save-hf-checkpoints", "--save-hf-ckpt"),
}
"""Fields whose flag has another name than the field; the first is the one that is shown."""

LISTS = ("kernels",)
"""Fields whose flag may be given several times: its values, with commas between."""

ELSEWHERE = {
    "--tensor-model-parallel-size": "--tp",
    "--tensor-parallel-size": "--tp",
    "--pipeline-model-parallel-size": "--pp",
    "--pipeline-parallel-size": "--pp",
    "--context-parallel-size": "--cp",
    "--expert-model-parallel-size": "--ep",
    "--sequence-parallel": "--sp",
    "--micro-batch-size": "--per-device-train-batch-size",
    "--train-micro-batch-size-per-gpu": "--per-device-train-batch-size",
    "--global-batch-size": "--global-batch",
    "--train-batch-size": "--global-batch",
    "--seq-length": "--seq",
    "--seq-len": "--seq",
    "--max-length": "--seq",
    "--train-iters": "--steps",
    "--lr": "--learning-rate",
    "--lr-decay-style": "--lr-scheduler-type",
    "--clip-grad": "--max-grad-norm",
    "--gradient-clipping": "--max-grad-norm",
    "--activation-checkpointing": "--recompute",
    "--recompute-activations": "--recompute",
    "--zero-stage": "--zero",
    "--save-interval": "--save-steps",
    "--save-limit": "--save-total-limit",
    "--load": "--resume",
    "--dataset": "--data",
    "--train-file": "--data",
    "--tokenizer-model": "--tokenizer",
    "--mtp-num-layers": "--mtp-depths",
    "--mtp-loss-scaling-factor": "--mtp-weight",
}
"""Options of Megatron, DeepSpeed and the Hugging Face Trainer, and what they are called here."""

SEVERAL = ("data", "data_path", "eval_data")
"""Flags that take several words."""

GROUPS: dict[str, dict[str, str]] = {
    "model and data": {
        "model": "A preset (tiny, small, llama3-8b, …), a .toml or .json file of model fields, or the config.json of a "
        "Hugging Face model: the architecture alone, with random weights.",
        "model_name_or_path": "A Hugging Face folder, or a name on the hub: architecture, weights and tokenizer.",
        "init_from": "A checkpoint of this engine to take the weights from, and nothing else.",
        "mtp_depths": "Extra prediction depths behind the layers (multi-token prediction); of a Hugging Face folder, "
        "those that it has.",
        "mtp_weight": "What the mean of their losses is multiplied by; DeepSeek-V3 began with 0.3 and ended with 0.1.",
        "router_bias_rate": "What a bias that chooses experts moves by after a step; 0 leaves it as it is. Default: "
        "the model's own, usually 0.001.",
        "data": "stdlib (the text of Python's own library, as bytes), files of text, folders or patterns of them, or a "
        "Megatron .bin/.idx prefix. Several are read one behind the other; with weights (a.jsonl:0.7 b.jsonl:0.3) each "
        "has its part of the samples.",
        "data_path": "Another name for --data.",
        "eval_data": "Held-out data of the same kind as --data; stdlib holds some of its own back.",
        "eval_fraction": "Hold this part of the .jsonl or text data back to evaluate on, chosen by content.",
        "tokenizer": "A tokenizer.json or its directory, for text; bytes without one. A preset takes its vocabulary.",
        "train_inserted_think": "Also train the empty think blocks that a chat template inserts into answers.",
        "chat_template_date": "YYYY-MM-DD, for chat templates that write the day (Llama 3.1). Default: the day of a "
        "run's first start, whenever it goes on.",
        "seq": "Tokens in a sequence.",
        "pack": "Fill sequences with several documents; none attends to another.",
        "on_bad_sample": "What a line that cannot be read does: end the run, or be skipped and counted.",
        "dataloader_num_workers": "Steps whose batches are made ahead, each on a thread; 0 makes them when asked for.",
        "show_samples": "Rows of data to show as text at the start, what is trained in ⟦brackets⟧.",
    },
    "layout": {
        "tp": "Tensor parallelism: ranks that share every layer.",
        "pp": "Pipeline parallelism: stages that the layers are cut into.",
        "dp": "Data parallelism: replicas; left out, what the number of processes leaves.",
        "cp": "Context parallelism (not available yet).",
        "ep": "Expert parallelism: ranks of tp × dp over which whole experts are spread; with 1 they are cut over tp.",
        "order": "Which axis is innermost, that is, nearest in rank.",
        "sp": "Split sequences over the tp ranks between layers (less activation memory).",
        "data_parallel": "This engine's ZeRO, or torch's fully_shard.",
        "zero": "What replicas shard: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters. Default 1.",
        "bucket_elements": "Elements in a bucket of parameters; by default one block's.",
        "wrap": "Classes of modules (A,B) whose parameters ZeRO-3 and fsdp gather together; by default layers.",
        "min_num_params": "Or the innermost modules with at least so many parameters.",
        "schedule": "The order of forward and backward on the stages; python -m triaxis.launch.schedule draws it. "
        "zb-h1 computes gradients of weights where a stage would wait; zb-v hardly waits, v-half needs half of 1f1b's "
        "activations, with two chunks on each stage, there and back.",
        "virtual_stages": "Chunks of layers per stage, for interleaved; 2 there by default. zb-v and v-half have 2.",
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
        "warmup_type": "A straight line, or DeepSpeed's logarithm: steep at first.",
        "min_learning_rate_ratio": "What is left of the peak at the last step.",
        "weight_decay": "Decoupled; on matrices, embeddings and the head among them, not on norms and biases.",
        "adam_beta1": "Decay of the first moment.",
        "adam_beta2": "Decay of the second moment.",
        "adam_epsilon": "Added to the root of the second moment.",
        "max_grad_norm": "Clip the global gradient norm to this; 0 is off.",
    },
    "precision, memory and repeatability": {
        "dtype": "bf16 keeps fp32 master weights.",
        "loss_scale": "With fp16: what losses are multiplied by; 0 finds it, and lowers it when a gradient overflows.",
        "initial_scale_power": "With fp16: the scale begins at 2 to this power.",
        "loss_scale_window": "With fp16: updates without an overflow until the scale doubles.",
        "hysteresis": "With fp16: overflows until the scale halves.",
        "consecutive_hysteresis": "With fp16: only overflows without an update between them count together.",
        "min_loss_scale": "With fp16: an overflow at this scale ends the run.",
        "accumulate_dtype": "What gradients are summed in; auto is fp32, and fp64 with fp64.",
        "offload_optimizer": "Where optimizer states are: none: on the device; cpu: in the host's memory; a folder "
        "(./states): in files there, mapped a bucket at a time. The last two in CPU runs only yet.",
        "offload_param": "Where ZeRO-3's parameters are: none or cpu.",
        "device": "Where to train, or (in a simulation) whose path to take; auto is a GPU where there is one, and "
        "all ranks must have found the same.",
        "transport": "How ranks on CPUs talk: auto lets those of one machine read each other's memory; gloo sends all "
        "over sockets.",
        "deterministic": "The same run gives the same bits each time on GPUs too, where it then is slower; on CPUs it "
        "always does.",
        "recompute": "Run each block's forward again in backward, instead of keeping its activations.",
        "kernels": "What does an operation where it is not torch's own: norm=compile,attention=flash; triaxis doctor "
        "shows the table, and what this machine cannot use.",
        "seed": "Decides initial values and the order of the data, whatever the layout.",
    },
    "output": {
        "output_dir": "Gets metrics.jsonl and loss.png.",
        "save_hf": "Write the trained model to this new folder, as Hugging Face has them, at the end.",
        "save_hf_checkpoints": "Write each checkpoint as such a folder too: OUT/hf/step-…, kept as long as it is.",
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
        "straggler_factor": "A rank whose work takes so many times as long as its like's, for ten steps, is named.",
        "check_collectives": "Steps, after a start, in which ranks compare what they ask for before each collective, "
        "and on CPUs each message; who reads another's memory always does.",
        "elastic": "Keep the checkpoint's global batch with another number of ranks: dp and microbatches follow.",
    },
}


def parse_flags(
    arguments: Sequence[str], speaks: bool, environment: Mapping[str, str] | None = None
) -> RunConfig:
    """The run that the command line asks for. Ends the process on --help (0) and on flags it cannot read (2).

    environment: where `accelerate launch` leaves what its own file asks for
    """
    parser = train_parser("triaxis train", DESCRIPTION, speaks, environment)
    return config_of(parser.parse_args(list(arguments)))


def train_parser(
    program: str, description: str, speaks: bool = True, environment: Mapping[str, str] | None = None
) -> Parser:
    """A parser that knows the flags of a run; `program` may add its own. What is not given is not in its namespace."""
    parser = RunParser(prog=program, description=description, speaks=speaks, elsewhere=ELSEWHERE)
    parser.environment = environment or {}
    hints = get_type_hints(RunConfig)
    defaults = {field.name: field.default for field in dataclasses.fields(RunConfig)}
    for title, helps in GROUPS.items():
        group = parser.add_argument_group(title)
        for name, text in helps.items():
            names = ALSO.get(name, (f"--{name.replace('_', '-')}",))
            kind = _kind(hints[name])
            said = "" if defaults[name] is None or kind is bool else f" (default: {defaults[name]})"
            said = " (default: True)" if defaults[name] is True else said
            given: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": f"{text}{said}"}
            if kind is bool:
                group.add_argument(*names, action=Claim, **given)
            elif name in LISTS:
                group.add_argument(*names, action=Listed, metavar=_metavar(kind), **given)
            elif name in SEVERAL:
                group.add_argument(*names, action=Joined, nargs="+", metavar="TEXT", **given)
            else:
                group.add_argument(*names, type=_reader(kind), metavar=_metavar(kind), **given)
    group = parser.add_argument_group("files of other programs (docs/deepspeed.md)")
    for name, (metavar, text, _) in FILES.items():
        group.add_argument(flag_of(name), metavar=metavar, help=text)
    return parser


FILES: dict[str, tuple[str, str, Callable[[str], Reading]]] = {
    "deepspeed": (
        "FILE",
        "A DeepSpeed JSON. Each key is honoured, named as changing nothing here, or refused.",
        read_deepspeed,
    ),
    "fsdp_config": ("FILE", "Settings of FSDP for --fsdp: a JSON file, or JSON itself.", read_fsdp_config),
    "accelerate_config": ("FILE", "The YAML of accelerate launch --config_file.", read_accelerate),
}
"""Options that name a file of another program: what stands for the value, help, and who reads it."""


class Joined(argparse.Action):
    """Several words, kept as one text with commas between them."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, SEPARATOR.join(values))


class RunParser(Parser):
    """A parser of a run's flags, of the Trainer's names for them, and of other programs' files beside them.

    What it finds has `sources`: where each value is from, `--bf16` or a key of a file.
    """

    environment: Mapping[str, str] = {}
    tells_notes = True

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # as argparse declares it
        try:
            line = translated(sys.argv[1:] if args is None else args)
            found, rest = super().parse_known_args(line.words, namespace)
            given = {name: value for name, value in vars(found).items() if name not in FILES}
            named = ((read, getattr(found, name)) for name, (_, _, read) in FILES.items())
            readings = [read(path) for read, path in named if path is not None]
            launched = read_environment(self.environment)
            file = settled([*readings, *([] if launched is None else [launched])])
            spelled = {flag.removeprefix("--").replace("-", "_"): word for flag, word in line.spelled.items()}
            for name, value in combined(file, given, spelled).items():
                setattr(found, name, value)
        except ValueError as error:
            self.error(str(error))
        found.sources = file.keys | {name: spelled.get(name, flag_of(name)) for name in given}
        found.notes = (*line.notes, *file.notes)
        if found.notes and self._speaks and self.tells_notes:
            print("\n".join(f"note: {note}" for note in found.notes), file=sys.stderr, flush=True)
        return found, rest


def config_of(options: argparse.Namespace) -> RunConfig:
    """The run among what was parsed."""
    hints = get_type_hints(RunConfig)
    given = {
        name: getattr(options, name) for helps in GROUPS.values() for name in helps if hasattr(options, name)
    }
    kinds = {name: _kind(hints[name]) for name in given}
    return RunConfig(
        **{
            name: kinds[name](value) if isinstance(kinds[name], EnumType) else value
            for name, value in given.items()
        }
    )


def _kind(hint: Any) -> Any:
    """The type of a flag that is given: `int` of `int | None`."""
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (part for part in get_args(hint) if part is not type(None))
    return hint


def _words(kind: Any) -> list[str]:
    if isinstance(kind, EnumType):
        return [str(member) for member in kind]  # type: ignore[var-annotated]
    return list(get_args(kind)) if get_origin(kind) is Literal else []


def _reader(kind: Any) -> Callable[[str], Any]:
    words = _words(kind)
    if not words:
        readers: dict[Any, Callable[[str], Any]] = {int: whole, float: number, str: str}
        return readers[kind]
    if isinstance(kind, EnumType):
        choose = one_of(words)
        return lambda text: kind(choose(text))
    return one_of(words)


def _metavar(kind: Any) -> str:
    words = _words(kind)
    return "{" + ",".join(words) + "}" if words else {int: "N", float: "X", str: "TEXT"}[kind]
