"""Sources of training rows, and which one a name or path means."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from triaxis.engine.data.corpus import open_corpus
from triaxis.engine.data.day import writes_dates
from triaxis.engine.data.files import CACHE, text_files
from triaxis.engine.data.megatron import open_megatron
from triaxis.engine.data.stdlib import open_stdlib
from triaxis.engine.data.stream import Ints, Sample
from triaxis.engine.data.tokenizing import Reading

SPLITS = ("train", "eval")


class Source(Protocol):
    """Rows of equal length, each a function of its index alone."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it; 0 where the files do not say (Megatron files without a tokenizer)."""
        ...

    def __len__(self) -> int:
        """Rows per epoch."""
        ...

    def sample(self, epoch: int, index: int) -> Sample: ...

    @property
    def fingerprint(self) -> str:
        """Equal where the content is."""
        ...

    def tokens_of(self, indices: Ints) -> int:
        """Real tokens in these rows: without padding."""
        ...

    def describe(self, index: int, position: int) -> str:
        """The file (and line) of one token, for messages."""
        ...

    def summary(self) -> str:
        """What was read, kept, empty and bad, and below it what else people must know."""
        ...


def open_source(
    name_or_path: str | Path,
    *,
    split: str,
    sequence_length: int,
    seed: int = 0,
    tokenizer_path: str | Path | None = None,
    on_bad_sample: str = "error",
    pack: bool = True,
    train_inserted: bool = False,
    date: str | None = None,
    eval_fraction: float | None = None,
    cache: Path | None = None,
) -> Source:
    """Open "stdlib", text files (.jsonl and others; a folder, a pattern, several), or Megatron files.

    Megatron's by their prefix, the .bin or the .idx. "stdlib" is split here, and text files where eval_fraction says
    what part is held out; otherwise an eval set is a file of its own, read whole.
    cache: where a large corpus's tokens are kept
    """
    del seed  # the order of samples is the loader's; no source here draws
    if split not in SPLITS:
        raise ValueError(f"`split` must be train or eval, but is {split!r}")
    if sequence_length < 1:
        raise ValueError(f"`sequence_length` must be at least 1, but is {sequence_length}")
    if str(name_or_path) == "stdlib":
        if tokenizer_path is not None:
            raise ValueError(
                f"`tokenizer` must be left out for stdlib, which is bytes, but is {tokenizer_path}"
            )
        return open_stdlib(split=split, sequence_length=sequence_length)
    files = text_files(str(name_or_path))
    if files is None:
        if eval_fraction is not None:
            raise ValueError(
                f"`eval_fraction` must be left out for token files such as {name_or_path}; name others with --eval_data"
            )
        return open_megatron(
            Path(name_or_path), sequence_length=sequence_length, tokenizer_path=tokenizer_path
        )
    reading = Reading(
        tokenizer_path=None if tokenizer_path is None else str(tokenizer_path),
        on_bad_sample=on_bad_sample,
        train_inserted=train_inserted,
        date=date if writes_dates(tokenizer_path) else None,
        eval_fraction=eval_fraction,
        held_out=split == "eval",
    )
    return open_corpus(
        files, reading, sequence_length=sequence_length, pack=pack, cache=cache or CACHE.expanduser()
    )
