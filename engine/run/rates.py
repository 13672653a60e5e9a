"""How fast a run is: tokens and model FLOPs per second."""

from __future__ import annotations

import os
import time

import torch

from triaxis.engine.config import ResolvedRun, RunConfig
from triaxis.engine.run.peak import peak_flops
from triaxis.parallel.worlds.group import World


class Rates:
    """Tokens and FLOPs per second since the run began to train."""

    def __init__(self, config: RunConfig, resolved: ResolvedRun, world: World, dtype: torch.dtype) -> None:
        self._flops_per_token = resolved.model.flops_per_token(config.seq)
        peak = peak_flops(world.device, dtype) if world.rank == 0 else None
        devices = world.size if world.device.type == "cuda" else min(world.size, os.cpu_count() or 1)
        self._peak_flops = None if peak is None else peak * devices
        self._start = time.perf_counter()

    def of_step(self, tokens: int = 0) -> tuple[float, float | None]:
        """(tokens/s, MFU) since the call before; MFU is None where the device's peak is not known.

        tokens: real ones, of all ranks; padding is no work that anybody wanted
        """
        now = time.perf_counter()
        tokens_per_second = tokens / (now - self._start)
        self._start = now
        if self._peak_flops is None:
            return tokens_per_second, None
        return tokens_per_second, tokens_per_second * self._flops_per_token / self._peak_flops
