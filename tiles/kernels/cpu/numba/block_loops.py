"""Compiled loops over blocks of weights (`tiles.block_format`): dot products with fp32 rows, and decoding to fp32.

The body of a loop is written in LLVM's vector types, because Numba makes 14 GB/s of scalar code here: 16 numbers at a time are widened in registers
from bytes or bits, so nothing decoded is ever stored. LLVM splits the vectors where the processor's are shorter; the order of sums is written
down, so bits are the same with AVX2 and AVX-512. A scale is made of its bits, exactly, and must be finite. The element type of the blocks names
their format, and Numba compiles a loop for each. What is generated stands here, since Numba notices a change of this file alone.

Ladder, q4_0 in GB of blocks a second, from the cache / from memory: with conversions of integers and one sum 18.2 / 17.9, with bits of floats and two
sums 20.5 / 20.1. Four rows of weights side by side: no quicker. `cpu.quantised` has the times of all formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ....block_format import BLOCK_FORMATS
from ....block_numbers import LEVELS
from .compiled import REASSOCIATE, Array, compiled


class ScaledGroup(NamedTuple):
    """Neighbouring numbers of a block that share a scale: vectors of 16, what they are multiplied by, and what is added then, or None each."""

    scale: Any
    numbers: Sequence[Any]
    least: Any = None


Decoder = Callable[[Any, Any], list[ScaledGroup]]
"""(builder, address of a block) -> its groups, in the order of its numbers."""

ELEMENTS: Final[Mapping[str, Any]] = {name: np.dtype([(name, np.uint8, (each.block_bytes,))]) for name, each in BLOCK_FORMATS.items()}
"""Name of a format -> element type of arrays of its blocks, as the loops take them."""

_LANES: Final = 16
_I8, _I16, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_BYTES, _SHORTS, _INTS, _FLOATS = (ir.VectorType(kind, _LANES) for kind in (_I8, _I16, _I32, _F32))
_FP16: Final = ir.VectorType(ir.HalfType(), _LANES)
_WORDS: Final = ir.VectorType(_I32, 4)
_FUSED: Final = ("contract",)
_VECTOR_BYTES: Final = 64
_MAGIC: Final = 0x4B000000
"""Bits of 2^23."""
_CONVERTS_FP16: Final = bool(get_host_cpu_features().get("f16c"))
_COUNT: Final = tuple(range(_LANES))


def _constant(kind: Any, value: Any) -> Any:
    """A number, in all lanes of a vector; or a number for each lane."""
    if isinstance(kind, ir.VectorType) and not isinstance(value, tuple | list):
        value = [value] * kind.count
    return ir.Constant(kind, value)


def _load(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    """What lies `offset` bytes behind an address, at any alignment."""
    found = builder.load(builder.inttoptr(builder.add(address, _constant(_I64, offset)), kind.as_pointer()))
    found.align = 1
    return found


def _store(builder: Any, value: Any, address: Any, offset: int) -> None:
    builder.store(value, builder.inttoptr(builder.add(address, _constant(_I64, offset)), value.type.as_pointer()), align=1)


def _spread(builder: Any, value: Any) -> Any:
    """A number in all lanes."""
    nothing = ir.Constant(ir.VectorType(value.type, _LANES), ir.Undefined)
    return _lane(builder, builder.insert_element(nothing, value, _constant(_I32, 0)), 0)


def _lane(builder: Any, vector: Any, number: int) -> Any:
    """A lane of a vector in all lanes."""
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), _constant(_INTS, number))


def _total(builder: Any, vector: Any) -> Any:
    """The sum of the lanes, in halves."""
    count = _LANES
    while count > 1:
        count //= 2
        halves = (ir.Constant(ir.VectorType(_I32, count), list(range(first, first + count))) for first in (0, count))
        nothing = ir.Constant(vector.type, ir.Undefined)
        vector = builder.fadd(*(builder.shuffle_vector(vector, nothing, half) for half in halves))
    return builder.extract_element(vector, _constant(_I32, 0))


def _fp16(builder: Any, bits: Any) -> Any:
    """fp16 numbers, in integers of 32 bits, as fp32: exponent and mantissa moved, times 2^112; exact for denormals too."""
    kind = bits.type
    size = builder.shl(builder.and_(bits, _constant(kind, 0x7FFF)), _constant(kind, 13))
    sign = builder.shl(builder.and_(bits, _constant(kind, 0x8000)), _constant(kind, 16))
    whole = builder.or_(size, sign) if kind == _INTS else _spread(builder, builder.or_(size, sign))
    return builder.fmul(builder.bitcast(whole, _FLOATS), _constant(_FLOATS, 2.0**112))


def _scale(builder: Any, address: Any, offset: int = 0) -> Any:
    """The fp16 number at an address as fp32, in all lanes. Scales of q6_k and iq4_xs are often denormal, which slows the product of `_fp16` down."""
    if _CONVERTS_FP16:
        return _spread(builder, builder.fpext(_load(builder, address, offset, ir.HalfType()), _F32))
    return _fp16(builder, builder.zext(_load(builder, address, offset, _I16), _I32))


def _ints(builder: Any, address: Any, offset: int, kind: Any = _BYTES) -> Any:
    """16 bytes, or pairs of bytes, as integers of 32 bits."""
    return builder.zext(_load(builder, address, offset, kind), _INTS)


def _float(builder: Any, whole: Any, less: float = 0.0) -> Any:
    """Small whole numbers less `less` as floats: bits of 2^23 + q, from which 2^23 + `less` is taken; exact, and quicker than a conversion."""
    return builder.fsub(builder.bitcast(builder.or_(whole, _constant(_INTS, _MAGIC)), _FLOATS), _constant(_FLOATS, 2.0**23 + less))


def _signed(builder: Any, values: Any) -> Any:
    """16 signed bytes as floats."""
    return builder.sitofp(builder.sext(values, _INTS), _FLOATS)


def _bits(builder: Any, whole: Any, first: int, count: int, target: int = 0) -> Any:
    """Bits `first`, `first` + 1, ... of each number, at bit `target`."""
    shift = first - target
    moved = builder.lshr(whole, _constant(_INTS, shift)) if shift > 0 else builder.shl(whole, _constant(_INTS, -shift)) if shift < 0 else whole
    return builder.and_(moved, _constant(_INTS, (1 << count) - 1 << target))


def _halves(builder: Any, address: Any, offset: int) -> tuple[Any, Any]:
    """The low and the high halves of 16 bytes."""
    both = _ints(builder, address, offset)
    return builder.and_(both, _constant(_INTS, 15)), builder.lshr(both, _constant(_INTS, 4))


def _q8_0(builder: Any, address: Any) -> list[ScaledGroup]:
    low, high = (_signed(builder, _load(builder, address, at, _BYTES)) for at in (2, 18))
    return [ScaledGroup(_scale(builder, address), (low, high))]


def _q4_0(builder: Any, address: Any) -> list[ScaledGroup]:
    return [ScaledGroup(_scale(builder, address), [_float(builder, half, 8) for half in _halves(builder, address, 2)])]


def _q4_1(builder: Any, address: Any) -> list[ScaledGroup]:
    numbers = [_float(builder, half) for half in _halves(builder, address, 4)]
    return [ScaledGroup(_scale(builder, address), numbers, _scale(builder, address, 2))]


def _with_fifth_bits(builder: Any, address: Any, offset: int) -> list[Any]:
    """32 half bytes with a fifth bit each, from 4 bytes of bits and the 16 bytes after them."""
    bits = _load(builder, address, offset, _I32)
    first, last = (_spread(builder, each) for each in (builder.shl(bits, _constant(_I32, 4)), builder.lshr(bits, _constant(_I32, 12))))
    fifth = (builder.and_(builder.lshr(each, _constant(_INTS, _COUNT)), _constant(_INTS, 16)) for each in (first, last))
    return [builder.or_(half, bit) for half, bit in zip(_halves(builder, address, offset + 4), fifth, strict=True)]


def _q5_0(builder: Any, address: Any) -> list[ScaledGroup]:
    return [ScaledGroup(_scale(builder, address), [_float(builder, each, 16) for each in _with_fifth_bits(builder, address, 2)])]


def _q5_1(builder: Any, address: Any) -> list[ScaledGroup]:
    numbers = [_float(builder, each) for each in _with_fifth_bits(builder, address, 4)]
    return [ScaledGroup(_scale(builder, address), numbers, _scale(builder, address, 2))]


def _levels(builder: Any, address: Any, offset: int) -> list[Any]:
    """The numbers of `LEVELS` that 32 half bytes stand for."""
    both = _load(builder, address, offset, _BYTES)
    halves = builder.and_(both, _constant(_BYTES, 15)), builder.lshr(both, _constant(_BYTES, 4))
    return [_signed(builder, _looked_up(builder, half)) for half in halves]


def _looked_up(builder: Any, halves: Any) -> Any:
    """`LEVELS` at the places that 16 bytes name: one instruction of x86, and a chain of choices elsewhere."""
    table = _constant(_BYTES, list(LEVELS))
    if builder.module.triple.startswith("x86_64"):
        shuffle = builder.module.declare_intrinsic("llvm.x86.ssse3.pshuf.b.128", (), ir.FunctionType(_BYTES, [_BYTES, _BYTES]))
        return builder.call(shuffle, [table, halves])
    found = _constant(_BYTES, LEVELS[0])
    for index, level in enumerate(LEVELS[1:], 1):
        found = builder.select(builder.icmp_unsigned("==", halves, _constant(_BYTES, index)), _constant(_BYTES, level), found)
    return found


def _iq4_nl(builder: Any, address: Any) -> list[ScaledGroup]:
    return [ScaledGroup(_scale(builder, address), _levels(builder, address, 2))]


def _iq4_xs(builder: Any, address: Any) -> list[ScaledGroup]:
    groups = [lane % 8 for lane in _COUNT]
    low = builder.lshr(_spread(builder, _load(builder, address, 4, _I32)), _constant(_INTS, [4 * each for each in groups]))
    high = builder.lshr(_spread(builder, builder.zext(_load(builder, address, 2, _I16), _I32)), _constant(_INTS, [2 * each for each in groups]))
    whole = builder.or_(builder.and_(low, _constant(_INTS, 15)), _bits(builder, high, 0, 2, 4))
    scales = builder.fmul(_scale(builder, address), _float(builder, whole, 32))
    return [ScaledGroup(_lane(builder, scales, group), _levels(builder, address, 8 + 16 * group)) for group in range(8)]


def _two_bits(builder: Any, address: Any, offset: int) -> list[Any]:
    """The 16 groups of numbers of two bits of q2_k and q3_k: four in each byte."""
    stored = [_ints(builder, address, offset + 16 * number) for number in range(4)]
    return [_bits(builder, stored[number // 8 * 2 + number % 2], number % 8 // 2 * 2, 2) for number in range(16)]


def _q2_k(builder: Any, address: Any) -> list[ScaledGroup]:
    both = _ints(builder, address, 0)
    scales = builder.fmul(_scale(builder, address, 80), _float(builder, builder.and_(both, _constant(_INTS, 15))))
    least = builder.fneg(builder.fmul(_scale(builder, address, 82), _float(builder, builder.lshr(both, _constant(_INTS, 4)))))
    numbers = enumerate(_two_bits(builder, address, 16))
    return [ScaledGroup(_lane(builder, scales, number), [_float(builder, each)], _lane(builder, least, number)) for number, each in numbers]


def _q3_k(builder: Any, address: Any) -> list[ScaledGroup]:
    """Scales have 6 bits: 4 low ones in one word, 2 high ones in the last."""
    words = [_load(builder, address, 96 + 4 * number, _I32) for number in range(3)]
    low = [_masked(builder, words[number % 2], 4 * (number // 2), 15) for number in range(4)]
    high = [builder.shl(_masked(builder, words[2], 2 * number, 3), _constant(_I32, 4)) for number in range(4)]
    whole = _ints_of_words(builder, [builder.or_(*pair) for pair in zip(low, high, strict=True)])
    scales = builder.fmul(_scale(builder, address, 108), _float(builder, whole, 32))
    third = [_ints(builder, address, 16 * number) for number in range(2)]
    found = []
    for number, two in enumerate(_two_bits(builder, address, 32)):
        three = builder.or_(two, _bits(builder, third[number % 2], number // 2, 1, 2))
        found.append(ScaledGroup(_lane(builder, scales, number), [_float(builder, three, 4)]))
    return found


def _masked(builder: Any, word: Any, shift: int, mask: int) -> Any:
    """Bits of four bytes, moved down."""
    return builder.and_(builder.lshr(word, _constant(_I32, shift)), _constant(_I32, mask * 0x01010101))


def _ints_of_words(builder: Any, words: Sequence[Any]) -> Any:
    """The 16 bytes of four words as integers of 32 bits."""
    vector = ir.Constant(_WORDS, ir.Undefined)
    for lane, word in enumerate(words):
        vector = builder.insert_element(vector, word, _constant(_I32, lane))
    return builder.zext(builder.bitcast(vector, _BYTES), _INTS)


def _six_bits(builder: Any, address: Any) -> tuple[list[Any], list[Any]]:
    """The scales, and what is added, of the 8 groups of q4_k or q5_k."""
    first, second, third = (_load(builder, address, at, _I32) for at in (4, 8, 12))
    words = []
    for word, shift in ((first, 0), (second, 4)):
        upper = builder.shl(_masked(builder, word, 6, 3), _constant(_I32, 4))
        words += [_masked(builder, word, 0, 63), builder.or_(_masked(builder, third, shift, 15), upper)]
    factors = _scale(builder, address), builder.fneg(_scale(builder, address, 2))
    both = builder.shuffle_vector(*factors, _constant(_INTS, [*range(8), *range(24, 32)]))
    found = builder.fmul(both, _float(builder, _ints_of_words(builder, words)))
    return [_lane(builder, found, group) for group in range(8)], [_lane(builder, found, 8 + group) for group in range(8)]


def _of_pairs(builder: Any, address: Any, offset: int, fifth: Sequence[Any]) -> list[ScaledGroup]:
    """Groups of q4_k and q5_k: 32 bytes have the numbers of one group in their low halves and those of the next one in their high halves.

    Args:
        offset: of the bytes in a block.
        fifth: bytes that have the fifth bit of a number of group g in bit g; none for q4_k.
    """
    (scales, least), found = _six_bits(builder, address), []
    for pair in range(4):
        halves = zip(*(_halves(builder, address, offset + 32 * pair + 16 * piece) for piece in (0, 1)), strict=True)
        for group, whole in enumerate(halves, 2 * pair):
            if fifth:
                whole = tuple(builder.or_(each, _bits(builder, bits, group, 1, 4)) for each, bits in zip(whole, fifth, strict=True))
            found.append(ScaledGroup(scales[group], [_float(builder, each) for each in whole], least[group]))
    return found


def _q4_k(builder: Any, address: Any) -> list[ScaledGroup]:
    return _of_pairs(builder, address, 16, ())


def _q5_k(builder: Any, address: Any) -> list[ScaledGroup]:
    return _of_pairs(builder, address, 48, [_ints(builder, address, 16 + 16 * piece) for piece in (0, 1)])


def _q6_k(builder: Any, address: Any) -> list[ScaledGroup]:
    scales = builder.fmul(_scale(builder, address, 208), _signed(builder, _load(builder, address, 192, _BYTES)))
    found = []
    for half in range(2):
        low = [_ints(builder, address, 64 * half + 16 * piece) for piece in range(4)]
        high = [_ints(builder, address, 128 + 32 * half + 16 * piece) for piece in range(2)]
        for number in range(8):
            quarter, piece = divmod(number, 2)
            nibble = _bits(builder, low[2 * (quarter % 2) + piece], 4 * (quarter // 2), 4)
            whole = builder.or_(nibble, _bits(builder, high[piece], 2 * quarter, 2, 4))
            found.append(ScaledGroup(_lane(builder, scales, 8 * half + number), [_float(builder, whole, 32)]))
    return found


def _f16(builder: Any, address: Any) -> list[ScaledGroup]:
    if _CONVERTS_FP16:
        return [ScaledGroup(None, [builder.fpext(_load(builder, address, at, _FP16), _FLOATS) for at in (0, 32)])]
    return [ScaledGroup(None, [_fp16(builder, _ints(builder, address, at, _SHORTS)) for at in (0, 32)])]


def _bf16(builder: Any, address: Any) -> list[ScaledGroup]:
    wide = (builder.shl(_ints(builder, address, at, _SHORTS), _constant(_INTS, 16)) for at in (0, 32))
    return [ScaledGroup(None, [builder.bitcast(each, _FLOATS) for each in wide])]


_BLOCKS: Final = (_q8_0, _q4_0, _q4_1, _q5_0, _q5_1, _iq4_nl, _iq4_xs, _q2_k, _q3_k, _q4_k, _q5_k, _q6_k, _f16, _bf16)
_DECODERS: Final[Mapping[str, Decoder]] = {each.__name__[1:]: each for each in _BLOCKS}


def _decoder(blocks: Any) -> tuple[Decoder, int, int]:
    """The decoder of an array type of blocks, bytes of a block, and bytes of its numbers as floats."""
    (name,) = blocks.dtype.fields
    kind = BLOCK_FORMATS[name]
    return _DECODERS[name], kind.block_bytes, 4 * kind.block_values


def _add(builder: Any, group: ScaledGroup, numbers: Sequence[Any], total: Any) -> None:
    """Add the products of a group with 16 floats for each of its vectors to a sum."""
    if group.least is not None:
        for vector, x in zip(group.numbers, numbers, strict=True):
            value = builder.fadd(builder.fmul(vector, group.scale, _FUSED), group.least, _FUSED)
            builder.store(builder.fadd(builder.fmul(x, value, _FUSED), builder.load(total), _FUSED), total)
        return
    found = builder.fmul(numbers[0], group.numbers[0], _FUSED)
    for vector, x in zip(group.numbers[1:], numbers[1:], strict=True):
        found = builder.fadd(found, builder.fmul(x, vector, _FUSED), _FUSED)
    if group.scale is not None:
        found = builder.fmul(found, group.scale, _FUSED)
    builder.store(builder.fadd(found, builder.load(total), _FUSED), total)


def _dot(context: Any, w: Any, row: Any, x: Any, count: Any) -> Any:
    """(array of blocks, address of a row of them, address of a row of floats, number of blocks) -> dot product; groups take turns at two sums."""
    decode, size, x_size = _decoder(w)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, row, numbers, blocks = arguments
        totals = [cgutils.alloca_once_value(builder, _constant(_FLOATS, 0.0)) for _ in range(2)]  # type: ignore[no-untyped-call]

        def add(index: Any, first: int) -> None:
            floats_at = builder.add(numbers, builder.mul(index, _constant(_I64, x_size)))
            offset = 0
            for number, group in enumerate(decode(builder, builder.add(row, builder.mul(index, _constant(_I64, size)))), first):
                floats = [_load(builder, floats_at, offset + _VECTOR_BYTES * vector, _FLOATS) for vector in range(len(group.numbers))]
                offset += _VECTOR_BYTES * len(floats)
                _add(builder, group, floats, totals[number % 2])

        one = _constant(_I64, 1)
        if x_size > 2 * _VECTOR_BYTES:  # several groups
            with cgutils.for_range(builder, blocks) as loop:
                add(loop.index, 0)
        else:
            with cgutils.for_range(builder, builder.lshr(blocks, one)) as loop:
                even = builder.shl(loop.index, one)
                add(even, 0)
                add(builder.add(even, one), 1)
            with builder.if_then(builder.trunc(blocks, ir.IntType(1))):
                add(builder.sub(blocks, one), 0)
        return _total(builder, builder.fadd(*map(builder.load, totals)))

    return types.float32(w, types.int64, types.int64, types.int64), generate


def _decode(context: Any, w: Any, row: Any, out: Any, count: Any) -> Any:
    """(array of blocks, address of some, address of floats, number of blocks): overwrite the floats with the numbers, each operation rounded once."""
    decode, size, x_size = _decoder(w)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, row, numbers, blocks = arguments
        with cgutils.for_range(builder, blocks) as loop:
            floats_at, offset = builder.add(numbers, builder.mul(loop.index, _constant(_I64, x_size))), 0
            for group in decode(builder, builder.add(row, builder.mul(loop.index, _constant(_I64, size)))):
                for vector in group.numbers:
                    value = vector if group.scale is None else builder.fmul(vector, group.scale)
                    _store(builder, value if group.least is None else builder.fadd(value, group.least), floats_at, offset)
                    offset += _VECTOR_BYTES
        return context.get_dummy_value()

    return types.void(w, types.int64, types.int64, types.int64), generate


_row_dot, _decode_row = cast(Any, intrinsic(_dot)), cast(Any, intrinsic(_decode))


@compiled(REASSOCIATE)
def multiply(x: Array, w: Array, y: Array, accumulate: bool) -> None:
    """y (+)= x @ w^T  # (R, K) @ (N, K)^T -> (R, N); w (N, blocks) of `ELEMENTS`; x and w with contiguous rows, one after the other."""
    for i in range(x.shape[0]):
        for n in range(w.shape[0]):
            found = _row_dot(w, w.ctypes.data + n * w.strides[0], x.ctypes.data + i * x.shape[1] * 4, w.shape[1])
            y[i, n] = y[i, n] + found if accumulate else found


@compiled(REASSOCIATE)
def decode(w: Array, out: Array) -> None:
    """out = the numbers of blocks  # (N, blocks) of `ELEMENTS` -> (N, K) fp32, both with contiguous rows."""
    for n in range(w.shape[0]):
        _decode_row(w, w.ctypes.data + n * w.strides[0], out.ctypes.data + n * out.strides[0], w.shape[1])
