"""`triaxis plan`, or `python -m triaxis.launch.plan`: model and cluster in, layout and start command out. No torch."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from triaxis.engine.plan import Precision
from triaxis.launch.ending import Exit, refuse, run_command
from triaxis.launch.hardware.hardware import Hardware, hardware_names, load_hardware
from triaxis.launch.hardware.nearly import with_network
from triaxis.launch.jobs.artefacts import Cluster, Job, job_name, torchrun_command, write_artefacts
from triaxis.launch.pages import plan_json, present
from triaxis.launch.pages.plan_parser import plan_parser
from triaxis.launch.pages.shortfall import shortfall
from triaxis.launch.planner.explain import Explanation, explain, neighbours, parse_wish
from triaxis.launch.planner.reprice import Repriced, reprice_best
from triaxis.launch.planner.run_flags import model_toml, run_flags
from triaxis.launch.planner.search import Candidate, Plan, Request, search
from triaxis.launch.planner.table import by_rule, decision_table
from triaxis.launch.published.memory_tables import MODELS, model_states, needs
from triaxis.launch.published.recommended import nearest
from triaxis.launch.writing import check_target, write_text, written_aside
from triaxis.models.config import ModelConfig
from triaxis.models.huggingface.guest import refuse_guest
from triaxis.models.presets import PRESETS, load_config
from triaxis.parallel.places.legal_values import counted


def main(arguments: Sequence[str] | None = None) -> int:
    parser = plan_parser()
    options = parser.parse_args(arguments)
    with _uncollected():
        return _answer(parser, options)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the collector of cycles: a plan makes small records by the million, none of them in cycles, and looking
    for some takes a quarter of its time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _answer(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    try:
        if options.score is not None:
            return _score(options)
        if options.presets:
            return _presets()
        hardware = with_network(load_hardware(options.hardware), options.network)
        if options.table:
            return _table(options, hardware)
        if options.memory:
            return _memory(options, hardware)
        if options.model is None or options.gpus is None:
            parser.error("give --model and --gpus, or --table, --memory or --score FILE")
        return _plan(options, hardware)
    except (ValueError, OSError) as error:
        return refuse("plan", error)


def _model(name: str) -> tuple[ModelConfig, str]:
    """The model and how train's --model names it: a preset, or a file (for sizes that are no presets, one to write)."""
    model = MODELS.get(name.upper().replace("_", "."))
    if model is None:
        model = next((one for one in MODELS.values() if one.name == name), None)
    if model is None:
        loaded = load_config(name)
        refuse_guest(loaded, "planned")
        return loaded, name
    return model, model.name if model.name in PRESETS else f"{model.name}.toml"


