"""What a run reads, opened by every rank, compared between ranks and with the run that is gone on from.

Ranks that read different things train on, with plausible losses that are wrong: so all of them must have opened the
same before the model is made, and a fault that one rank has is an error of all, with that rank and its machine.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

import torch

from triaxis.engine.config import ConfigError, ResolvedRun, RunConfig
from triaxis.engine.data.course import Course
from triaxis.engine.data.fingerprint import fingerprint_code, fingerprint_tokenizer
from triaxis.engine.data.joined import JoinedSource, OpenSet, refuse_equal
from triaxis.engine.data.loader import Loader
from triaxis.engine.data.sets import STDLIB, NamedSet, named_sets
from triaxis.engine.data.show import shown_rows
from triaxis.engine.data.source import Source, open_source
from triaxis.engine.data.stdlib import this_python
from triaxis.engine.data.tokenizer import open_tokenizer
from triaxis.engine.run.mixing import Mix, course_of
from triaxis.engine.run.on_all_ranks import RANKS_NAMED, listed_places, on_all_ranks, place_of
from triaxis.parallel.places.legal_values import counted
from triaxis.parallel.worlds.agreement import gather_json
from triaxis.parallel.worlds.mesh import Mesh

PYTHON = "Python whose library is the data"
ROOMS = Path(__file__).resolve().parents[1].parent
PLACES = (
    *("data", "data_path", "eval_data", "tokenizer", "model", "model_name_or_path", "init_from"),
    *("output_dir", "save_hf", "resume"),
)
"""Flags that name a place: machines may have the same thing at different ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """This rank's loaders. evaluation: None where the run has none. fingerprints: of what is read, by what it is.

    mix: the sets of the training data
    """

    training: Loader
    mix: Mix
    evaluation: Loader | None
    fingerprints: Mapping[str, str]


def open_inputs(config: RunConfig, resolved: ResolvedRun, mesh: Mesh, still: Callable[[], None]) -> RunInputs:
    """Opens the data on every rank, and compares. Collective.

    still: called now and then while data is read, which may take minutes on one rank and a moment on another
    Raises ValueError, on all ranks alike.
    """
    inputs = on_all_ranks(mesh, lambda: _open(config, resolved, mesh), still)
    _refuse_differing(mesh, config, inputs.fingerprints)
    return inputs


def _open(config: RunConfig, resolved: ResolvedRun, mesh: Mesh) -> RunInputs:
    sets = _open_sets(config, resolved, "train")
    source = sets[0].source if len(sets) == 1 else JoinedSource(sets)
    training = _loader(source, config, resolved, mesh, course_of(sets, config.seed))
    evaluation = _open_evaluation(config, resolved, mesh)
    if evaluation is not None and config.eval_batches:
        for _ in evaluation.eval_batches(config.eval_batches):
            pass  # a token that no embedding has would end the run after its last step
    fingerprints = {
        "training data": training.source.fingerprint,
        "evaluation data": "none" if evaluation is None else evaluation.source.fingerprint,
        "tokenizer": fingerprint_tokenizer(resolved.tokenizer),
        "model configuration": _short(asdict(resolved.model) | {"name": None}),
        "version of triaxis": fingerprint_code([ROOMS / room for room in ("parallel", "models", "engine")]),
        "version of PyTorch": torch.__version__,
    }
    if resolved.data == STDLIB:
        fingerprints[PYTHON] = this_python()
    return RunInputs(
        training=training, mix=Mix(sets, training), evaluation=evaluation, fingerprints=fingerprints
    )


def _short(value: object) -> str:
    return blake2b(repr(value).encode(), digest_size=12).hexdigest()


def _open_evaluation(config: RunConfig, resolved: ResolvedRun, mesh: Mesh) -> Loader | None:
    """This rank's loader of what is held out; None where the run holds nothing out."""
    if resolved.data != STDLIB and config.eval_data is None and not config.eval_fraction:
        return None
    sets = _open_sets(config, resolved, "eval")
    return _loader(
        sets[0].source if len(sets) == 1 else JoinedSource(sets, mixed=True), config, resolved, mesh
    )


