"""Attention over pages of keys and values: values against attention over everything at once, the same bits wherever pages lie, what is refused."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from scheduler import InlineRuntime
from tiles import TileTensor
from tiles.kernels.reference.buckets import Buckets
from tiles.ops import pages
from tiles.ops.attention import Bias, Scoring, attention

T, H, G, D = 11, 4, 2, 4
LENGTH, MOST, PAGES = 3, 4, 12
SCORINGS = {"plain": Scoring(), "cap": Scoring(0.8), "window": Scoring(window=4), "both": Scoring(0.8, window=7)}


def data(values: np.ndarray, tile: tuple[int, ...], runtime: InlineRuntime) -> TileTensor:
    """A tile tensor with these values."""
    found = TileTensor(runtime, values.shape, tile, values.dtype)
    found.write(values)
    return found


def paged(q, k, v, pages_of, g, per_tile, scoring, runtime):
    """Attention of two texts whose tokens come one by one, the second's three steps later; the rest of four rows is idle  # -> (2, T, .)."""
    keys, values = (TileTensor(runtime, (PAGES, LENGTH, G * D), (per_tile, LENGTH, g * D), q.dtype) for _ in range(2))
    for tile in range(keys.grid[0]):
        pages.clear(keys, values, tile)
    found, every = np.full(q.shape, np.nan, np.float64), range(keys.grid[0])
    for step in range(T + 3):
        row_of = {2: 0, 1: 1}  # rows of the texts
        at, table = np.zeros((4, 1), np.int32), np.full((4, MOST), -1, np.int32)
        given = [np.zeros((4, 1, x.shape[2]), q.dtype) for x in (q, k, v)]
        live = [(row, text, step - 3 * text) for row, text in row_of.items() if 0 <= step - 3 * text < T]
        for row, text, position in live:
            at[row], table[row] = position, pages_of[text]
            for new, x in zip(given, (q, k, v), strict=True):
                new[row, 0] = x[text, position]
        tensors = [data(new, (-1, 1, heads * D), runtime) for new, heads in zip(given, (g * H // G, g, g), strict=True)]
        positions, where = data(at, (-1, 1), runtime), data(table, (-1, -1), runtime)
        pages.append(tensors[1], tensors[2], positions, where, keys, values, every)
        out = pages.attention(tensors[0], keys, values, positions, where, every, head_size=D, scale=0.5, scoring=scoring).read()
        for row, text, position in live:
            found[text, position] = out[row, 0]
        idle = [row for row in range(4) if row not in {row for row, _, _ in live}]
        assert not out[idle].any()
    return found


@pytest.mark.parametrize("name", SCORINGS)
@pytest.mark.parametrize(("g", "per_tile"), [(2, 12), (1, 5)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
def test_pages_equal_the_whole(name, dtype, g, per_tile):
    """Two texts at different positions beside idle rows; and other pages give the same bits."""
    runtime, rng = InlineRuntime(), np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, T, heads * D)).astype(dtype) for heads in (H, G, G))
    whole = (data(x, (2, T, tile * D), runtime) for x, tile in ((q, 2 * g), (k, g), (v, g)))
    want = attention(*whole, head_size=D, scale=0.5, scoring=SCORINGS[name])[0].read().astype(np.float64)
    found = paged(q, k, v, np.arange(8).reshape(2, 4), g, per_tile, SCORINGS[name], runtime)
    bound = {np.float32: 1e-5, np.float64: 1e-12}.get(dtype, 6e-2)
    assert np.abs(found - want).max() < bound
    elsewhere = paged(q, k, v, rng.permutation(PAGES)[:8].reshape(2, 4), g, per_tile, SCORINGS[name], runtime)
    assert np.array_equal(found, elsewhere)


def test_tensors_that_do_not_fit_are_refused():
    """Rows in several tiles, several tokens a row, a bias, heads that tiles do not share."""
    runtime = InlineRuntime()

    def tensor(shape, tile, dtype=np.float32):
        return TileTensor(runtime, shape, tile, dtype)

    keys, table, positions = tensor((4, 3, 8), (2, 3, 4)), tensor((5, 4), (5, 4), np.int32), tensor((5, 1), (5, 1), np.int32)
    q = tensor((5, 1, 16), (5, 1, 8))
    with pytest.raises(ValueError, match="rows of one tile"):
        pages.append(*[tensor((5, 1, 8), (2, 1, 4))] * 2, positions, table, keys, keys, range(1))
    with pytest.raises(ValueError, match="rows of one tile"):
        pages.append(*[tensor((5, 2, 8), (5, 2, 4))] * 2, positions, table, keys, keys, range(1))
    with pytest.raises(ValueError, match="must hold the heads that share"):
        pages.attention(tensor((5, 1, 16), (5, 1, 4)), keys, keys, positions, table, range(1), head_size=4, scale=1.0)
    bias = Bias(tensor((6, 4), (6, 2)), Buckets(6, False, 7))
    with pytest.raises(ValueError, match="neither documents nor a bias"):
        pages.attention(q, keys, keys, positions, table, range(1), head_size=4, scale=1.0, scoring=Scoring(bias=bias))
