"""Write Megatron's indexed datasets: from JSON lines, or by merging such datasets.

python -m triaxis.launch.preprocess --input x.jsonl --output prefix [--tokenizer PATH] [--skip-bad]
python -m triaxis.launch.preprocess --merge a b --output prefix

Each text becomes one document, with the tokenizer's end token behind it. Merging gives the very bytes that
one pass over the files behind each other would.
"""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from triaxis.engine.data.jsonl import Document, Tally, read_documents
from triaxis.engine.data.megatron import check_index, strip_suffix
from triaxis.engine.data.tokenizer import open_tokenizer
from triaxis.launch.command_line import Claim, Parser
from triaxis.launch.ending import Exit, refuse, run_command
from triaxis.parallel.places.legal_values import counted


@contextmanager
def writing(
    output: Path, dtype: type[np.integer], *, overwrite: bool = False
) -> Iterator[Any]:  # the builder's library is untyped
    """A builder of output.bin and output.idx, which appear (the index last) only when all was written.

    Drafts have names that nobody else has, so two that write one output cannot mix; the later finds it there.
    Raises ValueError where it is there and may not be overwritten.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder  # noqa: PLC0415 - slow to import

    names = [output.with_name(output.name + suffix) for suffix in (".bin", ".idx")]
    output.parent.mkdir(parents=True, exist_ok=True)
    _refuse_existing(names, overwrite)
    drafts = [_draft(name) for name in names]
    builder = None
    try:
        builder = IndexedDatasetBuilder(str(drafts[0]), dtype=dtype)
        yield builder
        builder.finalize(str(drafts[1]))
        with _alone(output.parent):
            _refuse_existing(names, overwrite)
            names[1].unlink(missing_ok=True)
            for draft, name in zip(drafts, names, strict=True):
                draft.chmod(0o666 & ~_umask())
                draft.replace(name)
    finally:
        if builder is not None:
            with suppress(OSError):  # what a full disk could not take
                builder.data_file.close()
        for draft in drafts:
            draft.unlink(missing_ok=True)


def _refuse_existing(names: Sequence[Path], overwrite: bool) -> None:
    there = [name for name in names if os.path.lexists(name)]
    if there and not overwrite:
        raise ValueError(
            f"`--output` must be a new prefix, but {there[0]} exists; name another, or give --overwrite"
        )


def _draft(name: Path) -> Path:
    """A new, empty file beside it, of this process alone: no link is followed."""
    handle, path = tempfile.mkstemp(prefix=f".{name.name[:100]}.", suffix=".part", dir=name.parent)
    os.close(handle)
    return Path(path)


def _umask() -> int:
    mask: int = os.umask(0o022)
    os.umask(mask)
    return mask


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time renames in a folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def preprocess(
    source: Path,
    output: Path,
    *,
    tokenizer_path: Path | None = None,
    on_bad_sample: str = "error",
    overwrite: bool = False,
) -> Tally:
    """Tokenize a .jsonl file of texts; 16-bit ids where the vocabulary allows, else 32-bit."""
    from megatron.core.datasets.indexed_dataset import DType  # noqa: PLC0415 - slow to import

    tokenizer = open_tokenizer(tokenizer_path)
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    tally = Tally()
    with writing(output, dtype, overwrite=overwrite) as builder:
        for document in read_documents(source, tokenizer, tally, on_bad_sample):
            _refuse_messages(source, document)
            builder.add_document(np.array(document.ids, dtype=dtype), [len(document.ids)])
    return tally


def _refuse_messages(source: Path, document: Document) -> None:
    if document.trained is not None:
        raise ValueError(
            f"{source}:{document.line}: must have `text`, but has `messages`: an indexed dataset cannot say "
            "which tokens are trained; train on the .jsonl file itself"
        )


def merge(prefixes: Sequence[Path], output: Path, *, overwrite: bool = False) -> int:
    """Put datasets behind each other, document borders included; the number of documents."""
    indices = [check_index(prefix) for prefix in prefixes]
    if output.resolve() in [index.prefix.resolve() for index in indices]:
        raise ValueError(f"`--output` must be a new prefix, but {output} is one of those to merge")
    for index in indices[1:]:
        if index.dtype is not indices[0].dtype:
            raise ValueError(
                f"{index.prefix}.idx: the token type must be {indices[0].dtype.__name__} as in "
                f"{indices[0].prefix}.idx, but is {index.dtype.__name__}; tokenize both with one tokenizer"
            )
    with writing(output, indices[0].dtype, overwrite=overwrite) as builder:
        for index in indices:
            builder.add_index(str(index.prefix))
    return sum(index.documents for index in indices)


def main(arguments: Sequence[str] | None = None) -> int:
    warnings.filterwarnings("ignore", module="megatron")  # kernels that are not needed to write its files
    parser = Parser(prog="triaxis preprocess", description=(__doc__ or "").split("\n")[0])
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--input", type=Path, help="a .jsonl file with `text` in each line")
    task.add_argument(
        "--merge", type=Path, nargs="+", metavar="PREFIX", help="datasets to put behind each other"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="PREFIX")
    parser.add_argument(
        "--tokenizer", type=Path, help="tokenizer.json, or a Hugging Face folder (default: bytes)"
    )
    parser.add_argument("--skip-bad", action=Claim, help="leave bad lines out, and list them")
    parser.add_argument("--overwrite", action=Claim, help="write over an output that is there")
    options = parser.parse_args(arguments)
    if options.merge and (options.tokenizer or options.skip_bad):
        parser.error("--tokenizer and --skip-bad belong to --input, but --merge is given")
    output = strip_suffix(options.output)
    try:
        if options.merge:
            documents = counted(merge(options.merge, output, overwrite=options.overwrite), "document")
            print(f"{output}: merged {counted(len(options.merge), 'dataset')}, {documents}")
            return Exit.DONE
        on_bad_sample = "skip" if options.skip_bad else "error"
        tally = preprocess(
            options.input,
            output,
            tokenizer_path=options.tokenizer,
            on_bad_sample=on_bad_sample,
            overwrite=options.overwrite,
        )
    except (ValueError, OSError) as error:
        return refuse("preprocess", error)
    print(f"{options.input}: {tally}; wrote {output}.bin and {output}.idx")
    for line in tally.bad:
        print(f"left out {line}")
    return Exit.DONE


if __name__ == "__main__":
    sys.exit(run_command("preprocess", main))
