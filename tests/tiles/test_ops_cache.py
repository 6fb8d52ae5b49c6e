"""Attention over a cache of keys and values: what is refused, and values against attention over everything at once."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from scheduler import InlineRuntime
from tiles import TileTensor
from tiles.kernels.reference.buckets import Buckets
from tiles.ops import cache
from tiles.ops.attention import Bias, Scoring, attention

B, T, H, G, D = 3, 11, 4, 2, 4


def data(values: np.ndarray, tile: tuple[int, ...], runtime: InlineRuntime) -> TileTensor:
    """A tile tensor with these values."""
    found = TileTensor(runtime, values.shape, tile, values.dtype)
    found.write(values)
    return found


@pytest.mark.parametrize("piece", [1, 2, 5, 11])
@pytest.mark.parametrize(("b", "t", "g"), [(3, 11, 2), (2, 3, 1), (1, 4, 2), (3, 1, 1)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_pieces_equal_the_whole(dtype: type, b: int, t: int, g: int, piece: int) -> None:
    """Tokens that arrive in pieces see what they see when all come at once."""
    runtime, rng = InlineRuntime(), np.random.default_rng(0)
    q, k, v = (rng.standard_normal((B, T, heads * D)).astype(dtype) for heads in (H, G, G))
    want = attention(*(data(x, (b, t, tile * D), runtime) for x, tile in ((q, 2 * g), (k, g), (v, g))), head_size=D, scale=0.5)[0].read()
    keys, values = (TileTensor(runtime, (B, T, G * D), (b, t, g * D), dtype) for _ in range(2))
    for tile in range(keys.grid[1]):
        cache.clear(keys, values, tile)
    for start in range(0, T, piece):
        at = np.broadcast_to(np.arange(start, min(start + piece, T), dtype=np.int32), (B, min(piece, T - start)))
        positions = data(at, (b, -1), runtime)
        part = slice(start, start + piece)
        new_q, new_k, new_v = (data(x[:, part], (b, -1, tile * D), runtime) for x, tile in ((q, 2 * g), (k, g), (v, g)))
        cache.append(new_k, new_v, positions, keys, values, range(start // t, int(at.max()) // t + 1))
        found = cache.cached_attention(new_q, keys, values, positions, range(int(at.max()) // t + 1), head_size=D, scale=0.5).read()
        assert np.abs(found - want[:, part]).max() < (1e-5 if dtype == np.float32 else 1e-12)
    assert np.array_equal(keys.read(), k)
    assert np.array_equal(values.read(), v)


@pytest.mark.parametrize("piece", [1, 3])
@pytest.mark.parametrize(("b", "t", "g"), [(3, 11, 2), (2, 3, 1), (1, 4, 2)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", ["window", "bias", "cap", "all"])
def test_pieces_with_a_pattern_equal_the_whole(name: str, dtype: type, b: int, t: int, g: int, piece: int) -> None:
    """Windows, biases and caps; sequences that begin at different positions; tiles in front of every window are not looked at."""
    runtime, rng = InlineRuntime(), np.random.default_rng(0)
    q, k, v = (rng.standard_normal((B, T, heads * D)).astype(dtype) for heads in (H, G, G))
    bias = Bias(data(rng.standard_normal((6, H)).astype(dtype), (-1, 2 * g), runtime), Buckets(6, False, 7))
    chosen = {"window": Scoring(window=4), "bias": Scoring(bias=bias), "cap": Scoring(cap=0.8), "all": Scoring(0.8, bias, 5)}
    scoring = chosen[name]
    whole = (data(x, (b, t, tile * D), runtime) for x, tile in ((q, 2 * g), (k, g), (v, g)))
    want = attention(*whole, head_size=D, scale=0.5, scoring=scoring)[0].read().astype(np.float64)
    keys, values = (data(x, (b, t, g * D), runtime) for x in (k, v))
    for start in range(0, T - 2 * piece, piece):
        at = (start + np.minimum(np.arange(B)[:, None] * piece, T) + np.arange(piece)).astype(np.int32)
        at = np.minimum(at[:, :1], T - piece) + np.arange(piece, dtype=np.int32)
        rows = np.arange(B)[:, None]
        written = range(int(at.min()) // t, int(at.max()) // t + 1)
        first = cache.first_seen_tile(scoring.window, written, t)
        assert first == (max(0, written.start * t + 1 - scoring.window) // t if scoring.window else 0)
        found = cache.cached_attention(
            data(q[rows, at], (b, -1, 2 * g * D), runtime),
            keys,
            values,
            data(at, (b, -1), runtime),
            range(first, written.stop),
            head_size=D,
            scale=0.5,
            scoring=scoring,
        ).read()
        bound = {np.float32: 1e-5, np.float64: 1e-12}.get(dtype, 6e-2)
        assert np.abs(found.astype(np.float64) - want[rows, at]).max() < bound


def test_tensors_that_do_not_fit_are_refused() -> None:
    """Tokens cut along their axis, other numbers of positions, heads that tiles do not share."""
    runtime = InlineRuntime()

    def tensor(shape: tuple[int, ...], tile: tuple[int, ...], dtype: type = np.float32) -> TileTensor:
        return TileTensor(runtime, shape, tile, dtype)

    keys = tensor((B, T, G * D), (2, 4, D))
    with pytest.raises(ValueError, match="one tile along their axis"):
        cache.append(tensor((B, 4, G * D), (2, 2, D)), tensor((B, 4, G * D), (2, 2, D)), tensor((B, 4), (2, 2), np.int32), keys, keys, range(1))
    with pytest.raises(ValueError, match="a position each"):
        cache.append(tensor((B, 4, G * D), (2, 4, D)), tensor((B, 4, G * D), (2, 4, D)), tensor((B, 3), (2, 3), np.int32), keys, keys, range(1))
    with pytest.raises(ValueError, match="must hold the heads that share"):
        cache.cached_attention(tensor((B, 1, H * D), (2, 1, D)), keys, keys, tensor((B, 1), (2, 1), np.int32), range(1), head_size=D, scale=1.0)


@pytest.mark.parametrize(("b", "t", "g"), [(4, 11, 2), (2, 3, 1)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
def test_rows_of_a_cache_change_places_within_tiles(dtype: type, b: int, t: int, g: int) -> None:
    """One sequence goes on as several: at chosen tiles of the positions, and nowhere else; and one row becomes several of another tensor."""
    runtime, rng = InlineRuntime(), np.random.default_rng(0)
    x = rng.standard_normal((4, T, G * D)).astype(dtype)
    found, rows = data(x, (b, t, g * D), runtime), np.array([1, 0, 3, 3], np.int32)
    cache.reorder_rows(found, data(rows, (b,), runtime), range(1, found.grid[1]))
    assert np.array_equal(found.read()[:, t:], x[rows][:, t:])
    assert np.array_equal(found.read()[:, :t], x[:, :t])
    wide = TileTensor(runtime, (12, T, G * D), (3 * b, t, g * D), dtype)
    cache.gather_rows(data(x, (b, t, g * D), runtime), data(np.repeat(np.arange(4, dtype=np.int32), 3), (3 * b,), runtime), wide, range(wide.grid[1]))
    assert np.array_equal(wide.read(), np.repeat(x, 3, axis=0))


@pytest.mark.parametrize("row", [-1, 1, 4])
def test_rows_of_another_tile_are_named(row: int) -> None:
    """Below, before and behind the tile: IndexError with the row and the range; tensors that differ in more than their sequences are refused."""
    runtime = InlineRuntime()
    x, rows = data(np.zeros((4, 3, 2), np.float32), (2, 3, 2), runtime), data(np.array([0, 1, 2, row], np.int32), (2,), runtime)
    with pytest.raises(IndexError, match=rf"must be 2 to 3, got {row} for row 1 of it"):
        cache.reorder_rows(x, rows, [0])
    for other in (x, TileTensor(runtime, (4, 3, 2), (2, 2, 2), np.float32)):
        with pytest.raises(ValueError, match="gathered into another tensor with the same positions"):
            cache.gather_rows(x, rows, other, [0])
