"""The run: data, steps, evaluation and what is shown of them. Every rank runs it; one speaks."""

from __future__ import annotations

import dataclasses
import functools
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from triaxis.engine.checkpoint.folder import checkpoints_at
from triaxis.engine.config import (
    IN_MEMORY,
    ConfigError,
    ResolvedRun,
    RunConfig,
    SaveStrategy,
    learning_rate_of,
    run_directory,
    source_of,
)
from triaxis.engine.data.ahead import Ahead
from triaxis.engine.faults.numbers import judge, most_norm
from triaxis.engine.faults.replicas import check_replicas
from triaxis.engine.faults.supervision import Supervision, Watch
from triaxis.engine.plan import step_plan
from triaxis.engine.run.counters import Counters
from triaxis.engine.run.groups import told_groups
from triaxis.engine.run.inputs import RunInputs, open_inputs, told_inputs
from triaxis.engine.run.metrics import METRICS_NAME, MetricsWriter, StepRow
from triaxis.engine.run.on_all_ranks import tell_faults
from triaxis.engine.run.packing import check_packing
from triaxis.engine.run.peak import peak_memory_bytes
from triaxis.engine.run.plot import LivePicture, plot_run
from triaxis.engine.run.progress import Progress, opening
from triaxis.engine.run.rates import Rates
from triaxis.engine.run.restore import checkpoint_to_load, restore, stored_row
from triaxis.engine.run.resume import continues_here
from triaxis.engine.run.saving import Saver
from triaxis.engine.run.times import StepTimes
from triaxis.engine.run.weights import first_values, told_first_loss
from triaxis.engine.state_files import StateFiles
from triaxis.engine.step import TrainingStep
from triaxis.parallel.kernels.table import chosen_kernels, told_kernels
from triaxis.parallel.places.legal_values import counted
from triaxis.parallel.worlds.agreement import agree
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import build_mesh

