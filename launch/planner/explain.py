"""Why a layout lost, or does not fit, in numbers. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

from triaxis.launch.planner.layout import Layout
from triaxis.launch.planner.price import StepTime
from triaxis.launch.planner.search import Candidate, Plan, Space, candidates, faults, topologies
from triaxis.parallel.places.legal_values import counted

PARTS: Final = {
    "compute": "products, attention and the rest of the layers",
    "recompute": "forward again before backward",
    "tensor": "messages over tp",
    "context": "messages over cp",
    "expert": "messages over ep",
    "pipeline": "messages between stages",
    "bubble": "waiting in the pipeline",
    "data": "gradients and parameters over dp",
    "optimizer": "the update, and what a step costs besides",
}
"""The parts of a step's time, and what each is."""

KEYS: Final = ("dp", "tp", "pp", "zero", "microbatch", "virtual_stages", "recompute")
_YES = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


def parts(time: StepTime) -> dict[str, float]:
    """Seconds of each part, those that are not zero."""
    names = [field.name for field in fields(time) if field.name in PARTS]
    return {name: getattr(time, name) for name in names if getattr(time, name)}


def difference(better: Candidate, worse: Candidate, most: int = 2) -> str:
    """In what parts of the step `worse` loses: `1.24× the time: +2.1 s messages over tp, +0.4 s bubble`."""
    ratio = worse.seconds / better.seconds
    mine, other = parts(better.time), parts(worse.time)
    gaps = sorted(
        ((other.get(name, 0.0) - mine.get(name, 0.0), name) for name in PARTS), key=lambda gap: -gap[0]
    )
    told = [
        f"+{seconds_text(gap)} {PARTS[name]}" for gap, name in gaps[:most] if gap > 0.005 * better.seconds
    ]
    return f"{ratio:.2f}× the time" + (f": {', '.join(told)}" if told else "")


def seconds_text(seconds: float) -> str:
    """`12.3 s`, `45 ms`."""
    return f"{seconds:,.1f} s" if seconds >= 1 else f"{seconds * 1e3:,.0f} ms"


def seconds_range(candidate: Candidate) -> str:
    """`139–218 s`: between these nine of ten published runs of such a prediction lay."""
    low, high = candidate.seconds_range
    unit, scale = ("s", 1.0) if low >= 1 else ("ms", 1e3)
    digits = 1 if low * scale < 100 else 0
    return f"{low * scale:,.{digits}f}–{high * scale:,.{digits}f} {unit}"


def memory_range(candidate: Candidate) -> str:
    """`60.2–75.0 GB`."""
    low, high = candidate.memory_range
    return f"{low / 1e9:,.1f}–{high / 1e9:,.1f} GB"


def gigabytes(nbytes: float) -> str:
    """`65.4 GB` (10^9 bytes)."""
    return f"{nbytes / 1e9:,.1f} GB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The best layout that answers a wish, against the plan's best. candidate: None where no such layout is legal."""

    wish: Mapping[str, int | bool]
    candidate: Candidate | None
    verdict: str

    @property
    def asked(self) -> str:
        """`dp=8,tp=4,recompute=yes`."""
        words = {True: "yes", False: "no"}
        return ",".join(
            f"{key}={words[value] if isinstance(value, bool) else value}" for key, value in self.wish.items()
        )


def parse_wish(text: str) -> dict[str, int | bool]:
    """`dp=8,tp=4,pp=2,zero=1,microbatch=2,recompute=yes` as values. Raises ValueError for what it cannot read."""
    wish: dict[str, int | bool] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, sign, value = (piece.strip() for piece in part.partition("="))
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            raise ValueError(
                f"`--explain` must name {', '.join(KEYS)} as in dp=8,tp=4,pp=2, but has {key!r}"
                + (f"; nearest: {near[0]}" if near else "")
            )
        if key == "recompute":
            if value.lower() not in _YES:
                raise ValueError(f"`--explain` recompute must be yes or no, but is {value!r}")
            wish[key] = _YES[value.lower()]
        elif not sign or not value.isdecimal():
            raise ValueError(f"`--explain` {key} must be a whole number, but is {value!r}")
        else:
            wish[key] = int(value)
    if not wish:
        raise ValueError("`--explain` must name a layout as in dp=8,tp=4,pp=2, but is empty")
    return wish


