"""Rows of data as text, for people: what is trained stands in ⟦brackets⟧."""

from __future__ import annotations

from itertools import groupby

import numpy as np

from triaxis.engine.data.source import Source
from triaxis.engine.data.tokenizer import Tokenizer
from triaxis.models.batch import IGNORED


def shown_rows(source: Source, tokenizer: Tokenizer, rows: int) -> list[str]:
    """The first rows, a text each, without padding.

    A token is in brackets if it is a target, that is, if the position before it has its id as label.
    """
    shown = []
    for index in range(min(rows, len(source))):
        sample = source.sample(0, index)
        size = source.tokens_of(np.array([index]))
        trained = [False, *(sample.labels_L[: size - 1] != IGNORED).tolist()]
        text = ""
        for is_trained, run in groupby(
            zip(sample.tokens_L[:size].tolist(), trained, strict=True), lambda t: t[1]
        ):
            piece = tokenizer.decode([token for token, _ in run])
            text += f"⟦{piece}⟧" if is_trained else piece
        shown.append(f"row {index} ({source.describe(index, 0)}):\n{text}")
    return shown
