"""What fp16's losses are multiplied by, so that small gradients are not rounded to zero. No torch.

A gradient that leaves fp16's range on any rank is an overflow for all: the update is left out, and the scale falls.
After a while without one it rises again. The rule and its six settings are DeepSpeed's (`runtime/fp16/loss_scaler.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

FACTOR = 2.0
SETTINGS = (
    *("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis"),
    "min_loss_scale",
)
"""Fields of a run that decide it, as DeepSpeed names them."""
USUAL_POWER = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """Where the scaling is.

    value: what losses are multiplied by; patience: overflows, with the next, until it falls
    clean: updates since the last overflow
    """

    value: float
    patience: int
    clean: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaling:
    """How the scale moves.

    fixed: the scale, always; 0: it moves, from 2**initial_power on
    window: updates without an overflow until it doubles
    hysteresis: overflows until it halves; consecutive: any update between them begins the count anew
    least: where it ends to fall
    """

    fixed: float = 0.0
    initial_power: int = USUAL_POWER
    window: int = 1000
    hysteresis: int = 2
    consecutive: bool = False
    least: float = 1.0

    def begin(self) -> LossScale:
        value = self.fixed or max(FACTOR**self.initial_power, self.least)
        return LossScale(value=value, patience=self.hysteresis)

    def after_update(self, scale: LossScale) -> LossScale:
        """The scale behind an update that was made."""
        if self.fixed:
            return scale
        scale = replace(scale, clean=scale.clean + 1)
        rises = scale.clean % self.window == 0
        return LossScale(
            value=scale.value * FACTOR if rises else scale.value,
            patience=self.hysteresis if rises or self.consecutive else scale.patience,
            clean=scale.clean,
        )

    def after_overflow(self, scale: LossScale) -> LossScale:
        """The scale behind an update that was left out; the same where it cannot fall."""
        if self.fixed:
            return scale
        if scale.patience > 1:
            return LossScale(value=scale.value, patience=scale.patience - 1)
        return LossScale(value=max(scale.value / FACTOR, self.least), patience=scale.patience)

    def at_its_floor(self, scale: LossScale) -> bool:
        """Whether one more overflow would have to lower what cannot fall."""
        return not self.fixed and scale.patience <= 1 and scale.value <= self.least

    def most_in_a_row(self, usual: int) -> int:
        """Overflows in a row after which a lower scale is no longer the remedy."""
        return usual if self.fixed else usual + max(0, self.initial_power - USUAL_POWER)
