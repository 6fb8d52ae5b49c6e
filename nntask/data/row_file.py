"""Row files: directories of rows of token ids, whose fields have any lengths and are read row by row with ``pread``.

A directory is written atomically and contains:

- `values.bin` (int32, little-endian): the ids of all fields of all rows, concatenated;
- `ends.bin` (int64): a 0, then the end of each field in `values.bin`;
- `begins.bin` (int64), only for packed rows: the number of the first row of each sequence, then the number of rows;
- `checksums.json`: checksums of the blocks of the other files (`nntask.io.block_checksums`), verified when a block is first read, and at the heads
  of the files on opening.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import DataError
from ..io.atomic_write import written_aside
from ..io.block_checksums import HEAD_NBYTES, BlockChecksums, block_checksums, discard
from ..io.json_file import read_object
from ..io.sealed_json import sealed, unsealed
from ..io.strided_ranges import OpenFile
from .findings import FINDINGS, Finding, write_findings
from .packing import packed

_VALUES, _ENDS, _BEGINS = "values.bin", "ends.bin", "begins.bin"
_CHECKSUMS: Final = "checksums.json"
_ID: Final = np.dtype("<i4")
_END: Final = np.dtype("<i8")
Row = Sequence[npt.NDArray[np.int32]]


class RowFile:
    """An open directory of rows.

    Args:
        path: the directory.
        num_fields: number of fields of a row.
        name: name of the rows in messages; "" for the path.
        is_written: whether the directory is complete, and therefore has checksums.

    Raises:
        DataError: a file is missing, cut short, or changed since it was written.
    """

    def __init__(self, path: Path, num_fields: int, name: str = "", *, is_written: bool = True) -> None:
        self.path, self.name, self._num_fields = path, name or str(path), num_fields
        self._of = f" (cached rows of {name})" if name else ""
        self._checksums: dict[str, BlockChecksums] = {}
        try:
            names = (name for name in (_VALUES, _ENDS, _BEGINS) if name != _BEGINS or (path / name).exists())
            self._open = {name: OpenFile(path / name) for name in names}
            size = os.fstat(self._open[_ENDS].fd).st_size // _END.itemsize - 1
            self.num_rows = size // num_fields
            if size % num_fields or size < 0:
                raise DataError(f"{path / _ENDS}{self._of} is cut short", self._advice)
            if is_written:
                self._check_heads()
        except OSError as error:
            raise DataError(f"cannot read {path}{self._of}: {error.strerror}", self._advice) from None

    @property
    def _advice(self) -> str:
        return f"remove {self.path}, and the next run rebuilds it"

    @property
    def num_sequences(self) -> int:
        """Number of packed sequences; number of rows if the rows are not packed."""
        return os.fstat(self._open[_BEGINS].fd).st_size // _END.itemsize - 1 if _BEGINS in self._open else self.num_rows

    def sequence(self, number: int) -> list[Row]:
        """Return the rows of a sequence."""
        if _BEGINS not in self._open:
            return [self.row(number)]
        begin, end = self._read(_BEGINS, _END, number, 2)
        return [self.row(each) for each in range(int(begin), int(end))]

    def row(self, number: int) -> Row:
        """Return the fields of a row, (n,) int32 each.

        Raises:
            DataError: the files cannot be read.
        """
        ends = self._read(_ENDS, _END, number * self._num_fields, self._num_fields + 1)
        values = self._read(_VALUES, _ID, int(ends[0]), int(ends[-1] - ends[0]))
        return np.split(values.astype(np.int32), ends[1:-1] - ends[0])

    def _check_heads(self) -> None:
        """Read the checksums, and verify the heads of the files."""
        values = read_object(self.path / _CHECKSUMS, "the checksums")
        sizes = {name: os.fstat(file.fd).st_size for name, file in self._open.items()}
        try:
            digits = unsealed(values)
            if digits.keys() != sizes.keys():
                raise ValueError(f"it has checksums of {', '.join(digits)}, and there are {', '.join(sizes)}")
            self._checksums = {name: BlockChecksums(digits[name], size) for name, size in sizes.items()}
        except ValueError as error:
            raise DataError(f"{self.path / _CHECKSUMS} is damaged: {error}", self._advice) from None
        for name, size in sizes.items():
            self._compare(name, 0, min(size, HEAD_NBYTES))

    def _compare(self, name: str, begin: int, end: int) -> None:
        """Verify the checksums of the bytes [begin, end) of a file; raise DataError if they have changed since they were written."""
        if name not in self._checksums:
            return
        changed = self._checksums[name].first_changed(self._open[name].fd, begin, end)
        if changed is not None:
            discard(self.path / name, self._open[name].fd)
            raise DataError(
                f"{self.path / name} changed since it was written: the bytes from {changed} have another checksum",
                "it is nntask's own cache, which the next run rebuilds",
            )

    def _read(self, name: str, dtype: np.dtype[Any], first: int, count: int) -> npt.NDArray[np.int64]:
        try:
            self._compare(name, first * dtype.itemsize, (first + count) * dtype.itemsize)
            data = os.pread(self._open[name].fd, count * dtype.itemsize, first * dtype.itemsize)
        except OSError as error:
            raise DataError(f"cannot read {self.path / name}{self._of}: {error.strerror}", self._advice) from error
        if len(data) != count * dtype.itemsize:
            raise DataError(f"{self.path / name}{self._of} is shorter than its rows", self._advice)
        return np.frombuffer(data, dtype).astype(np.int64)

    def close(self) -> None:
        """Close the files; closing twice is fine."""
        for file in self._open.values():
            file.close()


def write_rows(path: Path, rows: Iterable[Row], pack: int | None = None, findings: Callable[[], Iterable[Finding]] = tuple) -> None:
    """Write rows to a new directory, one at a time.

    Args:
        path: directory to write; it appears when it is complete.
        rows: rows in order.
        pack: number of positions of a packed sequence, T; a row takes one position fewer than its first field has ids, since the last id is a target
            only. None to make each row a sequence.
        findings: function called when all rows are written; returns their findings, which are stored in the directory.
    """
    with written_aside(path) as new:
        new.mkdir()
        with (new / _VALUES).open("wb") as values, (new / _ENDS).open("wb") as ends:
            num_ids, ends_at = 0, [0]
            ends.write(np.array(ends_at, _END).tobytes())
            for row in rows:
                for field in row:
                    values.write(np.asarray(field, _ID).tobytes())
                    num_ids += len(field)
                    ends.write(np.array([num_ids], _END).tobytes())
        write_findings(new / FINDINGS, findings())
        if pack is not None:
            _write_packs(new, len(row) if num_ids else 1, pack)
        digits = {name: block_checksums(new / name) for name in (_VALUES, _ENDS, _BEGINS) if (new / name).exists()}
        (new / _CHECKSUMS).write_text(sealed(digits), encoding="utf-8")


def _write_packs(directory: Path, num_fields: int, limit: int) -> None:
    """Write the file of the rows that begin a packed sequence of at most `limit` positions."""
    rows = RowFile(directory, num_fields, is_written=False)
    try:
        with (directory / _BEGINS).open("wb") as file:
            for begin in packed((len(rows.row(number)[0]) - 1 for number in range(rows.num_rows)), limit):
                file.write(np.array([begin], _END).tobytes())
    finally:
        rows.close()
