"""What a run does about numbers that are not finite, full disks, ranks that die or stand still."""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from collections import namedtuple
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.agreement import LEARNING_RATE, MODEL, Layout, held_weights, plan_of, sequences
from tests.patience import NEVER_SECONDS, PATIENCE_SECONDS
from tests.runs import prepare, rows, run
from triaxis.engine.checkpoint.folder import complete_checkpoints
from triaxis.engine.checkpoint.manifest import SaveError
from triaxis.engine.checkpoint.storage import ShardWriter
from triaxis.engine.config import ConfigError, RunConfig, SaveStrategy
from triaxis.engine.data.loader import Loader
from triaxis.engine.faults.interruption import Interruption
from triaxis.engine.faults.presence import Presence, clear_presence, dead_ranks
from triaxis.engine.faults.replicas import ReplicaError
from triaxis.engine.faults.supervision import Supervision
from triaxis.engine.faults.watchdog import Watchdog
from triaxis.engine.rules import resolve
from triaxis.engine.run.metrics import MetricsWriter, read_metrics
from triaxis.engine.run.trainer import train
from triaxis.engine.step import TrainingStep, _Chunk
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.worlds.failure import RankError
from triaxis.parallel.worlds.group import World
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.thread import run_threads

pytestmark = pytest.mark.usefixtures("no_picture")


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return prepare(tmp_path_factory.mktemp("run")) | {"steps": 6, "eval_batches": 0}


@contextmanager
def spoiled(rank: int, steps: Container[int], value: float, *, gradient: bool = False) -> Iterator[None]:
    """In these steps (from 0) the rank's forward passes, or with `gradient` what comes back, are times `value`."""
    done: dict[int, int] = {}
    forward, trained = _Chunk.forward, TrainingStep.train

    def counted(self: TrainingStep, *arguments: Any) -> Any:
        try:
            return trained(self, *arguments)
        finally:
            done[self.mesh.rank] = done.get(self.mesh.rank, 0) + 1

    def spoils(self: _Chunk, hidden: Tensor | None, microbatch: int) -> Tensor:
        output = forward(self, hidden, microbatch)
        if self._step.mesh.rank != rank or done.get(rank, 0) not in steps:
            return output
        if gradient and output.requires_grad:
            output.register_hook(lambda incoming: incoming * value)
        return output if gradient else output * value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Chunk, "forward", spoils)
        patch.setattr(TrainingStep, "train", counted)
        yield


