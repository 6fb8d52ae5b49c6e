"""Findings about data: counts of the rows, bytes and files that a run leaves out, cuts or replaces.

Findings are counted during encoding. They are stored in the cache with the encoded data, so that a run that finds its data in the cache reports them
as well. A dataset collects the findings of its splits; the header of a run prints the sentences, and summary.json has the numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from ..errors import DataError
from ..io.atomic_write import written_aside
from ..io.json_text import decoded
from ..io.regular_file import read_text
from ..io.terminal_text import printable

FINDINGS: Final = "findings.json"
"""Name of the file of findings in a cache directory."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A difference between the data in the user's files and the data that a run learns.

    Args:
        key: name in summary.json, for example "rows_left_out".
        number: number of rows, bytes or files concerned.
        total: number of all rows, bytes or files; 0 if a total has no meaning.
        sentence: description for the user, with both numbers and the remedy.
    """

    key: str
    number: int
    total: int
    sentence: str

    def __post_init__(self) -> None:
        if not (isinstance(self.key, str) and isinstance(self.sentence, str) and type(self.number) is int and type(self.total) is int):
            raise TypeError("a finding has a key, two whole numbers and a sentence")
        object.__setattr__(self, "sentence", printable(self.sentence))  # it may contain names from files


def write_findings(path: Path, findings: Iterable[Finding]) -> None:
    """Write a file of findings atomically."""
    with written_aside(path) as new:
        new.write_text(json.dumps([asdict(finding) for finding in findings], indent=1) + "\n", encoding="utf-8")


def read_findings(path: Path) -> tuple[Finding, ...]:
    """Return the findings of a file that `write_findings` wrote; none if there is no file.

    Raises:
        DataError: the file cannot be read or is not a file of findings.
    """
    try:
        return tuple(Finding(**entry) for entry in decoded(read_text(path)))
    except FileNotFoundError:
        return ()
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} is not a file of findings ({error})", "remove it") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "remove it") from None


def no_validation(where: str) -> Finding:
    """Return the finding about a validation split without rows; `where` is a noun phrase for the split."""
    return Finding(
        "validation_missing", 1, 1, f"{where} has no row to validate on, so nothing is validated; add rows, or name others with --val-path"
    )


def counts(findings: Iterable[Finding]) -> dict[str, Any]:
    """Return the findings in the form of summary.json: the number and the total of each key, summed over findings that share it."""
    found: dict[str, dict[str, int]] = {}
    for finding in findings:
        entry = found.setdefault(finding.key, {"number": 0, "total": 0})
        entry["number"] += finding.number
        entry["total"] += finding.total
    return found
