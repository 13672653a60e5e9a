"""The run: data, steps, evaluation and what is shown of them. Every rank runs it; one speaks."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from triaxis.engine.config import (
    DataParallel,
    ResolvedRun,
    RunConfig,
    learning_rate_at,
    run_directory,
    warmup_steps_of,
)
from triaxis.engine.data.loader import Loader
from triaxis.engine.data.source import open_source
from triaxis.engine.metrics import MetricsWriter, StepRow
from triaxis.engine.optimizer import UpdateRule
from triaxis.engine.peak import peak_flops, peak_memory_bytes
from triaxis.engine.plot import plot_run
from triaxis.engine.progress import Progress
from triaxis.engine.step import StepPlan, StepResult, TrainingStep
from triaxis.parallel.group import World
from triaxis.parallel.mesh import Mesh, build_mesh
from triaxis.parallel.zero import DEFAULT_BUCKET_ELEMENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How a run ended, the same on every rank. Losses: nats per trained token."""

    steps: int
    loss: float
    eval_loss: float | None
    directory: Path


def step_plan(config: RunConfig, resolved: ResolvedRun) -> StepPlan:
    return StepPlan(
        model=resolved.model,
        microbatch_size=resolved.microbatch_size,
        microbatches=resolved.microbatches,
        sequence_length=config.seq,
        schedule=config.schedule,
        virtual_stages=resolved.virtual_stages,
        sequence_parallel=config.sp,
        recompute=config.recompute,
        data_parallel=config.data_parallel,
        zero=resolved.zero,
        bucket_elements=config.bucket_elements or DEFAULT_BUCKET_ELEMENTS,
        dtype=config.dtype,
        accumulate_dtype=resolved.accumulate_dtype,
        max_grad_norm=config.max_grad_norm,
        rule=UpdateRule(
            name=config.optimizer,
            weight_decay=config.weight_decay,
            betas=(config.adam_beta1, config.adam_beta2),
            epsilon=config.adam_epsilon,
        ),
        seed=config.seed,
    )


def open_loader(config: RunConfig, resolved: ResolvedRun, mesh: Mesh, split: str) -> Loader | None:
    """This rank's loader; None for an evaluation split that the run does not have."""
    data: str | Path = resolved.data
    if split == "eval" and resolved.data != "stdlib":
        if config.eval_data is None:
            return None
        data = config.eval_data
    source = open_source(
        data,
        split=split,
        sequence_length=config.seq,
        seed=config.seed,
        tokenizer_path=config.tokenizer,
        on_bad_sample=config.on_bad_sample,
        pack=config.pack,
    )
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
    )


class _Rates:
    """Tokens and FLOPs per second since the run began to train."""

    def __init__(self, config: RunConfig, resolved: ResolvedRun, world: World, dtype: torch.dtype) -> None:
        self._flops_per_token = resolved.model.flops_per_token(config.seq)
        self._tokens = resolved.global_batch * config.seq
        peak = peak_flops(world.device, dtype) if world.rank == 0 else None
        devices = world.size if world.device.type == "cuda" else min(world.size, os.cpu_count() or 1)
        self._peak_flops = None if peak is None else peak * devices
        self._start = time.perf_counter()

    def of_step(self) -> tuple[float, float | None]:
        """(tokens/s, MFU) of the step that just ended; MFU is None where the device's peak is not known."""
        now = time.perf_counter()
        tokens_per_second = self._tokens / (now - self._start)
        self._start = now
        if self._peak_flops is None:
            return tokens_per_second, None
        return tokens_per_second, tokens_per_second * self._flops_per_token / self._peak_flops


