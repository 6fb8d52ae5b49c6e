"""JSON lines: files with one object per line, or tables with one object per row, read one at a time. Errors name the file and line."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from ..errors import DataError
from ..io.json_text import decoded
from .directories import DataFiles, data_files, scored_files
from .findings import Finding, no_validation
from .objectives import Objective
from .opening import inner_suffix, lines_in, opened
from .row_counts import RowCounts
from .row_keys import format_hint
from .tables import TABLES, is_table, json_rows
from .texts import Corpus, Text, is_held_out

JSONL: Final = "jsonl"
_TEXT: Final = "text"
_SUFFIXES: Final = (".jsonl", ".json", ".ndjson")
_HALVES: Final = re.compile("[\ud800-\udfff]")


def clean(text: str) -> str:
    """Return the text with U+FFFD in place of each lone surrogate, which JSON can express and UTF-8 cannot."""
    return _HALVES.sub("\ufffd", text)


@dataclass(frozen=True, slots=True)
class Record:
    """A JSON object `values`, and its position `where` as a file and line (or row), for error messages."""

    values: Mapping[str, Any]
    where: str

    def text(self, key: str) -> str:
        """Return the string under a key.

        Raises:
            DataError: the key is missing or its value is not a string.
        """
        value = self.values.get(key)
        if not isinstance(value, str):
            what = f"{type(value).__name__} there" if key in self.values else f"the keys {', '.join(self.values) or 'none'}"
            if hint := format_hint(self.values):
                raise DataError(f'{self.where} must have a string under "{key}", got {hint}')
            raise DataError(f'{self.where} must have a string under "{key}", got {what}', "fix or remove the line")
        return clean(value)


@dataclass(frozen=True, slots=True)
class JsonLines:
    """The JSON objects of one split of some files.

    Args:
        files: files to read, in order.
        split: "validation" for the lines held out, about one in twenty; "train" for the others; "all" for all lines.
        select: number of lines to keep, from the first; -1 for all.
        nullable: column of tables that is kept in rows that have no value for it; "" for none.
    """

    files: tuple[Path, ...]
    split: Literal["all", "train", "validation"] = "all"
    select: int = -1
    nullable: str = ""

    def __iter__(self) -> Iterator[Record]:
        """Yield the objects in order.

        Raises:
            DataError: a file cannot be read, or a line is not a JSON object.
        """
        for number, (line, position) in enumerate(self._selected()):
            where = str(position)
            try:
                values = decoded(line)
            except ValueError as error:
                _check_begin(line, position, is_first=not number)
                raise DataError(f"{where} is not JSON: {error}", "fix or remove the line") from None
            if not isinstance(values, dict):
                _check_begin(line, position, is_first=not number)
                raise DataError(f'{where} must be an object such as {{"text": "..."}}, got {line.strip()[:40]}', "fix or remove the line")
            yield Record(values, where)

    @property
    def is_empty(self) -> bool:
        """Whether there are no lines."""
        return next(self._lines(), None) is None

    def num_lines(self) -> int:
        """Return the number of lines."""
        return sum(1 for _ in self._selected())

    def digest(self) -> str:
        """Return a hash of the lines and their order."""
        digest = hashlib.sha256()
        for line, _ in self._selected():
            digest.update(line.encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def _selected(self) -> Iterator[tuple[str, _Position]]:
        return itertools.islice(self._lines(), self.select if self.select >= 0 else None)

    def _lines(self) -> Iterator[tuple[str, _Position]]:
        """Yield the lines of the split that are not blank, each with its position."""
        for file in self.files:
            for line, where in _lines_of(file, self.nullable):
                if line.strip() and (self.split == "all" or is_held_out(line) == (self.split == "validation")):
                    yield line, where


class _Position(NamedTuple):
    """Position of a line or row, whose numbers begin at 1; its `str` is for messages."""

    file: Path
    unit: Literal["line", "row"]
    number: int

    def __str__(self) -> str:
        return f"{self.file} {self.unit} {self.number}"


def _lines_of(file: Path, nullable: str) -> Iterator[tuple[str, _Position]]:
    """Yield the lines of a file, or the rows of a table as JSON, each with its position."""
    if is_table(file.name):
        for number, row in enumerate(json_rows(file, nullable), 1):
            yield row, _Position(file, "row", number)
        return
    with opened(file) as lines:
        for number, encoded in enumerate(lines_in(lines, file), 1):
            position = _Position(file, "line", number)
            yield _decoded(encoded, position, "utf-8-sig" if number == 1 else "utf-8"), position


def _check_begin(line: str, position: _Position, *, is_first: bool) -> None:
    """Check that a file is not one JSON value over several lines, by its first line.

    Args:
        line: line that is not an object.
        position: position of the line.
        is_first: whether no object was read before the line.

    Raises:
        DataError: the line is the first one, and it begins an array or an object that continues on the next line.
    """
    is_array = line.lstrip().startswith("[")
    if (is_first or position.number == 1) and (is_array or line.strip() == "{"):
        file = position.file
        what, program = ("one array", ".[]") if is_array else ("objects over several lines", ".")
        raise DataError(f"{file} holds {what} instead of an object per line", f"convert it, for example with jq -c '{program}' {file} > lines.jsonl")


def _decoded(line: bytes, position: _Position, encoding: str) -> str:
    """Return the text of a line; raise DataError if the line is not UTF-8."""
    try:
        return line.decode(encoding)
    except UnicodeDecodeError as error:
        raise DataError(f"{position} is not text in UTF-8: {error.reason} at its byte {error.start}", "fix or remove the line") from None


def json_lines(path: str, val_path: str, select: int) -> tuple[JsonLines, JsonLines | None]:
    """Return the lines for training and for validation.

    Without a validation split, about one line in twenty is held out, chosen by a hash of the line.

    Args:
        path: file, pattern of files, or directory of files.
        val_path: file, pattern or directory for validation; "" for none.
        select: number of training lines to keep, from the first; -1 for all.

    Raises:
        DataError: there is no such file, or the files have no lines.
    """
    files = line_files(path)
    scored = line_files(val_path, "--val-path").train if val_path else files.validation
    if scored:
        train, validation = JsonLines(files.train, select=select), JsonLines(scored)
    else:
        train, validation = JsonLines(files.train, "train", select), JsonLines(files.train, "validation")
        if train.is_empty:
            train = replace(train, split="all")
    if train.is_empty:
        raise DataError("has no line", "give a file with an object per line", flag="--dataset-path", value=path)
    if val_path and validation.is_empty:
        raise DataError("has no line", "give a file with an object per line", flag="--val-path", value=val_path)
    return train, validation if scored or (train.split != "all" and not validation.is_empty) else None


def line_files(path: str, flag: Literal["--dataset-path", "--val-path"] = "--dataset-path") -> DataFiles:
    """Return the files of JSON lines that a flag names: by split for --dataset-path, those for validation for --val-path.

    Raises:
        DataError: there is no such file, or the layout of the directory does not determine the files.
    """
    found = (scored_files if flag == "--val-path" else data_files)(path, flag, _has_lines, _has_lines)
    if not found.train:
        raise DataError(f"has no file that ends in {', '.join((*_SUFFIXES, *TABLES))}", "name the file", flag=flag, value=path)
    return found


def _has_lines(name: str) -> bool:
    return inner_suffix(name) in _SUFFIXES or is_table(name)


def first_keys(path: str) -> frozenset[str]:
    """Return the keys of the first line; empty if it cannot be read, since opening the data reports the error."""
    try:
        return frozenset(next(iter(JsonLines(line_files(path).train))).values)
    except (DataError, StopIteration):
        return frozenset()


class RowTexts(Collection[Text]):
    """All strings of some lines, including those of messages, as texts on which a tokenizer is trained."""

    def __init__(self, lines: JsonLines) -> None:
        self._lines = lines

    def __len__(self) -> int:
        return self._lines.num_lines()

    def __iter__(self) -> Iterator[Text]:
        return (Text(record.where, None, "\n".join(_strings(record.values)) + "\n") for record in self._lines)

    def __contains__(self, text: object) -> bool:
        return any(each == text for each in self)


class LineTexts(RowTexts):
    """The strings under "text" of some lines, as texts; rows whose text is empty or null are left out.

    Args:
        lines: lines whose texts are used.
        split: "training" or "validation", for findings.

    Attributes:
        num_rows: number of lines, including those left out.
        findings: findings about empty rows and unknown keys.

    Raises:
        DataError: a line has no text, or a key that is refused.
    """

    def __init__(self, lines: JsonLines, split: str) -> None:
        super().__init__(replace(lines, nullable=_TEXT))
        counts, num_empty = RowCounts(Objective(), split), 0
        for record in self._lines:
            counts.num_rows += 1
            num_empty += not _text_of(record)
            counts.check("text", (record.values,), record.where)
        counts.add("rows_empty", num_empty)
        self.num_rows, self._num_filled, self.findings = counts.num_rows, counts.num_rows - num_empty, tuple(counts.findings())

    def __len__(self) -> int:
        return self._num_filled

    def __iter__(self) -> Iterator[Text]:
        return (Text(record.where, None, clean(text)) for record in self._lines if (text := _text_of(record)))


def _text_of(record: Record) -> str:
    """Return the text of a line, unchanged; "" for null; raise DataError if the line has no text."""
    value = record.values.get(_TEXT, 0)
    return "" if value is None else value if isinstance(value, str) else record.text(_TEXT)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield clean(value)
    elif isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(each)


def line_corpus(path: str, val_path: str, select: int) -> Corpus:
    """Return the corpus of files of JSON lines; the arguments are those of `json_lines`.

    Raises:
        DataError: see `json_lines`; or a row has no text or a key that is refused; or all texts are empty.
    """
    lines, scored = json_lines(path, val_path, select)
    train = LineTexts(lines, "training")
    if not train and lines.split == "train":  # all rows with a text are held out
        train, scored = LineTexts(replace(lines, split="all"), "training"), None
    validation = None if scored is None else LineTexts(scored, "validation")
    _check_filled(train, path, "--dataset-path")
    if validation is not None and val_path:
        _check_filled(validation, val_path, "--val-path")
    sentences, findings = told_lines(path, val_path)
    findings += train.findings + (validation.findings if validation is not None else ())
    if scored is not None and scored.split == "all" and not validation:
        findings += (no_validation(f"the validation split of --dataset-path {path}"),)
    return Corpus(Path(path).name, train, validation or (), sentences, findings)


def _check_filled(texts: LineTexts, path: str, flag: str) -> None:
    if not texts:
        raise DataError(f"holds no text: all of its {texts.num_rows:,} rows are empty", "give rows with a text", flag=flag, value=path)


def told_lines(path: str, val_path: str) -> tuple[tuple[str, ...], tuple[Finding, ...]]:
    """Return a report of the files used for each split, a sentence for each path, and findings about files left out."""
    files = [line_files(path), *([line_files(val_path, "--val-path")] if val_path else ())]
    return tuple(each.sentence for each in files if each.sentence), tuple(finding for each in files for finding in each.findings)
