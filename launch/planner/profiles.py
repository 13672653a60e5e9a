"""The prices of this engine's parts: what a dry run of each records (engine/trace/parts.py), on some hardware.

Work and bytes are affine in the sequences of a microbatch, operation by operation, so parts are recorded for two sizes
and priced for any. Where the loss comes in several chunks, another token more is another part of a chunk: there the
prices themselves are drawn through two and three chunks. PyTorch is imported when the first part is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import gcd
from typing import TYPE_CHECKING, Any, Final

from triaxis.engine.plan import Recompute, StepPlan
from triaxis.launch.hardware.hardware import Hardware
from triaxis.launch.planner.ends import depth_units, joined_unit
from triaxis.launch.planner.units import Pricer, Stretch, Unit, drawn
from triaxis.launch.simulator.timeline import Prices
from triaxis.models.config import ModelConfig
from triaxis.models.kinds import Kind
from triaxis.models.presets import load_config
from triaxis.parallel.layers.loss_chunks import chunk_tokens
from triaxis.parallel.programs.program import Compute

if TYPE_CHECKING:
    from triaxis.engine.trace.parts import Part, Parts, States, Updates

FEW_CHUNKS: Final = (2, 3)
"""Chunks of the loss through which the prices of more are drawn."""


_SMALL: Final = "tiny"
"""The model whose update is recorded."""
_ONE_BUCKET: Final = 1 << 62
"""Elements that no bucket reaches: all parameters of a small model are in one."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A model's units on one rank. depths: extra prediction depths, without their tables; hidden_bytes: of a hidden
    state as it passes between stages; table_bytes: that each chunk holds besides model states."""

    start: Stretch
    embedding: Unit
    layers: dict[Kind, Unit]
    head: Unit
    depths: tuple[Unit, ...]
    hidden_bytes: float
    table_bytes: int

    @cached_property
    def end(self) -> Unit:
        """The head, with all extra prediction depths."""
        return joined_unit(self.head, self.depths, self.embedding) if self.depths else self.head


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePrices:
    """Seconds of what follows the last backward pass: fixed, for each bucket, and for each element of a shard.

    begin: of what comes before the first forward pass: fixed, and for each microbatch
    before: up to the update; copies: of masters to parameters
    """

    begin: tuple[float, float]
    before: tuple[float, float, float]
    copies: tuple[float, float, float]

    @staticmethod
    def of(prices: tuple[float, float, float], buckets: int, elements: float) -> float:
        fixed, bucket, element = prices
        return fixed + bucket * buckets + element * elements

    def beginning(self, microbatches: int) -> float:
        fixed, each = self.begin
        return fixed + each * microbatches


@dataclass(frozen=True, slots=True)
class On:
    """Hardware as a key: one object is one machine, which this keeps from being another's."""

    hardware: Hardware

    def __hash__(self) -> int:
        return id(self.hardware)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, On) and self.hardware is other.hardware


def profile(plan: StepPlan, tp: int, hardware: Hardware, *, further: bool = False) -> Profile:
    """The units of a plan's model on the first of `tp` ranks, in a row of one node or of several.

    further: of microbatches whose gradients are added to those of one before
    """
    return _profile(_told(plan), plan.microbatch_size, tp, On(hardware), further)


def update_prices(plan: StepPlan, hardware: Hardware) -> UpdatePrices:
    """Of the plan's optimizer and number formats."""
    return _update_prices(_updated(plan), On(hardware))


def state_bytes(plan: StepPlan) -> States:
    """What model states take for each element."""
    return _updates(_updated(plan), _ONE_BUCKET, 1).states


def _updated(plan: StepPlan) -> StepPlan:
    """A step with the plan's update, of a small model: whose elements they are makes no difference."""
    small = replace(_told(plan), model=load_config(_SMALL), sequence_length=1, document_tokens=None)
    return replace(small, recompute=Recompute.NONE, sequence_parallel=False)


@lru_cache(maxsize=256)
def uniform(model: ModelConfig) -> bool:
    """Whether all layers are of one kind."""
    return len(model.kinds()) == 1


