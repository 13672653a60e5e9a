"""Which device each rank takes, and whether they fit together: told before anything is made on one. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

DeviceKind = Literal["auto", "cuda", "cpu"]
Transport = Literal["auto", "gloo"]
DEVICE_KINDS: Final = ("auto", "cuda", "cpu")


class DeviceError(RuntimeError):
    """The ranks cannot train on these devices; the message says which and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A rank's device. identity: tells one GPU of a machine from the others; empty on a CPU."""

    host: str
    device: str
    identity: str = ""

    @property
    def kind(self) -> str:
        return self.device.partition(":")[0]


def choose_device(asked: str, *, visible_gpus: int, rank: int, local_rank: int) -> str:
    """`cpu` or `cuda:N`. Raises DeviceError.

    A process that sees one GPU takes it, whatever its number on the machine: srun may show each task its own.
    """
    if asked == "cpu" or (asked == "auto" and not visible_gpus):
        return "cpu"
    if not visible_gpus:
        raise DeviceError(
            f"`device` must be cpu or auto where no GPU can be used, but is cuda on rank {rank}; look at nvidia-smi "
            "and CUDA_VISIBLE_DEVICES there, and whether this PyTorch is a CUDA build"
        )
    index = 0 if visible_gpus == 1 else local_rank
    if index >= visible_gpus:
        raise DeviceError(
            f"`LOCAL_RANK` must be less than the {visible_gpus} GPUs of this machine, but is {local_rank} on rank "
            f"{rank}; start one process a GPU (torchrun --nproc-per-node gpu sets it), or use --device cpu"
        )
    return f"cuda:{index}"


def device_fault(ranks: Sequence[Chosen]) -> str | None:
    """Why the ranks cannot train on what they chose; None if they can.

    Example: rank 1's driver is gone, so that `auto` gave it the CPU where rank 0 has a GPU.
    """
    first = ranks[0]
    other = next((rank for rank, chosen in enumerate(ranks) if chosen.kind != first.kind), None)
    if other is not None:
        gpu, cpu = (0, other) if first.kind == "cuda" else (other, 0)
        return (
            f"all ranks must use the same kind of device, but rank {gpu} on {ranks[gpu].host} has a GPU and rank {cpu} "
            f"on {ranks[cpu].host} none that can be used; look at nvidia-smi and CUDA_VISIBLE_DEVICES there, or train "
            "on CPUs with --device cpu"
        )
    holders: dict[tuple[str, str], int] = {}
    for rank, chosen in enumerate(ranks):
        holder = holders.setdefault((chosen.host, chosen.identity), rank)
        if chosen.kind == "cuda" and holder != rank:
            return (
                f"each rank must have a GPU of its own, but ranks {holder} and {rank} on {chosen.host} have the same "
                f"one ({chosen.identity}); start as many processes there as it has GPUs, or use --device cpu"
            )
    return None
