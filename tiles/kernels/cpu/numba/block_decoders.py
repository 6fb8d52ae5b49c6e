"""Decoders of blocks of weights (`tiles.block_format`) in LLVM's intermediate representation, for the loops of `block_loops`.

16 numbers at a time are widened in registers from bytes or bits. A scale is converted exactly and must be finite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from llvmlite import ir

from ....block_numbers import LEVELS
from .vectors import BYTES, F32, FEATURES, FLOATS, I16, I32, INTS, LANES, constant, load, spread


class ScaledGroup(NamedTuple):
    """Neighbouring numbers of a block that share a scale: vectors of 16, their factor, and the addend `least`; factor and addend may be None."""

    scale: Any
    numbers: Sequence[Any]
    least: Any = None


Decoder = Callable[[Any, Any], list[ScaledGroup]]
"""(builder, address of a block) -> its groups, in the order of its numbers."""

_MAGIC: Final = 0x4B000000
"""Bits of 2^23."""
_SHORTS, _FP16 = (ir.VectorType(kind, LANES) for kind in (I16, ir.HalfType()))
_WORDS: Final = ir.VectorType(I32, 4)
_CONVERTS_FP16: Final = "+f16c" in FEATURES
_COUNT: Final = tuple(range(LANES))


def _lane(builder: Any, vector: Any, number: int) -> Any:
    """Return a vector with one lane of `vector` in all lanes."""
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), constant(INTS, number))


def _fp16(builder: Any, bits: Any) -> Any:
    """Convert fp16 numbers, given as integers of 32 bits, to fp32: move exponent and mantissa, then multiply by 2^112; exact for denormals too."""
    kind = bits.type
    size = builder.shl(builder.and_(bits, constant(kind, 0x7FFF)), constant(kind, 13))
    sign = builder.shl(builder.and_(bits, constant(kind, 0x8000)), constant(kind, 16))
    whole = builder.or_(size, sign)
    return builder.fmul(builder.bitcast(whole if kind == INTS else spread(builder, whole), FLOATS), constant(FLOATS, 2.0**112))


def _scale(builder: Any, address: Any, offset: int = 0) -> Any:
    """Load the fp16 number at an address as fp32, in all lanes. Scales of q6_k and iq4_xs are often denormal, which slow the product of `_fp16`."""
    if _CONVERTS_FP16:
        return spread(builder, builder.fpext(load(builder, address, offset, ir.HalfType()), F32))
    return _fp16(builder, builder.zext(load(builder, address, offset, I16), I32))


def _ints(builder: Any, address: Any, offset: int, kind: Any = BYTES) -> Any:
    """Load 16 bytes, or pairs of bytes, as integers of 32 bits."""
    return builder.zext(load(builder, address, offset, kind), INTS)


def _float(builder: Any, whole: Any, less: float = 0.0) -> Any:
    """Convert small whole numbers q to floats q - `less`: bits of 2^23 + q, minus 2^23 + `less`; exact, and faster than a conversion."""
    return builder.fsub(builder.bitcast(builder.or_(whole, constant(INTS, _MAGIC)), FLOATS), constant(FLOATS, 2.0**23 + less))


def _signed(builder: Any, values: Any) -> Any:
    """Convert 16 signed bytes to floats."""
    return builder.sitofp(builder.sext(values, INTS), FLOATS)


def _bits(builder: Any, whole: Any, first: int, count: int, target: int = 0) -> Any:
    """Return bits `first` to `first` + `count` - 1 of each number, moved to bit `target`."""
    shift = first - target
    moved = builder.lshr(whole, constant(INTS, shift)) if shift > 0 else builder.shl(whole, constant(INTS, -shift)) if shift < 0 else whole
    return builder.and_(moved, constant(INTS, (1 << count) - 1 << target))


def _halves(builder: Any, address: Any, offset: int) -> tuple[Any, Any]:
    """Return the low and the high halves of 16 bytes."""
    both = _ints(builder, address, offset)
    return builder.and_(both, constant(INTS, 15)), builder.lshr(both, constant(INTS, 4))


def _q8_0(builder: Any, address: Any) -> list[ScaledGroup]:
    low, high = (_signed(builder, load(builder, address, at, BYTES)) for at in (2, 18))
    return [ScaledGroup(_scale(builder, address), (low, high))]


def _q4_0(builder: Any, address: Any) -> list[ScaledGroup]:
    return [ScaledGroup(_scale(builder, address), [_float(builder, half, 8) for half in _halves(builder, address, 2)])]


def _q4_1(builder: Any, address: Any) -> list[ScaledGroup]:
    numbers = [_float(builder, half) for half in _halves(builder, address, 4)]
    return [ScaledGroup(_scale(builder, address), numbers, _scale(builder, address, 2))]


def _with_fifth_bits(builder: Any, address: Any, offset: int) -> list[Any]:
    """Return 32 half bytes with a fifth bit each, from 4 bytes of bits and the 16 bytes after them."""
    bits = load(builder, address, offset, I32)
    first, last = (spread(builder, each) for each in (builder.shl(bits, constant(I32, 4)), builder.lshr(bits, constant(I32, 12))))
    fifth = (builder.and_(builder.lshr(each, constant(INTS, _COUNT)), constant(INTS, 16)) for each in (first, last))
    return [builder.or_(half, bit) for half, bit in zip(_halves(builder, address, offset + 4), fifth, strict=True)]


def _q5_0(builder: Any, address: Any) -> list[ScaledGroup]:
    return [ScaledGroup(_scale(builder, address), [_float(builder, each, 16) for each in _with_fifth_bits(builder, address, 2)])]


def _q5_1(builder: Any, address: Any) -> list[ScaledGroup]:
    numbers = [_float(builder, each) for each in _with_fifth_bits(builder, address, 4)]
    return [ScaledGroup(_scale(builder, address), numbers, _scale(builder, address, 2))]


def _levels(builder: Any, address: Any, offset: int) -> list[Any]:
    """Return the numbers of `LEVELS` that 32 half bytes encode."""
    both = load(builder, address, offset, BYTES)
    halves = builder.and_(both, constant(BYTES, 15)), builder.lshr(both, constant(BYTES, 4))
    return [_signed(builder, _looked_up(builder, half)) for half in halves]


def _looked_up(builder: Any, halves: Any) -> Any:
    """Return `LEVELS` at 16 indices, one a byte: one instruction of x86, and a chain of selections elsewhere."""
    table = constant(BYTES, list(LEVELS))
    if "+ssse3" in FEATURES:
        shuffle = builder.module.declare_intrinsic("llvm.x86.ssse3.pshuf.b.128", (), ir.FunctionType(BYTES, [BYTES, BYTES]))
        return builder.call(shuffle, [table, halves])
    looked_up = constant(BYTES, LEVELS[0])
    for index, level in enumerate(LEVELS[1:], 1):
        looked_up = builder.select(builder.icmp_unsigned("==", halves, constant(BYTES, index)), constant(BYTES, level), looked_up)
    return looked_up


def _iq4_nl(builder: Any, address: Any) -> list[ScaledGroup]:
    return [ScaledGroup(_scale(builder, address), _levels(builder, address, 2))]


def _iq4_xs(builder: Any, address: Any) -> list[ScaledGroup]:
    groups = [lane % 8 for lane in _COUNT]
    low = builder.lshr(spread(builder, load(builder, address, 4, I32)), constant(INTS, [4 * each for each in groups]))
    high = builder.lshr(spread(builder, builder.zext(load(builder, address, 2, I16), I32)), constant(INTS, [2 * each for each in groups]))
    whole = builder.or_(builder.and_(low, constant(INTS, 15)), _bits(builder, high, 0, 2, 4))
    scales = builder.fmul(_scale(builder, address), _float(builder, whole, 32))
    return [ScaledGroup(_lane(builder, scales, group), _levels(builder, address, 8 + 16 * group)) for group in range(8)]


def _two_bits(builder: Any, address: Any, offset: int) -> list[Any]:
    """Return the 16 groups of two-bit numbers of q2_k and q3_k: four numbers in each byte."""
    stored = [_ints(builder, address, offset + 16 * number) for number in range(4)]
    return [_bits(builder, stored[number // 8 * 2 + number % 2], number % 8 // 2 * 2, 2) for number in range(16)]


def _q2_k(builder: Any, address: Any) -> list[ScaledGroup]:
    both = _ints(builder, address, 0)
    scales = builder.fmul(_scale(builder, address, 80), _float(builder, builder.and_(both, constant(INTS, 15))))
    least = builder.fneg(builder.fmul(_scale(builder, address, 82), _float(builder, builder.lshr(both, constant(INTS, 4)))))
    numbers = enumerate(_two_bits(builder, address, 16))
    return [ScaledGroup(_lane(builder, scales, number), [_float(builder, each)], _lane(builder, least, number)) for number, each in numbers]


def _q3_k(builder: Any, address: Any) -> list[ScaledGroup]:
    """Decode q3_k. Scales have 6 bits: the 4 low bits in one of two words, the 2 high bits in the last word."""
    words = [load(builder, address, 96 + 4 * number, I32) for number in range(3)]
    low = [_masked(builder, words[number % 2], 4 * (number // 2), 15) for number in range(4)]
    high = [builder.shl(_masked(builder, words[2], 2 * number, 3), constant(I32, 4)) for number in range(4)]
    whole = _ints_of_words(builder, [builder.or_(*pair) for pair in zip(low, high, strict=True)])
    scales = builder.fmul(_scale(builder, address, 108), _float(builder, whole, 32))
    third = [_ints(builder, address, 16 * number) for number in range(2)]
    groups = []
    for number, two in enumerate(_two_bits(builder, address, 32)):
        three = builder.or_(two, _bits(builder, third[number % 2], number // 2, 1, 2))
        groups.append(ScaledGroup(_lane(builder, scales, number), [_float(builder, three, 4)]))
    return groups


def _masked(builder: Any, word: Any, shift: int, mask: int) -> Any:
    """Return the bits `mask` of each of four bytes, after a shift to the right."""
    return builder.and_(builder.lshr(word, constant(I32, shift)), constant(I32, mask * 0x01010101))


def _ints_of_words(builder: Any, words: Sequence[Any]) -> Any:
    """Return the 16 bytes of four words as integers of 32 bits."""
    vector = ir.Constant(_WORDS, ir.Undefined)
    for index, word in enumerate(words):
        vector = builder.insert_element(vector, word, constant(I32, index))
    return builder.zext(builder.bitcast(vector, BYTES), INTS)


def _six_bits(builder: Any, address: Any) -> tuple[list[Any], list[Any]]:
    """Return the scales and the addends of the 8 groups of q4_k or q5_k."""
    first, second, third = (load(builder, address, at, I32) for at in (4, 8, 12))
    words = []
    for word, shift in ((first, 0), (second, 4)):
        upper = builder.shl(_masked(builder, word, 6, 3), constant(I32, 4))
        words += [_masked(builder, word, 0, 63), builder.or_(_masked(builder, third, shift, 15), upper)]
    factors = _scale(builder, address), builder.fneg(_scale(builder, address, 2))
    both = builder.shuffle_vector(*factors, constant(INTS, [*range(8), *range(24, 32)]))
    scaled = builder.fmul(both, _float(builder, _ints_of_words(builder, words)))
    return [_lane(builder, scaled, group) for group in range(8)], [_lane(builder, scaled, 8 + group) for group in range(8)]


def _of_pairs(builder: Any, address: Any, offset: int, fifth: Sequence[Any]) -> list[ScaledGroup]:
    """Return the groups of q4_k and q5_k: 32 bytes have the numbers of one group in their low halves and those of the next in their high halves.

    Args:
        offset: position of the bytes in a block.
        fifth: bytes whose bit g is the fifth bit of a number of group g; none for q4_k.
    """
    (scales, least), groups = _six_bits(builder, address), []
    for pair in range(4):
        halves = zip(*(_halves(builder, address, offset + 32 * pair + 16 * half) for half in (0, 1)), strict=True)
        for group, whole in enumerate(halves, 2 * pair):
            if fifth:
                whole = tuple(builder.or_(each, _bits(builder, bits, group, 1, 4)) for each, bits in zip(whole, fifth, strict=True))
            groups.append(ScaledGroup(scales[group], [_float(builder, each) for each in whole], least[group]))
    return groups


def _q4_k(builder: Any, address: Any) -> list[ScaledGroup]:
    return _of_pairs(builder, address, 16, ())


def _q5_k(builder: Any, address: Any) -> list[ScaledGroup]:
    return _of_pairs(builder, address, 48, [_ints(builder, address, 16 + 16 * half) for half in (0, 1)])


def _q6_k(builder: Any, address: Any) -> list[ScaledGroup]:
    scales = builder.fmul(_scale(builder, address, 208), _signed(builder, load(builder, address, 192, BYTES)))
    groups = []
    for half in range(2):
        low = [_ints(builder, address, 64 * half + 16 * index) for index in range(4)]
        high = [_ints(builder, address, 128 + 32 * half + 16 * index) for index in range(2)]
        for number in range(8):
            quarter, index = divmod(number, 2)
            nibble = _bits(builder, low[2 * (quarter % 2) + index], 4 * (quarter // 2), 4)
            whole = builder.or_(nibble, _bits(builder, high[index], 2 * quarter, 2, 4))
            groups.append(ScaledGroup(_lane(builder, scales, 8 * half + number), [_float(builder, whole, 32)]))
    return groups


def _f16(builder: Any, address: Any) -> list[ScaledGroup]:
    """Decode f16, by the processor's conversion if it has one: weights can be denormal fp16, which slow the product of `_fp16`."""
    if _CONVERTS_FP16:
        return [ScaledGroup(None, [builder.fpext(load(builder, address, at, _FP16), FLOATS) for at in (0, 32)])]
    return [ScaledGroup(None, [_fp16(builder, _ints(builder, address, at, _SHORTS)) for at in (0, 32)])]


def _bf16(builder: Any, address: Any) -> list[ScaledGroup]:
    wide = (builder.shl(_ints(builder, address, at, _SHORTS), constant(INTS, 16)) for at in (0, 32))
    return [ScaledGroup(None, [builder.bitcast(each, FLOATS) for each in wide])]


_BLOCKS: Final = (_q8_0, _q4_0, _q4_1, _q5_0, _q5_1, _iq4_nl, _iq4_xs, _q2_k, _q3_k, _q4_k, _q5_k, _q6_k, _f16, _bf16)
DECODERS: Final[Mapping[str, Decoder]] = {each.__name__[1:]: each for each in _BLOCKS}
