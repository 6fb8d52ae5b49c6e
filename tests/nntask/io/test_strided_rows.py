"""Rows of a file with gaps between them: the same bytes however they are read, and a file that has become shorter is refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nntask.errors import StorageError
from nntask.io.strided_ranges import FileRange, OpenFile, strides_of

ROWS, COLUMNS = 700, 2000


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """A matrix in a file, behind some other bytes."""
    found = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
    path = tmp_path_factory.mktemp("files") / "matrix"
    path.write_bytes(b"abc" + found.tobytes())
    return path, found


@given(
    rows=st.tuples(st.integers(0, ROWS - 1), st.integers(1, ROWS)),
    columns=st.tuples(st.integers(0, COLUMNS - 1), st.integers(1, COLUMNS)),
)
def test_windows(values: tuple[Path, np.ndarray], rows: tuple[int, int], columns: tuple[int, int]) -> None:
    """Gaps of no, few and many bytes, one row and several calls full."""
    path, matrix = values
    window = slice(rows[0], min(ROWS, rows[0] + rows[1])), slice(columns[0], min(COLUMNS, columns[0] + columns[1]))
    whole = FileRange(OpenFile(path), np.dtype(np.float32), 3, matrix.shape, strides_of(matrix.shape, np.dtype(np.float32)))
    found = np.empty(matrix[window].shape, np.float32)
    whole[window].read(found)
    assert np.array_equal(found, matrix[window])


def test_a_file_that_becomes_shorter(values: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    """Between two rows, and inside one."""
    matrix = values[1][:, :100].copy()
    for size in (3 + matrix.nbytes // 2, 3 + matrix.nbytes // 2 + 150, 3):
        path = tmp_path / "short"
        path.write_bytes(b"abc" + matrix.tobytes())
        whole = FileRange(OpenFile(path), np.dtype(np.float32), 3, matrix.shape, strides_of(matrix.shape, np.dtype(np.float32)))
        os.truncate(path, size)
        with pytest.raises(StorageError, match="has become shorter"):
            whole[slice(0, ROWS), slice(10, 60)].read(np.empty((ROWS, 50), np.float32))
