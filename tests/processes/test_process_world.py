"""Groups of Gloo processes: the same meaning as threads, and a dead process is told to the others."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.forked import run_processes
from tests.patience import PATIENCE_SECONDS
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.worlds.device import Transport
from triaxis.parallel.worlds.failure import RankError
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.process import open_process_world
from triaxis.parallel.worlds.process_group import LARGE_GATHER_BYTES
from triaxis.parallel.worlds.thread import run_threads


def every_operation(world: World) -> dict[str, list[float]]:
    """Results of all operations on every group of a mesh, in a form that can be compared bit for bit."""
    mesh = build_mesh(world, Topology(dp=world.size // 2, tp=2))
    results: dict[str, list[float]] = {}
    generator = torch.Generator().manual_seed(world.rank)
    for name in ("world", "tp", "dp", "pp"):
        group = mesh.groups[name]
        inputs = torch.randint(-8, 8, (group.size * 6,), generator=generator) / 8
        for dtype in (torch.float32, torch.bfloat16):
            tensor = inputs.to(dtype)
            summed, largest, chosen = tensor.clone(), tensor.clone(), tensor.clone()
            gathered = torch.empty(group.size * tensor.numel(), dtype=dtype)
            shard, exchanged = torch.empty(6, dtype=dtype), torch.empty_like(tensor)
            works = [
                group.all_reduce(summed, asynchronous=True),
                group.all_reduce(largest, largest=True, asynchronous=True),
                group.all_gather(gathered, tensor, asynchronous=True),
                group.reduce_scatter(shard, tensor.clone(), asynchronous=True),
                group.all_to_all(exchanged, tensor, asynchronous=True),
                group.broadcast(chosen, group.size - 1, asynchronous=True),
            ]
            for work in works:
                work.wait()
                work.wait()
            for kind, result in (
                ("sum", summed),
                ("largest", largest),
                ("gathered", gathered),
                ("shard", shard),
                ("exchanged", exchanged),
                ("chosen", chosen),
            ):
                results[f"{name} {dtype} {kind}"] = result.float().tolist()
        given = [(group.rank + 2 * j) % 4 for j in range(group.size)]
        taken = [(i + 2 * group.rank) % 4 for i in range(group.size)]
        rows = torch.randint(-8, 8, (sum(given), 3), generator=generator) / 8
        exchanged = torch.empty(sum(taken), 3)
        group.all_to_all(exchanged, rows, output_rows=taken, input_rows=given)
        results[f"{name} rows"] = exchanged.view(-1).tolist()
    ring = mesh.everyone
    received = [torch.empty(3), torch.empty(3)]
    works = [ring.irecv(tensor, (ring.rank - 1) % ring.size) for tensor in received]
    works += [
        ring.isend(torch.full((3,), 10.0 * ring.rank + i), (ring.rank + 1) % ring.size) for i in range(2)
    ]
    for work in works:
        work.wait()
    results["received"] = torch.cat(received).tolist()
    ring.barrier()
    large = torch.zeros(ring.size, LARGE_GATHER_BYTES // 4 // ring.size)
    large[ring.rank].fill_(ring.rank + 1)
    ring.all_gather(large, large[ring.rank])
    results["large"] = large.mean(1).tolist()
    return results


@pytest.mark.parametrize("transport", ["auto", "gloo"])
@pytest.mark.parametrize("size", [2, 4])
def test_processes_agree_with_threads(size: int, transport: Transport, tmp_path: Path) -> None:
    processes = run_processes(size, tmp_path, every_operation, transport=transport)
    threads = run_threads(size, every_operation)
    for of_process, of_thread in zip(processes, threads, strict=True):
        assert of_process == of_thread


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_all_members_get_the_same_bits(transport: Transport, tmp_path: Path) -> None:
    def main(world: World) -> list[float]:
        group = world.new_group("all", [range(world.size)])
        tensor = torch.randn(1001, generator=torch.Generator().manual_seed(world.rank))
        group.all_reduce(tensor)
        return tensor.tolist()

    results = run_processes(4, tmp_path, main, transport=transport)
    assert len(results[0]) == 1001
    assert results[1:] == results[:1] * 3


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_a_killed_process_is_told_to_the_others(transport: Transport, tmp_path: Path) -> None:  # B91
    def main(world: World) -> str:
        group = world.new_group("all", [range(world.size)])
        group.barrier()
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            while True:
                group.all_reduce(torch.ones(8))
        except RankError as error:
            return str(error)

    results = run_processes(3, tmp_path, main, transport=transport)
    assert results[1] is None
    for rank in (0, 2):
        text = results[rank]
        assert f"rank {rank}: all_reduce in group 'all' (0, 1, 2) of (8,) float32" in text
        assert "test_process_world.py:" in text
        assert "\n" not in text


def test_a_device_mesh_has_our_groups(tmp_path: Path) -> None:
    def main(world: World) -> tuple[tuple[str, ...], list[int], list[int]]:
        mesh = build_mesh(world, Topology(dp=2, tp=2))
        theirs = mesh.device_mesh()
        names = theirs.mesh_dim_names or ()
        return names, theirs["dp"].mesh.tolist(), list(mesh.dp.ranks)

    for names, theirs, ours in run_processes(4, tmp_path, main):
        assert names == ("dp", "pp", "tp")
        assert theirs == ours


def test_a_local_rank_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:  # B155
    """Where no LOCAL_RANK is set it is the rank: on a second node it has no GPU, and takes nobody else's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(
        RuntimeError, match="`LOCAL_RANK` must be less than the 4 GPUs of this machine, but is 5 on rank 5"
    ):
        open_process_world(rank=5, size=8, local_rank=5, timeout_seconds=2)


def test_a_taken_port_is_one_clear_error() -> None:  # B150
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        holder = rf"taken by process {os.getpid()} \(.+\), so that rank 0"
        said = f"port {address.rpartition(':')[2]} of {address} is {holder}.*choose a free port"
        with pytest.raises(RuntimeError, match=said):
            open_process_world(
                rank=0, size=2, local_rank=0, timeout_seconds=2, init_method=f"tcp://{address}", device="cpu"
            )


def test_an_unreachable_master_is_one_clear_error() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(RuntimeError, match=f"rank 1 of 2 could not meet the others at {address} within 2 s"):
        open_process_world(
            rank=1, size=2, local_rank=1, timeout_seconds=2, init_method=f"tcp://{address}", device="cpu"
        )


@pytest.mark.parametrize("data_parallel", ["zero", "fsdp"])
def test_no_thread_of_gloo_outlives_a_run(data_parallel: str) -> None:
    """One that did would now and then abort a process that had done all its work."""
    command = [sys.executable, "-m", "tests.ending", data_parallel]
    ran = subprocess.run(command, check=True, timeout=PATIENCE_SECONDS, capture_output=True, text=True)
    opened, ended = ran.stdout.splitlines()
    assert "pt_gloo_runloop" in opened
    assert ended.strip() == "ended:"
