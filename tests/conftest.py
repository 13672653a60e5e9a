"""What every test shares: the seed of sampled layouts, and which tests this machine can run."""

from __future__ import annotations

import os
import random

import pytest

os.environ.setdefault(
    "TORCH_CPP_LOG_LEVEL", "ERROR"
)  # as `train` does: before a conftest of a ring imports torch


def pytest_configure() -> None:
    """Chooses the seed of the sampled layouts before workers are started, so that all draw the same sample."""
    os.environ.setdefault("TRIAXIS_SAMPLE_SEED", str(random.SystemRandom().randrange(10**6)))


def pytest_report_header() -> str:
    return f"sampled layouts: TRIAXIS_SAMPLE_SEED={os.environ['TRIAXIS_SAMPLE_SEED']}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons = {}
    if any(item.get_closest_marker("gpu") for item in items):
        import torch  # the pure ring runs without it

        if not torch.cuda.is_available():
            reasons["gpu"] = "needs a CUDA device"
    if os.environ.get("TRIAXIS_FULL") != "1":
        reasons["full"] = "runs with TRIAXIS_FULL=1 (make test-full)"
    for item in items:
        for mark, reason in reasons.items():
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))
