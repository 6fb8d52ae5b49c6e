"""Quantised tile tensors: products and lookups over tiles beside those with the decoded weights, bytes, and what is refused."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from support.weight_blocks import blocks_of, columns_of

from scheduler import InlineRuntime
from tiles import TileTensor
from tiles.block_format import BLOCK_FORMATS, ENCODED_FORMATS, BlockFormat, decode, encode
from tiles.kernels.cpu.quantised import FEW_ROWS
from tiles.ops import embedding, loss, matmul
from tiles.quantised import QuantisedTensor

B, T, N = 2, 5, 70
FORMATS = list(BLOCK_FORMATS.values())
formats = pytest.mark.parametrize("block_format", FORMATS, ids=lambda each: each.name)


def tensor(runtime: InlineRuntime, values: np.ndarray, tile: tuple[int, ...]) -> TileTensor:
    """A tile tensor with these values."""
    found = TileTensor(runtime, values.shape, tile, values.dtype, name="data")
    found.write(values)
    return found


def quantised(
    runtime: InlineRuntime, values: np.ndarray, tile: tuple[int, int], block_format: BlockFormat, dtype: type, *, is_turned: bool = False
) -> tuple[QuantisedTensor, np.ndarray]:
    """A tensor of blocks for these values, or of random ones of their shape, and the blocks."""
    blocks = blocks_of(values.T if is_turned else values, block_format)
    found = QuantisedTensor(runtime, values.shape, tile, dtype, block_format, is_turned=is_turned, name="w")
    for index, handle in zip(found.tiling.indices(), found.handles, strict=True):
        with runtime.acquire(handle, "W") as view:
            view[...] = blocks[found.stored_slices(index)]
    return found, blocks


@formats
@pytest.mark.parametrize("dtype", [np.float64, np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("tile", [(-1, -1, -1, -1), (1, 2, 2, 24), (2, 5, 1, 70), (1, 1, 3, 7)], ids=str)
@pytest.mark.parametrize("kind", [None, "gelu_new"])
def test_products_and_their_gradient(block_format: BlockFormat, dtype: type, tile: tuple[int, int, int, int], kind: str | None) -> None:
    """y, and dx, are those of the decoded weights; within 1e-3 of torch's in double precision, and much closer in fp32."""
    b, t, k, n = tile
    width = 3 * block_format.block_values
    k = k if k < 0 else k * block_format.block_values
    rng, runtime = np.random.default_rng(0), InlineRuntime()
    x, values, bias, dy = (rng.standard_normal(shape).astype(dtype) for shape in ((B, T, width), (N, width), (N,), (B, T, N)))
    w, blocks = quantised(runtime, values, (n, k), block_format, dtype)
    decoded = decode(blocks, block_format)
    given = torch.tensor(x.astype(np.float64), requires_grad=True)
    pre = given @ torch.tensor(decoded.astype(np.float64)).T + torch.tensor(bias.astype(np.float64))
    want = pre if kind is None else torch.nn.functional.gelu(pre, approximate="tanh")
    tx, tb, tdy = tensor(runtime, x, (b, t, k)), tensor(runtime, bias, (n,)), tensor(runtime, dy, (b, t, n))
    if kind is None:
        y = matmul.linear(tx, w, tb, transpose_w=True)
    else:
        _, y = matmul.linear_gelu(tx, w, tb, kind, transpose_w=True)
    dx = matmul.linear_backward_input(tdy, w, transpose_w=True)
    pre.backward(torch.tensor(dy.astype(np.float64)))
    limit = {8: 1e-12, 4: 2e-6, 2: 2e-2}[np.dtype(dtype).itemsize]
    for found, expected in ((y, want.detach().numpy()), (dx, given.grad.numpy())):
        assert found.dtype == dtype
        assert abs(found.read().astype(np.float64) - expected).max() <= limit * abs(expected).max()


@formats
def test_few_rows_and_many(block_format: BlockFormat) -> None:
    """Both ways of the fp32 kernel agree with decoding first, at the border between them and for wide rows."""
    rng, runtime = np.random.default_rng(1), InlineRuntime()
    columns = columns_of(block_format, 2080)
    w, _ = quantised(runtime, rng.standard_normal((300, columns)), (-1, -1), block_format, np.float32)
    decoded = w.read().astype(np.float64)
    for count in (1, FEW_ROWS, FEW_ROWS + 1, 40):
        x = rng.standard_normal((1, count, columns)).astype(np.float32)
        y = matmul.linear(tensor(runtime, x, (-1, -1, -1)), w, transpose_w=True).read()
        want = x.astype(np.float64) @ decoded.T
        assert abs(y - want).max() <= 2e-6 * abs(want).max()


@formats
@pytest.mark.parametrize("columns", [32, 96, 2080])
def test_a_row_of_any_number_of_blocks(block_format: BlockFormat, columns: int) -> None:
    """One block, an odd number and many, in rows that are no multiple of anything."""
    rng, runtime, columns = np.random.default_rng(2), InlineRuntime(), columns_of(block_format, columns)
    x = rng.standard_normal((1, 1, columns)).astype(np.float32)
    w, _ = quantised(runtime, rng.standard_normal((37, columns)), (-1, -1), block_format, np.float32)
    y = matmul.linear(tensor(runtime, x, (-1, -1, -1)), w, transpose_w=True).read()
    want = x.astype(np.float64) @ w.read().astype(np.float64).T
    assert abs(y - want).max() <= 2e-6 * abs(want).max()


