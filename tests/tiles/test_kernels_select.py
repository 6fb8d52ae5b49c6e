"""Choosing one token of each sequence."""

import ml_dtypes
import numpy as np
import pytest

from scheduler import InlineRuntime
from tiles import TileTensor
from tiles.kernels.catalog import kernel
from tiles.ops.select import select_rows


def tensors(x, positions, tile, runtime):
    """Values as tile tensors cut alike along the sequences."""
    whole = TileTensor(runtime, x.shape, tile, x.dtype)
    chosen = TileTensor(runtime, positions.shape, tile[:1], np.int32)
    whole.write(x)
    chosen.write(positions)
    return whole, chosen


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("tile", [(-1, -1, -1), (2, 4, 3), (1, 1, 1), (3, 5, 7)])
def test_rows_are_chosen_from_any_tile(tile, dtype):
    """First, last and middle tokens, over ragged tiles."""
    rng = np.random.default_rng(0)
    x, positions = rng.normal(size=(5, 9, 7)).astype(dtype), np.array([0, 8, 4, 3, 5], np.int32)
    out = select_rows(*tensors(x, positions, tile, InlineRuntime())).read()
    assert out.shape == (5, 1, 7)
    assert np.array_equal(out[:, 0], x[np.arange(5), positions])


def test_the_fast_kernel_equals_the_reference():
    """Tile by tile, over garbage."""
    x, positions = np.random.default_rng(1).normal(size=(3, 4, 2)), np.array([1, 5, 9], np.int32)
    for start in (0, 4, 8):
        outs = [np.full((3, 1, 2), np.nan) for _ in range(2)]
        for backend, out in zip(("reference", "cpu"), outs, strict=True):
            kernel("select_rows", backend)(x, positions, out, start=start, length=12)
        assert np.array_equal(*outs, equal_nan=True)


@pytest.mark.parametrize("position", [-1, 9])
def test_positions_outside_the_sequence_are_named(position):
    """IndexError with the position and the range."""
    with pytest.raises(IndexError, match=rf"0 to 8, got {position} for sequence 1"):
        select_rows(*tensors(np.zeros((2, 9, 3), np.float32), np.array([0, position], np.int32), (2, 4, 3), InlineRuntime()))
