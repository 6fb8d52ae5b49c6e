"""Random searches: some examples by default, the same ones every time; all of them, drawn anew, with the long tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import settings

FEW, MANY = "few", "many"
"""Profiles: of the default run, and of ``make test-all``."""
T = TypeVar("T", bound=Callable[..., Any])


def register_profiles() -> None:
    """Tell Hypothesis; `few` is used unless the command line says otherwise."""
    settings.register_profile(FEW, derandomize=True, database=None, deadline=None)
    settings.register_profile(MANY, deadline=None, print_blob=True)
    settings.load_profile(FEW)


def examples(number: int) -> int:
    """How many of so many examples this run looks at."""
    return number if settings.get_current_profile_name() == MANY else max(10, number // 4)


def search(number: int, **options: Any) -> Callable[[T], T]:
    """A property with so many examples in the long tests, and a quarter of them by default."""

    def decorate(test: T) -> T:
        marked: T = pytest.mark.search(settings(max_examples=examples(number), **options)(test))
        return marked

    return decorate