def train(config: RunConfig, resolved: ResolvedRun, world: World) -> Summary:
    """Trains on this rank of the world, to the end. Collective."""
    mesh = build_mesh(world, resolved.topology)
    loader = open_loader(config, resolved, mesh, "train")
    assert loader is not None, "only an evaluation split may be missing"
    evaluation = open_loader(config, resolved, mesh, "eval")
    step = TrainingStep(step_plan(config, resolved), mesh)
    total_steps = resolved.steps_of(len(loader.source))
    directory = run_directory(config)
    speaks = world.rank == 0
    sources = [loader.source.summary()] + ([evaluation.source.summary()] if evaluation is not None else [])
    with (
        MetricsWriter(directory, speaks=speaks, report_to=config.report_to) as metrics,
        Progress(total_steps, speaks=speaks, logging_steps=config.logging_steps) as progress,
    ):
        progress.announce(_opening(config, resolved, total_steps, sources))
        summary = _train(config, resolved, mesh, step, loader, evaluation, total_steps, metrics, progress)
    if speaks:
        picture = plot_run(directory)
        progress.announce(
            f"loss {summary.loss:.4f}"
            + (
                f", held-out loss {summary.eval_loss:.4f} nats per token"
                if summary.eval_loss is not None
                else ""
            )
            + f"\npicture: {picture}\nmetrics: {directory / 'metrics.jsonl'}"
        )
    return summary


def _train(
    config: RunConfig,
    resolved: ResolvedRun,
    mesh: Mesh,
    step: TrainingStep,
    loader: Loader,
    evaluation: Loader | None,
    total_steps: int,
    metrics: MetricsWriter,
    progress: Progress,
) -> Summary:
    rates = _Rates(config, resolved, mesh.world, step.pipeline.dtype)
    warmup_steps = warmup_steps_of(config, total_steps)
    result: StepResult | None = None
    eval_loss: float | None = None
    tokens = 0
    for number in range(total_steps):
        learning_rate = learning_rate_at(
            number,
            total_steps=total_steps,
            warmup_steps=warmup_steps,
            peak=config.learning_rate,
            minimum_ratio=config.min_learning_rate_ratio,
            decay=config.lr_scheduler_type,
        )
        mesh.clear_traffic()
        result = step.train(loader.step_batches(number), learning_rate)
        if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            raise FloatingPointError(
                f"step {number + 1}: loss {result.loss}, gradient norm {result.grad_norm}; "
                "lower --learning_rate, lengthen --warmup_ratio, or check the data"
            )
        tokens += resolved.global_batch * config.seq
        tokens_per_second, mfu = rates.of_step()
        sent_bytes = mesh.sent_bytes()
        if evaluation is not None and _evaluates(config, number + 1, total_steps):
            batches = evaluation.eval_batches(config.eval_batches)
            eval_loss, _ = step.evaluate(batches)
            rates.of_step()
        else:
            eval_loss = None
        row = StepRow(
            step=number + 1,
            loss=result.loss,
            grad_norm=result.grad_norm,
            clip_coefficient=result.clip_coefficient,
            lr=learning_rate,
            tokens=tokens,
            tokens_per_s=tokens_per_second,
            mfu=mfu,
            peak_mem_bytes=peak_memory_bytes(mesh.world.device),
            sent_bytes=sent_bytes,
            eval_loss=eval_loss,
        )
        metrics.write(row)
        progress.update(row)
    assert result is not None, "a run has at least one step"
    return Summary(steps=total_steps, loss=result.loss, eval_loss=eval_loss, directory=run_directory(config))


def _evaluates(config: RunConfig, done: int, total_steps: int) -> bool:
    return config.eval_batches > 0 and (
        done == total_steps or (config.eval_steps is not None and done % config.eval_steps == 0)
    )


def _opening(config: RunConfig, resolved: ResolvedRun, total_steps: int, sources: list[str]) -> str:
    topology = resolved.topology
    sharding = "fully_shard" if config.data_parallel == DataParallel.FSDP else f"ZeRO-{resolved.zero}"
    return "\n".join(
        [
            f"{resolved.model.name}: {resolved.model.parameters():,} parameters on {topology.world_size} ranks "
            f"(dp {topology.dp} × tp {topology.tp} × pp {topology.pp}), {sharding}, {config.dtype}, "
            f"seed {config.seed}",
            f"{total_steps} steps of {resolved.global_batch} sequences of {config.seq} tokens "
            f"({resolved.microbatches} microbatches of {resolved.microbatch_size} a rank), schedule {config.schedule}",
            *sources,
        ]
    )
