"""Rows packed with documents against rows of one document, and against the same documents as rows of their own.

    OMP_NUM_THREADS=1 python benchmarks/packed.py

Steps of all kinds run in turn in one process, so that a change of the machine's pace meets all of them; the figure is
the median, over the rounds, of CPU seconds. Peak memory is that of a process for each kind.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from itertools import accumulate

import torch

from triaxis.engine.plan import StepPlan
from triaxis.engine.step import TrainingStep
from triaxis.models.batch import IGNORED, Batch
from triaxis.models.fields import dense_model
from triaxis.parallel.kernels.attention import documents_of
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.thread import run_threads

DOCUMENTS, LEARNING_RATE, VOCABULARY = 8, 1e-3, 509
UNEVEN = (40, 80, 120, 180, 240, 340, 440, 608)
"""Lengths of eight documents in a row of 2,048 tokens."""
KINDS: dict[str, tuple[int, ...]] = {
    "one document a row": (2048,),
    "8 documents a row": (256,) * DOCUMENTS,
    "8 uneven documents a row": UNEVEN,
    "those 8 equal ones, a row each": (256,),
}
WHOLE, PACKED, UNEVENLY, APART = KINDS


def make_plan(hidden: int, layers: int, rows: int, kind: str) -> StepPlan:
    length = sum(KINDS[kind])
    model = dense_model(
        name="packed",
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        layers=layers,
        heads=8,
        kv_heads=4,
        ffn_size=64 * -(-8 * hidden // 3 // 64),
        max_positions=2048,
        tied=True,
    )
    return StepPlan(
        model=model, microbatch_size=rows * 2048 // length, microbatches=1, sequence_length=length
    )


def make_batch(plan: StepPlan, lengths: tuple[int, ...]) -> Batch:
    generator = torch.Generator().manual_seed(1)
    shape = (plan.microbatch_size, plan.sequence_length)
    tokens_BL = torch.randint(VOCABULARY, shape, generator=generator)
    labels_BL = tokens_BL.roll(-1, 1)
    labels_BL[:, [end - 1 for end in accumulate(lengths)]] = IGNORED
    positions_L = torch.cat([torch.arange(length) for length in lengths])
    numbers_L = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return Batch(
        tokens_BL=tokens_BL,
        labels_BL=labels_BL,
        positions_BL=positions_L.expand(shape),
        documents=documents_of(numbers_L.expand(shape)) if len(lengths) > 1 else None,
    )


def made_step(arguments: argparse.Namespace, kind: str) -> Callable[[], None]:
    """One step on that kind of rows, to be called again and again."""
    plan = make_plan(arguments.hidden, arguments.layers, arguments.rows, kind)
    batch = make_batch(plan, KINDS[kind])
    (step,) = run_threads(1, lambda world: TrainingStep(plan, build_mesh(world, Topology())))

    def run() -> None:
        step.train([batch], LEARNING_RATE)

    return run


def peak_bytes(arguments: argparse.Namespace, kind: str) -> int:
    """The most that this process ever held, after three steps."""
    run = made_step(arguments, kind)
    for _ in range(3):
        run()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default, told in (
        ("hidden", 64, "size of a hidden state"),
        ("layers", 4, "of the model"),
        ("rows", 4, "of 2,048 tokens in a step"),
        ("rounds", 15, "timed steps of each kind"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{told} ({default})")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    steps = {kind: made_step(arguments, kind) for kind in KINDS}
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(arguments.rounds + 1):
        for kind, run in steps.items():
            start = time.process_time()
            run()
            if number:  # the first is not timed
                seconds[kind].append(time.process_time() - start)
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        peaks = {kind: pool.apply(peak_bytes, (arguments, kind)) for kind in KINDS}
    for kind in KINDS:
        print(
            f"{kind:32} {statistics.median(seconds[kind]):7.3f} s a step, peak {peaks[kind] / 2**20:5.0f} MiB"
        )
    for mine, base in ((PACKED, APART), (PACKED, WHOLE), (UNEVENLY, WHOLE)):
        ratios = [one / other for one, other in zip(seconds[mine], seconds[base], strict=True)]
        told = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{mine} ÷ {base}: time {told}, peak {peaks[mine] / peaks[base]:.2f}")


if __name__ == "__main__":
    main()
