"""All ranks' programs run together, as the classes of ranks that cannot be told apart. Pure.

A communication happens when all that take part stand at it: each has one or several queues of what it has issued, and
only what is first in its queue can happen. With a price for each communication and computation, the run is a timeline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from triaxis.parallel.programs.operation import OPPOSITE, Operation
from triaxis.parallel.programs.program import Cluster, Communicate, Wait
from triaxis.parallel.programs.rank_classes import Classes

MOST_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Fault:
    """One broken obligation, in words. ranks: those that show it."""

    obligation: str
    message: str
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.obligation}: {self.message}"


@dataclass(slots=True, eq=False)
class Call:
    """A communication issued by a class.

    others: the classes of its group (or the other side's); ready, start, end: seconds
    last: of those that took part, the one that was ready last; before: what stood before it in its queue
    """

    owner: int
    event: Communicate
    label: str
    instance: tuple[object, ...]
    others: tuple[int, ...]
    ready: float
    start: float = 0.0
    end: float = 0.0
    done: bool = False
    last: Call | None = None
    before: Call | None = None


Item = tuple[str, Communicate | Wait | float]


@dataclass(slots=True, eq=False)
class State:
    """Where one class stands. clock: seconds"""

    items: Iterator[Item]
    queues: dict[str, deque[Call]] = field(default_factory=dict)
    last: dict[str, Call] = field(default_factory=dict)
    issued: dict[tuple[str, Operation], list[Call]] = field(default_factory=dict)
    waits: Call | None = None
    clock: float = 0.0
    over: bool = False


def by_group(event: Communicate) -> str:
    """A queue for each group."""
    return event.group


def by_channel(event: Communicate) -> str:
    """A queue for each group, and one for each direction of each pair that exchanges messages."""
    return f"{event.group} {event.peer} {event.operation}" if event.operation.is_message else event.group


def in_one(_event: Communicate) -> str:
    """One queue for all: what a device may make of its streams at worst."""
    return ""


class Lockstep:
    """All classes together, until all are through or none can go on. queue_of: the queue a communication stands in"""

    def __init__(
        self, cluster: Cluster, classes: Classes, queue_of: Callable[[Communicate], str] = by_group
    ) -> None:
        self.cluster, self.classes, self.queue_of = cluster, classes, queue_of
        self.states = [State(iter(self.items(index))) for index in range(len(classes.members))]
        self.faults: list[Fault] = []
        self._ready = deque(range(len(self.states)))
        self._groups: dict[tuple[int, str], tuple[tuple[object, ...], tuple[int, ...], tuple[int, ...]]] = {}
        self._arrived: dict[tuple[object, ...], dict[int, Call]] = {}

    def items(self, index: int) -> Iterable[Item]:
        """What a class does: its messages, and seconds of computation if they matter."""
        return self.cluster.program(self.classes.members[index][0]).messages()

    def seconds(self, call: Call) -> float:
        """How long a communication takes."""
        return 0.0

    def waited(self, index: int, call: Call) -> None:
        """A class waits for a call that is done; its clock goes on to the call's end."""

    def finish(self) -> list[Fault]:
        """Runs to the end; what stood in the way."""
        while self._ready and not self.faults:
            self._advance(self._ready.popleft())
        if not self.faults:
            self._check_end()
        return self.faults

    def _group(self, index: int, name: str) -> tuple[tuple[object, ...], tuple[int, ...], tuple[int, ...]]:
        """What a class's group of this name is: its key, the classes in it, the class at each place."""
        key = index, name
        found = self._groups.get(key)
        if found is None:
            rank = self.classes.members[index][0]
            members = self.cluster.members(name, rank) if name in self.cluster.groups else (rank,)
            by_place = tuple(self.classes.class_of[member] for member in members)
            kinds = tuple(sorted(set(by_place)))
            found = self._groups[key] = ((name, kinds), kinds, by_place)
        return found

    def _advance(self, index: int) -> None:
        state = self.states[index]
        if state.over or (state.waits is not None and not state.waits.done):
            return
        if state.waits is not None:
            self._pass(index, state.waits)
            state.waits = None
        for label, item in state.items:
            if isinstance(item, float):
                state.clock += item
            elif isinstance(item, Wait):
                known = state.issued.get((item.group, item.operation), ())
                if not 0 <= item.age < len(known):
                    self._fail(
                        "handles", f"{self._who(index)} waits in step {label} for what it never issued", index
                    )
                    return
                call = known[len(known) - 1 - item.age]
                if not call.done:
                    state.waits = call
                    return
                self._pass(index, call)
            else:
                self._issue(index, label, item)
                if self.faults:
                    return
        state.over = True

    def _pass(self, index: int, call: Call) -> None:
        self.waited(index, call)
        state = self.states[index]
        state.clock = max(state.clock, call.end)

    def _issue(self, index: int, label: str, event: Communicate) -> None:
        state = self.states[index]
        instance, kinds, by_place = self._group(index, event.group)
        if event.operation.is_message:
            if not 0 <= event.peer < len(by_place):
                self._fail("channels", f"{self._who(index)}: {event} has no such place", index)
                return
            others: tuple[int, ...] = (by_place[event.peer],)
        else:
            others = kinds
        call = Call(index, event, label, instance, others, state.clock)
        state.issued.setdefault((event.group, event.operation), []).append(call)
        name = self.queue_of(event)
        queue = state.queues.setdefault(name, deque())
        if not queue and others == (index,) and not event.operation.is_message:
            self._do_alone(call, name)  # its group's members are all of this class, and so all there
            return
        queue.append(call)
        call.before, state.last[name] = state.last.get(name), call
        if queue[0] is call:
            self._arrive(call)

    def _do_alone(self, call: Call, queue_name: str) -> None:
        state = self.states[call.owner]
        call.before, state.last[queue_name] = state.last.get(queue_name), call
        if call.before is not None:
            call.ready = max(call.ready, call.before.end)
        call.start, call.end, call.last, call.done = call.ready, call.ready + self.seconds(call), call, True

    def _arrive(self, first: Call) -> None:
        """A call is at the head of its queue; whatever that completes is completed."""
        heads = [first]
        while heads and not self.faults:
            call = heads.pop()
            if call.done:  # its partner came to the head at the same time, and was first
                continue
            if call.before is not None:
                call.ready = max(call.ready, call.before.end)
            partners = self._pair(call) if call.event.operation.is_message else self._meet(call)
            if not partners:
                continue
            last = max(partners, key=lambda partner: partner.ready)
            # members of an uneven all_to_all have messages of their own sizes: it lasts as long as the longest
            longest = max(partners, key=lambda partner: partner.event.nbytes) if call.event.gives else call
            end = last.ready + self.seconds(longest)
            for partner in partners:
                partner.start, partner.end, partner.last, partner.done = last.ready, end, last, True
                state = self.states[partner.owner]
                queue = state.queues[self.queue_of(partner.event)]
                queue.popleft()
                if queue:
                    heads.append(queue[0])
                if state.waits is partner:
                    self._ready.append(partner.owner)

    def _meet(self, call: Call) -> Sequence[Call]:
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
        if call.event.gives:
            self._check_parts([slot[index] for index in self._group(call.owner, call.event.group)[2]])
        return tuple(slot.values())

    def _check_parts(self, by_place: Sequence[Call]) -> None:
        """An uneven all_to_all: what each member gives another is what that one takes from it."""
        for i, giver in enumerate(by_place):
            for j, taker in enumerate(by_place):
                given, taken = giver.event.gives[j], taker.event.takes[i]
                if given != taken:
                    self._fail(
                        "agreement",
                        f"place {i} gives {given:,} elements of which place {j} takes {taken:,}: "
                        f"{self._told(giver)}; {self._told(taker)}",
                        giver.owner,
                        taker.owner,
                    )
                    return

    def _pair(self, call: Call) -> Sequence[Call]:
        """A send or receive: both sides when the other side's is at the head of its queue."""
        other = self.states[call.others[0]]
        queue = other.queues.get(self._opposite_queue(call))
        if not queue:
            return ()
        theirs = queue[0]
        opposite = OPPOSITE[call.event.operation]
        fits = (
            theirs.event.operation == opposite
            and theirs.event.group == call.event.group
            and theirs.others[0] == call.owner
        )
        if not fits:
            return ()
        mine, yours = call.event, theirs.event
        if (mine.dtype, mine.elements, mine.label) != (yours.dtype, yours.elements, yours.label):
            self._fail(
                "channels",
                f"a message is not what is received: {self._told(call)}; {self._told(theirs)}",
                call.owner,
                theirs.owner,
            )
            return ()
        return (call, theirs)

    def _opposite_queue(self, call: Call) -> str:
        """The queue in which the other side of a message would stand."""
        by_place = self._group(call.others[0], call.event.group)[2]
        opposite = OPPOSITE[call.event.operation]
        place = by_place.index(call.owner)
        return self.queue_of(replace(call.event, operation=opposite, peer=place))

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
        waits_for: dict[int, tuple[Call, list[int]]] = {}
        for index in blocked:
            call = self._head_before(index)
            if call.event.operation.is_message:
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

    def _head_before(self, index: int) -> Call:
        """What the class waits for, or what stands before it in its queue."""
        state = self.states[index]
        assert state.waits is not None, "a class that is not through waits"
        return state.queues[self.queue_of(state.waits.event)][0]

    def _who(self, index: int) -> str:
        ranks = self.classes.members[index]
        more = f" and {len(ranks) - 1} like it" if len(ranks) > 1 else ""
        return f"rank {ranks[0]} ({self.cluster.places[ranks[0]]}){more}"

    def _told(self, call: Call) -> str:
        return f"{self._who(call.owner)}, step {call.label}: {call.event}"

    def _fail(self, obligation: str, message: str, *owners: int) -> None:
        ranks = tuple(sorted({self.classes.members[owner][0] for owner in owners}))
        self.faults.append(Fault(obligation, message, ranks))
