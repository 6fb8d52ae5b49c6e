"""JSON lines: files with an object a line, read one by one. A line that is none, or lacks a key, is an error with its number."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from ..errors import DataError
from .row_keys import format_hint
from .texts import Corpus, Text

JSONL: Final = "jsonl"
_SUFFIXES: Final = (".jsonl", ".json", ".ndjson")
_VALIDATION_SHARE: Final = 20
_HALVES: Final = re.compile("[\ud800-\udfff]")


def clean(text: str) -> str:
    """The text with U+FFFD for each half of a pair of UTF-16, which JSON can say alone and UTF-8 cannot."""
    return _HALVES.sub("\ufffd", text)


@dataclass(frozen=True, slots=True)
class Record:
    """The object of a line, and where that is."""

    values: Mapping[str, Any]
    where: str

    def text(self, key: str) -> str:
        """The string under a key.

        Raises:
            DataError: there is none.
        """
        value = self.values.get(key)
        if not isinstance(value, str):
            what = f"{type(value).__name__} there" if key in self.values else f"the keys {', '.join(self.values) or 'none'}"
            if hint := format_hint(self.values):
                raise DataError(f'{self.where} must have a string under "{key}", got {hint}')
            raise DataError(f'{self.where} must have a string under "{key}", got {what}; mend or remove the line')
        return clean(value)


@dataclass(frozen=True, slots=True)
class JsonLines:
    """The objects of one part of some files.

    Args:
        files: in order.
        split: all lines, about one in twenty that is held out for validation, or the others.
        select: only the first `select` of them; -1 for all.
    """

    files: tuple[Path, ...]
    split: Literal["all", "train", "validation"] = "all"
    select: int = -1

    def __iter__(self) -> Iterator[Record]:
        """The objects in order.

        Raises:
            DataError: a file cannot be read, or a line is no object.
        """
        for number, (line, where) in enumerate(self._lines()):
            if number == self.select:
                return
            if not number and line.lstrip().startswith("["):
                raise DataError(f"{where} holds one array and not an object a line; turn it into lines: jq -c '.[]' FILE > FILE.jsonl")
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where} is not JSON: {error}; mend or remove the line") from None
            if not isinstance(values, dict):
                raise DataError(f'{where} must be an object such as {{"text": "..."}}, got {line.strip()[:40]}; mend or remove the line')
            yield Record(values, where)

    def num_lines(self) -> int:
        """How many objects there are."""
        found = sum(1 for _ in self._lines())
        return found if self.select < 0 else min(found, self.select)

    def digest(self) -> str:
        """A hash of the lines and their order."""
        digest = hashlib.sha256()
        for number, (line, _) in enumerate(self._lines()):
            if number == self.select:
                break
            digest.update(line.encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def _lines(self) -> Iterator[tuple[str, str]]:
        """The lines that are not blank, each with where it is."""
        for file in self.files:
            try:
                with file.open("rb") as lines:
                    for number, encoded in enumerate(lines, 1):
                        line = _decoded(encoded, f"{file} line {number}", "utf-8-sig" if number == 1 else "utf-8")
                        if line.strip() and (self.split == "all" or _is_held_out(line) == (self.split == "validation")):
                            yield line, f"{file} line {number}"
            except OSError as error:
                raise DataError(f"cannot read {file}: {error.strerror}; copy it again") from None


def _decoded(line: bytes, where: str, encoding: str) -> str:
    """The text of a line.

    Raises:
        DataError: it is not UTF-8.
    """
    try:
        return line.decode(encoding)
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not text in UTF-8: {error.reason} at its byte {error.start}; mend or remove the line") from None


def _is_held_out(line: str) -> bool:
    return int.from_bytes(hashlib.sha256(line.strip().encode()).digest()[:8], "little") % _VALIDATION_SHARE == 0


def json_lines(path: str, val_path: str, select: int) -> tuple[JsonLines, JsonLines | None]:
    """The lines for training and for validation; without validation files, about one line in twenty, by a hash of the line.

    Args:
        path: a file, or a directory of files.
        val_path: the same for validation; "" for none.
        select: only the first lines for training; -1 for all.

    Raises:
        DataError: there is no such file, or none with a line.
    """
    files = _files(path, "--dataset-path")
    if val_path:
        train, validation = JsonLines(files, select=select), JsonLines(_files(val_path, "--val-path"))
    else:
        train, validation = JsonLines(files, "train", select), JsonLines(files, "validation")
        if not train.num_lines():
            train = replace(train, split="all")
    if not train.num_lines():
        raise DataError(f"--dataset-path {path} has no line; give a file with an object a line")
    return train, validation if (validation.num_lines() and train.split != "all") or val_path else None


def _files(path: str, flag: str) -> tuple[Path, ...]:
    root = Path(path)
    if not root.is_dir():
        return (root,)
    found = tuple(sorted(each for each in root.iterdir() if each.suffix in _SUFFIXES and not each.name.startswith(".")))
    if not found:
        raise DataError(f"{flag} {path} has no file that ends in {', '.join(_SUFFIXES)}; name the file")
    return found


def first_keys(path: str) -> frozenset[str]:
    """Keys of the first line; none where it cannot be read, which is said when the data are opened."""
    try:
        return frozenset(next(iter(JsonLines(_files(path, "--dataset-path")))).values)
    except (DataError, StopIteration):
        return frozenset()


class LineTexts(Collection[Text]):
    """The strings under "text" of some lines, as texts.

    Args:
        lines: the lines.
    """

    def __init__(self, lines: JsonLines) -> None:
        self._lines, self._count = lines, lines.num_lines()

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Text]:
        return (Text(record.where, None, self._content(record)) for record in self._lines)

    def __contains__(self, text: object) -> bool:
        return any(each == text for each in self)

    def _content(self, record: Record) -> str:
        return record.text("text")


class RowTexts(LineTexts):
    """All strings of some lines, those of messages included, as texts from which a tokenizer learns."""

    def _content(self, record: Record) -> str:
        return "\n".join(_strings(record.values)) + "\n"


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield clean(value)
    elif isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(each)


def line_corpus(path: str, val_path: str, select: int) -> Corpus:
    """The texts of files of JSON lines."""
    train, validation = json_lines(path, val_path, select)
    return Corpus(Path(path).name, LineTexts(train), LineTexts(validation) if validation else ())
