"""Kills a training run at least 50 times, at random moments and in chosen ones, and asks for the run that never died.

    python -m tests.crash [--kills 50] [--seed N] [--output DIR]

Each start goes on with `--resume auto`. A kill is SIGKILL for one rank or for all: some milliseconds after a step, or
in the middle of a save (a file half written, before and after a rename), of an asynchronous write, or of a load.
Passes if every start could read a checkpoint, and metrics, weights and moments end as those of the straight run.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.crash.ranks import Ranks, arguments, done_steps
from tests.runs import last_state, prepare, rows

SIZE = 2
STEPS_PER_KILL = 2
ENDS_WITHIN_SECONDS = 15.0
LAUNCHER_NOTICES_SECONDS = 5.0
"""Before the ranks have met, only a launcher can tell those who wait that one died; here it is a slow one."""
FLAGS: dict[str, Any] = {
    "dp": SIZE,
    "zero": 1,
    "lr_scheduler_type": "linear",
    "eval_steps": 50,
    "logging_steps": 10**6,
    "save_steps": 2,
    "save_total_limit": 3,
}
Before = Callable[[int], None]


def dying(rank: int, owner: Any, name: str, calls: int, delay_seconds: float) -> Before:
    """A rank that kills itself so long after the n-th call of `owner.name` began."""

    def before(own: int) -> None:
        if own != rank:
            return
        original, left = getattr(owner, name), [calls]

        def dies(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                die = threading.Timer(delay_seconds, os.kill, (os.getpid(), signal.SIGKILL))
                die.start() if delay_seconds else die.function(*die.args)
            return original(*arguments, **named)

        setattr(owner, name, dies)

    return before


def moments() -> dict[str, tuple[Any, str]]:
    """Functions in which a rank dies, by what they are part of."""
    from triaxis.engine.checkpoint import storage
    from triaxis.engine.checkpoint.store import CheckpointStore
    from triaxis.engine.run.metrics import MetricsWriter
    from triaxis.engine.step import TrainingStep

    return {
        "in a step": (TrainingStep, "train"),
        "in a save": (CheckpointStore, "save"),
        "in a write": (storage.ShardWriter, "write_data"),
        "at a sync": (os, "fsync"),
        "at a rename": (os, "rename"),
        "in a commit": (CheckpointStore, "_place"),
        "in a load": (CheckpointStore, "load"),
        "in a read": (storage.ShardReader, "read_data"),
        "at a row": (MetricsWriter, "write"),
    }


def one_life(draw: random.Random, flags: dict[str, Any], output: Path, log: Path) -> str | None:
    """One start and its kill; what was killed and where, or None if the run came to its end first."""
    place, kinds = draw.choice(["anywhere", *moments()]), moments()
    victim = 0 if place in ("at a rename", "in a commit") else draw.randrange(SIZE)
    before: Before = lambda rank: None  # noqa: E731
    if place != "anywhere":
        delay_seconds = draw.choice([0.0, draw.uniform(0, 0.01), draw.uniform(0, 0.05)])
        calls = 1 if place in ("in a load", "in a read") else draw.randint(1, 3)
        before = dying(victim, *kinds[place], calls, delay_seconds)
    given = arguments({**flags, "async_save": draw.random() < 0.5, "output_dir": str(output)})
    with Ranks(SIZE, [*given, "--resume", "auto"], log, before=before) as ranks:
        target = done_steps(output) + draw.randint(0, 2 * STEPS_PER_KILL)
        everyone = draw.random() < 0.4
        deadline = time.monotonic() + (draw.uniform(0.05, 3) if place == "anywhere" else 30)
        while ranks.running() and time.monotonic() < deadline and not ranks.codes:
            if place == "anywhere" and done_steps(output) > target:
                time.sleep(draw.uniform(0, 0.03))
                break
            if done_steps(output) > target + STEPS_PER_KILL:  # what was to be its end did not come
                break
            time.sleep(0.002)
        if not ranks.codes and place != "anywhere":
            place = "late"
        if ranks.running() and (everyone or not ranks.codes):
            ranks.send(signal.SIGKILL, *(() if everyone else (victim,)))
        started = time.monotonic()
        if None in ranks.wait(seconds=LAUNCHER_NOTICES_SECONDS):
            ranks.send(signal.SIGTERM)
        codes = ranks.wait(seconds=ENDS_WITHIN_SECONDS)
        took_seconds = time.monotonic() - started
    assert None not in codes and took_seconds < ENDS_WITHIN_SECONDS, (
        f"killed {place}: {codes} after {took_seconds:.0f} s, a rank did not end:\n{log.read_text()}"
    )
    if codes == [0] * SIZE:
        return None
    assert -signal.SIGKILL in codes, f"killed {place}, but the ranks ended with {codes}:\n{log.read_text()}"
    assert all(code in (1, 75, -signal.SIGKILL) for code in codes), f"{codes}:\n{log.read_text()}"
    return place


def crash(folder: Path, *, kills: int, seed: int, show: Callable[[str], None] = print) -> Counter[str]:
    """Runs straight, then with `kills` kills; how often it was killed where. Raises AssertionError."""
    draw = random.Random(seed)
    flags = {**prepare(folder), **FLAGS, "steps": STEPS_PER_KILL * kills + 10}
    straight, killed = folder / "straight", folder / "killed"
    straight.mkdir()
    with Ranks(SIZE, arguments({**flags, "output_dir": str(straight)}), folder / "straight.log") as ranks:
        assert ranks.wait() == [0] * SIZE, ranks.said()
    found: Counter[str] = Counter()
    log = folder / "killed.log"
    while found.total() < kills:
        log.unlink(missing_ok=True)
        place = one_life(draw, flags, killed, log)
        if place is None:
            raise AssertionError(
                f"the run ended after {found.total()} of {kills} kills; raise STEPS_PER_KILL"
            )
        found[place] += 1
        show(f"kill {found.total()} of {kills}: {place}, at step {done_steps(killed)} of {flags['steps']}")
    given = arguments({**flags, "output_dir": str(killed)})
    with Ranks(SIZE, [*given, "--resume", "auto"], log) as ranks:
        assert ranks.wait() == [0] * SIZE, ranks.said()
    assert rows(killed) == rows(straight), f"metrics differ: {killed} and {straight}"
    assert last_state(killed) == last_state(straight), f"weights or moments differ: {killed} and {straight}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--output", type=Path, help="a new folder that stays (default: a temporary one)")
    options = parser.parse_args()
    print(f"seed {options.seed}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.output or Path(temporary)
        found = crash(folder, kills=options.kills, seed=options.seed)
        last = rows(folder / "killed")[-1]
    where = ", ".join(f"{count} {place}" for place, count in sorted(found.items()))
    print(f"{found.total()} kills ({where}): metrics, weights and moments are those of the straight run")
    print(f"step {last['step']}: loss {last['loss']!r}")


if __name__ == "__main__":
    sys.exit(main())
