"""Products with an epilogue by cuBLASLt, through its C interface: a bias, or the slope of GELU; sums in fp32 are rounded once, after it.

A plan is the algorithm that cuBLASLt's heuristic chooses, cached by sizes, types, strides and alignments. It depends on nothing else, and so do the
bits of a product. Shapes for which there is no algorithm are refused; the caller then has a kernel of its own, which rounds twice.

Attributes and their numbers are those of cublasLt.h since CUDA 11.3. GELU itself is not computed here: models recompute it from the stored sums.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

from .array import DeviceArray
from .products import REFUSALS, TYPES, WORKSPACE_NBYTES, ColumnMajor, Cublas, CublasError, check, cublas_lt

_TRANS_A, _TRANS_B, _EPILOGUE, _BIAS_POINTER, _AUX_POINTER, _AUX_DISTANCE = 3, 4, 7, 8, 11, 12
"""cublasLtMatmulDescAttributes_t."""
_MOST_WORKSPACE, _REDUCTIONS, _ALIGNMENT_OF_A = 1, 3, 5
"""cublasLtMatmulPreferenceAttributes_t; alignments of B, C and D follow that of A."""
_SUMS_IN_FP32: Final = 2
"""CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE: parts of a product are added in the type of its sums, and never by atomics."""
_REAL_FP32: Final = 0
"""cudaDataType of the factors of a product."""
_MOST_ALIGNMENT: Final = 256
_LEAST_ALIGNMENT: Final = 16
"""Kernels may read 16 bytes of an operand at a time, whatever its alignment."""
_AUX_MULTIPLE: Final = 8
"""Divisor of the distance of columns of GELU's operand (cuBLAS documentation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD)."""


class Epilogue(NamedTuple):
    """An operation on the sums of a product.

    Attributes:
        number: cublasLtEpilogue_t.
        pointer: attribute for the address of its operand.
        name: the product with it, in messages.
        rest: replacement of a refused product, in messages.
    """

    number: int
    pointer: int
    name: str
    rest: str


BIAS: Final = Epilogue(4, _BIAS_POINTER, "product with a bias", "such biases are added")
"""C = op(A) @ op(B) + operand, of the length of C's columns."""
GELU_SLOPE: Final = Epilogue(192, _AUX_POINTER, "product with the slope of GELU", "such slopes are multiplied")
"""C = op(A) @ op(B) * gelu'(operand), of the shape of C; GELU by tanh."""


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class _Plan(NamedTuple):
    """The description of a product, those of A, B and the result, and the chosen algorithm."""

    product: ctypes.c_void_p
    layouts: tuple[ctypes.c_void_p, ...]
    chosen: Heuristic


