"""Proves that the programs of all ranks of a cluster fit together, or shows where they do not. Pure.

The obligations:
    agreement    the members of a group ask for the same operations in the same order
    channels     what is sent between two ranks is received, first in first out, and fits
    progress     nobody waits for ever, though a send ends only when its receive is posted
    one queue    the same, with all communication of a rank in a single queue (streams of one device may block another)
    handles      every communication is waited for, once
    gradients    every bucket is reduced as often as its rule says, over its group; further sums are as declared
    memory       at the end each rank holds what it held at the beginning

Programs are deterministic and receive from named ranks only, so all runs end alike (Kahn 1974): one run under the
strictest meaning decides for every interleaving. Ranks that nobody can tell apart run in step, as one class: the
classes are the coarsest equitable partition, so the run of the classes is a run of all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from triaxis.parallel.events import Cluster, Communicate, Program, Wait

ALONE = ("send", "receive")
MOST_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Fault:
    """One broken obligation, in words. ranks: those that show it."""

    obligation: str
    message: str
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.obligation}: {self.message}"


@dataclass(frozen=True, slots=True)
class Proof:
    """What was shown, and what was not."""

    faults: tuple[Fault, ...]
    warnings: tuple[Fault, ...]
    ranks: int
    classes: int
    communications: int

    @property
    def holds(self) -> bool:
        return not self.faults


def prove(cluster: Cluster) -> Proof:
    """Checks every obligation over all ranks of the cluster."""
    faults = [*_check_programs(cluster), *_check_sizes(cluster)]
    classes = rank_classes(cluster)
    warnings: list[Fault] = []
    run = _Run(cluster, classes, one_queue=True)
    stuck = run.finish()
    if stuck:
        apart = _Run(cluster, classes, one_queue=False)
        stuck_apart = apart.finish()
        if stuck_apart:
            faults += stuck_apart
        else:
            warnings += [Fault("one queue", fault.message, fault.ranks) for fault in stuck]
    counted = {number: sum(1 for _ in program.messages()) for number, program in enumerate(cluster.programs)}
    return Proof(
        tuple(faults),
        tuple(warnings),
        cluster.size,
        len(classes.members),
        sum(counted[number] for number in cluster.program_of),
    )


# What one program can be asked by itself.


def _check_programs(cluster: Cluster) -> Iterator[Fault]:
    first_with: dict[int, int] = {}
    for rank, number in enumerate(cluster.program_of):
        first_with.setdefault(number, rank)
    for number, rank in first_with.items():
        program = cluster.programs[number]
        where = f"rank {rank} ({cluster.places[rank]})"
        for obligation, message in _program_faults(program):
            yield Fault(obligation, f"{where}: {message}", (rank,))


def _program_faults(program: Program) -> Iterator[tuple[str, str]]:
    issued: dict[tuple[str, str], list[tuple[str, Communicate, list[str]]]] = {}
    reductions: dict[int, list[Communicate]] = {}
    for label, event in program.messages():
        key = event.group, event.operation
        if isinstance(event, Communicate):
            issued.setdefault(key, []).append((label, event, []))
            if event.gradient >= 0:
                reductions.setdefault(event.gradient, []).append(event)
            continue
        known = issued.get(key, [])
        if event.age < 0 or event.age >= len(known):
            yield (
                "handles",
                f"in step {label} a {event.operation} in '{event.group}' is waited for before it is issued",
            )
        else:
            known[len(known) - 1 - event.age][2].append(label)
    for handles in issued.values():
        for label, event, waits in handles:
            if len(waits) != 1:
                times = "never" if not waits else f"{len(waits)} times"
                yield "handles", f"{event}, issued in step {label}, is waited for {times}; each handle once"
    rules = {rule.bucket: rule for rule in program.gradients}
    for bucket, rule in rules.items():
        done = reductions.get(bucket, [])
        if len(done) != rule.reductions:
            yield (
                "gradients",
                f"the gradient of bucket {bucket} is reduced {len(done)} times, not {rule.reductions}",
            )
        for event in done:
            if event.group != rule.group or event.elements != rule.elements:
                yield (
                    "gradients",
                    f"the gradient of bucket {bucket} must be reduced whole ({rule.elements:,} elements) over "
                    f"'{rule.group}', but step has {event}",
                )
    if rules:
        for bucket in reductions.keys() - rules.keys():
            yield "gradients", f"a gradient of bucket {bucket} is reduced, which no rule asks for"
    growth = sum(step.segment.growth for step in program.steps)
    if growth:
        yield "memory", f"the step ends with {growth:+,} bytes against its beginning"


def _check_sizes(cluster: Cluster) -> Iterator[Fault]:
    """Communications whose size each rank has for itself: the members of every group agree."""
    names: dict[int, dict[int, str]] = {}
    for number, program in enumerate(cluster.programs):
        names[number] = {
            event.varying: event.group
            for event in (program.steps[-1].segment.messages if program.steps else ())
            if isinstance(event, Communicate) and event.varying >= 0
        }
    for group in sorted({name for of_program in names.values() for name in of_program.values()}):
        for members in cluster.groups[group]:
            asked: dict[int, int] = {}
            for rank in members:
                places = names[cluster.program_of[rank]]
                for place, name in places.items():
                    if name == group:
                        asked[rank] = cluster.sizes[rank][place]
            if len(members) > 1 and (len(set(asked.values())) > 1 or (asked and len(asked) < len(members))):
                sizes = ", ".join(f"rank {rank}: {asked.get(rank, 'none')}" for rank in members[:MOST_SHOWN])
                yield Fault("agreement", f"gradients summed over '{group}' differ in size: {sizes}", members)


# Classes of ranks that cannot be told apart.


@dataclass(frozen=True, slots=True)
class Classes:
    """class_of[rank]; members[class], the first of which stands for all."""

    class_of: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]


def rank_classes(cluster: Cluster, apart: Sequence[object] | None = None) -> Classes:
    """The coarsest partition in which two ranks of a class run the same program with partners of the same classes.

    apart: for each rank, what else tells it from others (such as its speed)
    """
    numbers: dict[object, int] = {}

    def number(key: object) -> int:
        return numbers.setdefault(key, len(numbers))

    talks = [number(program.talk) for program in cluster.programs]
    uses = [_uses(program) for program in cluster.programs]
    place_in: dict[str, list[int]] = {}
    for name, partition in cluster.groups.items():
        places = [0] * cluster.size
        for members in partition:
            for place, rank in enumerate(members):
                places[rank] = place
        place_in[name] = places
    colors = [
        number(
            (
                talks[cluster.program_of[rank]],
                tuple(place_in[name][rank] for name, placed in uses[cluster.program_of[rank]] if placed),
                None if apart is None else apart[rank],
            )
        )
        for rank in range(cluster.size)
    ]
    count = len(set(colors))
    while True:
        numbers.clear()
        seen: dict[str, list[int]] = {}
        for name, partition in cluster.groups.items():
            views = [0] * cluster.size
            for members in partition:
                by_place = tuple(colors[rank] for rank in members)
                kinds = number(("kinds", tuple(sorted(set(by_place)))))
                placed = number(("places", by_place))
                for rank in members:
                    used = dict(uses[cluster.program_of[rank]]).get(name)
                    views[rank] = -1 if used is None else placed if used else kinds
            seen[name] = views
        colors = [
            number((colors[rank], tuple(views[rank] for views in seen.values())))
            for rank in range(cluster.size)
        ]
        if len(set(colors)) == count:
            break
        count = len(set(colors))
    alike: dict[int, list[int]] = {}
    for rank, color in enumerate(colors):
        alike.setdefault(color, []).append(rank)
    ordered = sorted(alike.values(), key=lambda ranks: ranks[0])
    class_of = [0] * cluster.size
    for index, ranks in enumerate(ordered):
        for rank in ranks:
            class_of[rank] = index
    return Classes(tuple(class_of), tuple(tuple(ranks) for ranks in ordered))


def _uses(program: Program) -> tuple[tuple[str, bool], ...]:
    """The groups a program talks in, and whether places in them matter."""
    used: dict[str, bool] = {}
    for segment in {id(step.segment): step.segment for step in program.steps}.values():
        for event in segment.messages:
            if isinstance(event, Communicate):
                used[event.group] = used.get(event.group, False) or event.peer >= 0
    return tuple(sorted(used.items()))


# The run under the strictest meaning.


@dataclass(slots=True, eq=False)
class _Call:
    """A communication issued by a class. others: the classes of its group (or the other side's)."""

    owner: int
    event: Communicate
    label: str
    instance: tuple[object, ...]
    others: tuple[int, ...]
    done: bool = False


@dataclass(slots=True, eq=False)
class _State:
    """Where one class stands."""

    messages: Iterator[tuple[str, Communicate | Wait]]
    queues: dict[str, deque[_Call]] = field(default_factory=dict)
    issued: dict[tuple[str, str], list[_Call]] = field(default_factory=dict)
    waits: _Call | None = None
    over: bool = False


class _Run:
    """All classes together, until all are through or none can go on."""

    def __init__(self, cluster: Cluster, classes: Classes, *, one_queue: bool) -> None:
        self.cluster, self.classes, self.one_queue = cluster, classes, one_queue
        self.states = [_State(cluster.program(ranks[0]).messages()) for ranks in classes.members]
        self.ready = deque(range(len(self.states)))
        self.faults: list[Fault] = []
        self._groups: dict[tuple[int, str], tuple[tuple[object, ...], tuple[int, ...], tuple[int, ...]]] = {}
        self._arrived: dict[tuple[object, ...], dict[int, _Call]] = {}

    def finish(self) -> list[Fault]:
        while self.ready and not self.faults:
            self._advance(self.ready.popleft())
        if not self.faults:
            self._check_end()
        return self.faults

    def _group(self, index: int, name: str) -> tuple[tuple[object, ...], tuple[int, ...], tuple[int, ...]]:
        """What a class's group of this name is: its key, the classes in it, the class at each place."""
        key = index, name
        found = self._groups.get(key)
        if found is None:
            rank = self.classes.members[index][0]
            partition = self.cluster.groups.get(name, ())
            members = next((part for part in partition if rank in part), (rank,))
            by_place = tuple(self.classes.class_of[member] for member in members)
            kinds = tuple(sorted(set(by_place)))
            found = self._groups[key] = ((name, kinds), kinds, by_place)
        return found

    def _advance(self, index: int) -> None:
        state = self.states[index]
        if state.over or (state.waits is not None and not state.waits.done):
            return
        state.waits = None
        for label, event in state.messages:
            if isinstance(event, Wait):
                known = state.issued.get((event.group, event.operation), ())
                if not 0 <= event.age < len(known):
                    self._fail(
                        "handles", f"{self._who(index)} waits in step {label} for what it never issued", index
                    )
                    return
                call = known[len(known) - 1 - event.age]
                if not call.done:
                    state.waits = call
                    return
                continue
            self._issue(index, label, event)
            if self.faults:
                return
        state.over = True

    def _issue(self, index: int, label: str, event: Communicate) -> None:
        state = self.states[index]
        instance, kinds, by_place = self._group(index, event.group)
        if event.operation in ALONE:
            if not 0 <= event.peer < len(by_place):
                self._fail("channels", f"{self._who(index)}: {event} has no such place", index)
                return
            others: tuple[int, ...] = (by_place[event.peer],)
        else:
            others = kinds
        call = _Call(index, event, label, instance, others)
        state.issued.setdefault((event.group, event.operation), []).append(call)
        queue = state.queues.setdefault("" if self.one_queue else event.group, deque())
        queue.append(call)
        if queue[0] is call:
            self._arrive(call)

    def _arrive(self, first: _Call) -> None:
        """A call is at the head of its queue; whatever that completes is completed."""
        heads = [first]
        while heads and not self.faults:
            call = heads.pop()
            partners = self._pair(call) if call.event.operation in ALONE else self._meet(call)
            for partner in partners:
                partner.done = True
                state = self.states[partner.owner]
                queue = state.queues["" if self.one_queue else partner.event.group]
                queue.popleft()
                if queue:
                    heads.append(queue[0])
                if state.waits is partner:
                    self.ready.append(partner.owner)

    def _meet(self, call: _Call) -> Sequence[_Call]:
        """A collective: all its classes when the last has come."""
        slot = self._arrived.setdefault(call.instance, {})
        for other in slot.values():
            if other.event.asked() != call.event.asked():
                self._fail(
                    "agreement",
                    f"members of a group ask for different things: {self._told(other)}; {self._told(call)}",
                    other.owner,
                    call.owner,
                )
                return ()
        slot[call.owner] = call
        if len(slot) < len(call.others):
            return ()
        del self._arrived[call.instance]
        return tuple(slot.values())

    def _pair(self, call: _Call) -> Sequence[_Call]:
        """A send or receive: both sides when the other side's is at the head of its queue."""
        other = self.states[call.others[0]]
        queue = other.queues.get("" if self.one_queue else call.event.group)
        if not queue:
            return ()
        theirs = queue[0]
        opposite = "receive" if call.event.operation == "send" else "send"
        fits = (
            theirs.event.operation == opposite
            and theirs.event.group == call.event.group
            and theirs.others[0] == call.owner
        )
        if not fits:
            return ()
        mine, yours = call.event, theirs.event
        if (mine.dtype, mine.elements) != (yours.dtype, yours.elements):
            self._fail(
                "channels",
                f"a message does not fit where it is received: {self._told(call)}; {self._told(theirs)}",
                call.owner,
                theirs.owner,
            )
            return ()
        return (call, theirs)

    # What went wrong, in words.

    def _check_end(self) -> None:
        blocked = [index for index, state in enumerate(self.states) if not state.over]
        if blocked:
            self._explain(blocked)
            return
        left = [call for state in self.states for queue in state.queues.values() for call in queue]
        if left:
            told = "; ".join(self._told(call) for call in left[:MOST_SHOWN])
            self._fail("channels", f"nobody takes part in: {told}", *[call.owner for call in left])

    def _explain(self, blocked: list[int]) -> None:
        """The cycle of waits, or the wait for somebody who is through."""
        waits_for: dict[int, tuple[_Call, list[int]]] = {}
        for index in blocked:
            call = self._head_before(index)
            if call.event.operation in ALONE:
                missing = list(call.others)
            else:
                come = self._arrived.get(call.instance, {})
                missing = [other for other in call.others if other not in come or come[other].done]
            waits_for[index] = call, missing
        path: list[int] = []
        at = blocked[0]
        while at not in path and at in waits_for and waits_for[at][1]:
            path.append(at)
            at = waits_for[at][1][0]
        cycle = path[path.index(at) :] if at in path else [*path]
        lines = []
        for index in cycle:
            call, missing = waits_for[index]
            whom = self._who(missing[0]) if missing else "nobody"
            lines.append(f"{self._told(call)} waits for {whom}")
        if at not in path and at < len(self.states) and self.states[at].over:
            lines.append(f"{self._who(at)} has ended")
        self._fail("progress", "nobody can go on: " + "; ".join(lines), *cycle)

    def _head_before(self, index: int) -> _Call:
        """What the class waits for, or what stands before it in its queue."""
        state = self.states[index]
        assert state.waits is not None, "a class that is not through waits"
        return state.queues["" if self.one_queue else state.waits.event.group][0]

    def _who(self, index: int) -> str:
        ranks = self.classes.members[index]
        more = f" and {len(ranks) - 1} like it" if len(ranks) > 1 else ""
        return f"rank {ranks[0]} ({self.cluster.places[ranks[0]]}){more}"

    def _told(self, call: _Call) -> str:
        return f"{self._who(call.owner)}, step {call.label}: {call.event}"

    def _fail(self, obligation: str, message: str, *owners: int) -> None:
        ranks = tuple(sorted({self.classes.members[owner][0] for owner in owners}))
        self.faults.append(Fault(obligation, message, ranks))
