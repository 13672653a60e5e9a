"""What a person sees while a run goes on: a bar on a terminal, plain lines anywhere else. Only one rank shows it."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from triaxis.engine.config import DataParallel, ResolvedRun, RunConfig
from triaxis.engine.plan import stage_layers
from triaxis.engine.run.metrics import StepRow
from triaxis.parallel.places.legal_values import counted


class Progress:
    """Shows every step on a terminal; elsewhere the first step, every `logging_steps`-th and the last.

    done: steps before the run was resumed. On a rank that does not speak it shows nothing.
    """

    def __init__(
        self, total_steps: int, *, speaks: bool = True, logging_steps: int = 10, done: int = 0
    ) -> None:
        self._speaks = speaks
        self._done = done
        self._total_steps = total_steps
        self._logging_steps = logging_steps
        self._started_seconds = time.monotonic()
        self._bar: Bar | None = None
        if speaks and sys.stderr.isatty():
            self._bar = Bar(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=None),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task("starting", total=total_steps)
            self._bar.start()

    def announce(self, text: str) -> None:
        """Lines of their own, above the bar."""
        if not self._speaks:
            return
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def update(self, row: StepRow) -> None:
        """One finished step."""
        if self._bar is not None:
            self._bar.update(self._task, completed=row.step, description=_figures(row))
            if row.eval_loss is not None:
                self.announce(f"step {row.step}: held-out loss {row.eval_loss:.4f}")
            return
        due = row.step % self._logging_steps == 0 or row.step in (self._done + 1, self._total_steps)
        if due or row.eval_loss is not None:
            left = f", {_duration(self._left_seconds(row.step))} left" if row.step < self._total_steps else ""
            self.announce(f"step {row.step}/{self._total_steps}: {_figures(row)}{left}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _left_seconds(self, step: int) -> float:
        elapsed = time.monotonic() - self._started_seconds
        return elapsed / max(1, step - self._done) * (self._total_steps - step)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _figures(row: StepRow) -> str:
    parts = [] if row.loss is None else [f"loss {row.loss:.4f}"]
    parts += [f"further {' '.join(f'{loss:.4f}' for loss in row.mtp_losses)}"] if row.mtp_losses else []
    clipped = f" (before clipping ×{row.clip_coefficient:.3g})" if row.clip_coefficient < 1 else ""
    parts += [] if row.grad_norm is None else [f"grad norm {row.grad_norm:.3f}{clipped}"]
    parts += [f"lr {row.lr:.2e}", f"{row.tokens_per_s:,.0f} tokens/s"]
    parts += [] if row.eval_loss is None else [f"held-out loss {row.eval_loss:.4f}"]
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    """`42 s`, `3 min 05 s`, `2 h 07 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def opening(config: RunConfig, resolved: ResolvedRun, total_steps: int, sources: list[str]) -> str:
    """The first words of a run: its model, its layout, its steps, and what it reads."""
    topology = resolved.topology
    ranks = counted(topology.world_size, "rank")
    stages = topology.pp * resolved.virtual_stages
    cuts = "/".join(str(len(layers)) for layers in stage_layers(resolved.model, stages))
    experts = f", experts over {topology.ep}" if topology.ep > 1 else ""
    sharding = "fully_shard" if config.data_parallel == DataParallel.FSDP else f"ZeRO-{resolved.zero}"
    return "\n".join(
        [
            f"{resolved.model.name}: {resolved.model.parameters():,} parameters on "
            f"{ranks} (dp {topology.dp} × tp {topology.tp} × pp {topology.pp}{experts}), "
            f"{sharding}, {config.dtype}, seed {config.seed}",
            f"{counted(total_steps, 'step')} of {counted(resolved.global_batch, 'sequence')} of "
            f"{counted(config.seq, 'token')} "
            f"({counted(resolved.microbatches, 'microbatch', 'microbatches')} of {resolved.microbatch_size} a rank), "
            f"schedule {config.schedule}" + (f", layers by stage {cuts}" if stages > 1 else ""),
            *sources,
        ]
    )
