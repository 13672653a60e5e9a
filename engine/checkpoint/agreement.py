"""What ranks tell each other about a checkpoint: small values, as JSON, over a group."""

from __future__ import annotations

import json

import torch

from triaxis.parallel.worlds.group import Group

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