def explain(plan: Plan, wish: Mapping[str, int | bool], chosen: Candidate | None = None) -> Explanation:
    """Why the layout that is wished for lost, does not fit, or cannot be; chosen: against which (the plan's best)."""
    fitting = [one for one in plan.candidates if _answers(one.layout, wish)]
    if not fitting and ("microbatch" in wish or "tp" in wish):
        fitting = [one for one in _all_of(plan, wish) if _answers(one.layout, wish)]
    if not fitting:
        return Explanation(wish=wish, candidate=None, verdict=_illegal(plan, wish))
    legal = [one for one in fitting if one.fits]
    if not legal:
        candidate = min(fitting, key=lambda one: one.memory_bytes)
        return Explanation(wish=wish, candidate=candidate, verdict=_too_large(candidate, wish))
    candidate = min(legal, key=lambda one: (not one.fits_surely, one.seconds))
    return Explanation(wish=wish, candidate=candidate, verdict=_against(chosen or plan.best, candidate))


def neighbours(plan: Plan, chosen: Candidate | None = None) -> tuple[Explanation, ...]:
    """Why not what people would try first: data parallelism alone, a node of tensor parallelism, a pipeline alone."""
    request = plan.request
    node = min(request.hardware.gpus_per_node, request.gpus)
    while node > 1 and faults(request, tp=node, pp=1):
        node //= 2
    stages = max((pp for _, tp, pp in {one.topology for one in plan.candidates} if tp == 1), default=1)
    wishes: list[dict[str, int | bool]] = [
        {"tp": 1, "pp": 1, "zero": stage} for stage in (1, 3) if request.gpus > 1
    ]
    wishes += [{"tp": node, "pp": 1}] if node > 1 else []
    wishes += [{"tp": 1, "pp": stages}] if stages > 1 else []
    found = (explain(plan, wish, chosen) for wish in wishes)
    return tuple(one for one in found if one.candidate is None or one.candidate != (chosen or plan.best))


def _answers(layout: Layout, wish: Mapping[str, int | bool]) -> bool:
    facts = {
        "dp": layout.dp,
        "tp": layout.tp,
        "pp": layout.pp,
        "zero": layout.zero,
        "microbatch": layout.microbatch,
        "virtual_stages": layout.virtual_stages,
        "recompute": layout.recomputes,
    }
    return all(facts[key] == value for key, value in wish.items())


def _all_of(plan: Plan, wish: Mapping[str, int | bool]) -> list[Candidate]:
    """Candidates of the wished topologies that the search may leave out: a large microbatch, a tp past a node."""
    only = [
        (dp, tp, pp)
        for dp, tp, pp in topologies(plan.request)
        if all(wish.get(name, size) == size for name, size in (("dp", dp), ("tp", tp), ("pp", pp)))
    ]
    microbatches = (int(wish["microbatch"]),) if "microbatch" in wish else Space().microbatches
    return list(candidates(plan.request, only, Space(microbatches=microbatches)))


def _illegal(plan: Plan, wish: Mapping[str, int | bool]) -> str:
    request = plan.request
    tp, pp = int(wish.get("tp", 1)), int(wish.get("pp", 1))
    dp = int(wish["dp"]) if "dp" in wish else None
    found = faults(
        request,
        tp=tp,
        pp=pp,
        dp=dp,
        microbatch=int(wish.get("microbatch", 1)),
        virtual_stages=int(wish.get("virtual_stages", 1)),
    )
    if found:
        return "cannot start: " + "; ".join(found)
    if wish.get("zero") and dp == 1:
        return "is the same as zero=0: with dp 1 there is nobody to share with"
    layouts, ranks = counted(len(plan.candidates), "layout"), counted(request.gpus, "rank")
    return f"none of the {layouts} of {ranks} has all of this together"


def _too_large(candidate: Candidate, wish: Mapping[str, int | bool]) -> str:
    hardware = candidate.layout.hardware
    largest = sorted(candidate.memory.by_category().items(), key=lambda item: -item[1])[:3]
    told = ", ".join(f"{name} {gigabytes(nbytes)}" for name, nbytes in largest)
    other = sorted(set(KEYS) - set(wish) - {"dp", "tp", "pp"})
    leeway = f" even at the best {', '.join(other)}" if other else ""
    return (
        f"does not fit{leeway}: {gigabytes(candidate.memory_bytes)} of {gigabytes(hardware.memory_bytes)}, "
        f"{gigabytes(-candidate.margin_bytes)} too much ({told})"
    )


def _against(chosen: Candidate | None, candidate: Candidate) -> str:
    assert chosen is not None, "something fits"
    if chosen == candidate:
        return "is the choice"
    if candidate.seconds >= chosen.seconds:
        return f"loses to {chosen}: {difference(chosen, candidate)}"
    why = "the choice is simpler: less tp and pp, a lower ZeRO stage, or no recompute"
    if candidate.crosses_nodes:
        why = "its tp crosses nodes, which no published run does"
    elif not candidate.fits_surely:
        why = f"it may not fit: up to {gigabytes(candidate.memory_range[1])}"
    return f"takes {candidate.seconds / chosen.seconds:.2f}× the time of the choice by the plan's prices, but {why}"
