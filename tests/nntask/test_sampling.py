"""Choosing tokens from scores."""

import numpy as np
import pytest

from nntask.trainer.sampling import Sampling, choose, sample

LOGITS = np.log(np.array([0.1, 0.5, 0.15, 0.25]))


def test_temperature_zero_takes_the_best():
    """No chance is involved."""
    assert {choose(LOGITS, Sampling(temperature=0), draw) for draw in (0.0, 0.5, 0.999)} == {1}


def test_draws_follow_the_probabilities():
    """A fine grid of draws meets each token as often as its probability says."""
    found = np.bincount([choose(LOGITS, Sampling(), draw) for draw in np.arange(0, 1, 1e-3)], minlength=4)
    assert np.abs(found / 1000 - np.exp(LOGITS)).max() < 2e-3


@pytest.mark.parametrize(
    ("how", "allowed"), [(Sampling(top_k=2), {1, 3}), (Sampling(top_p=0.5), {1}), (Sampling(top_p=0.6), {1, 3}), (Sampling(top_k=1, top_p=0.1), {1})]
)
def test_top_k_and_top_p_leave_only_the_best(how, allowed):
    """Top-p keeps the smallest set of best tokens that reaches p."""
    assert {choose(LOGITS, how, draw) for draw in np.arange(0, 1, 1e-2)} == allowed


def test_samples_repeat_with_the_seed_and_stay_in_the_vocabulary():
    """Same seed, same text; scores beyond the tokenizer's ids and contexts beyond the model's are cut off."""
    seen: list[int] = []

    def logits(ids):
        seen.append(len(ids))
        return np.arange(10.0)

    def text(seed):
        return list(sample(logits, [0], 8, Sampling(seed=seed), context=4, vocab_size=7))

    assert text(1) == text(1)
    assert text(1) != text(2)
    assert max(text(1)) < 7
    assert max(seen) == 4


def test_a_sample_ends_at_the_stop_token():
    """The stop token is not part of the text."""
    assert list(sample(lambda ids: np.array([0.0, 9.0, 0.0]), [0], 5, Sampling(temperature=0), context=4, vocab_size=3, stop=[1])) == []
