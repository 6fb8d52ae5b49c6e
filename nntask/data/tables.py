"""Texts made of rows: the rows of parquet and arrow files, or the lines of text files, one after another as one text.

A row without a newline at its end gets one, so rows never run into each other (WikiText's rows are the lines of its articles and have theirs).
pyarrow is imported when a parquet or arrow file is read.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..errors import DataError
from .texts import PIECE_NBYTES, Replaced, Text, decoded

TABLES: Final = (".parquet", ".arrow")
_COLUMN: Final = "text"
_ROWS_AT_ONCE: Final = 4096


@dataclass(frozen=True, slots=True)
class RowText(Text):
    """The rows of several files as one text.

    Args:
        files: parquet, arrow or text files, in order.
        select: only the first `select` rows; -1 for all.
    """

    files: tuple[Path, ...] = ()
    select: int = -1

    def pieces(self, replaced: Replaced | None = None) -> Iterator[str]:
        """The text in pieces of whole rows, about 1 MiB each.

        Args:
            replaced: counter of the bytes of text files that are replaced.

        Raises:
            DataError: a file cannot be read, or has no column of texts.
        """
        rows = (row for file in self.files for row in rows_of(file, replaced))
        size, piece = 0, []
        for row in itertools.islice(rows, self.select if self.select >= 0 else None):
            piece.append(row if row.endswith("\n") else row + "\n")
            size += len(row)
            if size >= PIECE_NBYTES:
                yield "".join(piece)
                size, piece = 0, []
        if piece:
            yield "".join(piece)


def rows_of(file: Path, replaced: Replaced | None = None) -> Iterator[str]:
    """The rows of one file.

    Args:
        file: a parquet, arrow or text file.
        replaced: counter of the bytes of text files that are replaced.

    Raises:
        DataError: the file cannot be read or has no column of texts, or pyarrow is missing.
    """
    try:
        if file.suffix in TABLES:
            yield from _table_rows(file)
        else:
            with file.open("rb") as lines:
                yield from _lines(decoded(lines, file, replaced))
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror or error}; copy it again") from None


def _lines(pieces: Iterable[str]) -> Iterator[str]:
    """The lines of a text in pieces, each with its line feed."""
    rest = ""
    for piece in pieces:
        *lines, rest = (rest + piece).split("\n")
        yield from (line + "\n" for line in lines)
    if rest:
        yield rest


def check_tables(files: Sequence[Path]) -> None:
    """Check that pyarrow is installed if any of the files is a parquet or arrow file.

    Raises:
        DataError: pyarrow is needed and is not installed.
    """
    tables = [file for file in files if file.suffix in TABLES]
    if tables and importlib.util.find_spec("pyarrow") is None:
        raise DataError(f"reading {tables[0]} needs the pyarrow package; pip install -e '.[hf]', or save the texts as files")


def _table_rows(file: Path) -> Iterator[str]:
    check_tables([file])
    import pyarrow as pa

    try:
        names, batches = _batches(file)
        column = _COLUMN if _COLUMN in names else names[0] if len(names) == 1 else None
        if column is None:
            raise DataError(f"{file} has the columns {', '.join(names)} and none is called {_COLUMN}; keep one of them, or call it {_COLUMN}")
        for batch in batches([column]):
            values = batch.column(column)
            if not pa.types.is_string(values.type) and not pa.types.is_large_string(values.type):
                raise DataError(f"the column {column} of {file} holds {values.type}, and texts are needed; give files with a column of strings")
            for value in values.to_pylist():
                yield value or ""
    except pa.ArrowException as error:
        raise DataError(f"{file} is not a whole {file.suffix[1:]} file: {str(error).splitlines()[0]}; copy it again") from None


def _batches(file: Path) -> tuple[list[str], Callable[[list[str]], Iterator[Any]]]:
    """The names of a table's columns, and a function from column names to batches of their rows."""
    if file.suffix == ".parquet":
        import pyarrow.parquet as pq

        table = pq.ParquetFile(file)
        return table.schema_arrow.names, lambda columns: table.iter_batches(_ROWS_AT_ONCE, columns=columns)
    import pyarrow as pa

    stream = pa.ipc.open_stream(pa.OSFile(str(file)))
    return stream.schema.names, lambda columns: (batch.select(columns) for batch in stream)
