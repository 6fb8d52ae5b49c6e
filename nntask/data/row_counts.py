"""Counts of rows that are cut, changed or left out during encoding, as findings for the header of a run and summary.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from .findings import Finding
from .objectives import Objective
from .row_keys import ROW_KEYS, RowKind, unknown_keys

_MOST_NAMED: Final = 8
"""Largest number of unknown keys that a finding names."""


class RowTally:
    """Counters of the rows of a part of a split.

    Attributes:
        numbers: key of `_SENTENCES` -> number of rows or answers.
        unknown: name of an unknown key -> number of rows that have it.
    """

    def __init__(self) -> None:
        self.numbers, self.unknown = Counter[str](), Counter[str]()

    def add(self, key: str, number: int = 1) -> None:
        """Add to the count of a key of `_SENTENCES`."""
        self.numbers[key] += number

    def check(self, kind: RowKind, rows: Iterable[Mapping[str, Any]], where: str) -> None:
        """Check the keys of a row, or of the messages of a row, and count the unknown ones, each at most once.

        Args:
            kind: kind of `rows`, which determines the known keys.
            rows: the row, or its messages.
            where: position of the row, for error messages.

        Raises:
            DataError: a key is refused.
        """
        for key in dict.fromkeys(key for row in rows for key in unknown_keys(row, kind, where)):
            self.unknown[f'"{key}"' + (" of messages" if kind == "message" else "")] += 1


class RowCounts(RowTally):
    """Counters of the rows of a split.

    Args:
        objective: training objective, with the lengths to which rows are cut.
        split: "training" or "validation"; "" for rows of both.

    Attributes:
        num_rows: number of rows.
    """

    def __init__(self, objective: Objective, split: str) -> None:
        super().__init__()
        self._objective, self._split = objective, split
        self.num_rows = 0

    def add_columns(self, kind: RowKind, columns: Iterable[str], num_rows: int) -> None:
        """Count the unknown columns of a table once for each of its rows."""
        for key in columns:
            if key not in ROW_KEYS[kind] and num_rows:
                self.unknown[f'"{key}"'] += num_rows

    def findings(self) -> Iterator[Finding]:
        """Yield a finding for each counter that is not 0, and one for all unknown keys."""
        before = "validation_" if self._split == "validation" else ""
        split = self._split and f"{self._split} "
        for key, sentence in _SENTENCES.items():
            number, total = self.numbers[key], self.numbers["answers"] if key == "answers_changed" else self.num_rows
            if number:
                terms = {"length": self._objective.length, "target_length": self._objective.target_length}
                yield Finding(before + key, number, total, sentence.format(number=number, total=total, split=split, **terms))
        if self.unknown:
            named = ", ".join(f"{key} in {number}" for key, number in self.unknown.most_common(_MOST_NAMED))
            more = f" and {len(self.unknown) - _MOST_NAMED} others" if len(self.unknown) > _MOST_NAMED else ""
            yield Finding(
                f"{before}unknown_keys",
                len(self.unknown),
                0,
                f"unknown keys of {self.num_rows} {split}rows are ignored: {named}{more}",
            )


_SENTENCES: Final = {
    "rows_empty": "{number} of {total} {split}rows have an empty text and are left out",
    "rows_left_out": "{number} of {total} {split}conversations have no answer to learn within --seq-len {length} and are left out; raise --seq-len",
    "rows_without_answers": "{number} of {total} {split}conversations have no answer that is learnt (weight 0, or none at all) and are left out",
    "rows_cut": "{number} of {total} {split}rows are longer than --seq-len {length} and are cut; raise --seq-len",
    "inputs_cut": "{number} of {total} {split}inputs are longer than --seq-len {length} and are cut; raise --seq-len",
    "outputs_cut": "{number} of {total} {split}outputs are longer than --target-len {target_length} and are cut; raise --target-len",
    "nulls_in_tools": (
        "{number} of {total} {split}conversations have null values in tools or in the arguments of calls, which columnar tables add for "
        "missing keys: those in tools are left out, and those in arguments are learnt; write such rows without them"
    ),
    "answers_changed": (
        "{number} of {total} {split}answers are not learnt as they are in the file: the chat template leaves out a part of them, often the text "
        "between <think> and </think>, or writes it differently"
    ),
}
