"""Command-line programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triaxis.parallel.lazy import lazily

if TYPE_CHECKING:
    from triaxis.launch.world import open_world as open_world
else:  # a name is imported when it is asked for: configurations and plans start without torch
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "world": ("open_world",),
        },
    )
