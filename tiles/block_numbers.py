"""Readable decoders of quantised weights: one function for each block layout of ggml's ``ggml-common.h``, from the bytes of blocks to fp32.

Every function takes blocks (N, bytes of a block) and returns their numbers (N, numbers of a block), with the bits that the Python package gguf
gives them: each product and each sum is rounded once. The K types have blocks of 256 numbers in groups of 16 or 32. Each group has its own scale
and, in some types, its own minimum, both of 4 to 8 bits and multiplied by a fp16 scale of the whole block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]

LEVELS: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Numbers that the half bytes of iq4_nl and iq4_xs encode (kvalues_iq4nl of ggml)."""
_LEVELS: Final = np.array(LEVELS, np.float32)


def _fp16(blocks: Bytes, offset: int) -> Floats:
    """Return the fp16 number at a byte offset of each block, (N, 1) in fp32."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2").astype(np.float32)


def _halves(blocks: Bytes, offset: int, num_bytes: int = 16) -> Bytes:
    """Return (N, 2 * num_bytes): the low halves of the bytes, then their high halves."""
    stored = blocks[:, offset : offset + num_bytes]
    return np.concatenate([stored & np.uint8(15), stored >> np.uint8(4)], axis=1)


def _fifth_bits(blocks: Bytes, offset: int) -> Bytes:
    """Return (N, 32): the bits of four bytes, as 0 or 16."""
    return np.unpackbits(blocks[:, offset : offset + 4], axis=1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Bytes) -> Floats:
    return (_halves(blocks, 2).astype(np.float32) - np.float32(8)) * _fp16(blocks, 0)


def _q4_1(blocks: Bytes) -> Floats:
    return _halves(blocks, 4).astype(np.float32) * _fp16(blocks, 0) + _fp16(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    return ((_halves(blocks, 6) | _fifth_bits(blocks, 2)).astype(np.float32) - np.float32(16)) * _fp16(blocks, 0)


def _q5_1(blocks: Bytes) -> Floats:
    return (_halves(blocks, 8) | _fifth_bits(blocks, 4)).astype(np.float32) * _fp16(blocks, 0) + _fp16(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _fp16(blocks, 0)


def _iq4_nl(blocks: Bytes) -> Floats:
    return _LEVELS[_halves(blocks, 2)] * _fp16(blocks, 0)


def _iq4_xs(blocks: Bytes) -> Floats:
    """Decode iq4_xs. A scale has its low 4 bits in one of four bytes and its high 2 bits in one of two bytes."""
    numbers = np.arange(8, dtype=np.uint16)
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> (2 * numbers) & 3
    low = np.ascontiguousarray(blocks[:, 4:8]).view("<u4") >> (4 * numbers.astype(np.uint32)) & 15
    scales = _fp16(blocks, 0) * ((low | high << 4).astype(np.float32) - np.float32(32))  # (N, 8)
    levels = np.stack([_LEVELS[_halves(blocks, 8 + 16 * group)] for group in range(8)], axis=1)  # (N, 8, 32)
    return (levels * scales[:, :, None]).reshape(-1, 256)


def _two_bits(stored: Bytes) -> Bytes:
    """(N, 64) bytes -> (N, 16, 16): bit pair 0 of bytes 0 to 31, then pairs 1, 2 and 3; then the same of bytes 32 to 63."""
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    return (stored.reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)).reshape(-1, 16, 16)


def _q2_k(blocks: Bytes) -> Floats:
    scales, numbers = blocks[:, :16, None], _two_bits(blocks[:, 16:80]).astype(np.float32)
    scale = _fp16(blocks, 80)[:, None] * (scales & np.uint8(15)).astype(np.float32)
    least = _fp16(blocks, 82)[:, None] * (scales >> np.uint8(4)).astype(np.float32)
    return (scale * numbers - least).reshape(-1, 256)


def _q3_k(blocks: Bytes) -> Floats:
    """Decode q3_k. A clear third bit subtracts 4 from the number; scales have their low 4 bits in eight bytes and their high 2 bits in four."""
    low = _halves(blocks, 96, 8)
    high = blocks[:, None, 104:108] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & np.uint8(3)
    scales = (low | high.reshape(-1, 16) << np.uint8(4)).astype(np.float32) - np.float32(32)  # (N, 16)
    third = blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    numbers = (_two_bits(blocks[:, 32:96]) | third.reshape(-1, 16, 16) << np.uint8(2)).astype(np.float32) - np.float32(4)
    return (numbers * (_fp16(blocks, 108) * scales)[:, :, None]).reshape(-1, 256)


def _six_bits(stored: Bytes) -> tuple[Floats, Floats]:
    """Return the scales and minima (N, 8) of q4_k and q5_k, from 12 bytes.

    Groups 0 to 3 have 6 bits of a byte each. The other groups have 4 bits of the last four bytes and the 2 bits that the first eight leave.
    """
    first, second, third = stored[:, :4], stored[:, 4:8], stored[:, 8:]
    low, high = np.uint8(15), np.uint8(63)
    scales = np.concatenate([first & high, third & low | first >> np.uint8(6) << np.uint8(4)], axis=1)
    minima = np.concatenate([second & high, third >> np.uint8(4) | second >> np.uint8(6) << np.uint8(4)], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _in_groups(numbers: Bytes, blocks: Bytes) -> Floats:
    """Return the decoded numbers (N, 256) of q4_k or q5_k: `numbers` (N, 8, 32) times their scales, minus their minima."""
    scales, minima = _six_bits(blocks[:, 4:16])
    scale, least = _fp16(blocks, 0) * scales, _fp16(blocks, 2) * minima
    return (scale[:, :, None] * numbers.astype(np.float32) - least[:, :, None]).reshape(-1, 256)


def _nibbles(stored: Bytes) -> Bytes:
    """(N, 128) bytes -> (N, 8, 32): the low halves of 32 bytes, their high halves, those of the next 32, and so on."""
    return (stored.reshape(-1, 4, 1, 32) >> np.array([0, 4], np.uint8)[:, None] & np.uint8(15)).reshape(-1, 8, 32)


def _q4_k(blocks: Bytes) -> Floats:
    return _in_groups(_nibbles(blocks[:, 16:]), blocks)


def _q5_k(blocks: Bytes) -> Floats:
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    return _in_groups(_nibbles(blocks[:, 48:]) | fifth << np.uint8(4), blocks)


def _q6_k(blocks: Bytes) -> Floats:
    low = blocks[:, :128].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8)[:, None] & np.uint8(15)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & np.uint8(3)
    numbers = (low.reshape(-1, 16, 16) | high.reshape(-1, 16, 16) << np.uint8(4)).astype(np.float32) - np.float32(32)
    scales = _fp16(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (numbers * scales[:, :, None]).reshape(-1, 256)


def _f16(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view("<f2").astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    values: Floats = np.ascontiguousarray(blocks).view(ml_dtypes.bfloat16).astype(np.float32)
    return values


NUMBERS: Final[Mapping[str, Callable[[Bytes], Floats]]] = MappingProxyType(
    {
        "q8_0": _q8_0,
        "q4_0": _q4_0,
        "q4_1": _q4_1,
        "q5_0": _q5_0,
        "q5_1": _q5_1,
        "iq4_nl": _iq4_nl,
        "iq4_xs": _iq4_xs,
        "q2_k": _q2_k,
        "q3_k": _q3_k,
        "q4_k": _q4_k,
        "q5_k": _q5_k,
        "q6_k": _q6_k,
        "f16": _f16,
        "bf16": _bf16,
    }
)
"""Name of a format -> its function."""
