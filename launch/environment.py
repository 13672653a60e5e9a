"""What a launcher such as torchrun tells a process, read from the environment and checked. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


class LaunchError(ValueError):
    """A launcher's variable is missing or malformed on this process."""


NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

NO_OVERLAP = ("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_NCCL_BLOCKING_WAIT")
"""Variables that are 1 in other programs' recipes, and then keep communication from overlapping with computation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """This process among those of the run.

    run_id: the same on all ranks, another for each start; restarts: how often the launcher has started it again
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    run_id: str = "alone"
    restarts: int = 0


def read_launch(environment: Mapping[str, str]) -> Launch:
    """Without any of the launcher's variables: one process. A missing or malformed one is named. Raises LaunchError."""
    if not any(environment.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return Launch()
    missing = [name for name in NEEDED if not environment.get(name)]
    if missing:
        given = [name for name in (*NEEDED, "LOCAL_RANK") if environment.get(name)]
        raise LaunchError(
            f"`{'`, `'.join(missing)}` must be set in the environment where {', '.join(given)} is, but is not; "
            f"start with torchrun, or unset {' and '.join(given)} to train in one process"
        )
    rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    port = _number(environment, "MASTER_PORT")
    if size < 1:
        raise LaunchError(f"`WORLD_SIZE` must be at least 1, but is {size}; start with torchrun")
    if rank >= size:
        raise LaunchError(f"`RANK` must be less than WORLD_SIZE {size}, but is {rank}; start with torchrun")
    if not 0 < port < 65536:
        raise LaunchError(f"`MASTER_PORT` must be from 1 to 65535, but is {port}; choose a free port")
    local_rank = _number(environment, "LOCAL_RANK") if environment.get("LOCAL_RANK") else rank
    local_size = _number(environment, "LOCAL_WORLD_SIZE") if environment.get("LOCAL_WORLD_SIZE") else size
    if environment.get("LOCAL_WORLD_SIZE") and local_rank >= local_size:
        raise LaunchError(
            f"`LOCAL_RANK` must be less than LOCAL_WORLD_SIZE {local_size}, but is {local_rank}; start with torchrun"
        )
    parts = (
        environment.get("TORCHELASTIC_RUN_ID", ""),
        str(port),
        environment.get("TORCHELASTIC_RESTART_COUNT", ""),
    )
    return Launch(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        run_id="-".join("".join(c for c in part if c.isalnum()) for part in parts if part),
        restarts=_number(environment, "TORCHELASTIC_RESTART_COUNT") if parts[2] else 0,
    )


def overlap_warnings(environment: Mapping[str, str]) -> list[str]:
    """A line for each variable that keeps communication from overlapping with computation."""
    return [
        f"warning: {name}=1 is set: communication hardly overlaps with computation; unset it for speed"
        for name in NO_OVERLAP
        if environment.get(name) == "1"
    ]


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment[name]
    if not value.isdecimal():
        raise LaunchError(f"`{name}` must be a whole number, but is {value!r}; start with torchrun")
    return int(value)
