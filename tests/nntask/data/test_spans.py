"""Corrupted spans: sizes, sentinels, and that input and output hold the text between them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.objective_data import TEXTS, Learner, opened, tokenizer_in
from support.search import search

from nntask.config.settings import DataSettings
from nntask.data import BatchStream, Objective, TokenFile, load_tokenizer
from nntask.data.spans import CorruptedSpans, first_sentinel, lengths_of, longest, sizes_of
from nntask.errors import DataError


def test_sizes_are_those_of_t5() -> None:
    """512 input tokens are made of 568 tokens of text, and give 114 of output (compute_input_and_target_lengths of T5)."""
    sizes = longest(512, None, 0.15)
    assert sizes is not None
    assert (sizes.text, sizes.input, sizes.output) == (568, 512, 114)
    small = longest(512, 30, 0.15)
    assert small is not None
    assert small.output <= 30 < sizes_of(small.text + 10, 0.15).output


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 2**32))
@search(60)
def test_lengths_add_up(total: int, count: int, seed: int) -> None:
    """Each is at least 1."""
    count = min(total, count)
    found = lengths_of(total, np.random.default_rng(seed).random(total - 1), count)
    assert len(found) == count
    assert found.sum() == total
    assert found.min() >= 1


@given(st.integers(4, 90), st.floats(0.05, 0.6), st.integers(0, 2**32))
@search(60)
def test_input_and_output_hold_the_text(tmp_path_factory: pytest.TempPathFactory, length: int, probability: float, seed: int) -> None:
    """What the sentinels of the output are followed by, put in the places of the input's, gives the text back; every sentinel once, in order."""
    path = tmp_path_factory.mktemp("spans") / "t.bin"
    sizes = longest(length, None, probability)
    assert sizes is not None
    path.write_bytes(np.random.default_rng(seed).integers(0, 100, 3 * sizes.text).astype("<u2").tobytes())
    file = TokenFile(path, vocab_size=200)
    objective = Objective("seq2seq", length=length, target_length=sizes.output, mask_probability=probability)
    examples = CorruptedSpans(file, objective, None, 200, seed)
    source, target = examples.corrupted(file.window(sizes.text, sizes.text), 1, 1)
    assert [*source[source >= 100]] == [*target[target >= 100]] == [199 - at for at in range(sizes.spans)]
    hidden = np.split(target, np.flatnonzero(target >= 100))[1:]
    spans = {int(each[0]): each[1:].tolist() for each in hidden}
    text = [token for each in source.tolist() for token in (spans[each] if each >= 100 else [each])]
    assert text == file.window(sizes.text, sizes.text).tolist()
    file.close()


def test_sentinels_of_a_tokenizer_are_used(tmp_path: Path) -> None:
    """T5's extra ids, wherever they are; as many as there are, each below the last."""
    tokenizer = load_tokenizer(tokenizer_in(tmp_path / "t5", ["a", "<extra_id_2>", "<extra_id_1>", "<extra_id_0>", "b"]))
    assert first_sentinel(tokenizer, 600, 3) == 8
    with pytest.raises(DataError, match="must have sentinels <extra_id_0> to <extra_id_3>, each with an id one below"):
        first_sentinel(tokenizer, 600, 4)
    upwards = load_tokenizer(tokenizer_in(tmp_path / "up", ["<extra_id_0>", "<extra_id_1>"]))
    with pytest.raises(DataError, match="each with an id one below"):
        first_sentinel(upwards, 600, 2)
    assert first_sentinel(None, 600, 2) == 599


def test_spans_of_a_text_become_a_batch(tmp_path: Path) -> None:
    """A tokenizer trained for it leaves the last ids free; outputs are read one later, behind the start id, and end with the end of text."""
    (tmp_path / "text.txt").write_text("\n".join(TEXTS * 5))
    config = Learner("seq2seq", decoder_start_token_id=5)
    data = DataSettings(dataset="text", dataset_path=str(tmp_path / "text.txt"))
    dataset = opened(config, data, 32)
    assert dataset.tokenizer is not None
    assert dataset.tokenizer.vocab_size <= 500
    batch = BatchStream(dataset.examples(1), 3, seed=1).next()
    assert {name: array.shape for name, array in batch.arrays.items()} == {
        **dict.fromkeys(("tokens", "documents"), (3, 32)),
        **dict.fromkeys(("decoder_tokens", "targets"), (3, 8)),
        "factor": (1,),
    }
    assert (batch.arrays["decoder_tokens"][:, 0] == 5).all()
    assert (batch.arrays["decoder_tokens"][:, 1:] == batch.targets[:, :-1]).all()
    assert (batch.targets[:, 0] == 599).all()
    assert (batch.targets[:, -1] == dataset.tokenizer.end_of_text).all()
    assert (batch.tokens == 599).sum(1).tolist() == [1, 1, 1]
    more = opened(config, replace(data, target_len=12), 32)
    longer = BatchStream(more.examples(1), 3, seed=1).next()
    assert longer.targets.shape == (3, 12)
    assert (longer.targets[:, 8:] == -1).all()
    assert longer.arrays["factor"] == np.float32(1 / 24)
    with pytest.raises(DataError, match="take 1 sentinels, the last ids of the model's vocabulary of 257"):
        opened(Learner("seq2seq", vocab_size=257), replace(data, tokenizer="bytes"), 8).examples(0)
