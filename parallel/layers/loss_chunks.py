"""In how many pieces the loss is computed: whole logits never exist. Pure arithmetic."""

from __future__ import annotations

from typing import Final

CHUNK_LOGITS: Final = 1 << 22
CHUNK_TOKENS: Final = 512
"""Logits held at once, and the tokens that a chunk has at least: each chunk reads the whole head again."""
CHUNK_LOGITS_ON_GPU: Final = 1 << 28
"""Half a GiB in bf16: no cache would hold a chunk, and every one adds to all of the head's gradient."""
KEPT_LOGITS: Final = 1 << 18
"""Exponentials kept for backward at most (2 MB in fp64): of small models a second product would cost more."""


def chunk_tokens(rows: int, chunk_logits: int | None = None, *, target: str = "cpu") -> int:
    """Tokens of one chunk, if there are as many, with `rows` rows of the vocabulary here.

    Example: 32,000 rows make chunks of 512 tokens, 4,000 rows chunks of 1,048; on a GPU 8,388 and 67,108.
    """
    most = CHUNK_LOGITS_ON_GPU if target == "cuda" else CHUNK_LOGITS
    held = max(most, CHUNK_TOKENS * rows) if chunk_logits is None else chunk_logits
    return max(1, held // max(rows, 1))
