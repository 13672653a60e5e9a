"""Every flag of `train` does something that can be seen: in the numbers, the messages, the files, or as a refusal."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.runs import MODEL, prepare, rows, run
from triaxis.engine.checkpoint.storage import ShardWriter
from triaxis.engine.config import ConfigError, RunConfig
from triaxis.engine.rules import resolve
from triaxis.engine.step import TrainingStep, _Chunk
from triaxis.launch import ranks
from triaxis.launch.environment import Launch
from triaxis.models.blocks import Block

FULL = os.environ.get("TRIAXIS_FULL") == "1"
EACH_RUN = 20
Flags = dict[str, Any]
TWO = {"dp": 2}
STAGES = {"pp": 2, "microbatches": 4}
CHUNKS = {"model": "deep.json", "pp": 2, "schedule": "interleaved", "virtual_stages": 2}

SEEN: dict[str, tuple[Flags, Flags]] = {
    "model": ({}, {"model": "deep.json"}),
    "data": ({}, {"data": "eval.jsonl"}),
    "eval_data": ({}, {"eval_data": "train.jsonl"}),
    "tokenizer": ({}, {"tokenizer": "tokenizer.json"}),
    "mtp_depths": ({}, {"mtp_depths": 1}),
    "mtp_weight": ({"mtp_depths": 1}, {"mtp_weight": 1.0}),
    "router_bias_rate": ({}, {"router_bias_rate": 0.0}),
    "seq": ({}, {"seq": 32}),
    "pack": ({}, {"pack": False}),
    "chat_template_date": ({}, {"chat_template_date": "yesterday"}),
    "on_bad_sample": ({"data": "bad.jsonl"}, {"on_bad_sample": "skip"}),
    "tp": ({}, {"tp": 2}),
    "pp": ({}, {"pp": 2}),
    "dp": ({}, TWO),
    "cp": ({}, {"cp": 2}),
    "ep": ({}, {"ep": 2}),
    "order": ({"tp": 2, "dp": 2}, {"order": "dp-pp-tp"}),
    "sp": ({"tp": 2}, {"sp": True}),
    "data_parallel": (TWO, {"data_parallel": "fsdp"}),
    "zero": (TWO, {"zero": 2}),
    "bucket_elements": (TWO, {"bucket_elements": 100}),
    "schedule": (STAGES, {"schedule": "gpipe"}),
    "virtual_stages": (CHUNKS, {"virtual_stages": 3}),
    "microbatches": ({}, {"microbatches": 3}),
    "global_batch": ({"microbatches": None}, {"global_batch": 3}),
    "per_device_train_batch_size": ({}, {"per_device_train_batch_size": 2}),
    "gradient_accumulation_steps": ({"microbatches": None}, {"gradient_accumulation_steps": 3}),
    "steps": ({}, {"steps": 5}),
    "num_train_epochs": ({}, {"steps": None, "num_train_epochs": 0.5}),
    "optimizer": ({}, {"optimizer": "sgd"}),
    "learning_rate": ({}, {"learning_rate": 1e-3}),
    "lr_scheduler_type": ({}, {"lr_scheduler_type": "linear"}),
    "warmup_ratio": ({"warmup_steps": None}, {"warmup_ratio": 0.5}),
    "warmup_steps": ({}, {"warmup_steps": 3}),
    "warmup_type": ({"warmup_steps": 3}, {"warmup_type": "log"}),
    "min_learning_rate_ratio": ({}, {"min_learning_rate_ratio": 0.5}),
    "weight_decay": ({}, {"weight_decay": 0.5}),
    "adam_beta1": ({}, {"adam_beta1": 0.5}),
    "adam_beta2": ({}, {"adam_beta2": 0.5}),
    "adam_epsilon": ({}, {"adam_epsilon": 1e-3}),
    "max_grad_norm": ({}, {"max_grad_norm": 0.1, "optimizer": "sgd"}),
    "dtype": ({}, {"dtype": "bf16"}),
    "accumulate_dtype": ({"dtype": "bf16"}, {"accumulate_dtype": "bf16"}),
    "recompute": ({}, {"recompute": True}),
    "kernels": ({}, {"kernels": "norm=plain"}),
    "seed": ({}, {"seed": 1}),
    "logging_steps": ({}, {"logging_steps": 1}),
    "eval_steps": ({}, {"eval_steps": 1}),
    "eval_batches": ({}, {"eval_batches": 0}),
    "report_to": ({}, {"report_to": "tensorboard"}),
    "save_strategy": ({}, {"save_strategy": "steps"}),
    "save_steps": ({}, {"save_steps": 2}),
    "save_minutes": ({}, {"save_minutes": 1e-6}),
    "save_total_limit": ({"save_steps": 1}, {"save_total_limit": 1}),
    "save_best": ({"save_steps": 100, "eval_steps": 1}, {"save_best": True}),
    "async_save": ({"save_steps": 1}, {"async_save": True}),
}
"""By flag: what else is given, and what is given beside that for the flag to be seen."""

ELSEWHERE = {
    "loss_scale": "ranks/test_loss_scale.py::test_a_run_that_overflows_on_and_on_ends_with_the_reason",
    "initial_scale_power": "ranks/test_loss_scale.py::test_a_run_that_overflows_on_and_on_ends_with_the_reason",
    "loss_scale_window": "ranks/test_loss_scale.py::test_the_scale_goes_on_where_it_was",
    "hysteresis": "ranks/test_loss_scale.py::test_one_ranks_overflow_is_all_ranks_and_the_next_step_is_normal",
    "consecutive_hysteresis": "ranks/test_loss_scale.py::test_fp16_as_people_ask_for_it",
    "min_loss_scale": "ranks/test_loss_scale.py::test_a_run_that_overflows_on_and_on_ends_with_the_reason",
    "device": "ranks/test_flags.py::test_ranks_wait_as_long_and_train_where_they_are_asked",
    "transport": "processes/test_headers.py::test_headers_are_exchanged_in_the_first_steps",
    "deterministic": "ranks/test_nccl.py::test_a_replayed_loss_is_exact_only_where_the_same_run_repeats",
    "offload_optimizer": "ranks/test_offload.py::test_offload_optimizer_changes_nothing_on_a_cpu",
    "offload_param": "ranks/test_offload.py::test_offload_param_changes_nothing_on_a_cpu",
    "model_name_or_path": "ranks/test_huggingface_runs.py::test_chats_and_a_folder_in_a_folder_out",
    "init_from": "ranks/test_huggingface_runs.py::test_weights_alone_begin_another_run",
    "save_hf_checkpoints": "ranks/test_guest_runs.py::test_a_folder_with_each_checkpoint_as_long_as_it_stays",
    "wrap": "ranks/test_guest_runs.py::test_units_by_class_and_by_size_train_alike",
    "min_num_params": "ranks/test_guest_runs.py::test_units_by_class_and_by_size_train_alike",
    "save_hf": "ranks/test_huggingface_runs.py::test_chats_and_a_folder_in_a_folder_out",
    "dataloader_num_workers": "ranks/test_corpus.py::test_a_run_is_the_same_with_and_without",
    "show_samples": "ranks/test_corpus.py::test_rows_are_shown_with_what_is_trained",
    "eval_fraction": "ranks/test_corpus.py::test_a_run_evaluates_on_the_part_held_out",
    "train_inserted_think": "ranks/test_chat.py::test_a_think_block_of_the_templates_own_is_masked_or_trained_as_asked",
    "data_path": "ranks/test_flags.py::test_two_names_of_one_flag_mean_the_same",
    "timeout_seconds": "ranks/test_flags.py::test_ranks_wait_as_long_and_train_where_they_are_asked",
    "output_dir": "processes/test_launch.py::test_a_layout_trains",
    "simulate": "processes/test_launch.py::test_simulated_ranks_give_the_numbers_of_processes",
    "on_save_error": "ranks/test_faults.py::test_training_goes_on_when_a_save_fails_or_stops_if_asked",
    "hang_timeout": "ranks/test_faults.py::test_a_rank_outside_any_communication_is_named",
    "on_nan": "ranks/test_faults.py::test_skipped_steps_are_counted_and_ten_in_a_row_end_the_run",
    "spike_factor": "ranks/test_faults.py::test_a_leap_of_the_gradient_norm_is_skipped_or_ends_the_run",
    "check_collectives": "processes/test_headers.py::test_headers_are_exchanged_in_the_first_steps",
    "straggler_factor": "ranks/test_times.py::test_a_rank_that_is_slow_for_long_is_named",
    "resume": "ranks/test_resume.py::test_two_halves_are_the_whole",
    "elastic": "ranks/test_resume.py::test_elastic_keeps_the_global_batch",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny run's files, and others to exchange for them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("run")
    prepare(folder)
    (folder / "deep.json").write_text(json.dumps({**MODEL, "layers": 6}))
    (folder / "bad.jsonl").write_text((folder / "train.jsonl").read_text() + "{\n")
    letters = Tokenizer(models.WordLevel({"?": 0, "a": 1, "b": 2, "</s>": 3}, unk_token="?"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters.add_special_tokens(["</s>"])
    letters.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def without_it() -> dict[str, Flags]:
    """What runs do without the flag, by what else is given: seen once."""
    return {}


@pytest.fixture
def observe(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[Flags], Flags]:
    """Runs four steps; what the run did, without what it said about its flags at the start."""
    monkeypatch.setattr("triaxis.engine.run.trainer.plot_run", lambda directory: directory)

    def observed(changes: Flags) -> Flags:
        output = tmp_path / str(len(list(tmp_path.iterdir())))
        flags = prepare(folder) | {"steps": 4, "eval_steps": None, "warmup_steps": 1} | changes
        flags = {
            name: str(folder / value) if str(value).endswith((".json", ".jsonl")) else value
            for name, value in flags.items()
        }
        seen: Flags = {"orders": {}, "blocks": 0, "groups": {}, "buckets": {}, "writers": set()}

        def note(patch: pytest.MonkeyPatch, owner: type, name: str, what: Callable[..., None]) -> None:
            function = getattr(owner, name)

            def noted(self: Any, *given: Any, **named: Any) -> Any:
                try:
                    return function(self, *given, **named)
                finally:  # a block that is recomputed ends early
                    what(self, *given)

            patch.setattr(owner, name, noted)

        def made(step: TrainingStep, *_: object) -> None:
            rank = step.mesh.rank
            seen["groups"][rank] = {name: group.ranks for name, group in step.mesh.groups.items()}
            seen["buckets"][rank] = len(step.data_parallel.buckets)

        def ordered(kind: str) -> Callable[..., None]:
            def append(chunk: _Chunk, *given: Any) -> None:
                seen["orders"].setdefault(chunk._step.mesh.rank, []).append((kind, chunk._index, given[-1]))

            return append

        def counted(*_: object) -> None:
            seen["blocks"] += 1

        def written(*_: object) -> None:
            seen["writers"].add(threading.current_thread().name)

        with monkeypatch.context() as patch:
            note(patch, TrainingStep, "__init__", made)
            note(patch, _Chunk, "forward", ordered("forward"))
            note(patch, _Chunk, "before_backward", ordered("backward"))
            note(patch, Block, "forward", counted)
            note(patch, ShardWriter, "write_data", written)
            try:
                run({**flags, "output_dir": str(output)})
            except ValueError as error:
                return {"refused": str(error)}
        files = sorted(
            re.sub(r"events.*", "events", str(path.relative_to(output))) for path in output.rglob("*")
        )
        lines = [
            line.split(":")[0] for line in capsys.readouterr().err.splitlines() if line.startswith("step")
        ]
        return {**seen, "rows": rows(output), "files": files, "lines": lines}

    return observed


def test_every_flag_is_in_one_of_the_tables() -> None:  # B135
    assert sorted([*SEEN, *ELSEWHERE]) == sorted(field.name for field in dataclasses.fields(RunConfig))
    for name, place in ELSEWHERE.items():
        file, _, test = place.partition("::")
        text = (Path(__file__).parents[1] / file).read_text()
        body = text.partition(f"def {test}(")[2].split("\n\n\n")[0]
        assert name in body or (body and name in ("resume", "output_dir")), place


@pytest.mark.parametrize("given", [{}, {"dp": 2, "save_steps": 1, "async_save": True}], ids=str)
def test_what_is_observed_is_the_same_each_time(given: Flags, observe: Callable[[Flags], Flags]) -> None:
    assert observe(given) == observe(given)


def some_flags() -> list[str]:
    """A fresh sample each run; all of them with the whole suite."""
    draw = random.Random(int(os.environ["TRIAXIS_SAMPLE_SEED"]))
    return list(SEEN) if FULL else draw.sample(list(SEEN), EACH_RUN)


@pytest.mark.parametrize("name", some_flags())
def test_a_flag_is_seen(
    name: str, observe: Callable[[Flags], Flags], without_it: dict[str, Flags]
) -> None:  # B135
    given, changes = SEEN[name]
    assert name in changes
    without = without_it.setdefault(str(given), without_it.get(str(given)) or observe(given))
    with_it = observe({**given, **changes})
    assert without != with_it
    if "refused" in with_it:
        assert f"`{name}` must" in with_it["refused"]


def test_two_names_of_one_flag_mean_the_same(observe: Callable[[Flags], Flags]) -> None:
    expected = observe({"microbatches": 3})
    found = observe(
        {"data": "stdlib", "data_path": "train.jsonl", "microbatches": None, "gradient_accumulation_steps": 3}
    )
    assert found["rows"] == expected["rows"]


def test_ranks_wait_as_long_and_train_where_they_are_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[float, str]] = []

    def opened(*, timeout_seconds: float, device: str, **_: object) -> None:
        asked.append((timeout_seconds, device))
        raise RuntimeError("nobody came")

    monkeypatch.setattr(ranks, "open_process_world", opened)
    monkeypatch.setattr(ranks.signal, "signal", lambda *_: None)
    monkeypatch.setattr(ranks.signal, "set_wakeup_fd", lambda *_, **__: None)
    wanted: list[tuple[float, Literal["auto", "cuda", "cpu"]]] = [
        (5.0, "auto"),
        (300.0, "cpu"),
        (1000.0, "cuda"),
    ]
    for timeout_seconds, device in wanted:
        directory = str(tmp_path / device)
        config = RunConfig(timeout_seconds=timeout_seconds, device=device, output_dir=directory)
        assert ranks.run_processes(config, resolve(config, 1), Launch()) == 1
    assert asked == wanted
    with pytest.raises(ConfigError, match="`timeout_seconds` must be finite and more than 0"):
        resolve(RunConfig(timeout_seconds=0.0), 1)
