"""Whether all copies of a weight are still equal: at the start, after a load, before a save and at the end.

Who holds copies follows from the layouts alone: ranks that declare the same part of the same parameter (over dp, over
tp, replicas of experts, both ends of a pipeline that share an embedding) must hold the same bits, in the weights, the
masters, the moments and the layers' own states. An axis that comes later needs no line here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from triaxis.engine.checkpoint.states import held_chunks, held_layer_states, held_masters, held_moments
from triaxis.engine.step import TrainingStep
from triaxis.parallel.places.legal_values import first_of
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.worlds.agreement import agree, gather_json

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
WORD_BYTES = 8
WIDTH = 2048
"""Words in a row of the table that a checksum sums up."""
FACTOR = 0x9E3779B97F4A7C1
"""An odd number whose multiples spread over all bits."""
NAMED = 4
"""Parameters that the error names."""


class ReplicaError(RuntimeError):
    """Copies of one weight differ; raised on all ranks alike, with the parameter and the ranks."""


@torch.no_grad()
def check_replicas(training: TrainingStep, moment: str, *, way_out: str) -> None:
    """Compares all copies by a checksum of each part. Collective, two small messages (one more to tell of faults).

    moment: when it is, for the message ("after step 6"); way_out: what to do if they differ
    """
    names, sums = _checksums(training)
    table = _table(training, names, sums)
    keys, places = torch.unique(table[:, :, 0], return_inverse=True)
    largest = torch.full_like(keys, torch.iinfo(torch.int64).min)
    smallest = torch.full_like(keys, torch.iinfo(torch.int64).max)
    flat, values = places.reshape(-1), table[:, :, 1].reshape(-1)
    largest.scatter_reduce_(0, flat, values, "amax")
    smallest.scatter_reduce_(0, flat, values, "amin")
    differing = keys[largest != smallest]
    if differing.numel():  # the same on all ranks: they hold one table
        raise ReplicaError(_told(training, names, table, differing, moment, way_out))


def _checksums(training: TrainingStep) -> tuple[list[str], list[Tensor]]:
    """What this rank holds, part by part: a name that all holders of the part give it, and its bits' checksum."""
    found: dict[str, Tensor] = {}
    for name, factor, values in _parts(training):
        found[name] = found.get(name, 0) + factor * _checksum(values)
    return list(found), list(found.values())


def _parts(training: TrainingStep) -> Iterator[tuple[str, int, Tensor]]:
    """Every part by "parameter offsets sizes", with a factor that keeps its weights, master and moments apart."""
    masters = held_masters(training.data_parallel.buckets)
    moments = held_moments(training.optimizer) if training.optimizer.steps else {}
    states = held_layer_states(training.stages)
    for name, tensor in (*masters.items(), *moments.items(), *states.items()):
        kind, _, parameter = name.partition("/")
        for offsets, view in tensor.chunks.items():
            yield f"{parameter} {offsets} {tuple(view.shape)}", _factor(kind), view
    for segment, weights in training.data_parallel.computing_weights():
        for offsets, view in held_chunks(segment, weights):
            yield f"{segment.layout.name} {offsets} {tuple(view.shape)} to compute with", 1, view


def _factor(kind: str) -> int:
    return _hash(kind) | 1


def _hash(text: str) -> int:
    """A number of 62 bits, the same in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 2


def _checksum(values: Tensor) -> Tensor:
    """A whole number modulo 2^64 that any change of a value, or of the values' order, changes; on their device.

    The bits as words of 8 bytes, `WIDTH` to a row: sums of columns and of rows, each by a factor of its place.
    """
    flat = values.detach().reshape(-1)
    size = flat.element_size()
    if flat.storage_offset() * size % WORD_BYTES:
        flat = flat.clone()  # words must begin where words may
    whole = flat.numel() - flat.numel() % (WORD_BYTES // size)
    rest = flat[whole:].view(INTEGERS[size]).long()
    words = torch.cat((flat[:whole].view(torch.int64), rest)) if len(rest) else flat.view(torch.int64)
    even = words[: len(words) - len(words) % WIDTH].view(-1, WIDTH)
    last = words[even.numel() :]
    columns, rows = even.sum(0), even.sum(1)
    columns[: len(last)] += last
    rows = torch.cat((rows, last.sum()[None]))
    # A word counts by its column's factor and its row's: odd and even make odd, which loses no bit modulo 2^64.
    return (columns * (_even(columns) + 1)).sum() + (rows * _even(rows) * FACTOR).sum()


def _even(like: Tensor) -> Tensor:
    """An even number for each place."""
    return torch.arange(len(like), dtype=torch.int64, device=like.device) * (2 * FACTOR)


def _table(training: TrainingStep, names: Sequence[str], sums: Sequence[Tensor]) -> Tensor:
    """All ranks' parts, [ranks, parts, 2]: the name's hash and the checksum, then zeros."""
    mesh, device = training.mesh, training.mesh.world.device
    (parts,) = agree(mesh, len(names))
    own = torch.zeros((parts, 2), dtype=torch.int64, device=device)
    if names:
        own[: len(names), 0] = torch.tensor([_hash(name) for name in names], device=device)
        own[: len(names), 1] = torch.stack(list(sums))
    table = torch.empty((mesh.everyone.size, parts, 2), dtype=torch.int64, device=device)
    mesh.everyone.all_gather(table, own)
    return table


def _told(
    training: TrainingStep,
    names: Sequence[str],
    table: Tensor,
    differing: Tensor,
    moment: str,
    way_out: str,
) -> str:
    """The error's words, the same on all ranks: only who holds a part knows its name. Collective, one message."""
    mesh = training.mesh
    wanted = set(differing.tolist())
    own = {str(_hash(name)): name for name in names if _hash(name) in wanted}
    known: dict[str, str] = {}
    for answer in gather_json(mesh.everyone, own, mesh.world.device):
        assert isinstance(answer, dict)
        known |= answer
    camps: dict[int, dict[int, set[int]]] = {}  # by part: the ranks that hold one and the same
    for rank, part in (table[:, :, 0, None] == differing).any(-1).nonzero().tolist():
        key, value = table[rank, part].tolist()
        camps.setdefault(key, {}).setdefault(value, set()).add(rank)
    parameters: dict[str, list[list[set[int]]]] = {}
    for key, by_value in camps.items():
        parameters.setdefault(known[str(key)].split(" ", 1)[0], []).append(list(by_value.values()))
    faults = [f"{name}, {_split(mesh.topology, parameters[name])}" for name in sorted(parameters)]
    return (
        f"all copies of a weight must be equal to the bit {moment}, but these are not: "
        f"{first_of(faults, NAMED, noun='parameter')}. {way_out}"
    )


def _split(topology: Topology, parts: Sequence[list[set[int]]]) -> str:
    """Who differs from whom in any part: all camps from the largest, by rank and place."""
    odd: set[int] = set()
    others: set[int] = set()
    for camps in parts:
        largest, *rest = sorted(camps, key=lambda camp: (-len(camp), min(camp)))
        others |= largest
        odd |= set().union(*rest)

    def listed(camp: set[int]) -> str:
        ranks = [f"{rank} ({topology.place(rank)})" for rank in sorted(camp)]
        return f"rank{'s' * (len(ranks) > 1)} {first_of(ranks, NAMED, separator=', ')}"

    return f"on {listed(odd)} not as on {listed(others - odd or others)}"
