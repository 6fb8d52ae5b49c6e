"""Products of rows that are tokens of texts: right, and of a row the same bits however many rows there are and wherever it lies among them."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from support.weight_blocks import blocks_of, columns_of

from scheduler import InlineRuntime
from tiles import BLOCK_FORMATS, TOKEN_ROWS, BlockFormat, QuantisedTensor, TileTensor
from tiles.kernels.cpu.onednn import library as onednn
from tiles.ops import experts, matmul

SHAPES = [(61, 61), (96, 70), (576, 130), (1536, 48), (24, 1), (2080, 67)]
"""Features and columns: multiples of vectors, remainders of both, a single column."""
COUNTS = [1, 2, 3, 4, 5, 7, 8, 11, 16, 31, TOKEN_ROWS]

Product = Callable[[np.ndarray], np.ndarray]


def tensor(runtime: InlineRuntime, values: np.ndarray) -> TileTensor:
    """A tensor of one tile."""
    found = TileTensor(runtime, values.shape, values.shape, values.dtype, name="data")
    found.write(values)
    return found


def check(product: Product, x: np.ndarray, want: np.ndarray, limit: float) -> None:
    """Every row has the bits that it has alone, in every number of rows and every place, and these are right."""
    alone = np.concatenate([product(row[None, None])[0] for row in x])
    assert abs(alone.astype(np.float64) - want).max() <= limit * abs(want).max()
    for count in COUNTS:
        for first in {0, (len(x) - count) // 2, len(x) - count}:
            found = product(x[first : first + count, None])[:, 0]
            assert np.array_equal(found, alone[first : first + count]), (count, first)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("kind", ["linear", "bias", "gelu_new"])
def test_rows_of_fp32_weights(shape: tuple[int, int], turned: bool, kind: str) -> None:
    """Weights as (K, N) and as (N, K), with a bias, and with an activation behind."""
    (k, n), rng, runtime = shape, np.random.default_rng(0), InlineRuntime()
    x, w, bias = (rng.standard_normal(size).astype(np.float32) for size in ((TOKEN_ROWS, k), (n, k) if turned else (k, n), (n,)))
    tw, tb = tensor(runtime, w), tensor(runtime, bias)

    def product(rows: np.ndarray) -> np.ndarray:
        given = tensor(runtime, rows)
        if kind == "gelu_new":
            return matmul.linear_gelu(given, tw, tb, kind, transpose_w=turned)[0].read()
        return matmul.linear(given, tw, tb if kind == "bias" else None, transpose_w=turned).read()

    want = x.astype(np.float64) @ (w.T if turned else w).astype(np.float64) + (0 if kind == "linear" else bias.astype(np.float64))
    check(product, x, want, 2e-6)


@pytest.mark.parametrize("block_format", BLOCK_FORMATS.values(), ids=lambda each: each.name)
@pytest.mark.parametrize("columns", [32, 96, 2080])
def test_rows_of_quantised_weights(block_format: BlockFormat, columns: int) -> None:
    """One block, an odd number of them and many."""
    rng, runtime, columns = np.random.default_rng(1), InlineRuntime(), columns_of(block_format, columns)
    x = rng.standard_normal((TOKEN_ROWS, columns)).astype(np.float32)
    w = QuantisedTensor(runtime, (70, columns), (-1, -1), np.float32, block_format, name="w")
    with runtime.acquire(w[0, 0], "W") as view:
        view[...] = blocks_of(rng.standard_normal((70, columns)), block_format)
    want = x.astype(np.float64) @ w.read().astype(np.float64).T
    check(lambda rows: matmul.linear(tensor(runtime, rows), w, transpose_w=True).read(), x, want, 2e-6)


@pytest.mark.skipif(not onednn.has_bf16_products(), reason="products of bf16 are made of fp32 ones here")
@pytest.mark.parametrize("turned", [False, True])
def test_rows_of_bf16_weights(turned: bool) -> None:
    """oneDNN's sums of bf16 rows do not depend on how many there are."""
    rng, runtime = np.random.default_rng(2), InlineRuntime()
    for k, n in SHAPES:
        x, w = (rng.standard_normal(size).astype(ml_dtypes.bfloat16) for size in ((TOKEN_ROWS, k), (n, k) if turned else (k, n)))
        tw = tensor(runtime, w)
        want = x.astype(np.float64) @ (w.T if turned else w).astype(np.float64)

        def product(rows: np.ndarray, tw: TileTensor = tw) -> np.ndarray:
            return matmul.linear(tensor(runtime, rows), tw, transpose_w=turned).read()

        check(product, x, want, 1e-2)