def _request(options: argparse.Namespace, hardware: Hardware) -> Request:
    hardware.peak(options.dtype)
    model, name = _model(options.model)
    return Request(
        model=replace(model, depths=options.mtp_depths),
        name=name,
        hardware=hardware,
        gpus=options.gpus,
        seq=options.seq,
        global_batch=options.global_batch,
        dtype=Precision(options.dtype),
        document_tokens=options.document_tokens,
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
    if options.report is not None:
        check_target(options.report, "report", overwrite=options.overwrite)
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
        return _does_not_fit(options, plan, found)
    answer = _Answer(plan=plan, chosen=chosen, job=_job(request, chosen, options.tokens))
    written = _files(options, answer, simulated)
    if options.json:
        extra: dict[str, Any] = {
            "policy": options.policy,
            "simulated": [plan_json.repriced_json(one) for one in simulated],
            "why_not": [plan_json.explanation_json(one) for one in neighbours(plan, chosen)],
            "explanations": [plan_json.explanation_json(one) for one in found],
            "written": written,
        }
        if options.tokens:
            days, cost = plan_json.length(chosen, options.tokens, options.price)
            extra |= {"tokens": options.tokens, "days": days, "cost": cost}
        print(json.dumps(plan_json.plan_json(plan, chosen, answer.command, extra), indent=2))
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


def _files(options: argparse.Namespace, answer: _Answer, simulated: Sequence[Repriced]) -> list[str]:
    """Writes what --write and --report ask for; ValueError where a file cannot be written."""
    written: list[str] = []
    if options.write is not None:
        written += map(str, _write(options, answer))
    if options.report is not None:
        from triaxis.launch.pages.report import write_report

        with written_aside(options.report, "report", overwrite=options.overwrite) as draft:
            write_report(
                draft,
                plan=answer.plan,
                chosen=answer.chosen,
                job=answer.job,
                tokens=options.tokens,
                price=options.price,
                simulated=tuple(simulated),
            )
        written.append(str(options.report))
    return written


def _write(options: argparse.Namespace, answer: _Answer) -> tuple[Path, ...]:
    cluster = Cluster(image=options.image, claim=options.claim)
    try:
        files = write_artefacts(options.write, answer.job, cluster, overwrite=options.overwrite)
    except OSError as error:
        raise ValueError(
            f"`--write` must be a place that can be written, but {options.write} is not: {error.strerror}; "
            f"give another"
        ) from error
    request = answer.plan.request
    if request.name != options.model and request.name.endswith(".toml"):  # a size that is no preset
        path = options.write / request.name
        write_text(path, model_toml(request.model), "write", overwrite=options.overwrite)
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
    documents = answer.chosen.layout.plan.documents_a_row
    packed = f", {documents} documents in each sequence" if documents > 1 else ""
    console.print(
        f"[bold]{request.model.name}[/], {request.model.parameters() / 1e9:,.2f} B parameters, on {request.gpus:,} × "
        f"{request.hardware.name}: {len(plan.candidates):,} layouts priced, {len(plan.fitting):,} fit{packed}\n"
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


def _does_not_fit(options: argparse.Namespace, plan: Plan, found: Sequence[Explanation]) -> int:
    lacks = shortfall(plan)
    if options.json:
        extra = {"explanations": [plan_json.explanation_json(one) for one in found], **lacks.as_json()}
        print(json.dumps(plan_json.plan_json(plan, None, None, extra), indent=2))
        return Exit.FAILED
    print(lacks)
    for one in found:
        print(f"{one.asked} {one.verdict}")
    return Exit.FAILED


def _table(options: argparse.Namespace, hardware: Hardware) -> int:
    rows = [
        (row, nearest(row.size.model.parameters(), row.size.gpus))
        for row in decision_table(hardware, options.seq, options.global_batch)
    ]
    if options.json:
        said = {"hardware": hardware.name, "seq": options.seq, "global_batch": options.global_batch}
        found = [plan_json.row_json(row, published) for row, published in rows]
        print(json.dumps({**said, "rows": found}, indent=2))
        return 0
    console = present.console()
    tokens, sequences = counted(options.seq, "token"), counted(options.global_batch, "sequence")
    console.print(f"[bold]{hardware.name}, {tokens} a sequence, {sequences} a step[/]\n")
    console.print(present.table_view(rows))
    console.print("\n[bold]memory of the rows, fullest rank[/]")
    console.print(present.memory_view(row for row, _ in rows))
    return 0


def _memory(options: argparse.Namespace, hardware: Hardware) -> int:
    model, _ = _model(options.model or "7B")
    states = tuple(model_states(model, options.gpus or 8, hardware))
    counts = tuple(needs(hardware, options.seq))
    if options.json:
        said = plan_json.memory_json(model, options.gpus or 8, hardware, states, counts)
        print(json.dumps(said, indent=2))
        return 0
    console = present.console()
    console.print(
        f"[bold]model states of {model.name} ({model.parameters() / 1e9:.2f} B) on {options.gpus or 8} GPUs, "
        f"pure data parallelism[/]"
    )
    console.print(present.states_view(states))
    console.print(f"\n[bold]{hardware.name}, {counted(options.seq, 'token')} a sequence[/]")
    console.print(present.needs_view(counts))
    console.print(
        "least: the fewest that hold it at all, everything sharded and recomputed. recommended: the fewest without\n"
        "recompute that fill at most 80%. Both are about fitting, not about finishing: docs/memory.md"
    )
    return 0


def _presets() -> int:
    """Every model and accelerator that has a name."""
    for name in PRESETS:
        print(f"model     {name:<20} {load_config(name).parameters():>17,} parameters")
    for name in hardware_names():
        hardware = load_hardware(name)
        print(f"hardware  {name:<20} {hardware.memory_bytes / 1e9:>8.0f} GB, {hardware.gpus_per_node} a node")
    return 0


def _score(options: argparse.Namespace) -> int:
    from triaxis.launch.published.score import main as score_main

    return score_main([str(options.score), *(["--json"] if options.json else [])])


if __name__ == "__main__":
    sys.exit(run_command("plan", main))
