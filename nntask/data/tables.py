"""Rows of parquet and arrow files, read as separate texts, as the lines of one text, or as JSON lines.

pyarrow is imported when a table is read. The first bytes of an arrow file show whether it is a stream or an IPC file (Feather 2).
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from ..errors import DataError
from ..io.regular_file import open_regular
from .opening import check_head, check_line, longest_line, most_unpacked, opened, too_large
from .row_counts import RowCounts
from .row_keys import ROW_KEYS
from .texts import PIECE_NBYTES, Replaced, Text, decoded, is_held_out

TABLES: Final = (".parquet", ".arrow", ".feather")
_COLUMN: Final = "text"
_ROWS_AT_ONCE: Final = 4096
_MAGIC_NBYTES: Final = 512
_RULES: Final = ROW_KEYS["text"]
_BATCH_NBYTES: Final = 16 << 20
"""Limit on the size of a batch in bytes, if each of its rows is the longest text of a dictionary."""
_PER_BYTE: Final = 64
_BESIDES: Final = 48 << 20
"""Limit on an unpacked column of a row group, in bytes: a number for each byte of the file, plus a constant."""
_EMPTY, _TRAIN, _VALIDATION = range(3)


def is_table(name: str) -> bool:
    """Return whether a file is a table, by its name."""
    return name.lower().endswith(TABLES)


class TableTexts(Collection[Text]):
    """The rows of tables, each as a separate text; empty rows are left out.

    Args:
        files: paths of the tables, in order.
        counts: counters of empty rows and unknown columns, over all splits.

    Raises:
        DataError: a table cannot be read or has no column of texts, or a row has a key that is refused.
    """

    def __init__(self, files: tuple[Path, ...], counts: RowCounts) -> None:
        self._files, self._splits = files, bytearray()  # split of each row, kept because it takes a hash of the text
        self._kept = bytes([_TRAIN, _VALIDATION])
        for file in files:
            self._splits += bytes((_VALIDATION if is_held_out(row) else _TRAIN) if row else _EMPTY for row in _counted_rows(file, counts))
        counts.num_rows += len(self._splits)
        counts.add("rows_empty", self._splits.count(_EMPTY))

    def of(self, split: Literal["train", "validation"]) -> TableTexts:
        """Return the rows held out for validation, about one in twenty, or the others, without reading the tables again."""
        found = copy.copy(self)
        found._kept = bytes([_TRAIN if split == "train" else _VALIDATION])
        return found

    def __len__(self) -> int:
        return sum(map(self._splits.count, self._kept))

    def __iter__(self) -> Iterator[Text]:
        splits = iter(self._splits)
        for file in self._files:
            for number, (row, split) in enumerate(zip(rows_of(file), splits, strict=False), 1):
                if split in self._kept:
                    yield Text(f"{file.name} row {number}", None, row)

    def __contains__(self, text: object) -> bool:
        return any(each == text for each in self)


@dataclass(frozen=True, slots=True)
class RowText(Text):
    """The rows of several files as the lines of one text. A row without a newline at its end gets one.

    Args:
        files: parquet, arrow or text files, in order.
        select: number of rows to use, from the first; -1 for all.
    """

    files: tuple[Path, ...] = ()
    select: int = -1

    def pieces(self, replaced: Replaced | None = None) -> Iterator[str]:
        """Yield the text in pieces of whole rows, about 1 MiB each.

        Args:
            replaced: counter of replaced bytes of text files; None to count nothing.

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
    """Yield the rows of a file.

    Args:
        file: a parquet, arrow or text file.
        replaced: counter of replaced bytes of text files; None to count nothing.

    Raises:
        DataError: the file cannot be read or has no column of texts, or pyarrow is missing.
    """
    if is_table(file.name):
        for batch in _batches(file, lambda schema: [_text_column(file, schema)]):
            yield from (value or "" for value in batch.column(0).to_pylist())
    else:
        with opened(file) as lines:
            yield from _lines(decoded(lines, file, replaced), file)


def _counted_rows(file: Path, counts: RowCounts) -> Iterator[str]:
    """Yield the texts of the rows of a table, and count its unknown columns; raise DataError for a value in a column that is refused."""
    text, others, num_rows = "", list[str](), 0

    def columns_of(schema: Any) -> list[str]:
        nonlocal text, others
        text = _text_column(file, schema)
        others = [name for name in schema.names if name != text]
        return [text, *(name for name in others if name in _RULES and _RULES[name].use == "refused")]

    for batch in _batches(file, columns_of):
        if batch.num_columns > 1:
            refused = batch.select([name for name in batch.schema.names if name != text])
            for number, row in enumerate(refused.to_pylist(), num_rows + 1):
                counts.check("text", (row,), f"{file} row {number}")
        num_rows += batch.num_rows
        yield from (value or "" for value in batch.column(text).to_pylist())
    counts.add_columns("text", others, num_rows)


def json_rows(file: Path, nullable: str = "") -> Iterator[str]:
    """Yield the rows of a table as JSON objects, without null values except in the column `nullable`, as a table gives every row all keys.

    Raises:
        DataError: the file cannot be read, or pyarrow is missing.
    """
    for batch in _batches(file, lambda schema: schema.names):
        for row in batch.to_pylist():
            filled = _without_nulls(row)
            if nullable in row and nullable not in filled:
                filled = {**filled, nullable: None}
            yield json.dumps(filled, ensure_ascii=False, default=str)