class CublasLt:
    """Products with an epilogue for one thread.

    Args:
        blas: cuBLAS on the same stream; its handle is one of cuBLASLt as well.
        workspace: address of `WORKSPACE_NBYTES` of the device's memory, which both may share.
    """

    def __init__(self, blas: Cublas, workspace: int) -> None:
        self._library = _library()
        self._blas, self._workspace = blas, workspace
        self._plans: dict[tuple[Any, ...], _Plan | None] = {}
        self._zero, self._one = ctypes.c_float(0.0), ctypes.c_float(1.0)
        self._warned: set[Epilogue] = set()

    def multiply(self, product: ColumnMajor, epilogue: Epilogue, operand: DeviceArray, stream: int) -> bool:
        """Start a product with an epilogue; return whether cuBLASLt computes this shape.

        Raises:
            CublasError: the call failed for another reason.
        """
        sides = product.a, product.b, product.c
        alignments = tuple(_alignment(array) for array in (*sides, operand))
        sizes = product.trans_a, product.trans_b, product.m, product.n, product.k, product.lda, product.ldb, product.ldc
        key = (epilogue, *sizes, *alignments, *(array.dtype for array in (*sides, operand)))
        if key not in self._plans:
            self._plans[key] = self._plan(product, epilogue, alignments)
        plan = self._plans[key]
        if plan is not None:
            if self._start(plan, product, epilogue, operand, stream):
                return True
            self._destroy(plan.product, plan.layouts)
        self._plans[key] = None
        self._warn(product, epilogue, self._reason(product, epilogue, alignments))
        return False

    def _start(self, plan: _Plan, product: ColumnMajor, epilogue: Epilogue, operand: DeviceArray, stream: int) -> bool:
        """Start a planned product; return False if it is refused."""
        a, b, c = plan.layouts
        self._set(self._library.cublasLtMatmulDescSetAttribute, plan.product, epilogue.pointer, ctypes.c_void_p(operand.address))
        status = self._library.cublasLtMatmul(
            self._blas.handle, plan.product, ctypes.byref(self._one), product.a.address, a, product.b.address, b, ctypes.byref(self._zero),
            product.c.address, c, product.c.address, c, ctypes.byref(plan.chosen), self._workspace, WORKSPACE_NBYTES, stream,
        )  # fmt: skip
        if status and status not in REFUSALS:
            raise CublasError(status)
        return not status

    def _plan(self, product: ColumnMajor, epilogue: Epilogue, alignments: tuple[int, ...]) -> _Plan | None:
        """Ask for an algorithm; None if there is none."""
        if self._reason(product, epilogue, alignments):
            return None
        with ExitStack() as unused:
            plan = self._planned(product, epilogue, alignments, unused)
            if plan is not None:
                unused.pop_all()
        return plan

    def _reason(self, product: ColumnMajor, epilogue: Epilogue, alignments: tuple[int, ...]) -> str:
        """Return why no plan is asked for; "" if one is."""
        if self._library is None:
            return "cuBLASLt was not found"
        if min(alignments) < _LEAST_ALIGNMENT:
            return f"cuBLASLt reads {_LEAST_ALIGNMENT} bytes at a time, and an operand begins at a multiple of {min(alignments)}"
        if epilogue is GELU_SLOPE and product.m % _AUX_MULTIPLE:
            return f"cuBLASLt takes the operand of GELU in rows of a multiple of {_AUX_MULTIPLE} numbers, got {product.m}"
        return ""

    def _planned(self, product: ColumnMajor, epilogue: Epilogue, alignments: tuple[int, ...], unused: ExitStack) -> _Plan | None:
        """Describe a product and ask for an algorithm; `unused` gets what ends the descriptions."""
        library = self._library
        described = self._created(library.cublasLtMatmulDescCreate, self._blas.sums[product.a.dtype.itemsize], _REAL_FP32)
        unused.callback(library.cublasLtMatmulDescDestroy, described)
        values = {_TRANS_A: product.trans_a, _TRANS_B: product.trans_b, _EPILOGUE: epilogue.number}
        for attribute, value in values.items():
            self._set(library.cublasLtMatmulDescSetAttribute, described, attribute, ctypes.c_int(value))
        # the heuristic reads the alignment of the operand from its address, and nothing there
        self._set(library.cublasLtMatmulDescSetAttribute, described, epilogue.pointer, ctypes.c_void_p(alignments[-1]))
        if epilogue is GELU_SLOPE:
            self._set(library.cublasLtMatmulDescSetAttribute, described, _AUX_DISTANCE, ctypes.c_int64(product.m))
        m, n, k = product.m, product.n, product.k
        shapes = (
            (product.a, (k, m) if product.trans_a else (m, k), product.lda),
            (product.b, (n, k) if product.trans_b else (k, n), product.ldb),
            (product.c, (m, n), product.ldc),
        )
        layouts = []
        for array, shape, distance in shapes:
            layouts.append(self._created(library.cublasLtMatrixLayoutCreate, TYPES[array.dtype], *shape, distance))
            unused.callback(library.cublasLtMatrixLayoutDestroy, layouts[-1])
        chosen = self._chosen(described, layouts, alignments)
        return None if chosen is None else _Plan(described, tuple(layouts), chosen)

    def _chosen(self, described: ctypes.c_void_p, layouts: Sequence[ctypes.c_void_p], alignments: tuple[int, ...]) -> Heuristic | None:
        """Return the heuristic's first choice; None if it has none."""
        library, chosen, count = self._library, Heuristic(), ctypes.c_int()
        preference = self._created(library.cublasLtMatmulPreferenceCreate)
        a, b, c = layouts
        try:
            self._set(library.cublasLtMatmulPreferenceSetAttribute, preference, _MOST_WORKSPACE, ctypes.c_uint64(WORKSPACE_NBYTES))
            self._set(library.cublasLtMatmulPreferenceSetAttribute, preference, _REDUCTIONS, ctypes.c_uint32(_SUMS_IN_FP32))
            for number, alignment in enumerate((*alignments[:3], alignments[2])):
                self._set(library.cublasLtMatmulPreferenceSetAttribute, preference, _ALIGNMENT_OF_A + number, ctypes.c_uint32(alignment))
            status = library.cublasLtMatmulAlgoGetHeuristic(
                self._blas.handle, described, a, b, c, c, preference, 1, ctypes.byref(chosen), ctypes.byref(count)
            )
        finally:
            check(library.cublasLtMatmulPreferenceDestroy(preference))
        if status not in (0, *REFUSALS):
            raise CublasError(status)
        return None if status or count.value == 0 or chosen.state else chosen

    def close(self) -> None:
        """Release all plans; idempotent."""
        while self._plans:
            _, plan = self._plans.popitem()
            if plan is not None:
                self._destroy(plan.product, plan.layouts)

    def _destroy(self, described: ctypes.c_void_p, layouts: tuple[ctypes.c_void_p, ...]) -> None:
        check(self._library.cublasLtMatmulDescDestroy(described))
        for layout in layouts:
            check(self._library.cublasLtMatrixLayoutDestroy(layout))

    @staticmethod
    def _created(create: Any, *arguments: int) -> ctypes.c_void_p:
        """Return a new description."""
        created = ctypes.c_void_p()
        check(create(ctypes.byref(created), *arguments))
        return created

    @staticmethod
    def _set(function: Any, described: ctypes.c_void_p, attribute: int, value: Any) -> None:
        check(function(described, attribute, ctypes.byref(value), ctypes.sizeof(value)))

    def _warn(self, product: ColumnMajor, epilogue: Epilogue, reason: str) -> None:
        """Warn at the first refusal of an epilogue."""
        if epilogue not in self._warned:
            self._warned.add(epilogue)
            shape = f"{product.n} rows of {product.k} numbers by {product.m} columns of {product.a.dtype}"
            fact = reason or f"cuBLASLt has no {epilogue.name} for {shape}"
            warnings.warn(f"{fact}; {epilogue.rest} by a kernel of their own, which takes longer", RuntimeWarning, stacklevel=2)


