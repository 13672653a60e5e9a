"""How a model knows where a token stands: kinds of positions as data. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023): every frequency divided by `factor`."""

    factor: float

    def scaled(self, frequencies: list[float], theta: float) -> list[float]:
        return [frequency / self.factor for frequency in frequencies]

    def magnitude(self) -> float:
        return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's: long wavelengths divided by `factor`, short ones as they are, smooth between the two.

    original_positions: of the pretraining; a wavelength is long above original_positions / low_frequency_factor tokens
    and short below original_positions / high_frequency_factor
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_positions: int

    def scaled(self, frequencies: list[float], theta: float) -> list[float]:
        return [self._scaled(frequency) for frequency in frequencies]

    def _scaled(self, frequency: float) -> float:
        turns = self.original_positions * frequency / (2 * math.pi)  # within the original context
        low, high = self.low_frequency_factor, self.high_frequency_factor
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        return (1 - kept) * frequency / self.factor + kept * frequency

    def magnitude(self) -> float:
        return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): frequencies interpolated by how often they turn in the original context.

    beta_fast, beta_slow: turns above which a frequency stays, and below which it is divided by `factor`
    attention_factor: what cosines and sines are multiplied by; None = by mscale and mscale_all_dim, if given, else
        0.1·ln(factor) + 1
    truncate: the borders of the ramp are whole dimensions
    """

    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def scaled(self, frequencies: list[float], theta: float) -> list[float]:
        size = 2 * len(frequencies)
        low, high = (self._dimension(turns, size, theta) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        width = high - low if high > low else 0.001  # a ramp of no width would divide by zero
        ramp = [min(max((index - low) / width, 0.0), 1.0) for index in range(len(frequencies))]
        return [
            frequency / self.factor * part + frequency * (1 - part)
            for frequency, part in zip(frequencies, ramp, strict=True)
        ]

    def _dimension(self, turns: float, size: int, theta: float) -> float:
        """The pair of elements, as a real number, that turns so often in the original context."""
        return size * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _yarn_scale(self.factor, self.mscale) / _yarn_scale(self.factor, self.mscale_all_dim)
        return _yarn_scale(self.factor, 1.0)

    def score_scale(self) -> float:
        """What latent attention's scores are multiplied by, besides 1/√d: m², since queries and keys count alike."""
        return _yarn_scale(self.factor, self.mscale_all_dim or 0.0) ** 2


def _yarn_scale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


Scaling = LinearScaling | Llama3Scaling | YarnScaling
SCALINGS: dict[str, Callable[..., Scaling]] = {
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions (Su et al. 2021). fraction: the part of each head that is turned, its first elements."""

    theta: float = 10000.0
    scaling: Scaling | None = None
    fraction: float = 1.0

    def turned(self, head_size: int) -> int:
        """Elements of a head that are turned."""
        return int(head_size * self.fraction)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """A trained vector for each position, added to the token's embedding."""


Positions = Rope | Learned