@formats
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_lookup(block_format: BlockFormat, dtype: type) -> None:
    """Rows of a quantised table, also from a later one on."""
    rng, runtime = np.random.default_rng(0), InlineRuntime()
    values, ids = rng.standard_normal((20, columns_of(block_format, 64))), rng.integers(0, 18, (2, 6)).astype(np.int32)
    table, _ = quantised(runtime, values, (8, block_format.block_values), block_format, dtype)
    x = embedding.embedding(tensor(runtime, ids, (1, 4)), table, 2)
    assert x.dtype == dtype
    np.testing.assert_array_equal(x.read(), table.read()[ids + 2])


@formats
def test_bytes(block_format: BlockFormat) -> None:
    """A tile is its blocks, to the byte, and lies in the bytes of the matrix."""
    runtime = InlineRuntime()
    size = block_format.block_values
    values = np.random.default_rng(0).standard_normal((10, 3 * size))
    w, blocks = quantised(runtime, values, (4, 2 * size), block_format, np.float32)
    assert w.nbytes == blocks.nbytes == sum(handle.view.nbytes for handle in w.handles)
    for index, handle in zip(w.tiling.indices(), w.handles, strict=True):
        with runtime.acquire(handle, "R") as view:
            np.testing.assert_array_equal(view, blocks[w.stored_slices(index)])
    np.testing.assert_array_equal(w.read(), decode(blocks, block_format))


@pytest.mark.parametrize("name", ENCODED_FORMATS)
def test_numbers_are_written_as_their_blocks(name: str) -> None:
    """`write` encodes, tile by tile; a format that is only read is refused."""
    values = np.random.default_rng(0).standard_normal((10, 96)).astype(np.float32)
    w = QuantisedTensor(InlineRuntime(), values.shape, (4, 64), np.float32, BLOCK_FORMATS[name], name="w")
    w.write(values)
    np.testing.assert_array_equal(w.read(), decode(encode(values, BLOCK_FORMATS[name]), BLOCK_FORMATS[name]))
    with pytest.raises(ValueError, match="only read"):
        QuantisedTensor(InlineRuntime(), values.shape, (4, 64), np.float32, BLOCK_FORMATS["q5_0"], name="w").write(values)


def test_what_is_refused() -> None:
    """Cut blocks, by the matrix or by its tiles, and values of another shape."""
    runtime, q4_0 = InlineRuntime(), BLOCK_FORMATS["q4_0"]
    for shape, tile in (((4, 48), (-1, -1)), ((4, 64), (-1, 48)), ((64,), (-1,))):
        with pytest.raises(ValueError, match="whole blocks of 32"):
            QuantisedTensor(runtime, shape, tile, np.float32, q4_0, name="w")
    with pytest.raises(ValueError, match="w has shape"):
        QuantisedTensor(runtime, (4, 64), (-1, -1), np.float32, q4_0, name="w").write(np.zeros((4, 32)))


@formats
@pytest.mark.parametrize("tile", [(-1, -1), (1, 24), (2, 70)], ids=str)
def test_turned_weights(block_format: BlockFormat, tile: tuple[int, int]) -> None:
    """A matrix (in, out), as GPT-2 has them, whose transpose is stored: product and gradient are those of the decoded one."""
    size = block_format.block_values
    width, tile = 3 * size, (tile[0] if tile[0] < 0 else tile[0] * size, tile[1])
    rng, runtime = np.random.default_rng(0), InlineRuntime()
    values, x, dy = rng.standard_normal((width, N)), rng.standard_normal((B, T, width)), rng.standard_normal((B, T, N))
    w, blocks = quantised(runtime, values, tile, block_format, np.float64, is_turned=True)
    np.testing.assert_array_equal(w.read(), decode(blocks, block_format).T)
    assert w.nbytes == blocks.nbytes
    for index, handle in zip(w.tiling.indices(), w.handles, strict=True):
        with runtime.acquire(handle, "R") as view:
            np.testing.assert_array_equal(view, blocks[w.stored_slices(index)])
    y = matmul.linear(tensor(runtime, x, (1, 2, tile[0])), w)
    np.testing.assert_allclose(y.read(), x @ w.read(), atol=1e-12)
    dx = matmul.linear_backward_input(tensor(runtime, dy, (1, 2, tile[1])), w)
    np.testing.assert_allclose(dx.read(), dy @ w.read().T, atol=1e-12)


@formats
def test_loss_of_a_quantised_head(block_format: BlockFormat) -> None:
    """The loss and its gradient by x are those of the decoded head."""
    rng, runtime = np.random.default_rng(0), InlineRuntime()
    width, size = columns_of(block_format, 64), block_format.block_values
    head, _ = quantised(runtime, rng.standard_normal((41, width)), (16, size), block_format, np.float64)
    plain = tensor(runtime, head.read(), (16, size))
    x, targets = (
        tensor(runtime, rng.standard_normal((B, T, width)), (1, 3, size)),
        tensor(runtime, rng.integers(0, 41, (B, T)).astype(np.int32), (1, 3)),
    )
    found = []
    for w in (head, plain):
        value, lse = loss.linear_cross_entropy(x, w, targets, scale=0.1)
        dx = loss.linear_cross_entropy_backward(x, w, targets, lse, None, scale=0.1)
        found.append((value.read(), dx.read()))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, theirs)
