"""Formats of quantised weights, as ggml lays them out: blocks of 32 or 256 neighbours of a row that share one or two fp16 scales.

A row of C weights is C / 32 or C / 256 blocks, one after the other, so a matrix (R, C) is an array of bytes (R, C / 32 * block_bytes).
`decode` returns the numbers that blocks encode, with the bits of the Python package gguf; `block_numbers` has the layouts. Weights of
16 bits count as blocks of 32 numbers without a scale, so that a matrix of a file can stay in memory as it is.

`encode` writes q8_0 and q4_0 only, with the bytes of ggml's reference quantisation (quantize_row_q8_0_ref and quantize_row_q4_0_ref of
ggml-quants.c). It expects finite weights below 65504 * 127 (q8_0) or 65504 * 8 (q4_0) in magnitude: the scale of larger ones is infinite.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .block_numbers import NUMBERS, Bytes, Floats

_PIECE: Final = 1 << 18
"""Number of weights encoded or decoded at once, so that temporaries stay small."""
_CHECKED: Final = 1 << 16
"""Number of bytes of blocks whose scales are checked at once."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Storage format of a block of weights.

    Args:
        name: ggml's name, in lower case.
        block_bytes: size of a block.
        block_values: number of weights in a block.
        scales: byte offsets of the 16-bit floats in a block; the numbers of the block are finite if these are.
    """

    name: str
    block_bytes: int
    block_values: int = 32
    scales: tuple[int, ...] = (0,)

    @property
    def is_quantised(self) -> bool:
        """Whether numbers are stored with fewer than 16 bits."""
        return self.name not in ("f16", "bf16")

    def row_bytes(self, columns: int) -> int:
        """Return the number of bytes in a row of `columns` weights.

        Raises:
            ValueError: `columns` is not a multiple of the block size.
        """
        if columns % self.block_values:
            raise ValueError(
                f"{self.name} stores rows of whole blocks of {self.block_values} weights, got {columns} columns; "
                f"keep this matrix as floats, or use a width that is a multiple of {self.block_values}"
            )
        return columns // self.block_values * self.block_bytes

    def columns(self, row_bytes: int) -> int:
        """Return the number of weights in a row of `row_bytes` bytes.

        Raises:
            ValueError: `row_bytes` is not a multiple of the block size.
        """
        if row_bytes % self.block_bytes:
            raise ValueError(f"{self.name} rows are whole blocks of {self.block_bytes} bytes, got {row_bytes}; is this a matrix of another format?")
        return row_bytes // self.block_bytes * self.block_values


Q8_0: Final = BlockFormat("q8_0", 34)
Q4_0: Final = BlockFormat("q4_0", 18)
_READ: Final = (
    BlockFormat("q4_1", 20, scales=(0, 2)),
    BlockFormat("q5_0", 22),
    BlockFormat("q5_1", 24, scales=(0, 2)),
    BlockFormat("iq4_nl", 18),
    BlockFormat("iq4_xs", 136, 256),
    BlockFormat("q2_k", 84, 256, scales=(80, 82)),
    BlockFormat("q3_k", 110, 256, scales=(108,)),
    BlockFormat("q4_k", 144, 256, scales=(0, 2)),
    BlockFormat("q5_k", 176, 256, scales=(0, 2)),
    BlockFormat("q6_k", 210, 256, scales=(208,)),
    BlockFormat("f16", 64, scales=tuple(range(0, 64, 2))),
    BlockFormat("bf16", 64, scales=tuple(range(0, 64, 2))),
)
BLOCK_FORMATS: Final[Mapping[str, BlockFormat]] = MappingProxyType({each.name: each for each in (Q8_0, Q4_0, *_READ)})
"""Format name -> format, for all formats that products and lookups accept."""
ENCODED_FORMATS: Final[Mapping[str, BlockFormat]] = MappingProxyType({each.name: each for each in (Q8_0, Q4_0)})
"""Format name -> format, for the formats that `encode` writes."""


def encode(values: npt.NDArray[Any], block_format: BlockFormat) -> Bytes:
    """Quantise a matrix (R, C) -> its blocks (R, C / 32 * block_bytes).

    Raises:
        ValueError: `values` is not a matrix of whole blocks, or `block_format` can only be read.
    """
    if block_format.name not in ENCODED_FORMATS:
        raise ValueError(f"weights are encoded as {' or '.join(ENCODED_FORMATS)}, got {block_format.name}, which is only read; use one of these")
    rows, columns = _matrix(values, "values")
    blocks = np.empty((rows, block_format.row_bytes(columns)), np.uint8)
    for piece in _pieces(rows, columns):
        some = np.ascontiguousarray(values[piece], np.float32).reshape(-1, block_format.block_values)
        out = blocks[piece].reshape(-1, block_format.block_bytes)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            if block_format == Q8_0:
                _encode_q8_0(some, out)
            else:
                _encode_q4_0(some, out)
    return blocks


def decode(blocks: npt.NDArray[Any], block_format: BlockFormat, out: Floats | None = None) -> Floats:
    """Return the weights (R, C) that blocks (R, bytes of a row) encode.

    Args:
        out: array for the weights; None for a new array.

    Raises:
        ValueError: `blocks` is not a matrix of whole blocks.
    """
    rows, row_bytes = _matrix(blocks, "blocks")
    columns = block_format.columns(row_bytes)
    if out is None:
        out = np.empty((rows, columns), np.float32)
    for piece in _pieces(rows, columns):
        some = np.ascontiguousarray(blocks[piece], np.uint8).reshape(-1, block_format.block_bytes)
        out[piece] = NUMBERS[block_format.name](some).reshape(-1, columns)
    return out


def first_bad_scale(blocks: Bytes, block_format: BlockFormat) -> Any:
    """Return the first infinity or NaN among the scales of blocks (R, bytes of a row); None if all are finite."""
    row_bytes = blocks.shape[1]
    step, kind = max(1, _CHECKED // row_bytes), ml_dtypes.bfloat16 if block_format.name == "bf16" else np.dtype("<f2")
    for row in range(0, blocks.shape[0], step):
        some = blocks[row : row + step].reshape(-1, block_format.block_bytes)
        if block_format.is_quantised:
            some = some[:, [at + byte for at in block_format.scales for byte in (0, 1)]]
        scales = np.ascontiguousarray(some).view(kind)
        if not np.isfinite(scales).all():
            return scales[~np.isfinite(scales)][0]
    return None


def _matrix(array: npt.NDArray[Any], what: str) -> tuple[int, int]:
    if array.ndim != 2:
        raise ValueError(f"quantised weights are matrices (rows, columns), got {what} of shape {array.shape}; merge its leading axes")
    return array.shape[0], array.shape[1]


def _pieces(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, _PIECE // max(columns, 1))
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def _inverse(scale: Floats) -> Floats:
    """Return 1 / scale, 0 for a scale of 0. For a scale below the smallest normal number it may be infinite, as in ggml."""
    return np.where(scale == 0, np.float32(0), 1 / scale)


def _encode_q8_0(values: Floats, out: Bytes) -> None:
    """(N, 32) -> (N, 34): the largest magnitude becomes 127; halves round away from zero."""
    scale = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    scaled = values * _inverse(scale)
    size = np.abs(scaled)
    whole = np.floor(size)
    whole += np.floor(2 * (size - whole))
    out[:, :2] = scale.astype("<f2").view(np.uint8)
    out[:, 2:] = (np.sign(scaled) * whole).astype(np.int8).view(np.uint8)


def _encode_q4_0(values: Floats, out: Bytes) -> None:
    """(N, 32) -> (N, 18): the value of largest magnitude, the first of equals, becomes 0, which encodes -8."""
    largest = np.take_along_axis(values, np.abs(values).argmax(axis=1, keepdims=True), axis=1)
    scale = largest / np.float32(-8)
    halves = np.trunc(values * _inverse(scale) + np.float32(8.5)).astype(np.uint8).clip(0, 15).reshape(-1, 2, 16)
    out[:, :2] = scale.astype("<f2").view(np.uint8)
    out[:, 2:] = halves[:, 0] | (halves[:, 1] << np.uint8(4))
