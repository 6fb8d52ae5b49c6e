"""Errors of nntask are data: a flag, a clause and a remedy, and for memory the shortage; messages are these, and copies keep them."""

from __future__ import annotations

from copy import copy

import pytest

from nntask import DataError, DoesNotFit, StorageError, UsageError
from nntask.errors import NntaskError
from scheduler import Shortage

LACK = Shortage("step", "ram", 2, 1)

ERRORS = [
    (UsageError("must be above 0, got -1", "use 1e-3", flag="--lr"), "--lr must be above 0, got -1", "--lr must be above 0, got -1; use 1e-3"),
    (UsageError("it is a whole sentence; read it"), "it is a whole sentence; read it", "it is a whole sentence; read it"),
    (DataError("a.bin is empty", "copy it again"), "a.bin is empty", "a.bin is empty; copy it again"),
    (StorageError("the disk is full"), "the disk is full", "the disk is full"),
    (DoesNotFit(LACK.fact, "raise --ram", shortage=LACK), LACK.fact, f"{LACK.fact}; raise --ram"),
    (DoesNotFit("2 B are above 1 B", "lower it", flag="--ram", shortage=LACK), "--ram 2 B are above 1 B", "--ram 2 B are above 1 B; lower it"),
]


@pytest.mark.parametrize(("error", "fact", "sentence"), ERRORS)
def test_an_error_is_its_parts(error: NntaskError, fact: str, sentence: str) -> None:
    """And a copy is the same, without the cause."""
    error.__cause__ = OSError("planted")
    for each in (error, copy(error)):
        assert (each.fact, str(each)) == (fact, sentence)
        assert (type(each), each.exit_code, vars(each)) == (type(error), error.exit_code, vars(error))
    assert copy(error).__cause__ is None
    assert getattr(copy(error), "shortage", None) == getattr(error, "shortage", None)


def test_another_name_of_a_flag_begins_the_message() -> None:
    """The variable or key that has set it; the flag, the rest and the original stay."""
    error = DoesNotFit("12 TB cannot be reserved", "lower it", flag="--ram", shortage=LACK)
    named = error.naming("ram in run.toml")
    assert str(named) == "ram in run.toml 12 TB cannot be reserved; lower it"
    assert (named.flag, named.fact, named.shortage) == ("--ram", "ram in run.toml 12 TB cannot be reserved", LACK)
    assert str(error) == "--ram 12 TB cannot be reserved; lower it"
