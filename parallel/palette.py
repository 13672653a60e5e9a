"""The colours of every picture: one colour, one meaning, in schedules, reports and plots. Standard library only.

Computation is blue, green and amber; messages have the strong colours of their axes; memory has pale ones. Each name
has a colour for light pages and one for dark ones.
"""

from __future__ import annotations

COLOURS: dict[str, tuple[str, str]] = {
    # what a rank computes
    "forward": ("#2a6fcb", "#3a7fdc"),
    "backward": ("#0e8560", "#158a66"),
    "inputs": ("#0e8560", "#158a66"),  # a backward pass split in two: gradients of inputs,
    "weights": ("#7ba12a", "#93b83a"),  # and of weights
    "phase": ("#d99a14", "#d29a2b"),  # the step's end: norm, update, publishing
    "recompute": ("#79a8e3", "#7fb0ee"),
    "idle": ("#d9dad3", "#3d434d"),
    # what it waits for, by axis
    "tp": ("#6a55c9", "#9384ea"),
    "dp": ("#e0662f", "#ea7a47"),
    "pp": ("#d2568b", "#e0709f"),
    "cp": ("#1a9bb0", "#37b3c7"),
    "ep": ("#a53030", "#e06a66"),
    "world": ("#7d828c", "#9aa0aa"),
    # what memory is held for
    "memory-parameters": ("#8db4e8", "#6f9fdc"),
    "memory-gradients": ("#8fcdb0", "#63ac8b"),
    "memory-optimizer": ("#ecc66f", "#c9a24c"),
    "memory-activations": ("#c3a5e0", "#a486c4"),
    "memory-gathered": ("#5b83b8", "#8fb5ea"),
    "memory-buckets": ("#4f9a7b", "#93d3b5"),
    "memory-messages": ("#e6a5c2", "#c27f9d"),
    "memory-temporaries": ("#c9bf8d", "#a39a6b"),
    "memory-fragments": ("#d5c9c0", "#8f857d"),
    "memory-context": ("#9b938c", "#6f6862"),
    "memory-other": ("#b5b9c0", "#7b818b"),
}

STAGES = ("#2a6fcb", "#d2568b", "#0e8560", "#d99a14", "#6a55c9", "#1a9bb0", "#e0662f", "#7ba12a")
"""Of pipeline stages on their nodes, again from the first after the last."""


def colour(name: str) -> str:
    """The colour on a light page."""
    return COLOURS[name][0]


def memory_name(kind: str) -> str:
    """The name in COLOURS of what memory is held for: `optimizer states` is `memory-optimizer`."""
    words = {"unreduced": "buckets", "pipeline": "messages", "buffers": "messages", "logits": "temporaries"}
    first = kind.split()[0]
    name = f"memory-{words.get(first, first)}"
    return name if name in COLOURS else "memory-other"


def paler(name: str, share: float) -> str:
    """The colour mixed with so much white: 0 is the colour itself, 1 is white."""
    red, green, blue = (int(colour(name)[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in (red, green, blue))


def ink_on(paint: str) -> str:
    """Black or white, whichever is easier to read on the colour (WCAG's relative luminance)."""
    parts = [int(paint[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#16181d" if (luminance + 0.05) / 0.0595 > 1.05 / (luminance + 0.05) else "#ffffff"


def style_sheet() -> str:
    """The colours as custom properties, for pages that are light or dark as their reader likes."""
    light, dark = (
        "".join(f" --{name}: {pair[place]};" for name, pair in COLOURS.items()) for place in (0, 1)
    )
    return f":root {{{light} }}\n@media (prefers-color-scheme: dark) {{ :root {{{dark} }} }}\n"
