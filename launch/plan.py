"""`triaxis plan`, or `python -m triaxis.launch.plan`: model and cluster in, layout and start command out. No torch."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from triaxis.launch.planner import present
from triaxis.launch.planner.artefacts import Cluster, Job, job_name, torchrun_command, write_artefacts
from triaxis.launch.planner.explain import explain, gigabytes, neighbours, parse_wish
from triaxis.launch.planner.hardware import Hardware, hardware_names, load_hardware
from triaxis.launch.planner.memory_tables import MODELS, least_accelerators, model_states, needs
from triaxis.launch.planner.recommended import nearest
from triaxis.launch.planner.reprice import Repriced, reprice_best
from triaxis.launch.planner.run_flags import model_toml, run_flags
from triaxis.launch.planner.search import Candidate, Plan, Request, lightest, search
from triaxis.launch.planner.table import SIZES, by_rule, table_row
from triaxis.models.config import ModelConfig
from triaxis.models.presets import PRESETS, load_config

DESCRIPTION = """Which layout, will it fit, how fast, how long, for how much, and the command that starts it.

  triaxis plan --model llama2-70b --gpus 64 --hardware a100-80g --seq 4096 --global-batch 1024
  triaxis plan --model llama2-70b --gpus 64 --tokens 2T --price 2.50 --report plan.html --write start/
  triaxis plan --model llama2-70b --gpus 64 --explain dp=8,tp=8,pp=1
  triaxis plan --table                     the four classic sizes, by the rule and by search
  triaxis plan --memory                    model states under DDP, ZeRO and FSDP; GPUs that models need
  triaxis plan --score runs.csv            predictions against published runs

Prices are closed forms; the ranges beside them held nine of ten published runs (docs/accuracy.md)."""

EXIT_CONFIGURATION = 2
EXIT_DOES_NOT_FIT = 1
SUFFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="triaxis.launch.plan",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("other questions").add_mutually_exclusive_group()
    what.add_argument("--table", action="store_true", help="the decision table: 7B, 13B, 70B, 671B")
    what.add_argument(
        "--memory", action="store_true", help="the memory tables; of --model on --gpus, if given"
    )
    what.add_argument(
        "--score", type=Path, metavar="FILE", help="predict every row of a file of published runs"
    )
    run = parser.add_argument_group("the run")
    run.add_argument(
        "--model", help="a preset, 1.8B, 7B, 13B, 70B or 671B, or a .toml or .json file of model fields"
    )
    run.add_argument("--gpus", type=int, help="how many")
    run.add_argument(
        "--hardware",
        default="h100-80g",
        help=f"{', '.join(hardware_names())}, or a TOML file (triaxis doctor writes one); default: %(default)s",
    )
    run.add_argument("--seq", type=int, default=4096, help="tokens in a sequence (default: %(default)s)")
    run.add_argument(
        "--global-batch",
        "--global_batch",
        type=int,
        default=1024,
        help="sequences a step (default: %(default)s)",
    )
    run.add_argument("--dtype", choices=("bf16", "fp32", "fp64"), default="bf16", help="default: %(default)s")
    run.add_argument(
        "--tokens", type=_tokens, help="tokens to train on, such as 300B or 2T: gives days and steps"
    )
    run.add_argument("--price", type=float, help="of one GPU for one hour: gives the cost")
    how = parser.add_argument_group("the answer")
    how.add_argument(
        "--policy",
        choices=("search", "table"),
        default="search",
        help="the best of all layouts, or the decision table's rule (default: %(default)s)",
    )
    how.add_argument(
        "--explain",
        action="append",
        default=[],
        metavar="dp=8,tp=4,pp=2",
        help="why a layout lost or does not fit (also zero, microbatch, virtual_stages, recompute); repeatable",
    )
    how.add_argument("--top", type=int, default=12, help="alternatives to show (default: %(default)s)")
    how.add_argument(
        "--simulate",
        type=int,
        nargs="?",
        const=3,
        default=0,
        metavar="N",
        help="price the best on N topologies (3) again by the engine's own program, proved and timed: "
        "seconds for each; then the fastest of these is chosen",
    )
    how.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    how.add_argument("--report", type=Path, metavar="FILE", help="write a page that explains it all")
    how.add_argument(
        "--write", type=Path, metavar="DIR", help="write start scripts and manifests (also triaxis script)"
    )
    how.add_argument("--image", default="triaxis:latest", help="of the manifests (default: %(default)s)")
    how.add_argument(
        "--claim", default="triaxis-data", help="their persistent volume claim (default: %(default)s)"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        if options.score is not None:
            return _score(options)
        hardware = load_hardware(options.hardware)
        if options.table:
            return _table(options, hardware)
        if options.memory:
            return _memory(options, hardware)
        if options.model is None or options.gpus is None:
            parser.error("give --model and --gpus, or --table, --memory or --score FILE")
        return _plan(options, hardware)
    except (ValueError, OSError) as error:
        lines = str(error).replace("\n", "\n  ")
        print(f"There is no plan:\n  {lines}", file=sys.stderr)
        return EXIT_CONFIGURATION


def _tokens(text: str) -> float:
    """`300B` is 3e11."""
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([KMBT]?)", text, re.IGNORECASE)
    if found is None or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"must be a number such as 300B or 2T, but is {text!r}")
    return float(found[1]) * SUFFIXES[found[2].upper()]


def _model(name: str) -> tuple[ModelConfig, str]:
    """The model and how train's --model names it: a preset, or a file (for sizes that are no presets, one to write)."""
    model = MODELS.get(name.upper().replace("_", "."))
    if model is None:
        model = next((one for one in MODELS.values() if one.name == name), None)
    if model is None:
        return load_config(name), name
    return model, model.name if model.name in PRESETS else f"{model.name}.toml"


