"""Rows, the standard library as a source, and the loader."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from triaxis.engine.data.course import epoch_order
from triaxis.engine.data.loader import Loader
from triaxis.engine.data.source import Source, open_source
from triaxis.engine.data.stdlib import held_out, list_files, open_stdlib
from triaxis.engine.data.stream import ArrayTokens, Rows, Sample, StreamSource, cut_windows, pack_documents
from triaxis.engine.data.tokenizer import BYTE_END
from triaxis.models.batch import IGNORED, Batch

A, B, C = 10, 20, 30
ORDER_OF_SEED_0 = [0, 3, 7, 5, 1, 2, 6, 4]


def stream(lengths: list[int], length: int, rows: Rows | None = None) -> StreamSource:
    """Documents of 10, 11, .. then 20, 21, .. in windows of `length`."""
    documents = [np.arange(size) + 10 * (number + 1) for number, size in enumerate(lengths)]
    tokens = np.concatenate(documents)
    starts = np.cumsum([0, *lengths[:-1]]).astype(np.int64)
    return StreamSource(
        tokens=ArrayTokens(tokens),
        document_starts=starts,
        rows=rows or cut_windows(len(tokens), length),
        sequence_length=length,
        vocab_size=100,
        name_document=lambda document: f"document {document}",
        report="test",
        fingerprint="test",
    )


def numbered(count: int, length: int = 4) -> StreamSource:
    """`count` rows, row i filled with the number i."""
    return StreamSource(
        tokens=ArrayTokens(np.repeat(np.arange(count), length)),
        document_starts=np.arange(0, count * length, length, dtype=np.int64),
        rows=cut_windows(count * length, length),
        sequence_length=length,
        vocab_size=count,
        name_document=lambda document: f"document {document}",
        report="test",
        fingerprint="test",
    )


def loader(source: Source, **changes: int) -> Loader:
    settings = {"seed": 7, "global_batch": 8, "microbatch_size": 2, "data_rank": 0, "data_size": 1}
    return Loader(source, **{**settings, "vocab_size": 1000, **changes})


def ids(batches: list[Batch]) -> list[int]:
    """The row numbers of `numbered` that are trained in the batches."""
    return [
        int(row[0])
        for batch in batches
        for row, labels in zip(batch.tokens_BL, batch.labels_BL, strict=True)
        if (labels != IGNORED).any()
    ]


def joined(parts: list[list[int]]) -> list[int]:
    return [number for part in parts for number in part]


def assert_row(row: Sample, tokens: list[int], labels: list[int], positions: list[int]) -> None:
    assert row.tokens_L.tolist() == tokens
    assert row.labels_L.tolist() == labels
    assert row.positions_L.tolist() == positions
    for array in (row.tokens_L, row.labels_L, row.positions_L):
        assert array.dtype == np.int64


def test_a_window_restarts_positions_and_has_no_loss_across_a_border() -> None:  # B125
    source = stream([3, 2, 6], 4)  # 10 11 12 20 | 21 30 31 32 | 33 34 35
    first, second, third = (source.sample(0, index) for index in range(3))
    assert_row(first, [A, A + 1, A + 2, B], [A + 1, A + 2, IGNORED, B + 1], [0, 1, 2, 0])
    assert first.documents_L is not None and first.documents_L.tolist() == [0, 0, 0, 1]
    assert_row(second, [B + 1, C, C + 1, C + 2], [IGNORED, C + 1, C + 2, C + 3], [0, 0, 1, 2])
    assert second.documents_L is not None and second.documents_L.tolist() == [0, 1, 1, 1]
    assert_row(third, [C + 3, C + 4, C + 5, 0], [C + 4, C + 5, IGNORED, IGNORED], [0, 1, 2, 3])
    assert third.documents_L is None


def test_a_border_at_the_windows_end_is_not_trained() -> None:
    row = stream([4, 4], 4).sample(0, 0)
    assert_row(row, [A, A + 1, A + 2, A + 3], [A + 1, A + 2, A + 3, IGNORED], [0, 1, 2, 3])
    assert row.documents_L is None


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 64])
def test_windows_train_every_token_but_each_documents_first(length: int) -> None:
    lengths = [1, 5, 2, 9, 1, 1, 7]
    source = stream(lengths, length)
    rows = [source.sample(0, index) for index in range(len(source))]
    labels = np.concatenate([row.labels_L for row in rows])
    wanted = [10 * (n + 1) + place for n, size in enumerate(lengths) for place in range(1, size)]
    assert labels[labels != IGNORED].tolist() == wanted
    for row in rows:  # within a document positions ascend by one, and the documents by the borders
        documents = np.zeros(length, int) if row.documents_L is None else row.documents_L
        assert documents[0] == 0
        inside = np.diff(documents) == 0
        assert (np.diff(row.positions_L)[inside] == 1).all()
        assert (row.positions_L[1:][~inside] == 0).all()


@pytest.mark.parametrize(
    ("pack", "wanted"),
    [
        (True, [(0, 3), (3, 5), (5, 9), (9, 13), (13, 15)]),
        (False, [(0, 3), (3, 5), (5, 9), (9, 13), (13, 14), (14, 15)]),
    ],
)
def test_packing(pack: bool, wanted: list[tuple[int, int]]) -> None:
    rows = pack_documents(np.array([0, 3, 5, 14]), 15, 4, pack=pack)
    assert list(zip(rows.starts.tolist(), rows.stops.tolist(), strict=True)) == wanted


def test_one_document_a_row_is_padded_without_loss() -> None:
    source = stream([3, 2], 4, pack_documents(np.array([0, 3]), 5, 4, pack=False))
    assert_row(source.sample(0, 0), [A, A + 1, A + 2, 0], [A + 1, A + 2, IGNORED, IGNORED], [0, 1, 2, 3])
    assert_row(source.sample(0, 1), [B, B + 1, 0, 0], [B + 1, IGNORED, IGNORED, IGNORED], [0, 1, 2, 3])
    assert source.sample(0, 0).documents_L is None


def test_replacing_a_document_leaves_its_neighbours_rows_alone() -> None:  # B125, the data's part
    before, after = stream([5, 5], 10), stream([5, 5], 10)
    after.tokens.tokens[:5] = 77  # type: ignore[attr-defined]
    one, other = before.sample(0, 0), after.sample(0, 0)
    for name in ("tokens_L", "labels_L", "positions_L"):
        assert getattr(one, name)[5:].tolist() == getattr(other, name)[5:].tolist()
    assert one.labels_L[4] == IGNORED


def test_stdlib_splits_by_file(tmp_path: Path) -> None:
    (tmp_path / "json").mkdir()
    for number in range(200):
        (tmp_path / "json" / f"m{number}.py").write_text(f"x = {number}\n")
    (tmp_path / "json" / "empty.py").touch()
    (tmp_path / "json" / "latin.py").write_bytes(b"# \xe9\n")
    for folder in ("site-packages", "test", "tests", "idlelib", "lib2to3"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "no.py").write_text("no")
    (tmp_path / "sitecustomize.py").write_text("no")  # what an installation adds, other accounts lack
    train = open_stdlib(split="train", sequence_length=16, folder=tmp_path)
    evaluation = open_stdlib(split="eval", sequence_length=16, folder=tmp_path)
    names = {
        source.name_document(number)
        for source in (train, evaluation)
        for number in range(len(source.document_starts))
    }
    assert names == {f"json/m{number}.py" for number in range(200)}
    kept = len(evaluation.document_starts)
    assert 0 < kept < 20 and len(train.document_starts) == 200 - kept
    assert f"kept {200 - kept}, empty 1, bad 1" in train.summary()
    assert all(held_out(evaluation.name_document(number)) for number in range(kept))


def test_stdlib_of_this_python() -> None:
    source = open_source("stdlib", split="eval", sequence_length=64, seed=0)
    assert source.vocab_size == 257 and len(source) > 50
    assert Path(json.__file__) in list_files(Path(json.__file__).parents[1])
    rows = [source.sample(0, index) for index in range(len(source))]
    tokens = np.concatenate([row.tokens_L for row in rows])
    ends = np.flatnonzero(tokens == BYTE_END)
    assert len(ends) == len(source.document_starts)  # type: ignore[attr-defined]
    assert (np.concatenate([row.labels_L for row in rows])[ends] == IGNORED).all()
    assert source.describe(0, 0).endswith(".py")
    with pytest.raises(ValueError, match="`tokenizer` must be left out for stdlib"):
        open_source("stdlib", split="eval", sequence_length=64, tokenizer_path="x")
    with pytest.raises(ValueError, match="`split` must be train or eval, but is 'test'"):
        open_source("stdlib", split="test", sequence_length=64)


def test_each_epoch_has_each_row_once_in_an_order_of_its_own_at_any_dp() -> None:  # B105, B106
    source = numbered(64)
    orders = []
    for data_size in (1, 2, 4):
        steps = [
            [
                number
                for rank in range(data_size)
                for number in ids(loader(source, data_rank=rank, data_size=data_size).step_batches(step))
            ]
            for step in range(16)
        ]
        orders.append(steps)
    assert orders[0] == orders[1] == orders[2]
    first, second = joined(orders[0][:8]), joined(orders[0][8:])
    assert sorted(first) == sorted(second) == list(range(64))
    assert first != second != list(range(64))
    assert ids(loader(source, seed=8).step_batches(0)) != orders[0][0]


def test_the_order_is_the_same_for_ever() -> None:
    assert epoch_order(8, seed=0, epoch=0).tolist() == ORDER_OF_SEED_0


def test_a_rank_gets_consecutive_samples_of_the_global_batch() -> None:  # B106
    source, order = numbered(64), epoch_order(64, seed=7, epoch=0).tolist()
    batches = loader(source, data_rank=1, data_size=2).step_batches(1)
    assert [ids([batch]) for batch in batches] == [order[12:14], order[14:16]]


def test_a_resume_with_another_global_batch_goes_on_where_it_was() -> None:  # B110
    source = numbered(256)
    order = epoch_order(256, seed=7, epoch=0).tolist()
    consumed = joined([ids(loader(source).step_batches(step)) for step in range(10)])
    assert consumed == order[:80]
    wide = [loader(source, global_batch=16, data_rank=rank, data_size=4) for rank in range(4)]
    resumed = [n for rank in range(4) for n in ids(wide[rank].step_batches(10, first_sample=80))]
    assert resumed == order[80:96]


def test_a_resume_at_an_epochs_border_trains_the_next_epoch() -> None:  # B111
    source = numbered(64)
    whole = [ids(loader(source).step_batches(step)) for step in range(24)]
    for saved in (8, 16):
        assert [ids(loader(source).step_batches(step)) for step in range(saved, 24)] == whole[saved:]
    assert sorted(joined(whole)) == sorted(list(range(64)) * 3)


def test_a_global_batch_crosses_epochs_and_may_exceed_one() -> None:
    source = numbered(5)
    found = joined([ids(loader(source).step_batches(step)) for step in range(5)])
    wanted = [n for epoch in range(8) for n in epoch_order(5, seed=7, epoch=epoch).tolist()]
    assert found == wanted


@pytest.mark.parametrize("data_size", [1, 2, 4])
@pytest.mark.parametrize("microbatch_size", [1, 2])
def test_evaluation_counts_every_row_once(data_size: int, microbatch_size: int) -> None:  # B40
    source = numbered(10)
    ranks = [
        loader(source, data_rank=rank, data_size=data_size, microbatch_size=microbatch_size)
        for rank in range(data_size)
    ]
    batches = [rank.eval_batches() for rank in ranks]
    assert len({len(found) for found in batches}) == 1
    assert all(len(batch.tokens_BL) == microbatch_size for found in batches for batch in found)
    assert sorted(n for found in batches for n in ids(found)) == list(range(10))
    assert sum(batch.trained_tokens() for found in batches for batch in found) == 10 * 3
    assert ranks[0].eval_samples() == 10 and ranks[0].eval_samples(1) == 8
    assert sorted(n for rank in ranks for n in ids(rank.eval_batches(1))) == list(range(8))


def test_a_batch_of_rows_with_and_without_borders() -> None:
    source = stream([3, 2, 6], 4)
    batch = loader(source, global_batch=3, microbatch_size=3).eval_batches()[0]
    assert batch.documents is not None and batch.documents.borders[-2:] == (8, 12)
    assert batch.tokens_BL.dtype == batch.labels_BL.dtype == batch.positions_BL.dtype == torch.int64
    assert batch.trained_tokens() == 3 + 3 + 2
    assert batch.to(torch.device("meta")).documents == batch.documents
    assert loader(numbered(4)).eval_batches()[0].documents is None


@pytest.mark.parametrize(("vocab_size", "row", "position"), [(13, 0, 3), (21, 1, 0)])
def test_a_token_outside_the_vocabulary_names_its_sample(vocab_size: int, row: int, position: int) -> None:
    source = stream([4, 4], 4)  # 10 11 12 13 | 20 21 22 23
    with pytest.raises(
        ValueError, match=rf"vocab_size {vocab_size} .*but sample {row} \(document {row}\) has"
    ):
        loader(source, microbatch_size=1, vocab_size=vocab_size).eval_batches()
    with pytest.raises(ValueError, match=r"sample 0 .* has 14 at position 4;"):  # a target of the next row
        loader(stream([8], 4), vocab_size=14).eval_batches(1)
    negative = stream([4], 4)
    negative.tokens.tokens[2] = -1  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="has -1 at position 2"):
        loader(negative).eval_batches()


def test_what_a_loader_refuses() -> None:
    with pytest.raises(ValueError, match=r"`global_batch` must be a multiple of .*2 x 3.*, but is 8"):
        loader(numbered(8), data_size=3)
    with pytest.raises(ValueError, match="`seed` must be at least 0, but is -1"):
        loader(numbered(8), seed=-1)