def test_sums_are_added_to_what_is_there() -> None:
    """Features in several tiles: a chain of sums, again whatever rows there are."""
    rng, runtime = np.random.default_rng(3), InlineRuntime()
    x, w = rng.standard_normal((TOKEN_ROWS, 200)).astype(np.float32), TileTensor(runtime, (70, 200), (70, 96), np.float32, name="w")
    w.write(rng.standard_normal((70, 200)).astype(np.float32))

    def product(rows: np.ndarray) -> np.ndarray:
        given = TileTensor(runtime, rows.shape, (len(rows), 1, 96), np.float32, name="x")
        given.write(rows)
        return matmul.linear(given, w, transpose_w=True).read()

    check(product, x, x.astype(np.float64) @ w.read().astype(np.float64).T, 2e-6)


@pytest.mark.parametrize("rank", [0, 5], ids=["", "with low-rank updates"])
@pytest.mark.parametrize("tile", [96, 60], ids=["one tile of features", "two tiles of features"])
def test_rows_of_experts(tile: int, rank: int) -> None:
    """Each row has the sum of its own experts, whatever other rows chose; the width inside an expert is in two tiles."""
    rng, runtime, width, inner, num_experts = np.random.default_rng(4), InlineRuntime(), 96, 70, 5

    def matrix(shape: tuple[int, int], cut: tuple[int, int]) -> TileTensor:
        result = TileTensor(runtime, shape, cut, np.float32, name="w")
        result.write(rng.standard_normal(shape).astype(np.float32))
        return result

    shapes = [((inner, width), (40, tile))] * 2 + [((width, inner), (tile, 40))]
    matrices = [experts.Expert(*(matrix(*shape) for shape in shapes)) for _ in range(num_experts)]
    shapes = [((rank, width), (-1, tile)), *[((inner, rank), (40, -1))] * 2, ((rank, inner), (-1, 40)), ((width, rank), (tile, -1))]
    updates = experts.ExpertUpdates([experts.ExpertUpdate(*(matrix(*shape) for shape in shapes)) for _ in matrices], 0.1) if rank else None
    x, router = (rng.standard_normal(size).astype(np.float32) for size in ((TOKEN_ROWS, width), (num_experts, width)))

    def routed(rows: np.ndarray) -> experts.Routing:
        return experts.route(tensor(runtime, (rows.astype(np.float64) @ router.T).astype(np.float32)), 2, renormalises=False)

    def product(rows: np.ndarray) -> np.ndarray:
        given = TileTensor(runtime, rows.shape, (len(rows), 1, tile), np.float32, name="x")
        given.write(rows)
        return experts.experts(given, routed(rows), matrices, updates=updates).read()

    chosen, want = routed(x[:, None]), np.zeros((TOKEN_ROWS, width))
    for i, k in np.ndindex(TOKEN_ROWS, 2):
        number = chosen.choices.read()[i, 0, k]
        gate, up, down = (w.read().astype(np.float64) for w in matrices[number])
        if updates is not None:
            a, gate_b, up_b, down_a, down_b = (factor.read().astype(np.float64) for factor in updates.of_experts[number])
            gate, up, down = gate + 0.1 * gate_b @ a, up + 0.1 * up_b @ a, down + 0.1 * down_b @ down_a
        gates = gate @ x[i]
        want[i] += chosen.weights.read()[i, 0, k] * (down @ (gates / (1 + np.exp(-gates)) * (up @ x[i])))
    check(product, x, want, 2e-6)
