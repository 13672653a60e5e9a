"""The schedules: GPipe, 1F1B, interleaved 1F1B, and ZB-H1; those in a V are made in vees.py. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from triaxis.parallel.pipeline.schedule import (
    SCHEDULES,
    Action,
    Kind,
    Placement,
    Schedule,
    ScheduleName,
    placement_of,
)
from triaxis.parallel.pipeline.vees import VEES


def make_schedule(
    name: str, pp: int, microbatches: int, virtual_stages: int = 1, *, weights_wait: bool = True
) -> Schedule:
    """The named schedule; ValueError for what it cannot do.

    weights_wait: gradients of weights come where the schedule has them; else right behind those of inputs, as suits
    recomputation: what it made again stays until then, and would soon be more than it saves
    """
    _refuse_impossible(name, pp, microbatches, virtual_stages)
    chosen = ScheduleName(name)
    order_of = VEES.get(chosen)
    orders = (
        tuple(order_of(pp, rank, microbatches) for rank in range(pp))
        if order_of is not None
        else _looped_orders(chosen, pp, microbatches, virtual_stages)
    )
    return Schedule(
        name=chosen,
        placement=placement_of(chosen, pp, virtual_stages),
        microbatches=microbatches,
        orders=orders if weights_wait else tuple(map(_weights_at_once, orders)),
    )


def _looped_orders(
    chosen: ScheduleName, pp: int, microbatches: int, virtual_stages: int
) -> tuple[tuple[Action, ...], ...]:
    # Interleaving is orderly in whole groups of pp microbatches. A shorter last group is filled up, and what
    # was added is left out afterwards: no microbatch needs another, so the orders still cannot get stuck.
    ordered = microbatches if virtual_stages == 1 else -(-microbatches // pp) * pp
    splits = SCHEDULES[chosen].splits
    forwards = _chunk_order(Kind.FORWARD, pp, ordered, virtual_stages)
    backwards = _chunk_order(Kind.INPUT if splits else Kind.BACKWARD, pp, ordered, virtual_stages)
    orders = []
    for rank in range(pp):
        warmup = {
            ScheduleName.GPIPE: microbatches,
            ScheduleName.ONE_F_ONE_B: pp - rank - 1,
            ScheduleName.INTERLEAVED: (virtual_stages - 1) * pp + 2 * (pp - rank - 1),
            ScheduleName.ZB_H1: pp - rank - 1,
        }[chosen]
        order = _alternate(forwards, backwards, min(warmup, len(forwards)))
        order = _with_weights(order, behind=rank) if splits else order
        orders.append(tuple(action for action in order if action.microbatch < microbatches))
    return tuple(orders)


def make_forward_schedule(placement: Placement, microbatches: int) -> Schedule:
    """Forward passes only, for evaluation. Groups of pp microbatches go there before the first comes back."""
    pp = len(placement.stages)
    order = tuple(_chunk_order(Kind.FORWARD, pp, microbatches, len(placement.stages[0])))
    return Schedule(
        name="forward",
        placement=placement,
        microbatches=microbatches,
        orders=(order,) * pp,
        forward_only=True,
    )


def _refuse_impossible(name: str, pp: int, microbatches: int, virtual_stages: int) -> None:
    names = [str(known) for known in ScheduleName]
    if name not in names:
        raise ValueError(f"`schedule` must be one of {', '.join(names)}, but is {name!r}")
    for field, value in (("pp", pp), ("microbatches", microbatches), ("virtual_stages", virtual_stages)):
        if value < 1:
            raise ValueError(f"`{field}` must be at least 1, but is {value}")
    rule = SCHEDULES[ScheduleName(name)]
    if rule.turns and virtual_stages != rule.chunks:
        raise ValueError(
            f"`virtual_stages` must be {rule.chunks} with schedule {name}, whose stages go there and back, "
            f"but is {virtual_stages}"
        )
    if rule.chunks == 1 and virtual_stages > 1:
        raise ValueError(
            f"`virtual_stages` must be 1 with schedule {name}, but is {virtual_stages}; "
            f"virtual stages need schedule interleaved and pp of at least 2"
        )
    if name == ScheduleName.INTERLEAVED and (virtual_stages < 2 or pp < 2):
        raise ValueError(
            f"schedule interleaved must have virtual_stages and pp of at least 2, but virtual_stages is "
            f"{virtual_stages} and pp is {pp}; raise them, or use schedule 1f1b"
        )


def _chunk_order(kind: Kind, pp: int, microbatches: int, virtual_stages: int) -> list[Action]:
    """Groups of pp microbatches go through all chunks, group by group; the last group may be shorter."""
    chunks = list(range(virtual_stages))
    if kind is not Kind.FORWARD:
        chunks.reverse()
    return [
        Action(kind=kind, chunk=chunk, microbatch=microbatch)
        for start in range(0, microbatches, pp)
        for chunk in chunks
        for microbatch in range(start, min(start + pp, microbatches))
    ]


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> tuple[Action, ...]:
    """`warmup` forwards, then one forward, one backward in turn, then the backwards left."""
    order = list(forwards[:warmup])
    steady = forwards[warmup:]
    for forward, backward in zip(steady, backwards, strict=False):
        order += [forward, backward]
    return (*order, *backwards[len(steady) :])


def _with_weights(order: Sequence[Action], behind: int) -> tuple[Action, ...]:
    """The gradients of weights come `behind` microbatches after those of inputs.

    ZB-H1 (Qi et al. 2023): rank r is r microbatches behind, so that each holds the activations of at most pp, as
    many as the first rank does in 1F1B. The ranks that would wait longest at the end have the most left to do then.
    """
    waiting: deque[Action] = deque()
    placed: list[Action] = []
    for action in order:
        placed.append(action)
        if action.kind is Kind.INPUT:
            waiting.append(action.like(Kind.WEIGHT))
            if len(waiting) > behind:
                placed.append(waiting.popleft())
    return (*placed, *waiting)


def _weights_at_once(order: Sequence[Action]) -> tuple[Action, ...]:
    """Every W right behind its I, whose message is on its way by then."""
    placed: list[Action] = []
    for action in order:
        if action.kind is not Kind.WEIGHT:
            placed.append(action)
        if action.kind is Kind.INPUT:
            placed.append(action.like(Kind.WEIGHT))
    return tuple(placed)