if TYPE_CHECKING:
    from triaxis.engine.checkpoint.store import CheckpointStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How a run ended, the same on every rank. Losses: nats per trained token.

    signal: the one that asked the run to save and end before its last step; 0 if it is complete
    """

    steps: int
    loss: float
    eval_loss: float | None
    directory: Path
    signal: int = 0


def train(
    config: RunConfig, resolved: ResolvedRun, world: World, supervision: Supervision | None = None
) -> Summary:
    """Trains on this rank of the world, to the end or to a signal. Collective.

    `config.resume` "auto" or a checkpoint goes on from there; see `triaxis.engine.run.resume.find_start`.
    """
    supervision = supervision or Supervision()
    _refuse_offload(config, world)
    mesh = build_mesh(world, resolved.topology)
    directory = run_directory(config)
    with supervision.watch(directory, mesh, config.hang_timeout) as watch:
        watch.at(0, "looking for checkpoints")
        path = checkpoint_to_load(config, mesh)
        watch.at(0, "reading data")
        inputs = open_inputs(config, resolved, mesh, lambda: watch.at(0, "reading data"))
        plan, files = step_plan(config, resolved), _state_files(config)
        if path is None:
            training = TrainingStep(plan, mesh, first_values(config, resolved), files)
        else:  # whatever values it had would be loaded over
            training = TrainingStep(dataclasses.replace(plan, seed=None), mesh, state_files=files)
        training.connect()
        watch.watch_pipeline(training)
        return _Run(config, resolved, training, inputs, supervision, watch).go(path)


class _Run:
    """One rank's run, from a fresh start or from a checkpoint."""

    def __init__(
        self,
        config: RunConfig,
        resolved: ResolvedRun,
        training: TrainingStep,
        inputs: RunInputs,
        supervision: Supervision,
        watch: Watch,
    ) -> None:
        self._config, self._resolved, self._training = config, resolved, training
        self._inputs, self._loader, self._evaluation = inputs, inputs.training, inputs.evaluation
        self._interruption, self._watch = supervision.interruption, watch
        self._mesh = training.mesh
        self._speaks = self._mesh.world.rank == 0
        self._checked = 0
        self._times = StepTimes(self._mesh, config.straggler_factor)
        self._directory = run_directory(config)

    def go(self, path: Path | None) -> Summary:
        """path: the checkpoint that the run goes on from."""
        config, resolved = self._config, self._resolved
        open_store = functools.cache(self._open_store)
        notes: list[str] = []
        self._watch.at(0, "loading")
        state = restore(path, config, resolved, self._training, self._inputs, open_store, notes.append)
        if state is None:
            check_packing(config, resolved, self._training)
            check_replicas(
                self._training,
                "before the first step",
                way_out="All ranks must run the same version of triaxis, of PyTorch and of the model's file",
            )
        counters = Counters() if state is None else Counters.restored(state)
        total_steps = resolved.steps_of(
            len(self._loader.source), done=counters.step, consumed=counters.samples
        )
        samples = counters.samples + (total_steps - counters.step) * resolved.global_batch
        sources = told_inputs(self._inputs, config, resolved, samples) if self._speaks else []
        kept = counters.step if state is not None and continues_here(config) else 0
        sources.append(told_groups(self._training, config.weight_decay))
        sources.append(told_kernels(chosen_kernels(config.kernels)))
        with (
            MetricsWriter(
                self._directory, speaks=self._speaks, report_to=config.report_to, done=kept
            ) as metrics,
            Progress(
                total_steps, speaks=self._speaks, logging_steps=config.logging_steps, done=counters.step
            ) as progress,
            Ahead(self._loader, workers=config.dataloader_num_workers, total_steps=total_steps) as ahead,
        ):
            progress.announce("\n".join([opening(config, resolved, total_steps, sources), *notes]))
            saver = Saver(
                config,
                resolved,
                self._training,
                self._inputs,
                open_store,
                row=None if state is None else stored_row(state),
                watch=self._watch,
                say=progress.announce,
            )
            saver.start(self._directory)
            if metrics.aside is not None:
                progress.announce(f"an older run wrote here: its metrics are now {metrics.aside}")
            if counters.step >= total_steps:
                saver.keep_finished(counters)
            summary = self._train(counters, total_steps, ahead, saver, metrics, progress)
        if self._speaks:
            progress.announce(_closing(summary, total_steps, counters.skipped_steps))
        return summary

    def _open_store(self) -> CheckpointStore:
        from triaxis.engine.checkpoint.store import CheckpointStore  # loads torch's checkpoint package: 1.5 s

        return CheckpointStore(self._directory, self._training)

    def _train(
        self,
        counters: Counters,
        total_steps: int,
        ahead: Ahead,
        saver: Saver,
        metrics: MetricsWriter,
        progress: Progress,
    ) -> Summary:
        rates = Rates(self._config, self._resolved, self._mesh.world, self._training.pipeline.dtype)
        picture, done = LivePicture(self._directory, speaks=self._speaks), counters.step
        eval_loss: float | None = None
        asked = time_due = 0
        saves = self._resolved.save_strategy != SaveStrategy.NO
        with self._interruption.looked_at() if saves else nullcontext():
            while counters.step < total_steps and not asked:
                row = self._step(counters, total_steps, rates, ahead, progress.announce)
                try:
                    eval_loss, fault = self._evaluate(counters.step, total_steps, rates)
                except Exception:
                    metrics.write(row)
                    raise
                row = dataclasses.replace(row, eval_loss=eval_loss, resumed=counters.step == done + 1 > 1)
                metrics.write(row)
                picture.update()
                progress.update(row)
                if told := told_first_loss(self._config, row, self._resolved.model.vocab_size):
                    progress.announce(told)
                if saves:
                    asked, time_due = agree(self._mesh, self._interruption.signal, int(saver.time_due()))
                if saver.after_step(
                    counters,
                    eval_loss,
                    time_due=bool(time_due),
                    asked=asked > 0 or fault is not None,
                    last=counters.step == total_steps,
                ):
                    rates.of_step()
                if fault is not None:
                    saver.finish()
                    raise ValueError(fault)
            saver.finish()
        if self._config.save_hf is not None and counters.step == total_steps:
            self._export(Path(self._config.save_hf), progress.announce)
        return Summary(
            steps=counters.step,
            loss=counters.loss,
            eval_loss=eval_loss,
            directory=self._directory,
            signal=asked if counters.step < total_steps else 0,
        )

    def _export(self, folder: Path, say: Callable[[str], None]) -> None:
        """Writes the last checkpoint as a Hugging Face folder, one file in memory at a time. Collective."""
        from triaxis.engine.run.hub_copies import export_together

        step = self._resolved.total_steps or 0
        self._watch.at(step, "exporting")
        told = export_together(
            self._mesh,
            checkpoints_at(self._directory)[-1],
            folder,
            source=source_of(self._config),
            still=lambda: self._watch.at(step, "exporting"),
        )
        say(told)

    def _step(
        self, counters: Counters, total_steps: int, rates: Rates, ahead: Ahead, say: Callable[[str], None]
    ) -> StepRow:
        """Step `counters.step` (from 0)."""
        config, mesh, number = self._config, self._mesh, counters.step
        learning_rate = learning_rate_of(config, number - counters.overflows, total_steps)
        scaling = self._training.plan.loss_scaling
        if scaling is not None and counters.scale is None:
            counters.scale = scaling.begin()
        scale = None if counters.scale is None else counters.scale.value
        mesh.clear_traffic()
        mesh.world.check_collectives(self._checked < config.check_collectives)
        self._checked += 1
        self._times.start()
        self._watch.at(number + 1, "reading data")
        batches = ahead.step_batches(number, counters.samples)
        self._times.data_is_there()
        self._watch.at(number + 1, "training")
        limit = most_norm(counters, config.spike_factor)
        result = self._training.train(batches, learning_rate, limit, scale or 1.0)
        self._watch.at(number + 1, "looking at its numbers")
        told = judge(result, counters, self._training, limit)
        if told is not None:
            say(told)
        counters.step += 1
        tokens = self._loader.tokens_of(counters.samples)
        counters.samples += self._resolved.global_batch
        counters.tokens += tokens
        counters.trained_tokens += result.trained_tokens
        counters.loss = result.loss
        tokens_per_second, mfu = rates.of_step(tokens)
        sent_bytes = mesh.sent_bytes()
        spent = self._times.finish()
        slow = self._times.straggler()
        if slow is not None:
            say(slow)
        return StepRow(
            step=number + 1,
            loss=result.loss,
            grad_norm=result.grad_norm,
            clip_coefficient=result.clip_coefficient,
            lr=learning_rate,
            tokens=counters.tokens,
            trained_tokens=counters.trained_tokens,
            tokens_per_s=tokens_per_second,
            mfu=mfu,
            peak_mem_bytes=peak_memory_bytes(mesh.world.device),
            sent_bytes=sent_bytes,
            seconds={"data": spent.data, "compute": spent.compute, **spent.wait},
            slowest_rank=spent.slowest_rank,
            skipped_steps=counters.skipped_steps if config.on_nan == "skip" or scaling else None,
            loss_scale=scale,
            auxiliary_loss=result.auxiliary_loss if self._resolved.model.has_losses() else None,
            mtp_losses=result.depth_losses,
            busiest_expert=None if result.load is None else float(result.load.busiest),
        )

    def _evaluate(self, done: int, total_steps: int, rates: Rates) -> tuple[float | None, str | None]:
        """(held-out loss, None) if an evaluation is due, or (None, why its data cannot be read on some rank)."""
        if self._evaluation is None or not _evaluates(self._config, done, total_steps):
            return None, None
        self._watch.at(done, "evaluating")
        fault = None
        try:
            batches = self._evaluation.eval_batches(self._config.eval_batches)
        except (ValueError, OSError) as error:
            fault = str(error)
        # Agreed before anything is computed: ranks that wait in a collective could not save what they have.
        faults = tell_faults(self._mesh, fault)
        if faults is not None:
            return None, faults
        loss, _ = self._training.evaluate(batches)
        rates.of_step()
        return loss, None


