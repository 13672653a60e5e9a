"""The day that a chat template writes: one for a whole run, or its data would change at midnight."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import Any

ASKS_THE_DAY = re.compile(r"""\bstrftime_now\((?P<quote>["'])(?P<format>.*?)(?P=quote)\)""")
"""What chat templates of transformers ask for the day with."""


def writes_dates(path: str | Path | None) -> bool:
    """Whether a folder's chat template asks what day it is."""
    if path is None or not Path(path).is_dir():
        return False
    texts = (Path(path) / name for name in ("chat_template.jinja", "tokenizer_config.json"))
    return any("strftime_now" in text.read_text(encoding="utf-8") for text in texts if text.is_file())


def dated(template: Any, date: str) -> Any:  # noqa: ANN401  (a template, templates by name, or none)
    """With that day where a template asks for it. The library calls its own clock, whatever is passed to it."""
    if isinstance(template, dict):
        return {name: dated(one, date) for name, one in template.items()}
    day = datetime.fromisoformat(date)
    return template and ASKS_THE_DAY.sub(lambda found: repr(day.strftime(found["format"])), template)
