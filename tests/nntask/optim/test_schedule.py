"""Learning rates."""

from itertools import pairwise

import pytest

from nntask.errors import UsageError
from nntask.optim.lr_schedule import SHAPES, make_schedule


def test_a_warm_up_from_a_start_is_the_formula_of_linear_lr():
    """start + (lr - start) * (step - 1) / (steps - 1) up to the last step of the warm-up, then constant."""
    schedule = make_schedule("constant", 3e-4, steps=20, warmup_steps=10, warmup_start_lr=1e-5)
    for step in range(1, 10):
        assert schedule(step) == pytest.approx(1e-5 + (3e-4 - 1e-5) * (step - 1) / 9, rel=1e-12)
    assert [schedule(step) for step in (10, 11, 20)] == [3e-4] * 3


def test_without_warm_up_the_first_step_has_the_whole_rate():
    """Neither no warm-up nor one of a single step divides by zero."""
    assert make_schedule("constant", 1.0, steps=5)(1) == 1.0
    assert make_schedule("constant", 1.0, steps=5, warmup_steps=1, warmup_start_lr=0.0)(1) == 1.0


@pytest.mark.parametrize("kind", list(SHAPES))
def test_warm_up_rises_to_the_peak_and_the_end_is_min_lr(kind):
    """Linear warm-up, then down without a jump (except constant), min_lr in the last step and after it."""
    schedule = make_schedule(kind, 1.0, steps=100, warmup_steps=10, min_lr=0.1)
    rates = [schedule(step) for step in range(1, 121)]
    assert rates[:10] == pytest.approx([i / 10 for i in range(1, 11)])
    assert all(after <= before + 1e-12 for before, after in pairwise(rates[9:]))
    if kind == "constant":
        assert set(rates[9:]) == {1.0}
    else:
        assert rates[99] == pytest.approx(0.1)
        assert rates[119] == pytest.approx(0.1)
        assert max(before - after for before, after in pairwise(rates[9:])) < 0.07


def test_shapes_have_their_known_values():
    """Half-way down: linear and cosine at the middle, wsd still at the peak until the last fifth."""
    middle = 51  # half of the 100 steps after the first
    rates = {kind: make_schedule(kind, 2.0, steps=101)(middle) for kind in SHAPES}
    assert rates == pytest.approx({"constant": 2.0, "linear": 1.0, "cosine": 1.0, "wsd": 2.0})
    assert make_schedule("wsd", 2.0, steps=101)(91) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("cosin", {}, "constant, linear, cosine, wsd"),
        ("linear", {"min_lr": 2.0}, "at most lr"),
        ("linear", {"warmup_steps": -1}, "0 or more"),
    ],
)
def test_broken_rules_are_named(kind, settings, words):
    """One plain sentence each."""
    with pytest.raises(UsageError, match=words):
        make_schedule(kind, 1.0, steps=10, **settings)
