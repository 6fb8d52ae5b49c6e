"""Blocks of every format of weights: encoded where there is an encoder, otherwise random bytes with scales of weights."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tiles.block_format import ENCODED_FORMATS, BlockFormat, encode


def columns_of(block_format: BlockFormat, columns: int) -> int:
    """The next number of columns that is whole blocks."""
    return -(-columns // block_format.block_values) * block_format.block_values


def blocks_of(values: np.ndarray, block_format: BlockFormat) -> np.ndarray:
    """Blocks of a matrix (R, C), or of a format that nothing encodes, random ones of its shape; finite."""
    values = np.asarray(values, np.float32)
    if block_format.name in ENCODED_FORMATS:
        return encode(values, block_format)
    if not block_format.is_quantised:
        return np.ascontiguousarray(values.astype(ml_dtypes.bfloat16 if block_format.name == "bf16" else np.float16)).view(np.uint8)
    return random_blocks((values.shape[0], block_format.row_bytes(values.shape[1])), block_format)


def random_blocks(shape: tuple[int, int], block_format: BlockFormat, seed: int = 0) -> np.ndarray:
    """Random bytes (R, bytes of a row), with finite scales of both signs and all sizes that weights have."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, shape, np.uint8)
    single = blocks.reshape(-1, block_format.block_bytes)
    largest = -2 if block_format.block_values == 32 else -4  # scales of groups multiply it by up to 127
    for offset in block_format.scales:
        scales = (rng.standard_normal(len(single)) * 10.0 ** rng.uniform(largest - 2, largest, len(single))).astype("<f2")
        single[:, offset : offset + 2] = scales[:, None].view(np.uint8)
    return blocks
