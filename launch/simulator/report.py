"""The simulation as one HTML page that needs no network: what `page/` holds, joined, with the data written into it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any, Final

from triaxis.parallel.palette import style_sheet

_PAGE: Final = Path(__file__).with_name("page")
_SCRIPTS: Final = ("figures", "answer", "canvas", "topology", "timeline", "memory", "draw")
"""In the order that they need each other."""


def write_report(simulation: Mapping[str, Any], path: Path) -> None:
    """Writes the page. ValueError: a figure is not finite, which JSON cannot say. OSError as `Path.write_text`.

    simulation: as `result.as_dict` says it; without times (a failed proof) the page leaves their sections out.
    """
    title = f"{simulation['run']['model']} on {simulation['topology']['world_size']:,} GPUs · triaxis"
    script = "\n".join(_read(f"{name}.js") for name in _SCRIPTS)
    page = _read("page.html")
    for element, content in (
        ("<title></title>", escape(title)),
        ("<style></style>", f"\n{style_sheet()}{_read('page.css')}"),
        ("<script></script>", f"\n{script}"),
        ('<script type="application/json" id="simulation"></script>', _inert(simulation)),
    ):
        before, after = page.split(element)
        page = before + element.replace("></", f">{content}</") + after
    path.write_text(page, encoding="utf-8")


def _read(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")


def _inert(simulation: Mapping[str, Any]) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(simulation, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
