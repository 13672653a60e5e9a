"""Run configuration, data, optimizer step, trainer and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triaxis.parallel.lazy import lazily

if TYPE_CHECKING:
    from triaxis.engine.checkpoint.store import CheckpointStore as CheckpointStore
    from triaxis.engine.config import ResolvedRun as ResolvedRun
    from triaxis.engine.config import RunConfig as RunConfig
    from triaxis.engine.optimizer import ShardOptimizer as ShardOptimizer
    from triaxis.engine.plan import StepPlan as StepPlan
    from triaxis.engine.plan import UpdateRule as UpdateRule
    from triaxis.engine.plan import step_plan as step_plan
    from triaxis.engine.rules import resolve as resolve
    from triaxis.engine.run.trainer import Summary as Summary
    from triaxis.engine.run.trainer import train as train
    from triaxis.engine.step import StepResult as StepResult
    from triaxis.engine.step import TrainingStep as TrainingStep
    from triaxis.engine.step import build_stages as build_stages
    from triaxis.engine.trace.cluster import trace_cluster as trace_cluster
else:  # a name is imported when it is asked for: configurations and plans start without torch
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "config": (
                "ResolvedRun",
                "RunConfig",
            ),
            "rules": ("resolve",),
            "plan": (
                "StepPlan",
                "UpdateRule",
                "step_plan",
            ),
            "step": (
                "StepResult",
                "TrainingStep",
                "build_stages",
            ),
            "optimizer": ("ShardOptimizer",),
            "run.trainer": (
                "Summary",
                "train",
            ),
            "checkpoint.store": ("CheckpointStore",),
            "trace.cluster": ("trace_cluster",),
        },
    )
