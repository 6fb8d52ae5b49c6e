"""Texts that share a sequence: their numbers, what is no target, and which rows go together."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.objective_data import TEXTS, Learner, lines_in, opened, tokenizer_in
from support.search import search

from nntask.config.settings import DataSettings
from nntask.data import BatchStream, TokenFile
from nntask.data.masking import MaskedWindows, Masking
from nntask.data.objectives import Objective
from nntask.data.packing import SeparateMaskedWindows, SeparateWindows, packed
from nntask.data.sampler import Windows, in_order
from nntask.data.spans import CorruptedSpans
from nntask.errors import DataError


def file_of(tmp_path: Path, ids: list[int]) -> TokenFile:
    """A file of ids."""
    (tmp_path / "t.bin").write_bytes(np.array(ids, "<u2").tobytes())
    return TokenFile(tmp_path / "t.bin", vocab_size=50)


def test_one_id_between_texts_begins_the_next(tmp_path: Path) -> None:
    """As in generation, which begins with it; it is still what follows the text before."""
    found = SeparateWindows(file_of(tmp_path, [5, 6, 0, 7, 8, 9, 0, 4, 3]), 8, 0, 0).arrays(np.array([0]), 0)
    assert found["documents"].tolist() == [[1, 1, 2, 2, 2, 2, 3, 3]]
    assert found["targets"].tolist() == [[6, 0, 7, 8, 9, 0, 4, 3]]


def test_ids_before_and_behind_texts_keep_to_them(tmp_path: Path) -> None:
    """What follows the end of a text is no target."""
    found = SeparateWindows(file_of(tmp_path, [1, 5, 2, 1, 6, 7, 2, 1, 8]), 8, 1, 2).arrays(np.array([0]), 0)
    assert found["documents"].tolist() == [[1, 1, 1, 2, 2, 2, 2, 3]]
    assert found["targets"].tolist() == [[5, 2, -1, 6, 7, 2, -1, 8]]


def test_a_batch_of_one_sequence(tmp_path: Path) -> None:
    """It has the arrays that the sequence has in a batch of several."""
    file = file_of(tmp_path, [1, 5, 2, 1, 6, 7, 2, 1, 8] * 3)
    masking = Masking(mask=40, special=np.array([1, 2], np.int32), num_ids=50, probability=0.5, seed=0)
    spans = CorruptedSpans(file, Objective("seq2seq", length=8, target_length=8), None, 50, 0)
    for examples in (
        Windows(file, 8),
        SeparateWindows(file, 8, 1, 2),
        MaskedWindows(file, 8, masking),
        SeparateMaskedWindows(file, 8, masking, 1, 2),
        spans,
    ):
        several = examples.arrays(np.arange(2), 0)
        for number in range(2):
            alone = examples.arrays(np.array([number]), 0)
            assert {name: rows.tolist() for name, rows in alone.items()} == {
                name: rows[number : number + 1].tolist() for name, rows in several.items()
            }


def test_boundaries_of_a_dataset(tmp_path: Path) -> None:
    """With the flag a batch has documents, also of masked tokens; token ids without a tokenizer have no boundaries."""
    place = tokenizer_in(tmp_path / "tok", sorted({word for text in TEXTS for word in text.split()}))
    path = str(lines_in(tmp_path / "t.jsonl", [{"text": text} for text in TEXTS]))
    for kind in ("causal", "masked"):
        data = DataSettings(dataset="jsonl", dataset_path=path, tokenizer_path=str(place), objective=kind, document_boundaries=True)
        dataset = opened(Learner(), data, 64)
        batch = BatchStream(dataset.examples(0), 2, seed=0).next()
        assert sorted(batch.arrays) == ["documents", "factor", "targets", "tokens"]
        assert (np.diff(batch.arrays["documents"]) >= 0).all()
        assert batch.arrays["documents"].max() > 2
        assert batch.arrays["factor"] == np.float32(1 / (batch.targets >= 0).sum())
        scored = dataset.scored_examples(0)
        assert scored is None or all("factor" not in each.arrays for each in in_order(scored, 2, 2))
    (tmp_path / "train.bin").write_bytes(np.arange(300, dtype="<u2").tobytes())
    with pytest.raises(DataError, match="--document-boundaries needs the end-of-text id"):
        opened(Learner(), DataSettings(dataset="train.bin", dataset_path=str(tmp_path), document_boundaries=True)).examples(0)


@given(st.lists(st.integers(1, 20)), st.integers(20, 40))
@search(60)
def test_rows_are_packed_as_long_as_they_fit(lengths: list[int], limit: int) -> None:
    """No sequence is too long, none could take the next row, and every row is in one."""
    begins = list(packed(lengths, limit))
    assert begins[-1] == len(lengths)
    sums = [sum(lengths[one:two]) for one, two in pairwise(begins)]
    assert all(each <= limit for each in sums)
    assert all(each + lengths[begin] > limit for each, begin in zip(sums, begins[1:-1], strict=False))
    assert sum(sums) == sum(lengths)
