"""Rows of token ids in files: fields of any lengths, read row by row with ``pread``. A directory that appears when it is complete.

`values.bin` has the ids (int32, little-endian) of all fields of all rows behind each other, `ends.bin` (int64) where each field ends, after a 0;
`begins.bin` (int64), where there is one, the rows that begin a packed sequence, and at its end the number of rows. `checksums.json` has checksums of
the blocks of each (`nntask.io.block_checksums`), which are compared when a block is first read, and at the heads of the files on opening.
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
from ..io.regular_file import open_regular
from ..io.sealed_json import sealed, unsealed
from .findings import FINDINGS, Finding, write_findings
from .packing import packed

_VALUES, _ENDS, _BEGINS = "values.bin", "ends.bin", "begins.bin"
_CHECKSUMS: Final = "checksums.json"
_ID: Final = np.dtype("<i4")
_END: Final = np.dtype("<i8")
Row = Sequence[npt.NDArray[np.int32]]


class RowFile:
    """Rows on disk.

    Args:
        path: their directory.
        num_fields: fields of a row.
        name: what messages call the rows; the path unless given.
        is_written: whether the directory is complete, and so has checksums.

    Raises:
        DataError: a file is missing, cut short, or changed since it was written.
    """

    def __init__(self, path: Path, num_fields: int, name: str = "", *, is_written: bool = True) -> None:
        self.path, self.name, self._num_fields = path, name or str(path), num_fields
        self._of = f" (cached rows of {name})" if name else ""
        self._open: dict[str, int] = {}
        self._checksums: dict[str, BlockChecksums] = {}
        try:
            for file in (_VALUES, _ENDS, _BEGINS):
                if file != _BEGINS or (path / file).exists():
                    self._open[file] = open_regular(path / file)
            size = os.fstat(self._open[_ENDS]).st_size // _END.itemsize - 1
            self.num_rows = size // num_fields
            if size % num_fields or size < 0:
                raise DataError(f"{path / _ENDS}{self._of} is cut short; {self._advice}")
            if is_written:
                self._check_heads()
        except OSError as error:
            raise DataError(f"cannot read {path}{self._of}: {error.strerror}; {self._advice}") from None

    @property
    def _advice(self) -> str:
        return f"remove {self.path} to have it made again"

    @property
    def num_sequences(self) -> int:
        """Packed sequences; rows, where none are packed."""
        return os.fstat(self._open[_BEGINS]).st_size // _END.itemsize - 1 if _BEGINS in self._open else self.num_rows

    def sequence(self, number: int) -> list[Row]:
        """The rows of a sequence."""
        if _BEGINS not in self._open:
            return [self.row(number)]
        begin, end = self._read(_BEGINS, _END, number, 2)
        return [self.row(each) for each in range(int(begin), int(end))]

    def row(self, number: int) -> Row:
        """The fields of a row.

        Raises:
            DataError: the files cannot be read.
        """
        ends = self._read(_ENDS, _END, number * self._num_fields, self._num_fields + 1)
        values = self._read(_VALUES, _ID, int(ends[0]), int(ends[-1] - ends[0]))
        return np.split(values.astype(np.int32), ends[1:-1] - ends[0])

    def _check_heads(self) -> None:
        """Read the checksums, and compare the heads of the files with them."""
        values = read_object(self.path / _CHECKSUMS, "the checksums")
        sizes = {name: os.fstat(fd).st_size for name, fd in self._open.items()}
        try:
            digits = unsealed(values)
            if digits.keys() != sizes.keys():
                raise ValueError(f"it has checksums of {', '.join(digits)}, and there are {', '.join(sizes)}")
            self._checksums = {name: BlockChecksums(digits[name], size) for name, size in sizes.items()}
        except ValueError as error:
            raise DataError(f"{self.path / _CHECKSUMS} is damaged: {error}; {self._advice}") from None
        for name, size in sizes.items():
            self._compare(name, 0, min(size, HEAD_NBYTES))

    def _compare(self, name: str, begin: int, end: int) -> None:
        """Check that the bytes [begin, end) of a file are those that were written.

        Raises:
            OSError: the file cannot be read.
            DataError: the bytes changed.
        """
        if name not in self._checksums:
            return
        changed = self._checksums[name].first_changed(self._open[name], begin, end)
        if changed is not None:
            discard(self.path / name, self._open[name])
            raise DataError(
                f"{self.path / name} changed since it was written: the bytes from {changed} have another checksum; "
                "it is nntask's own cache, which the next run makes again"
            )

    def _read(self, name: str, dtype: np.dtype[Any], first: int, count: int) -> npt.NDArray[np.int64]:
        try:
            self._compare(name, first * dtype.itemsize, (first + count) * dtype.itemsize)
            data = os.pread(self._open[name], count * dtype.itemsize, first * dtype.itemsize)
        except OSError as error:
            raise DataError(f"cannot read {self.path / name}{self._of}: {error.strerror}; {self._advice}") from error
        if len(data) != count * dtype.itemsize:
            raise DataError(f"{self.path / name}{self._of} is shorter than its rows; {self._advice}")
        return np.frombuffer(data, dtype).astype(np.int64)

    def close(self) -> None:
        """Close the files; closing twice is fine."""
        while self._open:
            os.close(self._open.popitem()[1])

    def __del__(self) -> None:
        self.close()


def write_rows(path: Path, rows: Iterable[Row], pack: int | None = None, findings: Callable[[], Iterable[Finding]] = tuple) -> None:
    """Write rows, one at a time.

    Args:
        path: the directory, which appears when it is complete.
        pack: T, positions of the sequences that rows are packed into; a row has as many as its first field without its last id, which is a target
            only. None for a sequence a row.
        findings: called when all rows are written; returns what they lost, which is kept beside them.
    """
    with written_aside(path) as new:
        new.mkdir()
        with (new / _VALUES).open("wb") as values, (new / _ENDS).open("wb") as ends:
            at, ends_at = 0, [0]
            ends.write(np.array(ends_at, _END).tobytes())
            for row in rows:
                for field in row:
                    values.write(np.asarray(field, _ID).tobytes())
                    at += len(field)
                    ends.write(np.array([at], _END).tobytes())
        write_findings(new / FINDINGS, findings())
        if pack is not None:
            _write_packs(new, len(row) if at else 1, pack)
        digits = {name: block_checksums(new / name) for name in (_VALUES, _ENDS, _BEGINS) if (new / name).exists()}
        (new / _CHECKSUMS).write_text(sealed(digits), encoding="utf-8")


def _write_packs(directory: Path, num_fields: int, limit: int) -> None:
    """Write which rows begin a packed sequence."""
    rows = RowFile(directory, num_fields, is_written=False)
    try:
        with (directory / _BEGINS).open("wb") as file:
            for begin in packed((len(rows.row(number)[0]) - 1 for number in range(rows.num_rows)), limit):
                file.write(np.array([begin], _END).tobytes())
    finally:
        rows.close()
