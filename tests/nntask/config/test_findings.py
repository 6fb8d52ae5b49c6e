"""Findings about data: kept in a file, and their numbers in summary.json."""

from __future__ import annotations

from pathlib import Path

import pytest

from nntask.data.findings import Finding, counts, read_findings, write_findings
from nntask.errors import DataError


def test_findings_come_back_from_their_file(tmp_path: Path) -> None:
    """What was written is read; a missing file holds none."""
    findings = (Finding("rows_left_out", 16, 20, "16 of 20 rows are left out"), Finding("bytes_replaced", 3, 0, "3 bytes are replaced"))
    write_findings(tmp_path / "findings.json", findings)
    assert read_findings(tmp_path / "findings.json") == findings
    assert read_findings(tmp_path / "other.json") == ()
    assert counts(findings) == {"rows_left_out": {"number": 16, "total": 20}, "bytes_replaced": {"number": 3, "total": 0}}


def test_a_finding_is_counted_for_all_splits_and_shows_nothing_that_a_terminal_obeys() -> None:
    """Two findings of one key are summed; escape codes in names become text."""
    findings = [Finding("files_empty", 3, 4, "3 of 4"), Finding("files_empty", 1, 2, "1 of 2 in \x1b]0;owned\x07")]
    assert counts(findings) == {"files_empty": {"number": 4, "total": 6}}
    assert findings[1].sentence == "1 of 2 in \\x1b]0;owned\\x07"


@pytest.mark.parametrize("content", ["", "{}[", '[{"key": "a"}]', "7", '["a"]', '[{"key": "a", "number": 1, "total": 1, "sentence": 5}]'])
def test_a_file_of_something_else_is_refused(content: str, tmp_path: Path) -> None:
    """A damaged file of the cache is named, with what to remove."""
    (tmp_path / "findings.json").write_text(content)
    with pytest.raises(DataError, match="remove"):
        read_findings(tmp_path / "findings.json")