def _state_files(config: RunConfig) -> StateFiles | None:
    place = config.offload_optimizer
    return None if place in IN_MEMORY else StateFiles(Path(place))


def _refuse_offload(config: RunConfig, world: World) -> None:
    """On a CPU all states are in the host's memory; on a GPU they cannot be kept there yet."""
    for name in ("offload_optimizer", "offload_param"):
        if getattr(config, name) != "none" and world.device.type == "cuda":
            raise ConfigError(
                (f"`{name}` must be none on GPUs, but is {getattr(config, name)}: not available there yet",)
            )


def _evaluates(config: RunConfig, done: int, total_steps: int) -> bool:
    return config.eval_batches > 0 and (
        done == total_steps or (config.eval_steps is not None and done % config.eval_steps == 0)
    )


def _closing(summary: Summary, total_steps: int, skipped: int) -> str:
    """The last words; draws the picture."""
    if summary.signal:
        name = signal.Signals(summary.signal).name
        return f"{name}: saved step {summary.steps} of {total_steps}; --resume auto goes on from there"
    metrics = summary.directory / METRICS_NAME
    if not metrics.stat().st_size:
        done = "the one step was" if total_steps == 1 else f"all {total_steps} steps were"
        return f"{done} done before"
    loss = f"loss {summary.loss:.4f}"
    if summary.eval_loss is not None:
        loss += f", held-out loss {summary.eval_loss:.4f} nats per token"
    if skipped:
        loss += f"; {counted(skipped, 'update')} left out, whose numbers were not finite or leapt"
    return f"{loss}\npicture: {plot_run(summary.directory)}\nmetrics: {metrics}"