def _alignment(array: DeviceArray) -> int:
    """Return the largest power of two up to `_MOST_ALIGNMENT` that divides the address."""
    return min(array.address & -array.address, _MOST_ALIGNMENT)


def _library() -> Any:
    """Return cuBLASLt; None if it is missing."""
    library = cublas_lt()
    return None if library is None else typed_cublas_lt(library)


def typed_cublas_lt(library: Any) -> Any:
    """Declare the types of the functions that nntask calls; without types ctypes truncates addresses to 32 bits."""
    pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    created, attribute = ctypes.POINTER(ctypes.c_void_p), [pointer, integer, pointer, size]
    signatures: dict[str, list[Any]] = {
        "cublasLtMatmulDescCreate": [created, integer, integer],
        "cublasLtMatmulDescDestroy": [pointer],
        "cublasLtMatmulDescSetAttribute": attribute,
        "cublasLtMatrixLayoutCreate": [created, integer, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64],
        "cublasLtMatrixLayoutDestroy": [pointer],
        "cublasLtMatmulPreferenceCreate": [created],
        "cublasLtMatmulPreferenceDestroy": [pointer],
        "cublasLtMatmulPreferenceSetAttribute": attribute,
        "cublasLtMatmulAlgoGetHeuristic": [*[pointer] * 7, integer, pointer, pointer],
        "cublasLtMatmul": [*[pointer] * 14, size, pointer],
    }
    for name, argtypes in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = argtypes, integer
    return library
