"""Headers: what ranks tell each other before a communication, so that a mismatch is told with both sides at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from triaxis.parallel.programs.operation import Operation
from triaxis.parallel.worlds.failure import RankError
from triaxis.parallel.worlds.group import Group, Request

HEADER_BYTES, HEADERS_SHOWN = 320, 4
MESSAGES = (Operation.SEND, Operation.RECEIVE)


def header(group: Group, request: Request, tensors: Sequence[Tensor]) -> Tensor:
    """What is asked for, as bytes of one length: what all must say alike, and how it reads to people.

    Alike is the operation, shapes and types; of a message, sent here and received there, its sender and purpose.
    """
    kinds = ", ".join(
        f"{'' if request.input_rows else tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}".strip()
        for t in tensors
    )
    alike = read = f"{request.operation} {kinds}".strip()
    if request.operation in MESSAGES:
        sender = group.rank if request.operation is Operation.SEND else request.peer
        alike, read = f"{sender} {request.label} {kinds}", f"{request.told(group.ranks)} {kinds}"
    text = f"{alike}\n{read} at {request.site}".encode()[:HEADER_BYTES]
    return torch.tensor(list(text.ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)


def refuse_differences(group: Group, headers: Mapping[int, Tensor]) -> None:
    """Raises RankError with the first rank's call and a few that differ from it, where any does. headers: by rank."""
    rows = {
        rank: bytes(told.tolist()).rstrip(b"\0").decode(errors="replace").split("\n")
        for rank, told in sorted(headers.items())
    }
    first, *others = rows
    different = [rank for rank in others if rows[rank][0] != rows[first][0]]
    if different:
        lines = [f"  rank {rank}: {rows[rank][-1]}" for rank in [first, *different[:HEADERS_SHOWN]]]
        raise RankError(
            f"members of group '{group.name}' {group.ranks} ask for different things:\n" + "\n".join(lines)
        )
