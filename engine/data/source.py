"""Sources of training rows, and which one a name or path means."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from triaxis.engine.data.jsonl import open_jsonl
from triaxis.engine.data.megatron import open_megatron
from triaxis.engine.data.stdlib import open_stdlib
from triaxis.engine.data.stream import Ints, Sample

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
) -> Source:
    """Open "stdlib", a .jsonl file, or Megatron files (their prefix, the .bin or the .idx).

    Only "stdlib" is split here: of files, an eval set is a file of its own, read whole.
    """
    del seed  # the order of samples is the loader's; no source here draws
    if split not in SPLITS:
        raise ValueError(f"`split` must be train or eval, but is {split!r}")
    if sequence_length < 1:
        raise ValueError(f"`sequence_length` must be at least 1, but is {sequence_length}")
    path = Path(name_or_path)
    if str(name_or_path) == "stdlib":
        if tokenizer_path is not None:
            raise ValueError(
                f"`tokenizer` must be left out for stdlib, which is bytes, but is {tokenizer_path}"
            )
        return open_stdlib(split=split, sequence_length=sequence_length)
    if path.suffix == ".jsonl":
        return open_jsonl(
            path,
            sequence_length=sequence_length,
            tokenizer_path=tokenizer_path,
            on_bad_sample=on_bad_sample,
            pack=pack,
        )
    return open_megatron(path, sequence_length=sequence_length, tokenizer_path=tokenizer_path)
