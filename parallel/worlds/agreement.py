"""What ranks tell each other in small: values as JSON over a group, and whole numbers of which the largest counts."""

from __future__ import annotations

import json

import torch

from triaxis.parallel.worlds.group import Group
from triaxis.parallel.worlds.mesh import Mesh

Json = object


def gather_json(group: Group, value: Json, device: torch.device) -> list[Json]:
    """V → R: every member's value, by member. Collective on the group."""
    text = json.dumps(value).encode()
    length = torch.tensor([len(text)], device=device)
    group.all_reduce(length, largest=True)
    padded = text.ljust(int(length))  # with spaces, which JSON passes over
    shard = torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(device)
    output = torch.empty(group.size * len(padded), dtype=torch.uint8, device=device)
    group.all_gather(output, shard)
    return [json.loads(part.numpy().tobytes()) for part in output.cpu().view(group.size, -1)]


def send_json(group: Group, value: Json, device: torch.device) -> Json:
    """R of member 0: its value, on every member. Collective on the group."""
    return gather_json(group, value if group.rank == 0 else None, device)[0]


def agree(mesh: Mesh, *values: int) -> list[int]:
    """The largest of each value over all ranks: what is decided, is decided by all. Collective, one small message."""
    agreed = torch.tensor(values, dtype=torch.int32, device=mesh.world.device)
    mesh.everyone.all_reduce(agreed, largest=True)
    return agreed.tolist()
