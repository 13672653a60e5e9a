"""The orders of ZB-V and V-half, whose stages go there and back: chunk 0 of a rank on the way, chunk 1 back. Pure.

Both fill waiting with gradients of weights (W), which nobody waits for. With F, I and W of one length no rank waits
in ZB-V between its first action and its last; V-half waits 7/12 as long as 1F1B (of many ranks), with p + 2 chunks'
activations instead of 2p. Of chunk and kind, microbatches come in order: sums have the bits that 1F1B gives them.

    zb-v, pp 2, 3 microbatches      rank 0: 0F0 0F1 0F2 1F0 1I0 1W0 1F1 1I1 1W1 0I0 0W0 1F2 1I2 1W2 0I1 …
                                    rank 1: 0F0 1F0 0F1 1F1 1I0 1W0 0F2 0I0 0W0 1F2 1I1 1W1 0I1 1I2 0I2 …
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Final

from triaxis.parallel.pipeline.schedule import Action, Kind, ScheduleName

PERIOD: Final = 6
"""Of V-half: in as many units a rank does F, I and W of a microbatch in both chunks."""


def zb_v(pp: int, rank: int, microbatches: int) -> tuple[Action, ...]:
    """A rank's order in ZB-V (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory"; as torch has it).

    At most 2 * pp chunks' activations are held, as many as 1F1B's first rank has. The phases need 2 * pp - 1
    microbatches; fewer are filled up, and what was added is left out.
    """
    line = _Line(max(microbatches, 2 * pp - 1))
    line.repeat(2 * (pp - rank) - 1, "0F")
    line.repeat(rank, "1F 0F")
    line.repeat(pp - rank, "1F 1I 1W")
    while line.begun("0F") < line.total:
        line.repeat(1, "0F 0I 0W 1F 1I 1W")
    while line.begun("1F") < line.total:  # what the last forwards on the way have left for those back
        line.repeat(1, "0I 0W 1F 1I 1W")
    line.repeat(rank, "0I 1I")
    line.repeat(pp - rank, "0I 0W")
    line.repeat(line.total - line.begun("1W"), "1W")
    line.repeat(line.total - line.begun("0W"), "0W")
    return tuple(action for action in line.order if action.microbatch < microbatches)


class _Line:
    """An order that grows: each kind of each chunk takes its next microbatch."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.order: list[Action] = []
        self._next: dict[str, Iterator[int]] = {}
        self._begun: dict[str, int] = {}

    def begun(self, word: str) -> int:
        return self._begun.get(word, 0)

    def repeat(self, times: int, words: str) -> None:
        for word in words.split() * times:
            microbatch = self.begun(word)
            self._begun[word] = microbatch + 1
            self.order.append(Action(kind=Kind(word[1]), chunk=int(word[0]), microbatch=microbatch))


def v_half(pp: int, rank: int, microbatches: int) -> tuple[Action, ...]:
    """A rank's order in V-half (Qi et al. 2024): all is done in its unit of time, W wherever one is free.

    Forwards wait two units from rank to rank on the way, so that chunks fill and empty at one rate.
    """
    shift = 3 if pp % 2 == 0 else 0
    offsets = {
        "0F": 2 * rank,
        "1F": 3 * pp - rank - 2,
        "1I": 3 * pp + shift + 2 * rank - 1,
        "0I": 6 * pp + shift - rank - 2,
    }
    taken = {
        offset + PERIOD * microbatch: Action(kind=Kind(word[1]), chunk=int(word[0]), microbatch=microbatch)
        for word, offset in offsets.items()
        for microbatch in range(microbatches)
    }
    assert len(taken) == len(offsets) * microbatches, "two actions in one unit of time"
    order: list[Action] = []
    waiting: deque[Action] = deque()
    for unit in count():
        action = taken.pop(unit, None)
        if action is not None:
            order.append(action)
            if action.kind is Kind.INPUT:
                waiting.append(action.like(Kind.WEIGHT))
        elif waiting:
            order.append(waiting.popleft())
        elif not taken:
            return tuple(order)
    raise AssertionError


VEES: Final[Mapping[ScheduleName, Callable[[int, int, int], tuple[Action, ...]]]] = {
    ScheduleName.ZB_V: zb_v,
    ScheduleName.V_HALF: v_half,
}
