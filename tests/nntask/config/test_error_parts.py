"""Errors of nntask are data: a flag, a clause and a remedy, and for memory the shortage; messages are these, and copies keep them."""

from __future__ import annotations

from copy import copy

import pytest

from nntask import DataError, DoesNotFit, StorageError, UsageError
from nntask.errors import NntaskError, Setting
from scheduler import Shortage
from wrappers.cli.options.sources import SettingOrigin

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


RAM = SettingOrigin("ram", "12TB", "12TB", "run.toml")
DISK = SettingOrigin("NNTASK_DISK", "a", "a")


def test_another_name_of_a_flag_begins_the_message() -> None:
    """The variable or key that has set it, with its value if the flag has it from there; the flag, the rest and the original stay."""
    error = DoesNotFit("cannot be reserved", "lower it", flag="--ram", value="12TB", shortage=LACK)
    named = error.naming({"--ram": RAM})
    assert str(named) == "ram = 12TB in run.toml cannot be reserved; lower it"
    assert (named.flag, named.value, named.fact, named.shortage) == ("--ram", "12TB", "ram = 12TB in run.toml cannot be reserved", LACK)
    assert str(copy(named)) == str(named)
    assert str(error) == "--ram 12TB cannot be reserved; lower it"
    assert str(UsageError("must be a size, got 'x'", flag="--ram").naming({"--ram": RAM})) == "ram in run.toml must be a size, got 'x'"
    assert str(UsageError("is more", flag="--ram", value="1TB").naming({"--ram": RAM})) == "ram in run.toml 1TB is more"


def test_other_flags_are_named_as_well() -> None:
    """The file of a key only once; words of a message that look like a flag stay."""
    others = (Setting("--ram", "12TB"), Setting("--disk", "a"), Setting("--lr", 0.5))
    error = UsageError("{0} and {1} and {2}, not --ram 12TB", "drop {0} or {1}", others=others)
    assert str(error) == "--ram 12TB and --disk a and --lr 0.5, not --ram 12TB; drop --ram 12TB or --disk a"
    assert (error.others, error.remedy) == (others, "drop --ram 12TB or --disk a")
    named = error.naming({"--ram": RAM, "--disk": DISK})
    assert str(named) == "ram = 12TB in run.toml and NNTASK_DISK=a and --lr 0.5, not --ram 12TB; drop ram = 12TB or NNTASK_DISK=a"
    assert error.naming({"--seed": RAM}) is error
