"""The rules a run must keep, checked together and before torch is imported. Each fault is a line for people."""

from __future__ import annotations

import dataclasses
import math
import os
from datetime import date
from pathlib import Path
from typing import Literal

from triaxis.engine.config import IN_MEMORY, ConfigError, DataParallel, ResolvedRun, RunConfig, SaveStrategy
from triaxis.engine.data.files import text_files
from triaxis.engine.data.sets import named_sets
from triaxis.engine.data.vocabulary import vocabulary_of
from triaxis.engine.loss_scale import SETTINGS
from triaxis.models.config import ModelConfig
from triaxis.models.huggingface.families import FAMILIES
from triaxis.models.huggingface.guest import GuestModel
from triaxis.models.presets import PRESETS, depths_in, load_config, window_of
from triaxis.parallel.kernels.table import read_choice
from triaxis.parallel.pipeline.schedule import SCHEDULES, ScheduleName
from triaxis.parallel.places.legal_values import divisors
from triaxis.parallel.places.topology import Topology, resolve_topology

DEFAULT_MICROBATCH_SIZE = 4
DEFAULT_STEPS = 100
SAVE_FLAGS = {"save_steps": SaveStrategy.STEPS, "save_minutes": SaveStrategy.TIME}

_POSITIVE = (
    *(
        "seq",
        "tp",
        "pp",
        "dp",
        "cp",
        "ep",
        "virtual_stages",
        "microbatches",
        "global_batch",
        "steps",
        "eval_steps",
    ),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "bucket_elements"),
    "min_num_params",
    *("logging_steps", "timeout_seconds", "adam_epsilon"),
    *("save_steps", "save_minutes", "save_total_limit", "hang_timeout", "spike_factor", "straggler_factor"),
    *("loss_scale_window", "hysteresis", "min_loss_scale"),
)
_NOT_NEGATIVE = (
    *("learning_rate", "weight_decay", "max_grad_norm", "warmup_steps", "eval_batches", "seed"),
    *("dataloader_num_workers", "show_samples", "check_collectives", "mtp_depths", "mtp_weight"),
    "router_bias_rate",
    *("loss_scale", "initial_scale_power"),
)
_MOST = {
    **dict.fromkeys(("tp", "pp", "dp", "cp", "ep", "virtual_stages"), 1_000_000),
    **dict.fromkeys(
        ("microbatches", "gradient_accumulation_steps", "per_device_train_batch_size"), 1_000_000
    ),
    **dict.fromkeys(("timeout_seconds", "hang_timeout", "save_minutes"), 10_000_000),
    **dict.fromkeys(("steps", "eval_batches", "warmup_steps", "num_train_epochs"), 10**12),
    "seq": 100_000_000,
    "mtp_depths": 1000,
    "initial_scale_power": 100,
    **dict.fromkeys(("loss_scale", "min_loss_scale"), 1e30),
    **dict.fromkeys(("loss_scale_window", "hysteresis"), 10**12),
    "global_batch": 1_000_000_000,
}
"""Beyond what anybody has run, and still quick to check."""
_FRACTIONS = ("eval_fraction", "warmup_ratio", "min_learning_rate_ratio", "adam_beta1", "adam_beta2")


def resolve(config: RunConfig, world_size: int, model: ModelConfig | None = None) -> ResolvedRun:
    """Checks every rule and settles every value; `model` None is the one that `config.model` names.

    Raises one ConfigError that lists all faults.
    """
    faults = range_faults(config)
    if faults:
        raise ConfigError(tuple(faults))
    topology = _topology(config, world_size, faults)
    if model is None:
        try:
            model = model_of(config)
            faults += _hub_faults(config, model)
        except ValueError as error:
            faults.append(str(error))
    zero = config.zero if config.zero is not None else 3 if config.data_parallel == DataParallel.FSDP else 1
    virtual_stages = config.virtual_stages or SCHEDULES[config.schedule].chunks
    faults += _parallel_faults(config, virtual_stages)
    faults += _training_faults(config)
    faults += _save_faults(config)
    size, count, total = _batch(config, None if topology is None else topology.dp, faults)
    data, data_faults = _data(config)
    faults += data_faults
    if model is not None:
        faults += _model_faults(config, model, virtual_stages, size)
    if faults:
        raise ConfigError(tuple(faults))
    assert model is not None and topology is not None
    steps = config.steps
    if steps is None and config.num_train_epochs is None:
        steps = DEFAULT_STEPS
    return ResolvedRun(
        model=model,
        topology=topology,
        data=data,
        zero=zero,
        virtual_stages=virtual_stages,
        microbatch_size=size,
        microbatches=count,
        global_batch=total,
        total_steps=steps,
        epochs=config.num_train_epochs,
        accumulate_dtype=_accumulate_dtype(config),
        save_strategy=_save_strategy(config),
        tokenizer=_tokenizer(config, data),
    )


