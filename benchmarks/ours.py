"""This project under the benchmark: trains under torchrun and prints one JSON line (rank 0).

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 8 benchmarks/ours.py --tp 2 --pp 2 --dp 2

`--microbatches` is per data-parallel rank, as in the peers' scripts.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.floor import products_of, seconds_of
from triaxis.engine.plan import Precision, StepPlan, UpdateRule
from triaxis.engine.step import TrainingStep
from triaxis.models.batch import Batch
from triaxis.models.fields import dense_model
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.worlds.mesh import Mesh, build_mesh
from triaxis.parallel.worlds.process import open_process_world

LEARNING_RATE = 1e-3
FLOOR_ROUNDS = 5


@dataclass(slots=True)
class Record:
    """What one rank measured, by timed step; losses of all steps; a step's products alone, by round."""

    step_seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    product_seconds: list[float] = field(default_factory=list)
    peak_rss_bytes: int = 0
    sent_bytes: dict[str, int] = field(default_factory=dict)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    defaults = {"tp": 1, "pp": 1, "dp": 1, "zero": 0, "layers": 4, "hidden": 256, "heads": 4, "ffn": 704}
    defaults |= {"vocab": 512, "seq": 128, "mbs": 2, "microbatches": 8, "steps": 10, "warmup": 2}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--transport", choices=("auto", "gloo"), default="auto", help="how ranks talk (auto)")
    parser.add_argument("--sp", action="store_true", help="sequence parallelism")
    parser.add_argument("--json", type=Path, help="also append the line here")
    parser.add_argument("--profile", type=Path, help="write rank 0's operators of one more step here")
    return parser.parse_args()


def make_plan(arguments: argparse.Namespace) -> StepPlan:
    model = dense_model(
        name="benchmark",
        vocab_size=arguments.vocab,
        hidden_size=arguments.hidden,
        layers=arguments.layers,
        heads=arguments.heads,
        kv_heads=arguments.heads,
        ffn_size=arguments.ffn,
        max_positions=arguments.seq,
    )
    return StepPlan(
        model=model,
        microbatch_size=arguments.mbs,
        microbatches=arguments.microbatches,
        sequence_length=arguments.seq,
        sequence_parallel=arguments.sp,
        zero=arguments.zero,
        dtype=Precision(arguments.dtype),
        kernels="attention=short" if arguments.dtype == "bf16" else "",
        rule=UpdateRule(weight_decay=0.1),
    )


def make_batches(plan: StepPlan, step: int, data_rank: int) -> list[Batch]:
    """A data-parallel rank's microbatches of a step: random starts, and strides of 1 to 7 to be learnt."""
    generator = torch.Generator().manual_seed(1_000_003 * step + data_rank)
    rows, length, vocab = plan.microbatch_size, plan.sequence_length, plan.model.vocab_size
    positions_BL = torch.arange(length).repeat(rows, 1)
    batches = []
    for _ in range(plan.microbatches):
        starts = torch.randint(0, vocab, (rows, 1), generator=generator)
        strides = torch.randint(1, 8, (rows, 1), generator=generator)
        ids = (starts + strides * torch.arange(length + 1)) % vocab
        batches.append(
            Batch(
                tokens_BL=ids[:, :-1].contiguous(),
                labels_BL=ids[:, 1:].contiguous(),
                positions_BL=positions_BL,
                documents=None,
            )
        )
    return batches


def measure(step: TrainingStep, mesh: Mesh, *, steps: int, warmup_steps: int) -> Record:
    """Times steps as the peers do: from a barrier to the barrier after the update."""
    record = Record()
    for number in range(warmup_steps + steps):
        if number == warmup_steps:
            mesh.clear_traffic()
        mesh.everyone.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        result = step.train(make_batches(step.plan, number, mesh.dp_rank), LEARNING_RATE)
        mesh.everyone.barrier()
        if number >= warmup_steps:
            record.step_seconds.append(time.perf_counter() - start)
            record.cpu_seconds.append(time.process_time() - cpu_start)
        record.losses.append(result.loss)
    return record


def profile_step(step: TrainingStep, mesh: Mesh, path: Path) -> None:
    """One more step on all ranks; rank 0 writes its operators, the dearest by own CPU time first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step.train(make_batches(step.plan, 0, mesh.dp_rank), LEARNING_RATE)
    if mesh.rank == 0:
        path.write_text(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=60))


def report(record: Record, mesh: Mesh, arguments: argparse.Namespace) -> dict[str, object]:
    """The figures of all ranks. Collective."""
    mine = {
        "peak_rss_bytes": record.peak_rss_bytes,
        "cpu_seconds": record.cpu_seconds,
        "product_seconds": record.product_seconds,
        "sent_bytes": record.sent_bytes,
    }
    ranks: list[dict[str, object]] = [{} for _ in range(mesh.world.size)]
    dist.all_gather_object(ranks, mine)
    sent: dict[str, int] = {}
    for rank in ranks:
        for name, count in rank["sent_bytes"].items():  # type: ignore[attr-defined]
            sent[name] = sent.get(name, 0) + count
    return {
        "tp": arguments.tp,
        "pp": arguments.pp,
        "dp": arguments.dp,
        "zero": arguments.zero,
        "step_seconds": record.step_seconds,
        "cpu_seconds": [sum(each) for each in zip(*(r["cpu_seconds"] for r in ranks), strict=True)],
        "product_seconds": [sum(each) for each in zip(*(r["product_seconds"] for r in ranks), strict=True)],
        "losses": record.losses,
        "peak_rss_bytes": [rank["peak_rss_bytes"] for rank in ranks],
        "sent_bytes_per_step": {name: count // arguments.steps for name, count in sent.items()},
    }


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    world = open_process_world(
        rank=int(os.environ["RANK"]),
        size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        timeout_seconds=300,
        device="cpu",
        transport=arguments.transport,
    )
    mesh = build_mesh(world, Topology(tp=arguments.tp, pp=arguments.pp, dp=arguments.dp))
    step = TrainingStep(make_plan(arguments), mesh)
    record = measure(step, mesh, steps=arguments.steps, warmup_steps=arguments.warmup)
    record.peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    record.sent_bytes = dict(mesh.sent_bytes())
    products = products_of(lambda: step.train(make_batches(step.plan, 0, mesh.dp_rank), LEARNING_RATE))
    mesh.everyone.barrier()
    record.product_seconds = seconds_of(products, FLOOR_ROUNDS)
    line = json.dumps(report(record, mesh, arguments))
    if arguments.profile is not None:
        profile_step(step, mesh, arguments.profile)
    if mesh.rank == 0:
        print(line, flush=True)
        if arguments.json is not None:
            with arguments.json.open("a") as file:
                file.write(line + "\n")
    world.close()


if __name__ == "__main__":
    main()
