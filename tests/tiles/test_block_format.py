"""Blocks of quantised weights, bit by bit beside those of the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from support.weight_blocks import random_blocks

from tiles.block_format import BLOCK_FORMATS, ENCODED_FORMATS, Q4_0, Q8_0, BlockFormat, decode, encode, first_bad_scale
from tiles.kernels.catalog import kernel

FORMATS = list(ENCODED_FORMATS.values())
ALL = pytest.mark.parametrize("block_format", BLOCK_FORMATS.values(), ids=lambda each: each.name)
TYPES = {name: gguf.GGMLQuantizationType[name.upper()] for name in BLOCK_FORMATS}


def ours_and_theirs(values: np.ndarray, block_format: BlockFormat) -> tuple[np.ndarray, np.ndarray]:
    """Our bytes, and gguf's."""
    with np.errstate(all="ignore"):
        return encode(values, block_format), gguf.quants.quantize(values, TYPES[block_format.name])


def matrices() -> dict[str, np.ndarray]:
    """Matrices that are hard on rounding."""
    rng = np.random.default_rng(0)
    plain = rng.standard_normal((70, 96)).astype(np.float32)
    ties = rng.integers(-16, 17, (40, 64)).astype(np.float32) / 2
    ties[:, ::32], ties[:, 5::32] = -8, 8
    two = np.zeros((4, 64), np.float32)
    two[:, 3], two[:, 9] = -2, 2
    return {
        "normal": plain,
        "zeros": np.zeros((3, 64), np.float32),
        "one zero block": np.where(np.arange(96) < 32, np.float32(0), plain),
        "negative zeros": np.full((2, 32), -0.0, np.float32),
        "huge": plain * np.float32(1e6),
        "beyond fp16": plain * np.float32(1e30),
        "small": plain * np.float32(1e-6),
        "denormal scales": plain * np.float32(1e-38),
        "denormal": plain * np.float32(1e-43),
        "ties": ties,
        "largest of both signs": two,
        "all negative": -np.abs(plain),
        "one row": plain[:1],
        "one block": plain[:1, :32],
    }


@pytest.mark.parametrize("name", list(matrices()))
@pytest.mark.parametrize("block_format", FORMATS, ids=lambda each: each.name)
def test_bytes_are_those_of_gguf(block_format: BlockFormat, name: str) -> None:
    """Every byte, and every decoded bit."""
    values = matrices()[name]
    ours, theirs = ours_and_theirs(values, block_format)
    np.testing.assert_array_equal(ours, theirs)
    with np.errstate(all="ignore"):
        decoded = gguf.quants.dequantize(theirs, TYPES[block_format.name])
        ours_again = decode(ours, block_format)
    np.testing.assert_array_equal(ours_again, decoded)


@settings(max_examples=200, deadline=None)
@given(arrays(np.float32, (2, 64), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_bytes_are_those_of_gguf_for_any_floats(values: np.ndarray) -> None:
    """Any finite floats at all."""
    for block_format in FORMATS:
        np.testing.assert_array_equal(*ours_and_theirs(values, block_format))


def test_pieces_of_a_large_matrix_are_the_whole() -> None:
    """A matrix of several pieces has the bytes of gguf."""
    values = np.random.default_rng(1).standard_normal((700, 1024)).astype(np.float32)
    for block_format in FORMATS:
        ours, theirs = ours_and_theirs(values, block_format)
        np.testing.assert_array_equal(ours, theirs)
        assert abs(decode(ours, block_format) - values).max() < (0.02 if block_format == Q8_0 else 0.4)


def test_layout() -> None:
    """Scale, then values: those of q4_0 in halves of bytes."""
    values = np.arange(32, dtype=np.float32)[None] - 16
    block = encode(values, Q4_0)[0]
    assert block[:2].view(np.float16)[0] == 2.0
    assert (block[2] & 15, block[2] >> 4) == (0, 8)
    eight = encode(values * 127 / 16, Q8_0)[0]
    assert eight[:2].view(np.float16)[0] == 1.0
    assert eight[2:].view(np.int8)[0] == -127


def test_what_is_refused() -> None:
    """Cut blocks, and what is no matrix."""
    with pytest.raises(ValueError, match="whole blocks of 32 weights, got 33 columns"):
        encode(np.zeros((2, 33), np.float32), Q4_0)
    with pytest.raises(ValueError, match="whole blocks of 34 bytes, got 18"):
        decode(np.zeros((2, 18), np.uint8), Q8_0)
    with pytest.raises(ValueError, match="matrices"):
        encode(np.zeros(32, np.float32), Q4_0)


def numbers_of_gguf(blocks: np.ndarray, block_format: BlockFormat) -> np.ndarray:
    """The numbers that the gguf package decodes; 16-bit ones are NumPy's."""
    if block_format.name == "f16":
        return blocks.view("<f2").astype(np.float32)
    with np.errstate(all="ignore"):
        return np.asarray(gguf.quants.dequantize(blocks, TYPES[block_format.name]))


@ALL
def test_numbers_are_those_of_gguf(block_format: BlockFormat) -> None:
    """Every bit of random blocks, of blocks without a scale, and of rows in several pieces, by `decode` and by the compiled loop."""
    assert (block_format.block_values, block_format.block_bytes) == gguf.GGML_QUANT_SIZES[TYPES[block_format.name]] or not block_format.is_quantised
    for rows, count in ((1, 1), (37, 3), (300, 12)):
        blocks = random_blocks((rows, count * block_format.block_bytes), block_format, seed=rows)
        blocks[0] = 0
        want = numbers_of_gguf(blocks, block_format)
        fast = np.empty_like(want)
        kernel("decode_blocks", "cpu")(blocks, fast, block_format=block_format.name)
        for found in (decode(blocks, block_format), fast):
            np.testing.assert_array_equal(found.view(np.uint32), want.view(np.uint32))


@ALL
def test_numbers_of_any_scale(block_format: BlockFormat) -> None:
    """Denormal, tiny and the largest finite scales decode to the bits of the gguf package; 1.0 is stored exactly as 1.0 in 16 bits."""
    blocks = random_blocks((64, block_format.block_bytes), block_format)
    scales = np.array([0, 1, 0x8001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0xFBFF], "<u2")
    for offset in block_format.scales:
        blocks[:, offset : offset + 2] = np.resize(scales, 64)[:, None].view(np.uint8)
    want = numbers_of_gguf(blocks, block_format)
    fast = np.empty_like(want)
    kernel("decode_blocks", "cpu")(blocks, fast, block_format=block_format.name)
    for found in (decode(blocks, block_format), fast):
        np.testing.assert_array_equal(found.view(np.uint32), want.view(np.uint32))


@ALL
def test_scales_that_are_not_finite_are_found(block_format: BlockFormat) -> None:
    """Each scale of a block counts, in the last row too, and bytes that are no scale do not."""
    blocks = random_blocks((4000, 2 * block_format.block_bytes), block_format)
    assert first_bad_scale(blocks, block_format) is None
    infinite = b"\x80\x7f" if block_format.name == "bf16" else b"\x00\x7c"
    for offset in block_format.scales[:3]:
        broken = blocks.copy()
        broken[-1, offset : offset + 2] = np.frombuffer(infinite, np.uint8)
        assert np.isinf(first_bad_scale(broken, block_format))


def test_only_two_formats_are_written() -> None:
    """The others are refused with the ones that are."""
    with pytest.raises(ValueError, match="encoded as q8_0 or q4_0, got q6_k"):
        encode(np.zeros((1, 256), np.float32), BLOCK_FORMATS["q6_k"])
