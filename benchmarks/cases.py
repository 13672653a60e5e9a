"""What is measured: sizes, layouts, and the cases they make. Standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A Llama-like model (SwiGLU, RMSNorm, rope, untied) and the work of one step of a data-parallel rank."""

    hidden: int
    layers: int
    microbatches: int
    microbatch_size: int
    heads: int = 4
    vocab: int = 512
    sequence_length: int = 128

    @property
    def ffn(self) -> int:
        """Two thirds of four times hidden, rounded up to 64: the rule in the peers' scripts."""
        return 64 * math.ceil(8 * self.hidden / 3 / 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How many ways the ranks split each axis. Written "tp,pp,dp"."""

    tp: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        return f"{self.tp},{self.pp},{self.dp}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One size at one layout. steps, warmup_steps: timed, and run before without being timed."""

    size: Size
    layout: Layout
    steps: int
    warmup_steps: int = 2
    zero: int = 0
    sequence_parallel: bool = False
    dtype: str = "fp32"

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all data-parallel ranks."""
        size = self.size
        return size.microbatches * size.microbatch_size * size.sequence_length * self.layout.dp

    @property
    def title(self) -> str:
        return f"hidden {self.size.hidden}, tp,pp,dp {self.layout}, {self.dtype}"


SIZES = {
    256: Size(hidden=256, layers=4, microbatches=8, microbatch_size=2),
    1024: Size(hidden=1024, layers=2, microbatches=2, microbatch_size=1),
}
LAYOUTS = tuple(
    Layout(tp=tp, pp=pp, dp=dp) for tp, pp, dp in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2))
)
QUICK_LAYOUTS = (LAYOUTS[0], LAYOUTS[-1])


def parse_layout(text: str) -> Layout:
    """A layout out of "tp,pp,dp"; ValueError where it is none."""
    try:
        tp, pp, dp = (int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"`layout` must be three numbers tp,pp,dp, but is {text!r}; write 2,2,2") from None
    if min(tp, pp, dp) < 1:
        raise ValueError(f"`layout` must have no number below 1, but is {text!r}")
    return Layout(tp=tp, pp=pp, dp=dp)
