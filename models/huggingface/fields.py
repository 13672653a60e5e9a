"""What a config.json says, under the names that the versions of `transformers` gave its fields. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Unsupported(ValueError):
    """A configuration that uses what the engine does not have; the message names the field and its value."""


class Fields:
    """The fields of a config.json; an error names the file and the field."""

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self.values, self.origin = values, origin

    def get(self, name: str, default: Any = None) -> Any:  # noqa: ANN401  (JSON)
        """A field's value; `default` where it is missing or null."""
        value = self.values.get(name)
        return default if value is None else value

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number above 0."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(
                f"{self.origin}: `{name}` must be a whole number of at least 1, but is {value!r}"
            )
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{self.origin}: `{name}` must be a number, but is {value!r}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.origin}: `{name}` must be true or false, but is {value!r}")
        return value

    def refuse(self, name: str, why: str) -> Unsupported:
        """The error for a field whose value is not supported."""
        return Unsupported(
            f"{self.origin}: `{name}` is {self.values.get(name)!r}, which is not supported: {why}"
        )

    def one_of(self, name: str, allowed: Mapping[str, Any], default: str) -> Any:  # noqa: ANN401
        """What the field's value stands for."""
        value = self.get(name, default)
        if value not in allowed:
            raise self.refuse(name, f"it must be one of {', '.join(allowed)}")
        return allowed[value]

    def unused(self, **neutral: object) -> None:
        """Refuses fields whose value is not the one that leaves the feature off."""
        for name, value in neutral.items():
            if self.get(name, value) != value:
                raise self.refuse(name, f"only {value!r} is")

    def rope(self) -> tuple[float, dict[str, Any] | None]:
        """Theta, and the scaling as the flat field `rope_scaling` has it; None for no scaling.

        transformers 5 keeps both in `rope_parameters`, earlier ones `rope_theta` and `rope_scaling`, whose type may be
        called `type`; the original context may stand beside them.
        """
        told = self.get("rope_parameters") or self.get("rope_scaling") or {}
        if not isinstance(told, Mapping):
            raise ValueError(f"{self.origin}: `rope_scaling` must have fields, but is {told!r}")
        theta = told.get("rope_theta", self.get("rope_theta", 10000.0))
        kind = told.get("rope_type", told.get("type", "default"))
        if kind == "default":
            return float(theta), None
        if kind not in _SCALINGS:
            raise self.refuse(
                "rope_scaling" if "rope_scaling" in self.values else "rope_parameters",
                f"its type must be default or one of {', '.join(_SCALINGS)}",
            )
        names = _SCALINGS[kind]
        known = {*names, "rope_type", "type", "rope_theta", "partial_rotary_factor"}
        unknown = sorted(set(told) - known)
        if unknown:
            raise ValueError(
                f"{self.origin}: rotary scaling {kind} must have the fields {', '.join(names)}, but has `{unknown[0]}`"
            )
        values = {ours: told[theirs] for theirs, ours in names.items() if told.get(theirs) is not None}
        if "original_positions" in names.values() and "original_positions" not in values:
            values["original_positions"] = self.whole(
                "original_max_position_embeddings", self.get("max_position_embeddings")
            )
        return float(theta), {"rope_type": kind, **values}


_SCALINGS: dict[str, dict[str, str]] = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_frequency_factor",
        "high_freq_factor": "high_frequency_factor",
        "original_max_position_embeddings": "original_positions",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_positions",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
        "truncate": "truncate",
    },
}
"""Rotary scalings: their fields, and ours (models/positions.py)."""


def rope_fields(theta: float, scaling: Mapping[str, Any] | None, fraction: float = 1.0) -> dict[str, Any]:
    """Theta and scaling as config.json has them, under the names of transformers 5 and of those before it."""
    if scaling is None:
        told: dict[str, Any] = {"rope_type": "default"}
    else:
        kind = scaling["rope_type"]
        told = {"rope_type": kind}
        told |= {
            theirs: scaling[ours] for theirs, ours in _SCALINGS[kind].items() if scaling.get(ours) is not None
        }
    part = {} if fraction == 1.0 else {"partial_rotary_factor": fraction}
    old = None if scaling is None else told
    return {
        "rope_theta": theta,
        "rope_scaling": old,
        "rope_parameters": {**told, "rope_theta": theta, **part},
        **part,
    }
