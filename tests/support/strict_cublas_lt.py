"""cuBLASLt on the CPU, strict: products with a bias, as `tiles.kernels.cuda.epilogues` asks for them (cuBLAS documentation, chapter 3).

Refused: attributes of other sizes, shapes that do not fit, an algorithm of another product, operands that are less aligned than was promised, memory
that is not the device's, and descriptions that are destroyed twice.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import ml_dtypes
import numpy as np
from support.fake_cuda import CFunction, FakeCuda
from support.fake_cuda_calls import CUDARuntimeError
from support.hazards import Access

from tiles.kernels.reference.elementwise import slope

_TYPES = {0: np.dtype(np.float32), 14: np.dtype(ml_dtypes.bfloat16)}
"""cudaDataType."""
_SIZES = {"product": {3: 4, 4: 4, 7: 4, 8: 8, 11: 8, 12: 8}, "preference": {1: 8, 3: 4, 5: 4, 6: 4, 7: 4, 8: 4}}
"""Bytes of the attributes that are set, by number."""
_BIAS, _DGELU, _SUMS_IN_FP32, _INVALID, _ILLEGAL_ADDRESS = 4, 192, 2, 7, 700

Refuses = Callable[[int, int, int], int]
"""Function of (m, n, k): 0, or the status of a shape that has no algorithm; -1 for a heuristic that finds none."""


@dataclass
class _Described:
    """A description: its kind, the arguments that it was created with, and its attributes."""

    kind: str
    created: tuple[int, ...]
    values: dict[int, int] = field(default_factory=dict)


class LibcublasLt:
    """The library.

    Args:
        device_of: function of a handle of cuBLAS: its device, if that is current, else None.
        refuses: shapes that have no algorithm.

    Attributes:
        described: descriptions that exist, by address.
    """

    def __init__(self, cuda: FakeCuda, device_of: Callable[[int], int | None], refuses: Refuses) -> None:
        self.described: dict[int, _Described] = {}
        self._cuda, self._device_of, self._refuses = cuda, device_of, refuses
        self._numbers, self._problems = count(1), dict[int, Any]()
        pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
        created, attribute = ctypes.POINTER(ctypes.c_void_p), [pointer, integer, pointer, size]
        layout = [created, integer, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64]
        for name, kind, arguments in (
            ("cublasLtMatmulDesc", "product", [created, integer, integer]),
            ("cublasLtMatrixLayout", "layout", layout),
            ("cublasLtMatmulPreference", "preference", [created]),
        ):
            setattr(self, f"{name}Create", CFunction(cuda, f"{name}Create", arguments, self._creates(kind)))
            setattr(self, f"{name}Destroy", CFunction(cuda, f"{name}Destroy", [pointer], self._destroys(kind)))
            setattr(self, f"{name}SetAttribute", CFunction(cuda, f"{name}SetAttribute", attribute, self._sets(kind)))
        heuristic = [*[pointer] * 7, integer, pointer, pointer]
        self.cublasLtMatmulAlgoGetHeuristic = CFunction(cuda, "cublasLtMatmulAlgoGetHeuristic", heuristic, self._choose)
        self.cublasLtMatmul = CFunction(cuda, "cublasLtMatmul", [*[pointer] * 14, size, pointer], self._multiply)

    def _creates(self, kind: str) -> Callable[..., int]:
        def create(made: ctypes.c_void_p, *arguments: int) -> int:
            made.value = 0x700_0000_0000 + 0x100 * next(self._numbers)
            self.described[made.value] = _Described(kind, arguments)
            return 0

        return create

    def _destroys(self, kind: str) -> Callable[[int], int]:
        def destroy(number: int) -> int:
            one = self.described.pop(number, None)
            return 0 if one is not None and one.kind == kind else self._invalid(f"{number:#x} is no {kind}, or one that was destroyed")

        return destroy

    def _sets(self, kind: str) -> Callable[..., int]:
        def change(number: int, attribute: int, value: Any, nbytes: int) -> int:
            one, size = self.described.get(number), _SIZES[kind].get(attribute)
            if one is None or one.kind != kind or size != nbytes or ctypes.sizeof(value) != nbytes:
                return self._invalid(f"attribute {attribute} of a {kind} has {size} bytes, got {nbytes} of {value!r}")
            one.values[attribute] = value.value or 0
            return 0

        return change

    def _invalid(self, said: str) -> int:
        self._cuda.refuse(f"cublasLt: {said}")
        return _INVALID

    def _problem(self, handle: int, product: int, layouts: tuple[int, ...]) -> tuple[Any, ...] | None:
        """Types, sizes and operations of a product, without addresses; None if it is wrong."""
        if self._device_of(handle) is None:
            return None
        one, sides = self.described.get(product), [self.described.get(number) for number in layouts]
        if one is None or one.kind != "product" or any(side is None or side.kind != "layout" for side in sides):
            self._invalid("a product takes descriptions of itself and of four matrices")
            return None
        (compute, scale), (a, b, c, d) = one.created, (side.created for side in sides if side)
        opa, opb, epilogue = (one.values.get(number, default) for number, default in ((3, 0), (4, 0), (7, 1)))
        m, k = (a[2], a[1]) if opa else (a[1], a[2])
        n = b[1] if opb else b[2]
        if c != d or c[1:3] != (m, n) or k != (b[2] if opb else b[1]) or {opa, opb} - {0, 1} or any(side[3] < side[1] for side in (a, b, c)):
            self._invalid(f"matrices {a}, {b} and {c} (type, rows, columns, distance) have no product with operations {opa} and {opb}")
            return None
        distance = one.values.get(12, 0)
        if epilogue == _DGELU and (distance < m or distance % 8 or compute != 68):
            self._invalid(f"the operand of GELU has columns of {m} numbers, {distance} apart, which is no multiple of 8, or sums of type {compute}")
            return None
        if epilogue not in (_BIAS, _DGELU) or scale != 0 or compute not in (68, 77) or not a[0] == b[0] == c[0] or (compute == 77 and a[0] != 0):
            self._invalid(f"epilogue {epilogue} of types {a[0]}, {b[0]}, {c[0]}, sums of type {compute} by factors of type {scale}")
            return None
        return opa, opb, m, n, k, a, b, c, compute, epilogue, distance

    def _choose(self, handle: int, product: int, *rest: Any) -> int:
        *layouts, preference, asked, chosen, number = rest
        problem, preferred = self._problem(handle, product, tuple(layouts)), self.described.get(preference)
        if problem is None or preferred is None or preferred.kind != "preference" or asked != 1:
            return _INVALID
        if preferred.values.get(3) != _SUMS_IN_FP32:
            return self._invalid("parts of a product may be added in another type than its sums")
        status = self._refuses(*problem[2:5])
        number.value = 0 if status else 1
        if not status:
            chosen.algorithm[0], chosen.workspace = 1 + len(self._problems), preferred.values.get(1, 0)
            bias = self.described[product].values.get(11 if problem[9] == _DGELU else 8, 0)
            self._problems[chosen.algorithm[0]] = problem, [preferred.values.get(place, 256) for place in (5, 6, 7, 8)] + [bias & -bias]
        return max(status, 0)

    def _multiply(self, handle: int, product: int, alpha: Any, *rest: Any) -> int:
        a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, chosen, workspace, nbytes, stream = rest
        problem = self._problem(handle, product, (a_layout, b_layout, c_layout, d_layout))
        bias = self.described[product].values.get(11 if problem[9] == _DGELU else 8, 0) if problem else 0
        planned, alignments = self._problems.get(chosen.algorithm[0], (None, []))
        if problem is None or problem != planned or chosen.workspace > nbytes:
            return self._invalid("the algorithm is of another product, or takes a larger workspace")
        if any(address % alignment for address, alignment in zip((a, b, c, d, bias), alignments, strict=True)):
            return self._invalid(f"operands are to be aligned to {alignments}, got {a:#x}, {b:#x}, {c:#x}, {d:#x}, {bias:#x}")
        m, a_shape, b_shape, d_shape = problem[2], *problem[5:8]
        item = _TYPES[d_shape[0]].itemsize
        extents = [((shape[3] * (shape[2] - 1) + shape[1]) * item) for shape in (a_shape, b_shape, d_shape)]
        places = [
            (a, extents[0], False),
            (b, extents[1], False),
            (d, extents[2], True),
            (bias, (problem[10] * (problem[3] - 1 if problem[9] == _DGELU else 0) + m) * item, False),
            (workspace, nbytes, True),
        ]
        if any(self._cuda.memory_at(place, length, "an operand") is None for place, length, _ in places):
            return self._invalid("an operand is no memory of a device")
        factors = alpha.value, beta.value
        try:
            accesses = [Access(*place) for place in places]
            self._cuda.submit(stream, "a product", accesses, lambda: _compute(problem, (a, b, d, bias), factors))
        except CUDARuntimeError as error:
            if error.status != _ILLEGAL_ADDRESS:
                raise
            return 14  # CUBLAS_STATUS_INTERNAL_ERROR
        return 0


def _compute(problem: tuple[Any, ...], places: tuple[int, ...], factors: tuple[float, float]) -> None:
    """D = alpha op(A) @ op(B) + bias, or times the slope of GELU, rounded once; all in columns."""

    def matrix(place: int, shape: tuple[int, ...]) -> np.ndarray:
        kind, rows, columns, distance = shape
        dtype = _TYPES[kind]
        nbytes = (distance * (columns - 1) + rows) * dtype.itemsize
        flat = np.frombuffer((ctypes.c_char * nbytes).from_address(place), dtype)
        return np.lib.stride_tricks.as_strided(flat, (rows, columns), (dtype.itemsize, distance * dtype.itemsize))

    opa, opb, m, n, _, a, b, d, _, epilogue, distance = problem
    left, right = matrix(places[0], a).astype(np.float32), matrix(places[1], b).astype(np.float32)
    operand = matrix(places[3], (d[0], m, n, distance) if epilogue == _DGELU else (d[0], m, 1, m)).astype(np.float32)
    assert factors == (1.0, 0.0)
    product = ((right if not opb else right.T).T @ (left if not opa else left.T).T).T
    matrix(places[2], d)[...] = product * slope(operand, "gelu_new") if epilogue == _DGELU else product + operand
