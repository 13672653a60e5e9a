"""What the process world asks of NCCL, with torch's own functions in its place."""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from triaxis.engine.checkpoint.manifest import CheckpointError, RunState
from triaxis.engine.faults.presence import Presence, is_dead
from triaxis.engine.run.stored_row import check_replay
from triaxis.launch.directory import hold_directory
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.worlds import process
from triaxis.parallel.worlds.communicators import Options
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.process import ProcessWorld, agree_on_device
from triaxis.parallel.worlds.process_group import ProcessGroup
from triaxis.parallel.worlds.thread import run_threads


class Handle:
    """A communicator that nobody made."""

    def __init__(self, name: str) -> None:
        self.name = name


class Asked:
    """What was asked of torch, instead of a GPU."""

    def __init__(self) -> None:
        self.splits: list[tuple[str, list[list[int]], Options]] = []
        self.seconds: dict[str, float] = {}
        self.messages: list[tuple[str, str, int]] = []
        self.everyone = Handle("everyone")

    def split_group(self, **asked: Any) -> Handle:  # noqa: ANN401
        self.splits.append((asked["group_desc"], asked["split_ranks"], asked["pg_options"]))
        return Handle(asked["group_desc"])

    def message(self, kind: str) -> Any:  # noqa: ANN401
        return lambda _tensor, rank, group: self.messages.append((kind, group.name, rank))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    asked = Asked()
    monkeypatch.setattr(dist, "split_group", asked.split_group)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=asked.everyone))
    monkeypatch.setattr(dist, "isend", asked.message("send"))
    monkeypatch.setattr(dist, "irecv", asked.message("receive"))
    monkeypatch.setattr(process, "nccl_options", lambda options: options)
    monkeypatch.setattr(
        dist.distributed_c10d,
        "_set_pg_timeout",
        lambda timeout, handle: asked.seconds.__setitem__(handle.name, timeout.total_seconds()),
    )
    return asked


def gpu_world(rank: int, size: int) -> ProcessWorld:
    return ProcessWorld(
        rank,
        size,
        torch.device("cuda", rank),
        store=HashStore(),
        setup=timedelta(seconds=3000),
        operation=timedelta(seconds=300),
    )


def test_an_axis_is_one_split_of_the_world(asked: Asked) -> None:
    """Also where a rank's part is itself alone: torch names groups by how many a rank has made."""
    world = gpu_world(3, 8)
    mesh = build_mesh(world, Topology(tp=2, pp=2, dp=2))
    assert sorted(name for name, _, _ in asked.splits) == ["dp up", "pp down", "pp up", "tp up"]
    for _, parts, _ in asked.splits:
        assert sorted(rank for part in parts for rank in part) == list(range(8))
    assert mesh.everyone.handle is asked.everyone  # type: ignore[attr-defined]
    assert ("pp up", Options(urgent=True, most_blocks=4)) in [
        (name, given) for name, _, given in asked.splits
    ]
    world.settle()
    assert set(asked.seconds.values()) == {300}
    assert len(asked.seconds) == 5


def test_messages_up_and_down_have_queues_of_their_own(asked: Asked) -> None:
    group = build_mesh(gpu_world(1, 3), Topology(pp=3)).pp
    assert isinstance(group, ProcessGroup)
    token = torch.zeros(1)
    group.isend(token, 2)
    group.irecv(token, 0)
    group.isend(token, 0)
    group.irecv(token, 2)
    assert asked.messages == [
        ("send", "everyone", 2),
        ("receive", "everyone", 0),
        ("send", "pp down", 0),
        ("receive", "pp down", 2),
    ]


def test_what_nobody_goes_on_beside_runs_on_the_stream_of_the_computations(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = build_mesh(gpu_world(0, 2), Topology(tp=2)).tp
    found: list[tuple[str, bool]] = []
    for name in (
        "all_reduce",
        "all_gather_single",
        "reduce_scatter_single",
        "all_to_all_single",
        "broadcast",
    ):

        def done(*_: object, async_op: bool, name: str = name, **__: object) -> None:
            found.append((name, async_op))

        monkeypatch.setattr(dist, name, done)
    part, whole = torch.zeros(2), torch.zeros(4)
    for later in (False, True):
        group.all_reduce(whole, asynchronous=later)
        group.all_gather(whole, part, asynchronous=later)
        group.reduce_scatter(part, whole, asynchronous=later)
        group.all_to_all(whole, whole.clone(), asynchronous=later)
        group.broadcast(whole, 0, asynchronous=later)
    names = ["all_reduce", "all_gather_single", "reduce_scatter_single", "all_to_all_single", "broadcast"]
    assert found == [(name, later) for later in (False, True) for name in names]


def test_ranks_agree_on_their_devices_before_any_is_used() -> None:
    store = HashStore()

    def main(world: World) -> str:
        try:
            agree_on_device(store, world.rank, world.size, torch.device("cpu" if world.rank != 1 else "meta"))
        except RuntimeError as error:
            return str(error)
        return "fit"

    told = run_threads(3, main)
    assert told[0] == told[1] == told[2] != "fit"


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_no_other_run(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without(_file: object, _how: int) -> None:
        raise OSError(number, "no locks")

    monkeypatch.setattr(fcntl, "flock", without)
    hold_directory(tmp_path).close()
    assert "has no locks" in capsys.readouterr().err
    presence = Presence(tmp_path, "run", 0, 1)
    assert not is_dead(presence.folder, 0)
    monkeypatch.undo()
    assert not is_dead(presence.folder, 0), "its lock is free, and yet nobody may call it dead"
    presence.close()


def test_a_replayed_loss_is_exact_only_where_the_same_run_repeats(tmp_path: Path) -> None:
    def state(rounding: dict[str, object]) -> RunState:
        return RunState(step=1, tokens=0, config={}, sampler={}, eval_loss=2.0, extra={"rounding": rounding})

    near = 2.0 + 1e-7
    cpu = {"device": "x86"}
    with pytest.raises(CheckpointError, match="must be 2"):
        check_replay(state(cpu), near, cpu, "fp32", tmp_path)
    for deterministic in (False, True):
        gpu: dict[str, object] = {"device": "H100", "deterministic": deterministic}
        assert check_replay(state(gpu), 2.0, gpu, "fp32", tmp_path) is None
        if deterministic:
            with pytest.raises(CheckpointError, match="must be 2"):
                check_replay(state(gpu), near, gpu, "fp32", tmp_path)
        else:
            told = check_replay(state(gpu), near, gpu, "fp32", tmp_path)
            assert told is not None
            assert "another order" in told
            with pytest.raises(CheckpointError):
                check_replay(state(gpu), 2.1, gpu, "fp32", tmp_path)