@pytest.mark.parametrize(
    ("layout", "rank", "gradient"),
    [
        (Layout(dp=2, zero=0), 1, False),
        (Layout(dp=2, zero=1), 1, False),
        (Layout(dp=2, zero=2), 1, False),
        (Layout(dp=2, zero=3), 1, False),
        (Layout(tp=2), 1, False),
        (Layout(pp=2), 0, False),
        (Layout(pp=2), 1, False),
        (Layout(dp=2, zero=2), 1, True),
        (Layout(tp=2), 1, True),
        (Layout(pp=2), 0, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_skipped_step_leaves_every_bit(
    layout: Layout, rank: int, gradient: bool, dtype: str
) -> None:  # B95
    """One rank's NaN, in the second of three steps: the others skip too, and the third is as if it had not been."""

    def main(world: World) -> tuple[list[bool], list[float], list[Tensor]]:
        mesh = build_mesh(world, Topology(tp=layout.tp, pp=layout.pp, dp=layout.dp))
        plan = replace(plan_of(layout, MODEL, "adamw, clip 1", dtype), skip_bad=True)
        step = TrainingStep(plan, mesh)
        share = layout.global_batch() // layout.dp
        skipped, losses = [], []
        for number in (0, 1, 2) if spoils else (0, 2):
            batch = sequences(number, layout.global_batch(), MODEL.vocab_size)
            before = [tensor for _, tensor in held_weights(step)]
            result = step.train(batch[mesh.dp.rank * share : (mesh.dp.rank + 1) * share], LEARNING_RATE)
            after = [tensor for _, tensor in held_weights(step)]
            same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            assert same == result.skipped
            skipped.append(result.skipped)
            losses.append(result.loss)
        return skipped, losses[-1:], after

    spoils = True
    with spoiled(rank, range(1, 2), float("nan"), gradient=gradient):
        found = run_threads(layout.size, main)
    spoils = False
    expected = run_threads(layout.size, main)
    for (skipped, loss, weights), (_, right, others) in zip(found, expected, strict=True):
        assert skipped == [False, True, False]
        assert loss == right
        assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


def test_skipped_steps_are_counted_and_ten_in_a_row_end_the_run(
    flags: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # B95
    common = {**flags, "dp": 2, "on_nan": "skip", "output_dir": str(tmp_path)}
    with spoiled(1, range(2, 4), float("inf")):
        run(common)
    assert (
        "step 3: loss inf, gradient norm nan (from the loss of rank 1); the update is"
        in capsys.readouterr().err
    )
    assert [row["skipped_steps"] for row in rows(tmp_path)] == [0, 0, 1, 2, 2, 2]
    assert [row["loss"] is None for row in rows(tmp_path)] == [False, False, True, True, False, False]
    tokens = [row["tokens"] for row in rows(tmp_path)]
    assert tokens == sorted(tokens) and tokens[0] < 96  # real ones, of the updates that were left out too
    with (
        spoiled(0, range(1, 100), float("nan")),
        pytest.raises(FloatingPointError, match=r"step 11: .*, for the 10th time in a row"),
    ):
        run({**common, "steps": 30})
    with spoiled(0, {*range(1, 10), *range(11, 20)}, float("nan")):
        run({**common, "steps": 21})  # nine, a good one, nine
    assert rows(tmp_path)[-1]["skipped_steps"] == 18


def test_a_gradient_that_is_not_finite_is_named(
    flags: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # B95
    common = {**flags, "pp": 2, "steps": 2, "warmup_steps": 1, "on_nan": "skip", "output_dir": str(tmp_path)}
    with spoiled(0, range(1, 2), float("nan"), gradient=True):
        run(common)
    told = capsys.readouterr().err
    assert "gradient norm nan (every rank's loss is finite: it comes from the gradient of " in told
    assert re.search(r"of model\.layers\.0\.\S+ and \d+ more\); the update is skipped", told), told


def test_a_leap_of_the_gradient_norm_is_skipped_or_ends_the_run(
    flags: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One step whose loss, and so its gradient, is a thousand times what it should be, on one rank."""
    common = {**flags, "dp": 2, "steps": 14, "spike_factor": 5.0}
    with spoiled(1, range(12, 13), 1000.0):
        run({**common, "on_nan": "skip", "output_dir": str(tmp_path / "skip")})
    assert "see --spike-factor); the update is skipped" in capsys.readouterr().err
    assert [row["skipped_steps"] for row in rows(tmp_path / "skip")] == [0] * 12 + [1, 1]
    with (
        spoiled(1, range(12, 13), 1000.0),
        pytest.raises(FloatingPointError, match=r"step 13: .*more than .*, see --spike-factor"),
    ):
        run({**common, "output_dir": str(tmp_path / "stop")})


def test_by_default_a_nan_ends_the_run_on_every_rank(flags: dict[str, Any], tmp_path: Path) -> None:  # B96
    told: list[str] = []
    config = RunConfig(simulate=True, **{**flags, "dp": 2, "output_dir": str(tmp_path)})
    resolved = resolve(config, 2)

    def rank(world: World) -> None:
        with pytest.raises(FloatingPointError) as caught:
            train(config, resolved, world)
        told.append(str(caught.value))

    with spoiled(1, range(3, 4), float("nan")):
        run_threads(2, rank)
    assert len(told) == 2 and told[0] == told[1]
    assert (
        told[0].startswith("step 4: loss nan, gradient norm nan (from the loss of rank 1); lower")
        and "--on-nan skip" in told[0]
    )
    assert len(rows(tmp_path)) == 3


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_replicas_are_equal_after_each_step_of_a_run(
    zero: int, flags: dict[str, Any], tmp_path: Path
) -> None:  # B41
    """The loop that ships, five steps on two replicas."""
    weights: dict[int, list[Tensor]] = {0: [], 1: []}
    trained = TrainingStep.train

    def noted(self: TrainingStep, *arguments: Any) -> Any:
        result = trained(self, *arguments)
        weights[self.mesh.rank].append(torch.cat([tensor.flatten() for _, tensor in held_weights(self)]))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingStep, "train", noted)
        run({**flags, "dp": 2, "zero": zero, "steps": 5, "output_dir": str(tmp_path)})
    assert len(weights[0]) == 5
    assert all(map(torch.equal, weights[0], weights[1]))
    assert not any(map(torch.equal, weights[0], weights[0][1:]))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_replicas_that_differ_end_the_run_before_it_is_saved(
    dtype: str, flags: dict[str, Any], tmp_path: Path
) -> None:  # B41
    """One bit of one weight of one rank, after the second save."""
    trained = TrainingStep.train

    def strays(self: TrainingStep, *arguments: Any) -> Any:
        result = trained(self, *arguments)
        if self.mesh.rank == 3 and self.optimizer.steps == 5:
            self.data_parallel.buckets[0].master.view(torch.int32)[7] ^= 1 << 20
            self.data_parallel.publish()
        return result

    common = {
        **flags,
        "pp": 2,
        "dp": 2,
        "zero": 0,
        "dtype": dtype,
        "save_steps": 2,
        "output_dir": str(tmp_path),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingStep, "train", strays)
        with pytest.raises(
            ReplicaError, match=r"after step 6, .*, on rank 3 \(dp 1, pp 1, tp 0\) not as on rank 1"
        ):
            run(common)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000002", "step-00000004"]
    assert run({**common, "resume": "auto"}).steps == 6


@contextmanager
def full_disk(rank: int, saves: range) -> Iterator[None]:
    """The rank's shards do not fit in these saves (counted from 0)."""
    write, count = ShardWriter.write_data, [0]

    def fails(self: ShardWriter, plan: Any, planner: Any) -> Any:
        if threading.current_thread().name.endswith(str(rank)) or rank < 0:
            count[0] += 1
            if count[0] - 1 in saves:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, plan, planner)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardWriter, "write_data", fails)
        yield


@pytest.mark.parametrize("asynchronous", [False, True])
def test_training_goes_on_when_a_save_fails_or_stops_if_asked(
    asynchronous: bool, flags: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # B60
    common = {**flags, "save_steps": 2, "output_dir": str(tmp_path / "a"), "async_save": asynchronous}
    with full_disk(-1, range(1, 2)):
        assert run(common).steps == 6
    assert [path.name for path in complete_checkpoints(tmp_path / "a")] == ["step-00000002", "step-00000006"]
    told = capsys.readouterr().err
    assert "the checkpoint of step 4 was not saved" in told and "No space left" in told
    assert "training goes on (--on_save_error continue)" in told
    stop = {**common, "output_dir": str(tmp_path / "b"), "on_save_error": "stop"}
    with full_disk(-1, range(1, 2)), pytest.raises(SaveError, match="the checkpoint of step 4 was not saved"):
        run(stop)
    last = {**common, "output_dir": str(tmp_path / "c")}
    with full_disk(-1, range(2, 3)), pytest.raises(SaveError, match="the checkpoint of step 6 was not saved"):
        run(last)  # nothing comes after it that could make up for it


def test_rows_wait_for_room_on_a_full_disk(tmp_path: Path) -> None:
    from tests.ranks.test_metrics import row

    class Full(FileIO):
        room = 10**6

        def write(self, content: Any) -> int:
            fits = min(len(content), self.room)
            if not fits:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.room -= fits
            return super().write(content[:fits])

    writer = MetricsWriter(tmp_path)
    file = writer._file = Full(tmp_path / "metrics.jsonl", "wb")
    writer.write(row(1))
    file.room = 100
    writer.write(row(2))
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1]
    assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"\n")
    file.room = 10**6
    writer.write(row(3))
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    file.room = 0
    writer.write(row(4))
    with pytest.raises(OSError, match=r"1 row of metrics.jsonl is lost"):
        writer.close()


@pytest.mark.parametrize(
    ("given", "strategy", "saved"),
    [
        ({}, SaveStrategy.SIGNAL, []),
        ({"save_strategy": "no"}, SaveStrategy.NO, []),
        ({"save_steps": 4}, SaveStrategy.STEPS, [4, 6]),
        ({"save_steps": 2, "save_total_limit": 2}, SaveStrategy.STEPS, [4, 6]),
        ({"save_minutes": 1e-6}, SaveStrategy.TIME, [1, 2, 3, 4, 5, 6]),
        ({"save_strategy": "steps"}, SaveStrategy.STEPS, [6]),
    ],
)
def test_when_a_run_is_saved(
    given: dict[str, Any], strategy: SaveStrategy, saved: list[int], flags: dict[str, Any], tmp_path: Path
) -> None:
    assert resolve(RunConfig(**given), 1).save_strategy == strategy
    run({**flags, **given, "output_dir": str(tmp_path)})
    assert [int(path.name[5:]) for path in complete_checkpoints(tmp_path)] == saved


def test_the_best_evaluation_is_kept(flags: dict[str, Any], tmp_path: Path) -> None:
    """A learning rate far too large for the last steps makes an early checkpoint the best."""
    common = {**flags, "eval_batches": 1, "eval_steps": 1, "steps": 8, "lr_scheduler_type": "constant"}
    common |= {
        "save_best": True,
        "save_steps": 100,
        "save_total_limit": 1,
        "warmup_steps": 7,
        "learning_rate": 3,
    }
    run({**common, "output_dir": str(tmp_path)})
    losses = {row["step"]: row["eval_loss"] for row in rows(tmp_path)}
    best = min(losses, key=lambda step: losses[step])
    assert 1 < best < 8, losses
    assert [int(path.name[5:]) for path in complete_checkpoints(tmp_path)] == [best, 8]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"save_strategy": "epoch", "save_steps": 5},
            "`save_steps` must be left out with save_strategy epoch",
        ),
        ({"save_strategy": "no", "async_save": True}, "`async_save` must be left out with save_strategy no"),
        ({"save_best": True}, "`save_best` needs evaluations on the way, but eval_steps is None"),
        ({"hang_timeout": 0.0}, "`hang_timeout` must be finite and more than 0"),
        ({"elastic": True, "resume": "never"}, "`elastic` must be left out with --resume never"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(RunConfig(**given), 1)


def test_a_signal_is_for_the_trainer_only_while_it_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    early, interruption = Interruption(), Interruption()
    assert not early.ask(15)
    with interruption.looked_at():
        assert interruption.ask(15) and interruption.signal == 15
        now[0] += 1
        assert interruption.ask(10) and interruption.signal == 15  # the same request, from the launcher
        now[0] += 2
        assert not interruption.ask(15)  # who asks again is in a hurry
    assert interruption.ask(15)  # it ends by itself


def test_a_dead_rank_is_told_from_one_that_lives_or_left(tmp_path: Path) -> None:
    own = Presence(tmp_path, "x", 0, 3)
    reader, writer = os.pipe()
    pids = []
    for rank in (1, 2):
        pid = os.fork()
        if not pid:
            presence = Presence(tmp_path, "x", rank, 3)
            os.write(writer, b".")
            if rank == 2:
                time.sleep(0.1)
                presence.close()
            else:
                time.sleep(NEVER_SECONDS)
            os._exit(0)
        pids.append(pid)
    assert len(os.read(reader, 1) + os.read(reader, 1)) == 2
    os.waitpid(pids[1], 0)
    assert not own.neighbour_died() and dead_ranks(tmp_path, "x", 3) == []
    os.kill(pids[0], signal.SIGSTOP)
    assert not own.neighbour_died()
    os.kill(pids[0], signal.SIGKILL)
    os.waitpid(pids[0], 0)
    assert own.neighbour_died() and dead_ranks(tmp_path, "x", 3) == [1]
    assert dead_ranks(tmp_path, "another start", 3) == []
    own.close()
    clear_presence(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_outside_any_communication_is_named(flags: dict[str, Any], tmp_path: Path) -> None:  # B91
    """Rank 1 sleeps where it should read data. Both write down where they are; one tells it, and the run ends."""
    told: list[str] = []
    over = threading.Event()
    config = RunConfig(
        simulate=True,
        **{**flags, "dp": 2, "hang_timeout": 5.0, "output_dir": str(tmp_path)},
        dataloader_num_workers=0,
    )
    resolved = resolve(config, 2)
    batches, still_seconds = Loader.step_batches, Watchdog._still_seconds
    at_step: set[int] = set()

    def sleeps(self: Loader, step: int, **named: Any) -> Any:
        at_step.update({self.data_rank} if step == 2 else ())
        if step == 2 and self.data_rank == 1:
            over.wait(PATIENCE_SECONDS)
            raise KeyError("asleep")
        return batches(self, step, **named)

    def still_where_it_matters(
        self: Watchdog,
    ) -> float:  # the steps before may be slow, where the machine is busy
        seconds = still_seconds(self)
        return seconds if len(at_step) == 2 else 0.0

    def end(message: str | None) -> None:
        if message is not None:
            told.append(message)
            over.set()

    def rank(world: World) -> None:
        train(config, resolved, world, Supervision(end=end))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loader, "step_batches", sleeps)
        patch.setattr(Watchdog, "_still_seconds", still_where_it_matters)
        with pytest.raises((KeyError, RankError)):
            run_threads(2, rank)
    (message,) = told
    assert re.match(r"no progress for \d+ s at step 3, (reading data|training)", message)
    assert "rank 1 (dp 1, pp 0, tp 0) is at " in message
    assert "rank 0 waits in all_reduce (trained tokens) in group 'world' (0, 1) at engine/step.py" in message
    for number in (0, 1):
        report = (tmp_path / "hang" / f"rank-{number}.txt").read_text()
        assert report.startswith(f"rank {number} (dp {number}, pp 0, tp 0), process {os.getpid()}")
        assert "last operation by group:" in report and "in sleeps" in report


def test_a_disk_too_small_for_two_checkpoints_is_told_at_the_start(
    flags: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # B61
    for free, warned in ((1 << 40, False), (1000, True)):
        usage = namedtuple("usage", "total used free")(1 << 40, 0, free)
        monkeypatch.setattr("triaxis.engine.run.saving.shutil.disk_usage", lambda _path, usage=usage: usage)
        run(flags | {"steps": 1, "warmup_steps": 0, "save_steps": 1, "output_dir": str(tmp_path / str(free))})
        assert ("warning: a checkpoint takes" in capsys.readouterr().err) is warned