def apart(plan: StepPlan, pp: int) -> StepPlan:
    """The plan as its parts see it: a tied table that two stages hold is one table on each."""
    return replace(plan, model=replace(plan.model, tied=False)) if pp > 1 and plan.model.tied else plan


def _told(plan: StepPlan) -> StepPlan:
    """The plan with all that its parts do not depend on left at what it is by default."""
    return StepPlan(
        model=plan.model,
        microbatch_size=1,
        microbatches=1,
        sequence_length=plan.sequence_length,
        sequence_parallel=plan.sequence_parallel,
        recompute=plan.recompute,
        dtype=plan.dtype,
        accumulate_dtype=plan.accumulate_dtype,
        max_grad_norm=plan.max_grad_norm,
        rule=plan.rule,
        seed=None,
        document_tokens=plan.document_tokens,
    )


@lru_cache(maxsize=1)
def _known() -> Any:  # noqa: ANN401  (torch's types, imported late)
    from triaxis.engine.trace.meter import Known

    return Known()


@lru_cache(maxsize=512)
def _parts(plan: StepPlan, tp: int, further: bool) -> Parts:
    from triaxis.engine.trace.parts import trace_parts

    try:
        return trace_parts(plan, tp, _known(), further=further)
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        # A trace touches no page, but a system refuses a single tensor that is larger than all its memory.
        raise ValueError(
            f"{plan.model.name} must have weights that this machine could hold one by one, to be planned, but with tp "
            f"{tp} one is larger: experts are planned without ep yet; simulate the layout with its --ep, or plan on a "
            "larger machine"
        ) from None


def shapes_of(plan: StepPlan, tp: int) -> Parts:
    """The parts of the plan's model as they are recorded: which parameters there are, and when they are whole."""
    told = _told(plan)
    layers = _layers(replace(told, microbatch_size=_least(plan, tp)), tp, False)
    ends = _ends(told, _few_tokens(told, tp)[0], tp, False)
    return replace(layers, embedding=ends.embedding, head=ends.head)


def _least(plan: StepPlan, tp: int) -> int:
    """The fewest sequences that sequence parallelism can cut."""
    return tp // gcd(tp, plan.sequence_length) if plan.sequence_parallel else 1


@lru_cache(maxsize=512)
def _updates(plan: StepPlan, bucket_elements: int, microbatches: int) -> Updates:
    from triaxis.engine.trace.parts import trace_update

    return trace_update(plan, _known(), bucket_elements=bucket_elements, microbatches=microbatches)


def _layers(plan: StepPlan, tp: int, further: bool) -> Parts:
    """Parts of which the layers are asked for: a few words are enough."""
    return _parts(replace(plan, model=replace(plan.model, vocab_size=tp)), tp, further)


def _ends(plan: StepPlan, tokens: int, tp: int, further: bool) -> Parts:
    """Parts of which the ends are asked for, for so many tokens however they are cut into sequences: one layer is
    enough."""
    kind = plan.model.kind(0)
    longest = max(plan.model.max_positions, tokens)
    model = replace(plan.model, layers=1, leading=(), repeating=(kind,), max_positions=longest, depths=0)
    ends = replace(plan, model=model, sequence_length=tokens, microbatch_size=1, recompute=Recompute.NONE)
    ends = replace(ends, document_tokens=None)  # they attend to nothing
    return _parts(ends, tp, further)