def _lines(pieces: Iterable[str], file: Path) -> Iterator[str]:
    """Yield the lines of a text in pieces, each with its line feed; raise DataError if a line of a compressed file is too large."""
    most, size, begun = longest_line(file), 0, list[str]()
    for piece in pieces:
        first, *lines = piece.split("\n")
        begun.append(first)
        size += len(first)
        check_line(size, most, file)
        if lines:
            yield "".join(begun) + "\n"
            yield from (line + "\n" for line in lines[:-1])
            begun, size = [lines[-1]], len(lines[-1])
    if size:
        yield "".join(begun)


def check_tables(files: Sequence[Path]) -> None:
    """Check that pyarrow is installed if any of the files is a parquet or arrow file.

    Raises:
        DataError: pyarrow is needed and is not installed.
    """
    tables = [file for file in files if is_table(file.name)]
    if tables and importlib.util.find_spec("pyarrow") is None:
        raise DataError(f"reading {tables[0]} needs the pyarrow package", "pip install -e '.[hf]', or save the texts as files")


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _batches(file: Path, columns_of: Callable[[Any], list[str]]) -> Iterator[Any]:
    """Yield the rows of a table in batches; `columns_of` returns the columns to read, from a schema. Raise DataError if the table cannot be read."""
    check_tables([file])
    import pyarrow as pa

    try:
        with os.fdopen(open_regular(file), "rb") as head:
            magic = head.read(_MAGIC_NBYTES)
        check_head(file, magic)
        if magic.startswith(b"FEA1"):
            raise DataError(f"{file} is a file of Feather 1, which is not read", "write it again with pyarrow.feather.write_feather, or as parquet")
        schema, batches = _opened(file, magic)
        yield from batches(columns_of(schema))
    except pa.ArrowException as error:
        raise DataError(f"{file} is not a whole {file.suffix[1:]} file: {str(error).splitlines()[0]}", "copy it again") from None
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror or error}", "copy it again") from None


def _text_column(file: Path, schema: Any) -> str:
    """Return the name of a table's column of texts; raise DataError if there is no such column, or it does not contain strings."""
    import pyarrow as pa

    names = schema.names
    column = _COLUMN if _COLUMN in names else names[0] if len(names) == 1 else None
    if column is None:
        raise DataError(f"{file} has the columns {', '.join(names)} and none is called {_COLUMN}", f"keep one of them, or call it {_COLUMN}")
    kind = schema.field(column).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise DataError(f"the column {column} of {file} holds {kind}, and texts are needed", "give files with a column of strings")
    return str(column)


def _opened(file: Path, magic: bytes) -> tuple[Any, Callable[[list[str]], Iterator[Any]]]:
    """Return the schema of a table, and a function from column names to batches of rows with these columns."""
    import pyarrow as pa

    if file.suffix.lower() == ".parquet" or magic.startswith(b"PAR1"):
        import pyarrow.parquet as pq

        table = pq.ParquetFile(file)
        _check_unpacked(file, table.metadata)
        return table.schema_arrow, lambda columns: _within(file, _parquet_batches(file, table, columns))
    source = pa.OSFile(str(file))
    if magic.startswith(b"ARROW1"):
        reader = pa.ipc.open_file(source)
        return reader.schema, lambda columns: _within(file, (reader.get_batch(at).select(columns) for at in range(reader.num_record_batches)))
    stream = pa.ipc.open_stream(source)
    return stream.schema, lambda columns: _within(file, (batch.select(columns) for batch in stream))


def _parquet_batches(file: Path, table: Any, columns: list[str]) -> Iterator[Any]:
    """Yield the rows of a parquet file in batches, with fewer rows if a dictionary has long texts, since every row may be the longest one."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    leaves = [table.schema.column(at) for at in range(len(table.schema))]
    texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY" and leaf.path.split(".")[0] in columns]
    probe = pq.ParquetFile(file, read_dictionary=texts)
    for group in range(table.num_row_groups):
        longest = 1
        for batch in probe.iter_batches(1, row_groups=[group], columns=columns) if texts else ():
            for values in _dictionaries(batch.columns):
                longest = max(longest, pc.max(pc.binary_length(values)).as_py() or 0)
            break
        num_rows = max(1, min(_ROWS_AT_ONCE, _BATCH_NBYTES // longest))
        yield from table.iter_batches(num_rows, row_groups=[group], columns=columns)


def _dictionaries(arrays: Iterable[Any]) -> Iterator[Any]:
    """Yield the dictionaries of arrays and of the arrays nested in them."""
    import pyarrow as pa

    for array in arrays:
        if pa.types.is_dictionary(array.type):
            yield array.dictionary
        elif pa.types.is_struct(array.type):
            yield from _dictionaries(array.field(at) for at in range(array.type.num_fields))
        elif pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
            yield from _dictionaries([array.values])


def _within(file: Path, batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches; raise an error if their total size exceeds `most_unpacked`, or a text is not UTF-8."""
    left = most_unpacked(file)
    for batch in batches:
        left -= batch.nbytes
        if left < 0:
            raise too_large(file)
        batch.validate(full=True)  # texts are UTF-8
        yield batch


def _check_unpacked(file: Path, about: Any) -> None:
    """Raise DataError if a column of a parquet file with the metadata `about` unpacks to far more than the size of the file."""
    most = _PER_BYTE * file.stat().st_size + _BESIDES
    for group in range(about.num_row_groups):
        for at in range(about.num_columns):
            column = about.row_group(group).column(at)
            if column.total_uncompressed_size > most:
                raise DataError(
                    f"the column {column.path_in_schema} of {file} unpacks to {column.total_uncompressed_size:,} bytes, far more than the file",
                    "write it in smaller row groups",
                )
