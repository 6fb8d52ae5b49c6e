"""Vectors of 16 numbers in LLVM's intermediate representation, for loops that are written in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils, config

LANES: Final = 16
I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
BYTES, INTS, FLOATS = (ir.VectorType(kind, LANES) for kind in (I8, I32, F32))
_ASKED: Final = cast(Any, config).CPU_FEATURES
FEATURES: Final[str] = cast(Any, llvmlite.binding.get_host_cpu_features()).flatten() if _ASKED is None else _ASKED
"""Features of the processor that Numba compiles for, such as "+avx2,+f16c"."""
IS_WIDE: Final = "+avx512f" in FEATURES
"""Whether the processor has 32 registers of 16 floats; otherwise loops assume 16 registers of 8."""
_HAS_FUSED: Final = "+fma" in FEATURES or "+neon" in FEATURES


def constant(kind: Any, value: Any) -> Any:
    """Return a constant: a number in all lanes of a vector, or a number for each lane."""
    if isinstance(kind, ir.VectorType) and not isinstance(value, tuple | list):
        value = [value] * kind.count
    return ir.Constant(kind, value)


def int64(value: int) -> Any:
    """Return a constant of the type of addresses and counts."""
    return ir.Constant(I64, value)


def load(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    """Load the value at `address` + `offset` bytes, at any alignment."""
    value = builder.load(builder.inttoptr(builder.add(address, constant(I64, offset)), kind.as_pointer()))
    value.align = 1
    return value


def store(builder: Any, value: Any, address: Any, offset: int) -> None:
    """Write a value to `address` + `offset` bytes, at any alignment."""
    builder.store(value, builder.inttoptr(builder.add(address, constant(I64, offset)), value.type.as_pointer()), align=1)


def prefetch(builder: Any, address: Any) -> None:
    """Let the processor begin to read the cache line at `address`, which may lie beyond all data."""
    kinds = (I8.as_pointer(), I32, I32, I32)
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), kinds), "llvm.prefetch.p0i8")  # type: ignore[no-untyped-call]
    builder.call(function, [builder.inttoptr(address, kinds[0]), *(constant(I32, value) for value in (0, 2, 1))])


def spread(builder: Any, value: Any) -> Any:
    """Return a vector with a number in all lanes."""
    nothing = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(nothing, value, constant(I32, 0)), nothing, constant(INTS, 0))


def total(builder: Any, vector: Any) -> Any:
    """Return the sum of the lanes, by adding halves."""
    count = LANES
    while count > 1:
        count //= 2
        halves = (ir.Constant(ir.VectorType(I32, count), list(range(first, first + count))) for first in (0, count))
        nothing = ir.Constant(vector.type, ir.Undefined)
        low, high = (builder.shuffle_vector(vector, nothing, half) for half in halves)
        vector = builder.fadd(low, high)
    return builder.extract_element(vector, constant(I32, 0))


def addresses(builder: Any, first: Any, step: Any, count: int) -> list[Any]:
    """Return `count` addresses, `step` bytes from one to the next."""
    result = [first]
    for _ in range(1, count):
        result.append(builder.add(result[-1], step))
    return result


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once if the processor can: explicitly, because LLVM decides for each loop anew which operations to fuse."""
    if not _HAS_FUSED:
        return builder.fadd(builder.fmul(a, b), c)
    name = "llvm.fma.f32" if a.type == F32 else f"llvm.fma.v{LANES}f32"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(a.type, [a.type] * 3), name)  # type: ignore[no-untyped-call]
    return builder.call(function, [a, b, c])


def add_product(builder: Any, x: Any, w: Any, slot: Any) -> None:
    """Add x * w to the number or vector in a stack slot."""
    builder.store(fused(builder, x, w, builder.load(slot)), slot)


def zeros(builder: Any, kind: Any, rows: int, columns: int) -> list[list[Any]]:
    """Return stack slots of zeros, which become registers."""
    return [[cgutils.alloca_once_value(builder, constant(kind, 0.0)) for _ in range(columns)] for _ in range(rows)]  # type: ignore[no-untyped-call]


@contextmanager
def in_groups(builder: Any, end: Any, count: int, begin: Any) -> Iterator[Any]:
    """Loop over the first numbers of all whole groups of `count` between `begin` and `end`."""
    number = builder.udiv(builder.sub(end, begin), constant(I64, count))
    with cgutils.for_range(builder, number) as loop:
        yield builder.add(begin, builder.mul(loop.index, constant(I64, count)))


def group_begins(builder: Any, end: Any, counts: Sequence[int]) -> list[tuple[int, Any]]:
    """Return each of the descending `counts` with the number at which its groups begin; groups of larger counts come first."""
    begin, groups = constant(I64, 0), []
    for count in counts:
        groups.append((count, begin))
        begin = builder.sub(end, builder.urem(builder.sub(end, begin), constant(I64, count)))
    return groups
