"""Which tests run in `make test`: two cases of each quick one. All others get the marker `more`, with which `make test-more` runs them.

Tests marked ``long``, ``pages`` or ``browser`` stay where their markers put them.
"""

from __future__ import annotations

import resource
import zlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
TABLE = TESTS / "more.txt"
"""Tests that take half a second or more: a line `file::test`, or `file  # reason` for all tests of a file."""
SECONDS = 1.0
"""Processor time of a test of `make test`, with the processes that it starts; above it, the run's last lines name the test."""

SPENT = "processor seconds"
"""Name of that time among the properties of a test's report."""


def listed() -> list[str]:
    """Lines of the table without comments."""
    lines = (line.partition("#")[0].strip() for line in TABLE.read_text().splitlines())
    return [line for line in lines if line]


def name_of(item: pytest.Item) -> str:
    """File and function of a test, as the table has them."""
    return f"{item.path.relative_to(TESTS)}::{getattr(item, 'originalname', None) or item.name}"


def mark(items: Iterable[pytest.Item]) -> None:
    """Mark what `make test` leaves out with `more`.

    Of a parametrised test it keeps the first case and one that the name of the test draws, so that tests of the same matrix keep different cases. Of
    a test marked ``every`` it keeps the first case of each kind, which is the case's id before the first hyphen. The contracts keep all cases.
    """
    slow = set(listed())
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        name = name_of(item)
        if name in slow or name.partition("::")[0] in slow:
            item.add_marker(pytest.mark.more)
        elif not name.startswith("contracts/") and not any(item.get_closest_marker(other) for other in ("long", "pages", "browser")):
            cases[name].append(item)
    for name, same in cases.items():
        if same[0].get_closest_marker("every"):
            kinds = [item.name.partition("-")[0] for item in same]
            kept = {kinds.index(kind) for kind in kinds}
        else:
            kept = {0, 1 + zlib.crc32(name.encode()) % max(1, len(same) - 1)}
        for place, item in enumerate(same):
            if place not in kept:
                item.add_marker(pytest.mark.more)


def processor_seconds() -> float:
    """Processor time of this process and of those that it has started and waited for."""
    own, started = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + started.ru_utime + started.ru_stime


def slow_ones(reports: Iterable[pytest.TestReport]) -> list[str]:
    """Tests of `make test` that took longer than such a test may, the slowest first, each with its processor seconds.

    The contracts and tests marked ``every`` may take longer.
    """
    quick = (report for report in reports if not {"more", "every", "long", "pages"} & report.keywords.keys())
    spent = {report.nodeid: dict(report.user_properties).get(SPENT, 0.0) for report in quick}
    slowest = sorted(spent.items(), key=lambda pair: -pair[1])
    return [f"{seconds:5.1f} s  {name}" for name, seconds in slowest if seconds > SECONDS and not name.startswith("tests/contracts/")]
