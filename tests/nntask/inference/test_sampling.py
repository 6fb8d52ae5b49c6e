"""Choosing tokens from scores."""

import numpy as np
import pytest

from nntask.errors import Diverged
from nntask.inference.sampling import Sampling, choose

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


def test_top_k_keeps_the_lowest_ids_of_equal_scores():
    """What is left does not depend on how scores were sorted."""
    scores = np.array([1.0, 2.0, 1.0, 2.0, 1.0, 0.0])
    assert {choose(scores, Sampling(top_k=3), draw) for draw in np.arange(0, 1, 1e-2)} == {0, 1, 3}


@pytest.mark.filterwarnings("error")
def test_a_temperature_near_zero_takes_the_best_without_a_warning():
    """Scores over it overflow to minus infinity, which has no weight."""
    assert {choose(LOGITS, Sampling(temperature=5e-324), draw) for draw in (0.0, 0.5, 0.999)} == {1}


@pytest.mark.parametrize("how", [Sampling(temperature=0), Sampling(), Sampling(top_k=2)])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_scores_that_are_not_finite_are_refused(how, bad):
    """Nothing is chosen from them, wherever they are."""
    with pytest.raises(Diverged, match=r"must be finite, and one is -?(nan|inf).*use an earlier checkpoint"):
        choose(np.array([0.1, bad, 0.3], np.float32), how, 0.5)


def test_draws_are_counted():
    """Equal for the same seed, text and number; others differ."""
    how = Sampling(seed=3)
    found = [how.draw(text, number) for text in range(3) for number in range(3)]
    assert found == [Sampling(seed=3).draw(text, number) for text in range(3) for number in range(3)]
    assert len({*found, Sampling(seed=4).draw(0, 0)}) == 10
    assert all(0 <= each < 1 for each in found)
