"""Blocks of quantised weights, as ggml lays them out: 32 neighbours of a row share one fp16 scale.

A row of C weights is C / 32 blocks, one behind the other; a matrix (R, C) is so an array of bytes (R, C / 32 * block_bytes). A block is its scale d,
little-endian, and then its values: of q8_0 32 int8 q, worth d * q each; of q4_0 16 bytes whose low halves are the first 16 values and whose high
halves the last 16, worth d * (q - 8). `encode` gives the bytes of ggml's reference quantisation (quantize_row_q8_0_ref and quantize_row_q4_0_ref of
ggml-quants.c), the same as the Python package gguf writes. Weights are expected to be finite, and below 65504 * 127 (q8_0) or * 8 (q4_0) in
magnitude: the scale of larger ones is infinite.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
_PIECE: Final = 1 << 18
"""Weights that are worked on at once, so that temporaries stay small."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How a block of weights is stored.

    Args:
        name: as ggml calls it, in lower case.
        block_bytes: size of a block.
        block_values: weights of a block.
    """

    name: str
    block_bytes: int
    block_values: int = 32

    def row_bytes(self, columns: int) -> int:
        """Size of a row of `columns` weights.

        Raises:
            ValueError: a block would be cut.
        """
        if columns % self.block_values:
            raise ValueError(
                f"{self.name} stores rows of whole blocks of {self.block_values} weights, got {columns} columns; "
                f"keep this matrix as floats, or use a width that is a multiple of {self.block_values}"
            )
        return columns // self.block_values * self.block_bytes

    def columns(self, row_bytes: int) -> int:
        """Weights in a row of that size.

        Raises:
            ValueError: the size is not that of whole blocks.
        """
        if row_bytes % self.block_bytes:
            raise ValueError(f"{self.name} rows are whole blocks of {self.block_bytes} bytes, got {row_bytes}; is this a matrix of another format?")
        return row_bytes // self.block_bytes * self.block_values


Q8_0: Final = BlockFormat("q8_0", 34)
Q4_0: Final = BlockFormat("q4_0", 18)
BLOCK_FORMATS: Final[Mapping[str, BlockFormat]] = MappingProxyType({each.name: each for each in (Q8_0, Q4_0)})


def encode(values: npt.NDArray[Any], block_format: BlockFormat) -> Bytes:
    """Quantise a matrix (R, C) -> its blocks (R, C / 32 * block_bytes).

    Raises:
        ValueError: it is no matrix of whole blocks.
    """
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
    """The weights (R, C) that blocks (R, C / 32 * block_bytes) stand for.

    Args:
        out: receives them; None for a new array.

    Raises:
        ValueError: they are no matrix of whole blocks.
    """
    rows, row_bytes = _matrix(blocks, "blocks")
    columns = block_format.columns(row_bytes)
    if out is None:
        out = np.empty((rows, columns), np.float32)
    for piece in _pieces(rows, columns):
        some = np.ascontiguousarray(blocks[piece], np.uint8).reshape(-1, block_format.block_bytes)
        values = _decode_q8_0(some) if block_format == Q8_0 else _decode_q4_0(some)
        out[piece] = values.reshape(-1, columns)
    return out


def _matrix(array: npt.NDArray[Any], what: str) -> tuple[int, int]:
    if array.ndim != 2:
        raise ValueError(f"quantised weights are matrices (rows, columns), got {what} of shape {array.shape}; merge its leading axes")
    return array.shape[0], array.shape[1]


def _pieces(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, _PIECE // max(columns, 1))
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def _inverse(scale: Floats) -> Floats:
    """1 / scale, 0 for a scale of 0; of one below the smallest normal number it may be infinite, as in ggml."""
    return np.where(scale == 0, np.float32(0), 1 / scale)


def _scales(blocks: Bytes) -> Floats:
    """(N, 1) in fp32."""
    return np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)


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
    """(N, 32) -> (N, 18): the value of largest magnitude, the first of equals, becomes 0, which stands for -8."""
    largest = np.take_along_axis(values, np.abs(values).argmax(axis=1, keepdims=True), axis=1)
    scale = largest / np.float32(-8)
    halves = np.trunc(values * _inverse(scale) + np.float32(8.5)).astype(np.uint8).clip(0, 15).reshape(-1, 2, 16)
    out[:, :2] = scale.astype("<f2").view(np.uint8)
    out[:, 2:] = halves[:, 0] | (halves[:, 1] << np.uint8(4))


def _decode_q8_0(blocks: Bytes) -> Floats:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _scales(blocks)


def _decode_q4_0(blocks: Bytes) -> Floats:
    halves = np.concatenate([blocks[:, 2:] & np.uint8(15), blocks[:, 2:] >> np.uint8(4)], axis=1)
    return (halves.astype(np.float32) - np.float32(8)) * _scales(blocks)
