"""The diagrams of the package's README are those of the code."""

from __future__ import annotations

import pytest

from scheduler.state_diagrams import README, with_diagrams


def test_diagrams_are_fresh() -> None:
    """`python -m scheduler.state_diagrams` would change nothing."""
    text = README.read_text()
    assert with_diagrams(text) == text, "run: python -m scheduler.state_diagrams"


def test_missing_markers_are_named() -> None:
    """A README without the markers cannot be refreshed, and the error says which are missing."""
    with pytest.raises(ValueError, match=r"begin task states"):
        with_diagrams("nothing here")