def _save_strategy(config: RunConfig) -> SaveStrategy:
    """As given, or as the flag that only one of them has; without any, a signal alone saves."""
    if config.save_strategy is not None:
        return SaveStrategy(config.save_strategy)
    for name, strategy in SAVE_FLAGS.items():
        if getattr(config, name) is not None:
            return strategy
    # An export is made from the last checkpoint.
    return SaveStrategy.STEPS if config.save_hf or config.save_hf_checkpoints else SaveStrategy.SIGNAL


def _save_faults(config: RunConfig) -> list[str]:
    faults = []
    strategy = _save_strategy(config)
    both = all(getattr(config, name) is not None for name in SAVE_FLAGS)
    if both and config.save_strategy is None:
        faults.append(
            f"`save_steps` and `save_minutes` must not both be given, but are {config.save_steps} and "
            f"{config.save_minutes:g}; leave one out"
        )
    for name, needed in SAVE_FLAGS.items():
        if (
            getattr(config, name) is not None
            and strategy != needed
            and not (both and config.save_strategy is None)
        ):
            faults.append(
                f"`{name}` must be left out with save_strategy {strategy}, but is {getattr(config, name)}; "
                f"use --save_strategy {needed}"
            )
    if config.save_best and (config.eval_batches == 0 or config.eval_steps is None):
        faults.append(
            f"`save_best` needs evaluations on the way, but eval_steps is {config.eval_steps} and eval_batches is "
            f"{config.eval_batches}; give "
            + " and ".join(
                ["--eval_steps"] * (config.eval_steps is None)
                + ["--eval_batches"] * (not config.eval_batches)
            )
        )
    if (
        config.save_best
        and config.eval_data is None
        and not (config.eval_fraction or (config.data_path or config.data) == "stdlib")
    ):
        faults.append(
            "`save_best` needs data to evaluate on, but there is none; give --eval_data or --eval_fraction"
        )
    if strategy == SaveStrategy.NO:
        for name in ("save_total_limit", "save_best", "async_save", "save_hf", "save_hf_checkpoints"):
            if getattr(config, name):
                faults.append(
                    f"`{name}` must be left out with save_strategy no, but is {getattr(config, name)}; "
                    f"use --save_strategy steps"
                )
    if config.save_hf_checkpoints and config.async_save:
        faults.append(
            "`save_hf_checkpoints` must be left out with async_save: a copy is made of a checkpoint that is complete; "
            "export later with triaxis convert"
        )
    if config.save_hf is not None and os.path.exists(config.save_hf):
        faults.append(
            f"`save_hf` must be a new folder, but {config.save_hf} exists; name another, or move it away"
        )
    if config.resume not in (None, "auto", "never") and not os.path.isdir(config.resume):
        faults.append(
            f"`resume` must be auto, never, or a folder that holds a checkpoint, but there is no folder "
            f"{config.resume}; check the path"
        )
    if config.elastic and config.resume == "never":
        faults.append("`elastic` must be left out with --resume never: there is nothing to adapt to")
    return faults


def _accumulate_dtype(config: RunConfig) -> Literal["fp32", "fp64", "bf16"]:
    if config.accumulate_dtype != "auto":
        return config.accumulate_dtype
    return "fp64" if config.dtype == "fp64" else "fp32"