def _request(options: argparse.Namespace, hardware: Hardware) -> Request:
    for field in ("gpus", "seq", "global_batch"):
        if getattr(options, field) < 1:
            raise ValueError(f"`{field}` must be at least 1, but is {getattr(options, field)}")
    hardware.peak(options.dtype)
    model, name = _model(options.model)
    return Request(
        model=model,
        name=name,
        hardware=hardware,
        gpus=options.gpus,
        seq=options.seq,
        global_batch=options.global_batch,
        dtype=options.dtype,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """A plan, the layout chosen by the policy, and its job."""

    plan: Plan
    chosen: Candidate
    job: Job

    @property
    def command(self) -> str:
        return torchrun_command(self.job)


def _plan(options: argparse.Namespace, hardware: Hardware) -> int:
    request = _request(options, hardware)
    wishes = [parse_wish(text) for text in options.explain]
    plan = search(request)
    chosen = plan.best
    simulated: tuple[Repriced, ...] = ()
    if options.simulate > 0 and options.policy == "search":
        simulated = reprice_best(
            plan, options.simulate, lambda text: print(text, file=sys.stderr, flush=True)
        )
        chosen = simulated[0].candidate if simulated and simulated[0].works else chosen
    if options.policy == "table":
        by_table = by_rule(request)
        chosen = by_table if by_table.fits else None
    found = [explain(plan, wish, chosen) for wish in wishes]
    if chosen is None:
        return _does_not_fit(options, plan, [present.explanation_json(one) for one in found])
    answer = _Answer(plan=plan, chosen=chosen, job=_job(request, chosen, options.tokens))
    written: list[str] = []
    if options.write is not None:
        written += [str(path) for path in _write(options, answer)]
    if options.report is not None:
        from triaxis.launch.planner.report import write_report

        write_report(
            options.report,
            plan=plan,
            chosen=chosen,
            job=answer.job,
            tokens=options.tokens,
            price=options.price,
        )
        written.append(str(options.report))
    if options.json:
        extra: dict[str, Any] = {
            "policy": options.policy,
            "simulated": [present.repriced_json(one) for one in simulated],
            "why_not": [present.explanation_json(one) for one in neighbours(plan, chosen)],
            "explanations": [present.explanation_json(one) for one in found],
            "written": written,
        }
        if options.tokens:
            days, cost = present.length(chosen, options.tokens, options.price)
            extra |= {"tokens": options.tokens, "days": days, "cost": cost}
        print(json.dumps(present.plan_json(plan, chosen, answer.command, extra), indent=2))
        return 0
    _show(options, answer, simulated, [present.explanation_view(one) for one in found], written)
    return 0


def _job(request: Request, chosen: Candidate, tokens: float | None) -> Job:
    node = request.hardware.gpus_per_node
    nodes = max(1, request.gpus // node) if request.gpus % node == 0 or request.gpus < node else request.gpus
    return Job(
        name=job_name(request.model.name),
        flags=run_flags(request, chosen, tokens),
        nodes=nodes,
        gpus_per_node=request.gpus // nodes,
    )


def _write(options: argparse.Namespace, answer: _Answer) -> tuple[Path, ...]:
    cluster = Cluster(image=options.image, claim=options.claim)
    files = write_artefacts(options.write, answer.job, cluster)
    request = answer.plan.request
    if request.name != options.model and request.name.endswith(".toml"):  # a size that is no preset
        path = options.write / request.name
        path.write_text(model_toml(request.model), encoding="utf-8")
        files += (path,)
    return files


def _show(
    options: argparse.Namespace,
    answer: _Answer,
    simulated: Sequence[Repriced],
    found: list[Any],
    written: list[str],
) -> None:
    console = present.console()
    plan, request = answer.plan, answer.plan.request
    console.print(
        f"[bold]{request.model.name}[/], {request.model.parameters() / 1e9:,.2f} B parameters, on {request.gpus:,} × "
        f"{request.hardware.name}: {len(plan.candidates):,} layouts priced, {len(plan.fitting):,} fit\n"
    )
    console.print(present.choice_view(answer.chosen, options.tokens, options.price))
    if simulated:
        console.print("\n[bold]by simulation[/]")
        for one in simulated:
            console.print(f"{one.candidate}: {present.simulated_text(one)}")
    console.print("\n[bold]what nothing beats in both memory and time[/]")
    console.print(present.pareto_view(plan.pareto, options.top))
    console.print("\n[bold]why not[/]")
    for other in neighbours(plan, answer.chosen):
        console.print(f"{other.asked} {other.verdict}")
    for view in found:
        console.print("")
        console.print(view)
    console.print(
        "\n[bold]start[/]" + (" (on each node, with the first one's name)" if answer.job.nodes > 1 else "")
    )
    print(answer.command)
    for path in written:
        print(f"wrote {path}")


def _does_not_fit(options: argparse.Namespace, plan: Plan, found: list[dict[str, Any]]) -> int:
    """Says the least that would do: more of these accelerators, or larger ones."""
    request, hardware = plan.request, plan.request.hardware
    light = lightest(request)[0]
    least = least_accelerators(request.model, request.name, hardware, request.seq, request.dtype)
    larger = [name for name in hardware_names() if _fits_on(request, name)]
    if options.json:
        extra = {
            "explanations": found,
            "lightest": present.candidate_json(light),
            "least_gpus": None if least is None else least.layout.gpus,
            "needed_bytes_per_gpu": light.memory_bytes,
            "hardware_that_fits": larger,
        }
        print(json.dumps(present.plan_json(plan, None, None, extra), indent=2))
        return EXIT_DOES_NOT_FIT
    many = (
        f"{least.layout.gpus:,} × {hardware.name} ({least}, {gigabytes(least.memory_bytes)} each)"
        if least is not None
        else f"more than 16,384 × {hardware.name}"
    )
    print(
        f"{request.model.name} with {request.seq:,} tokens a sequence does not fit on {request.gpus:,} × "
        f"{hardware.name} ({gigabytes(hardware.memory_bytes)}): the lightest of {len(plan.candidates):,} layouts, "
        f"{light}, needs {gigabytes(light.memory_bytes)} a GPU.\n"
        f"The least that would do: {many}; or {request.gpus:,} GPUs of {gigabytes(light.memory_bytes)}"
        + (f", such as {', '.join(larger[:4])}." if larger else ", which none of the presets has.")
    )
    for one in found:
        print(f"{one['wish']}: {one['verdict']}")
    return EXIT_DOES_NOT_FIT


def _fits_on(request: Request, name: str) -> bool:
    other = load_hardware(name)
    if other.memory_bytes <= request.hardware.memory_bytes or request.dtype not in other.peak_flops:
        return False
    return any(one.fits for one in lightest(replace(request, hardware=other)))


def _table(options: argparse.Namespace, hardware: Hardware) -> int:
    rows = [
        (row, nearest(row.size.model.parameters(), row.size.gpus))
        for row in (table_row(size, hardware, options.seq, options.global_batch) for size in SIZES)
    ]
    if options.json:
        print(
            json.dumps(
                {
                    "hardware": hardware.name,
                    "seq": options.seq,
                    "global_batch": options.global_batch,
                    "rows": [present.row_json(row, published) for row, published in rows],
                },
                indent=2,
            )
        )
        return 0
    console = present.console()
    console.print(
        f"[bold]{hardware.name}, {options.seq:,} tokens a sequence, {options.global_batch:,} sequences a step[/]\n"
    )
    console.print(present.table_view(rows))
    console.print("\n[bold]memory of the rows, fullest rank[/]")
    console.print(present.memory_view(row for row, _ in rows))
    return 0


def _memory(options: argparse.Namespace, hardware: Hardware) -> int:
    model, _ = _model(options.model or "7B")
    states = tuple(model_states(model, options.gpus or 8, hardware))
    counts = tuple(needs(hardware, options.seq))
    if options.json:
        print(
            json.dumps(
                {
                    "model": model.name,
                    "gpus": options.gpus or 8,
                    "states": [
                        {
                            "engine": one.engine,
                            "stage": one.stage,
                            "name": one.name,
                            "parameters": one.parameters,
                            "gradients": one.gradients,
                            "optimizer": one.optimizer,
                            "buffers": one.buffers,
                            "total": one.total,
                        }
                        for one in states
                    ],
                    "needs": [
                        {
                            "model": need.name,
                            "parameters": need.model.parameters(),
                            "hardware": hardware.name,
                            "least": None if need.least is None else need.least.layout.gpus,
                            "recommended": None if need.recommended is None else need.recommended.layout.gpus,
                        }
                        for need in counts
                    ],
                },
                indent=2,
            )
        )
        return 0
    console = present.console()
    console.print(
        f"[bold]model states of {model.name} ({model.parameters() / 1e9:.2f} B) on {options.gpus or 8} GPUs, "
        f"pure data parallelism[/]"
    )
    console.print(present.states_view(states))
    console.print(f"\n[bold]{hardware.name}, {options.seq:,} tokens a sequence[/]")
    console.print(present.needs_view(counts))
    console.print(
        "least: the fewest that hold it at all, everything sharded and recomputed. recommended: the fewest without\n"
        "recompute that fill at most 80%. Both are about fitting, not about finishing: docs/memory.md"
    )
    return 0


def _score(options: argparse.Namespace) -> int:
    from triaxis.launch.planner.score import main as score_main

    return score_main([str(options.score), *(["--json"] if options.json else [])])


if __name__ == "__main__":
    sys.exit(main())
