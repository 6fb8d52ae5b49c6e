"""Blocks of quantised weights, bit by bit beside those of the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tiles.block_format import BLOCK_FORMATS, Q4_0, Q8_0, BlockFormat, decode, encode

FORMATS = list(BLOCK_FORMATS.values())
TYPES = {"q8_0": gguf.GGMLQuantizationType.Q8_0, "q4_0": gguf.GGMLQuantizationType.Q4_0}


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