def _few_tokens(plan: StepPlan, tp: int) -> tuple[int, int]:
    """Tokens of the microbatches through which the prices of the loss are drawn."""
    chunk = chunk_tokens(-(-plan.model.vocab_size // tp))
    few, more = (-(-chunk * count // tp) * tp for count in FEW_CHUNKS)
    return few, more


@lru_cache(maxsize=4096)
def _profile(plan: StepPlan, size: int, tp: int, on: On, further: bool) -> Profile:
    """The units for microbatches of `size` sequences."""
    if further:
        return _further(plan, size, tp, on)
    least = _least(plan, tp)
    low = _layers(replace(plan, microbatch_size=least), tp, False)
    high = low if size == least else _layers(replace(plan, microbatch_size=2 * least), tp, False)
    pricer = Pricer(on.hardware, tp, size / least - 1)
    tokens = size * plan.sequence_length
    embedding, head = _end_units(plan, tokens, tp, on)
    return Profile(
        start=pricer.stretch(low.start, high.start),
        embedding=embedding,
        layers={kind: pricer.unit(part, high.layers[kind]) for kind, part in low.layers.items()},
        head=head,
        depths=depth_units(pricer, low, high),
        hidden_bytes=plan.dtype.element_bytes
        * plan.model.hidden_size
        * tokens
        / (tp if plan.sequence_parallel else 1),
        table_bytes=low.table_bytes,
    )


def _further(plan: StepPlan, size: int, tp: int, on: On) -> Profile:
    """The units where gradients are added: what that takes more than writing them depends on no token."""
    first = _profile(plan, size, tp, on, False)
    least = replace(plan, microbatch_size=_least(plan, tp), recompute=Recompute.NONE)
    few = _few_tokens(plan, tp)[0]
    inner = [_layers(least, tp, added) for added in (False, True)]
    ends = [_ends(plan, few, tp, added) for added in (False, True)]
    pricer = Pricer(on.hardware, tp, 0.0)

    def longer(unit: Unit, written: Part, added: Part) -> Unit:
        pairs = zip(pricer.unit(written, written).backward, pricer.unit(added, added).backward, strict=True)
        more = [after.computing - before.computing for before, after in pairs]
        return replace(
            unit,
            backward=tuple(
                replace(piece, seconds=piece.seconds + extra, computing=piece.computing + extra)
                for piece, extra in zip(unit.backward, more, strict=True)
            ),
        )

    return replace(
        first,
        embedding=longer(first.embedding, ends[0].embedding, ends[1].embedding),
        layers={
            kind: longer(unit, inner[0].layers[kind], inner[1].layers[kind])
            for kind, unit in first.layers.items()
        },
        depths=tuple(map(longer, first.depths, inner[0].depths, inner[1].depths)),
        head=longer(first.head, ends[0].head, ends[1].head),
    )


@lru_cache(maxsize=4096)
def _end_units(plan: StepPlan, tokens: int, tp: int, on: On) -> tuple[Unit, Unit]:
    """The embedding, and the last norm with the loss, of so many tokens."""
    few = _few_tokens(plan, tp)
    if tokens <= few[1]:
        ends = _ends(plan, tokens, tp, False)
        exact = Pricer(on.hardware, tp, 0.0)
        return exact.unit(ends.embedding, ends.embedding), exact.unit(ends.head, ends.head)
    low, high = (_ends(plan, count, tp, False) for count in few)
    share = (tokens - few[0]) / (few[1] - few[0])
    exact = Pricer(on.hardware, tp, 0.0)
    heads = [exact.unit(part, part) for part in (low.head, high.head)]
    head = replace(
        heads[0],
        forward=drawn(heads[0].forward, heads[1].forward, share),
        backward=tuple(
            drawn(one, other, share) for one, other in zip(heads[0].backward, heads[1].backward, strict=True)
        ),
    )
    return Pricer(on.hardware, tp, share).unit(low.embedding, high.embedding), head


@lru_cache(maxsize=1024)
def _update_prices(plan: StepPlan, on: On) -> UpdatePrices:
    """What a bucket and what an element costs follows from the same elements in few buckets and in many."""
    few = _updates(plan, _ONE_BUCKET, 1)
    many = _updates(plan, 1, 2)
    prices = Prices(on.hardware)
    launch = on.hardware.launch_overhead_s

    def line(of_few: Sequence[Compute], of_many: Sequence[Compute]) -> tuple[float, float, float]:
        moved = sum(prices.operation(event) - launch for event in of_few)
        each = (len(of_many) - len(of_few)) / (many.buckets - few.buckets)
        return launch * (len(of_few) - each * few.buckets), launch * each, moved / few.elements

    begun = [sum(map(prices.operation, one.begin)) for one in (few, many)]
    return UpdatePrices(
        begin=(2 * begun[0] - begun[1], begun[1] - begun[0]),
        before=line(few.before, many.before),
        copies=line(few.copies, many.copies),
    )
