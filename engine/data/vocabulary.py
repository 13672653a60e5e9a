"""How many tokens a tokenizer's file has, read as JSON: known before any library is loaded."""

from __future__ import annotations

import json
import os
from pathlib import Path


def vocabulary_of(path: str) -> int | None:
    """Ids are below it; None where there is no tokenizer.json that says. path: the file, or its folder."""
    file = Path(path) / "tokenizer.json" if os.path.isdir(path) else Path(path)
    if not os.path.isfile(file):  # a pipe would be waited for
        return None
    try:
        whole = json.loads(file.read_text(encoding="utf-8"))
        entries = whole["model"]["vocab"]
        ids = entries.values() if isinstance(entries, dict) else range(len(entries))
        return 1 + int(max(*ids, *(token["id"] for token in whole.get("added_tokens") or []), 0))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None  # whoever opens it says what is wrong
