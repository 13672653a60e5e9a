"""Public names of a package that are imported when they are asked for (PEP 562). Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazily(
    package: str, names: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__`; `names` are the public ones, by the package's modules.

    Example: lazily("triaxis.models", {"config": ("ModelConfig",)}).
    """
    module_of = {name: module for module, members in names.items() for name in members}

    def find(name: str) -> Any:  # noqa: ANN401 - whatever the name stands for
        if name not in module_of:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}; public are {', '.join(module_of)}"
            )
        return getattr(import_module(f"{package}.{module_of[name]}"), name)

    return find, lambda: sorted(module_of)