def _open_sets(config: RunConfig, resolved: ResolvedRun, split: str) -> list[OpenSet]:
    """What a split reads: one set, or one for each that `--data` gives a weight."""
    own = split == "eval" and config.eval_data is not None
    named = (NamedSet(place=str(config.eval_data)),) if own else named_sets(resolved.data)
    opened = [
        OpenSet(
            name=one.place,
            weight=one.weight or 1,
            weighed=one.weight is not None,
            source=open_source(
                one.place,
                split=split,
                sequence_length=config.seq,
                seed=config.seed,
                tokenizer_path=resolved.tokenizer,
                on_bad_sample=config.on_bad_sample,
                pack=config.pack,
                train_inserted=config.train_inserted_think,
                date=config.chat_template_date,
                eval_fraction=config.eval_fraction or None,
            ),
        )
        for one in named
    ]
    refuse_equal(opened)
    return opened


def _loader(
    source: Source, config: RunConfig, resolved: ResolvedRun, mesh: Mesh, course: Course | None = None
) -> Loader:
    if source.vocab_size > resolved.model.vocab_size:
        raise ValueError(
            f"`model` must have a vocabulary of at least the data's {source.vocab_size} tokens, "
            f"but {resolved.model.name} has {resolved.model.vocab_size}; choose the tokenizer's own model"
        )
    return Loader(
        source,
        seed=config.seed,
        global_batch=resolved.global_batch,
        microbatch_size=resolved.microbatch_size,
        data_rank=mesh.dp.rank,
        data_size=mesh.dp.size,
        vocab_size=resolved.model.vocab_size,
        course=course,
    )


def told_inputs(inputs: RunInputs, config: RunConfig, resolved: ResolvedRun, samples: int) -> list[str]:
    """What is read and what becomes of it, a line each; samples: of the whole run."""
    eval_batches = config.eval_batches
    training, evaluation = inputs.training, inputs.evaluation
    told = [
        training.source.summary(),
        *inputs.mix.told(samples, resolved.global_batch, resolved.epochs),
    ]
    if evaluation is not None:
        told.append(evaluation.source.summary())
        if eval_batches:
            rows, all_rows = evaluation.eval_samples(eval_batches), len(evaluation.source)
            told.append(f"an evaluation takes {rows:,} of its {counted(all_rows, 'row')}, each once")
    if config.show_samples:
        tokenizer = open_tokenizer(resolved.tokenizer)
        for one in inputs.mix.sets:
            told += shown_rows(one.source, tokenizer, config.show_samples)
    return told


def _refuse_differing(mesh: Mesh, config: RunConfig, fingerprints: Mapping[str, str]) -> None:
    """Raises where not all ranks read the same, and names those that are fewer."""
    values = {name: str(value) for name, value in asdict(config).items()}
    compared = {**fingerprints, **{f"--{name}": v for name, v in values.items() if name not in PLACES}}
    python = compared.pop(PYTHON, None)  # another build with the same text is no fault
    places = {name: values[name] for name in PLACES} | (
        {"data": f"text of Python {python}"} if python else {}
    )
    own = [compared, socket.gethostname(), places]
    answers = gather_json(mesh.everyone, own, mesh.world.device)
    faults = []
    for what in compared:
        camps: dict[str, list[int]] = {}
        for rank, answer in enumerate(answers):
            assert isinstance(answer, list)
            camps.setdefault(answer[0][what], []).append(rank)
        largest, *rest = sorted(camps.items(), key=lambda camp: (-len(camp[1]), camp[1][0]))
        for other in rest:
            sides = (_camp(mesh, what, camp, answers) for camp in (other, largest))
            faults.append(f"{what}: {' but '.join(sides)}")
    if faults:
        raise ConfigError(
            (
                "all ranks must read the same, but do not; start all with one command, on equal files:",
                *faults,
            )
        )


FLAG_OF = {
    "training data": "data",
    "evaluation data": "eval_data",
    "tokenizer": "tokenizer",
    "model configuration": "model",
}


def _camp(mesh: Mesh, what: str, camp: tuple[str, list[int]], answers: list[object]) -> str:
    """`1a2b3c on rank 1 (dp 0, pp 0, tp 1) on node7 (/data/x.jsonl)`."""
    value, ranks = camp
    named = []
    for rank in ranks[:RANKS_NAMED]:
        answer = answers[rank]
        assert isinstance(answer, list)
        path = answer[2]["data_path"] if what == "training data" else "None"
        path = path if path != "None" else answer[2].get(FLAG_OF.get(what, ""), "None")
        named.append(place_of(mesh, rank, answer[1]) + (f" ({path})" if path != "None" else ""))
    return f"{value} on {listed_places(named, len(ranks))}"