def range_faults(config: RunConfig) -> list[str]:
    """What is no number of its kind, or beyond what anybody has run; checked before anything is made of it."""
    faults = []
    for name in _POSITIVE:
        value = getattr(config, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            faults.append(f"`{name}` must be finite and more than 0, but is {value}")
    for name in _NOT_NEGATIVE:
        value = getattr(config, name)
        if value is not None and not (math.isfinite(value) and value >= 0):
            faults.append(f"`{name}` must be finite and 0 or more, but is {value}")
    for name in _FRACTIONS:
        value = getattr(config, name)
        if value is not None and not 0 <= value <= 1:
            faults.append(f"`{name}` must be from 0 to 1, but is {value}")
    for name in ("adam_beta1", "adam_beta2"):
        if getattr(config, name) == 1:
            faults.append(f"`{name}` must be less than 1, but is 1")
    for name, most in _MOST.items():
        value = getattr(config, name)
        if value is not None and value > most:
            faults.append(f"`{name}` must be at most {most:,}, but is {value:,}")
    if config.zero not in (None, 0, 1, 2, 3):
        faults.append(f"`zero` must be 0, 1, 2 or 3, but is {config.zero}")
    return faults


def _topology(config: RunConfig, world_size: int, faults: list[str]) -> Topology | None:
    if config.cp > 1:
        faults.append(
            f"`cp` must be 1, but is {config.cp}: context parallelism is not available yet; use --cp 1"
        )
    sizes = {"tp": config.tp, "pp": config.pp, "dp": config.dp or 1}
    product = math.prod(sizes.values())
    if config.cp == 1 and product > world_size:
        named = " × ".join(name for name in sizes if name != "dp" or config.dp is not None)
        started = "process was" if world_size == 1 else "processes were"
        faults.append(f"{named} = {product} but {world_size} {started} started")
        return None
    try:
        return resolve_topology(
            world_size=world_size,
            tp=config.tp,
            pp=config.pp,
            cp=1,
            ep=config.ep,
            dp=config.dp,
            order=config.order,
        )
    except ValueError as error:  # its remedies know ranks only; engine/advice.py knows every rule
        faults.append(str(error).partition("; nearest that work")[0])
        return None


def _parallel_faults(config: RunConfig, virtual_stages: int) -> list[str]:
    faults = []
    interleaved = config.schedule == ScheduleName.INTERLEAVED
    if interleaved and (config.pp < 2 or virtual_stages < 2):
        faults.append(
            f"`schedule` interleaved needs pp and virtual_stages of at least 2, but pp is {config.pp} and "
            f"virtual_stages is {virtual_stages}"
        )
    rule = SCHEDULES[config.schedule]
    if not rule.several and virtual_stages != rule.chunks:
        why = "its stages go there and back" if rule.turns else "only interleaved has more"
        faults.append(
            f"`virtual_stages` must be {rule.chunks} with schedule {config.schedule}, but is {virtual_stages}: {why}"
        )
    if config.wrap is not None and not config.wrap.replace(",", " ").split():
        faults.append("`wrap` must name a class of modules, but is empty; name some (A,B), or leave it out")
    if config.wrap is not None and config.min_num_params is not None:
        faults.append(
            f"`wrap` and `min_num_params` must not both be given, but are {config.wrap} and {config.min_num_params}; "
            "leave one out"
        )
    if config.data_parallel == DataParallel.FSDP:
        if rule.splits:
            faults.append(
                f"`data_parallel` must be zero with schedule {config.schedule}, but is fsdp: torch's fully_shard "
                "cannot compute the gradients of weights later; use --data-parallel zero, or --schedule 1f1b"
            )
        if config.zero not in (None, 3):
            faults.append(
                f"`zero` must be 3 or left out with data_parallel fsdp, which always shards everything, "
                f"but is {config.zero}; use --data-parallel zero for the other stages"
            )
        if config.simulate:
            faults.append(
                "`data_parallel` must be zero with --threads, but is fsdp: torch's fully_shard needs processes; "
                "start with torchrun, or use --data-parallel zero --zero 3"
            )
        if config.bucket_elements is not None:
            faults.append(
                f"`bucket_elements` must be left out with data_parallel fsdp, but is {config.bucket_elements}: "
                f"fully_shard makes its own buckets"
            )
    return faults


def _training_faults(config: RunConfig) -> list[str]:
    faults = []
    if config.steps is not None and config.num_train_epochs is not None:
        faults.append(
            f"`steps` and `num_train_epochs` must not both be given, but are {config.steps} and "
            f"{config.num_train_epochs:g}; leave one out"
        )
    if config.warmup_ratio and config.warmup_steps is not None:
        faults.append(
            f"`warmup_ratio` and `warmup_steps` must not both be given, but are {config.warmup_ratio:g} and "
            f"{config.warmup_steps}; leave one out"
        )
    if config.steps is not None and config.warmup_steps is not None and config.warmup_steps >= config.steps:
        faults.append(
            f"`warmup_steps` must be less than steps {config.steps}, but is {config.warmup_steps}; "
            f"use at most {config.steps - 1}"
        )
    try:
        if config.kernels is not None and not read_choice(config.kernels):
            faults.append(
                "`kernels` must be OPERATION=NAME with commas between, but is empty; or leave it out"
            )
    except ValueError as error:
        faults.append(str(error))
    if config.chat_template_date is not None and not _is_day(config.chat_template_date):
        faults.append(
            f"`chat_template_date` must be a day such as 2026-12-31, but is {config.chat_template_date!r}"
        )
    place = config.offload_optimizer
    if place not in IN_MEMORY and "/" not in place:
        faults.append(
            f"`offload_optimizer` must be none, cpu or a folder (./{place}), but is {place!r}; "
            "a folder's path has a / in it"
        )
    elif not place.isprintable():
        faults.append(
            f"`offload_optimizer` must be none, cpu or a folder with a printable name, but is {place!r}"
        )
    if config.offload_param != "none" and config.zero != 3:
        faults.append(
            f"`offload_param` must be none but with zero 3, which shards parameters, but is {config.offload_param}; "
            "use --zero 3"
        )
    if config.mtp_weight != RunConfig().mtp_weight and not config.mtp_depths:
        faults.append(
            f"`mtp_weight` must be left out without extra prediction depths, but is {config.mtp_weight:g}; "
            "give --mtp_depths"
        )
    usual = RunConfig()
    faults += [
        f"`{name}` must be left out with dtype {config.dtype}, but is {getattr(config, name)}; it is fp16 whose losses "
        "are scaled (--dtype fp16)"
        for name in SETTINGS
        if config.dtype != "fp16" and getattr(config, name) != getattr(usual, name)
    ]
    if config.accumulate_dtype == "bf16" and config.dtype != "bf16":
        faults.append(
            f"`accumulate_dtype` must be auto with dtype {config.dtype}, but is bf16; use it with --dtype bf16"
        )
    if config.accumulate_dtype == "fp32" and config.dtype == "fp64":
        faults.append(
            "`accumulate_dtype` must be auto with dtype fp64, but is fp32: it would round the gradients"
        )
    return faults


def _batch(config: RunConfig, dp: int | None, faults: list[str]) -> tuple[int, int, int]:
    """Microbatch size, microbatches, global batch out of the ones given: global = size × microbatches × dp."""
    size, total = config.per_device_train_batch_size, config.global_batch
    count, synonym = config.microbatches, config.gradient_accumulation_steps
    if count is not None and synonym is not None and count != synonym:
        faults.append(
            f"`microbatches` and `gradient_accumulation_steps` name the same number, but are {count} and {synonym}; "
            f"leave one out"
        )
    count = synonym if count is None else count
    if dp is None:  # the topology's own fault is reported; nothing to divide by
        return size or DEFAULT_MICROBATCH_SIZE, count or 1, total or 0
    if total is None:
        size = size or DEFAULT_MICROBATCH_SIZE
        count = count or (2 * config.pp if config.pp > 1 else 1)
        return size, count, size * count * dp
    divisor = (size or 1) * (count or 1) * dp
    exact = size is not None and count is not None
    if total % divisor or (exact and total != divisor):
        rule = "equal" if exact else "be a multiple of"
        given = [f"per_device_train_batch_size {size}"] * (size is not None)
        given += [f"microbatches {count}"] * (count is not None)
        faults.append(
            f"`global_batch` must {rule} {' × '.join([*given, f'dp {dp}'])} = {divisor}, but is {total}"
            + ("; leave one of the three out" if exact else "")
        )
        return size or 1, count or 1, total
    rest = total // divisor
    if size is None and count is None:
        enough = min(2 * config.pp, rest) if config.pp > 1 else 1
        size = max(d for d in divisors(rest) if d <= DEFAULT_MICROBATCH_SIZE and rest // d >= enough)
        return size, rest // size, total
    return (size or rest), (count or rest), total


def _data(config: RunConfig) -> tuple[str, list[str]]:
    """Where the data is, and what is missing: `stdlib`, a .jsonl file, or the prefix of .bin and .idx files."""
    faults = []
    if config.data_path is not None and config.data not in ("stdlib", config.data_path):
        faults.append(
            f"`data` and `data_path` must not name different data, but are {config.data} and {config.data_path}; "
            f"leave one out"
        )
    data = config.data_path or config.data
    faults += _set_faults(config, data)
    if config.eval_data is not None:
        if data == "stdlib":
            faults.append(
                f"`eval_data` must be left out with data stdlib, which holds its own back, but is {config.eval_data}"
            )
        else:
            faults += _missing_data("eval_data", config.eval_data)
    if config.eval_fraction is not None and (config.eval_data is not None or data == "stdlib"):
        faults.append(
            f"`eval_fraction` must be left out with eval_data and with data stdlib, which has its own, but is "
            f"{config.eval_fraction:g}"
        )
    if config.tokenizer is not None and data == "stdlib":
        faults.append(
            f"`tokenizer` must be left out with data stdlib, which is bytes, but is {config.tokenizer}; "
            f"name your text with --data"
        )
    elif config.tokenizer is not None and not os.path.exists(config.tokenizer):
        faults.append(
            f"`tokenizer` must be a tokenizer.json or a directory that holds one, but {config.tokenizer} does not "
            f"exist; check the path"
        )
    return data, faults


def _is_day(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def model_of(config: RunConfig) -> ModelConfig:
    """The model that the run names; ValueError if there is none.

    A preset that starts from nothing takes the vocabulary of a tokenizer that has more tokens than it.
    """
    model = load_config(config.model_name_or_path or config.model)
    if config.mtp_depths:
        model = dataclasses.replace(model, depths=config.mtp_depths)
    if (
        config.tokenizer is None
        or config.model_name_or_path
        or config.init_from
        or config.model not in PRESETS
    ):
        return model
    tokens = vocabulary_of(config.tokenizer) or 0
    return dataclasses.replace(model, vocab_size=tokens) if tokens > model.vocab_size else model


def _hub_faults(config: RunConfig, model: ModelConfig) -> list[str]:
    """What a Hugging Face folder asks for and the run does not give."""
    faults = []
    folder = config.model_name_or_path
    if folder is not None and config.model != RunConfig().model:
        faults.append(
            f"`model` must be left out with model_name_or_path, which names it, but is {config.model}; leave one out"
        )
    if folder is not None and config.init_from is not None:
        faults.append(
            f"`init_from` must be left out with model_name_or_path, which has weights, but is {config.init_from}; "
            "give the architecture alone with --model DIR/config.json"
        )
    there = depths_in(folder) if folder is not None and config.mtp_depths else config.mtp_depths
    if config.mtp_depths > there:
        faults.append(
            f"`mtp_depths` must be at most {there}, the extra prediction depths that {folder} has, but is "
            f"{config.mtp_depths}; take its architecture alone, with random weights, with --model {folder}/config.json"
        )
    window = window_of(folder or config.model) if model.own_attention else None
    if window is not None and config.seq > window:
        faults.append(
            f"`seq` must be at most {window}, the `sliding_window` of {model.name}, since attention here sees all "
            f"earlier tokens, but is {config.seq}; shorten it"
        )
    return faults


def _tokenizer(config: RunConfig, data: str) -> str | None:
    """As given, or the one in the model's folder; the standard library's text stays bytes."""
    folder = config.model_name_or_path
    if config.tokenizer is not None or folder is None or data == "stdlib":
        return config.tokenizer
    names = ("tokenizer.json", "tokenizer_config.json")
    return folder if any(os.path.isfile(Path(folder) / name) for name in names) else None


def _set_faults(config: RunConfig, data: str) -> list[str]:
    """What is wrong with the sets of data, each looked for where it should be."""
    try:
        sets = named_sets(data)
    except ValueError as error:
        return [str(error)]
    faults = [fault for one in sets for fault in _missing_data("data", one.place)]
    if sets[0].weight is not None and config.num_train_epochs is not None:
        faults.append(
            "`num_train_epochs` must be left out where data has weights, since each set then comes round at a time of "
            f"its own, but is {config.num_train_epochs:g}; use --steps"
        )
    if sets[0].weight is not None and _save_strategy(config) == SaveStrategy.EPOCH:
        faults.append(
            "`save_strategy` must not be epoch where data has weights, since each set then comes round at a time of "
            "its own; use steps or time"
        )
    return faults


def _missing_data(field: str, data: str) -> list[str]:
    if data == "stdlib":
        return []
    try:
        if text_files(data, field) is not None:
            return []
    except ValueError as error:
        return [f"{error}; check the path"]
    prefix = data.removesuffix(".bin").removesuffix(".idx")
    needed = [f"{prefix}.bin", f"{prefix}.idx"]
    missing = [path for path in needed if not os.path.isfile(path)]
    if not missing:
        return []
    return [
        f"`{field}` must be stdlib, a .jsonl file or the prefix of Megatron .bin and .idx files, but is {data}: "
        f"there is no file {' and no file '.join(missing)}; check the path"
    ]


def _guest_faults(config: RunConfig, model: GuestModel) -> list[str]:
    """What only models that the engine builds itself can do."""
    asked = {name: getattr(config, name) for name in ("tp", "pp", "ep")}
    faults = [
        f"`{name}` must be 1 for {model.name}, but is {size}" for name, size in asked.items() if size > 1
    ]
    faults += [f"`sp` must be left out for {model.name}, but is given"] * config.sp
    if config.kernels:
        faults.append(f"`kernels` must be left out for {model.name}, but is {config.kernels}")
    faults += [f"`mtp_depths` must be 0 for {model.name}, but is {model.depths}"] * (model.depths > 0)
    if SCHEDULES[config.schedule].splits:
        faults.append(f"`schedule` must be 1f1b for {model.name}, but is {config.schedule}")
    why = (
        f": transformers builds it whole, for dp alone (--zero 3, or --data-parallel fsdp); the engine builds "
        f"{', '.join(FAMILIES)}"
    )
    return [fault + why for fault in faults]


def _model_faults(config: RunConfig, model: ModelConfig, virtual_stages: int, size: int) -> list[str]:
    if isinstance(model, GuestModel):
        faults = _guest_faults(config, model)
        if faults:
            return faults
    faults = []
    tp = config.tp
    if config.ep > 1 and not model.experts():
        faults.append(
            f"`ep` must be 1 for a dense model, but is {config.ep}: {model.name} has no experts to spread; use --ep 1"
        )
    faults += [
        f"`ep` must divide the {count} experts of a layer of {model.name}, but is {config.ep}"
        for count in model.experts()
        if count % config.ep
    ]
    if config.router_bias_rate is not None and not model.has_choosing_bias():
        faults.append(
            f"`router_bias_rate` must be left out for {model.name}, whose experts, if any, are chosen without a bias, "
            f"but is {config.router_bias_rate:g}"
        )
    if config.ep > 1 and config.data_parallel == DataParallel.FSDP:
        faults.append(
            "`ep` must be 1 with data_parallel fsdp, which knows one group of replicas; use --zero 3"
        )
    if model.depths and config.data_parallel == DataParallel.FSDP:
        faults.append(
            f"`mtp_depths` must be 0 with data_parallel fsdp, but is {model.depths}: embedding and head run "
            "again for each depth, and fully_shard's units run once a microbatch; use --zero 3"
        )
    cuts = (*model.cuts(), *(model.expert_cuts() if config.ep == 1 else ()))
    for cut in (cut for cut in cuts if not cut.allows(tp)):
        faults.append(
            f"`tp` must divide the {cut.blocks} {cut.what} of {model.name}"
            + ("" if cut.serving is None else " or be a multiple of them")
            + f", but is {tp}"
        )
    chunks = config.pp * virtual_stages
    if chunks > model.layers:
        product = f"pp {config.pp}" + (f" × virtual_stages {virtual_stages}" if virtual_stages > 1 else "")
        faults.append(
            f"`pp` × `virtual_stages` must be at most the {model.layers} layers of {model.name}, but is "
            f"{product} = {chunks}"
        )
    tokens = config.seq * size
    if config.sp and tokens % tp:
        faults.append(
            f"`seq` {config.seq} × per_device_train_batch_size {size} = {tokens} tokens must be a multiple of tp {tp} "
            f"under --sp"
        )
    if config.seq > model.max_positions:
        faults.append(
            f"`seq` must be at most the {model.max_positions} positions of {model.name}, but is {config.seq}"
        )
    return faults
