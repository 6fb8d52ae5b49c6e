"""Matrix products on a GPU by cuBLAS, through its C interface: a handle on one stream with a workspace of its own.

CuPy's wrapper sets the stream before each call, which resets the workspace (cublasSetStream). Without a workspace, cuBLAS neither promises equal bits
nor allows capture in a graph. Products here are in row-major order, cuBLAS's in column-major order: out = a @ b is computed as its transpose,
out^T = b^T @ a^T, over the same bytes.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np

from ..registry import BF16
from .array import DeviceArray

WORKSPACE_NBYTES: Final = 32 << 20
"""Size that NVIDIA recommends for Hopper; a fixed size keeps the choice of algorithms, and so the rounding, the same."""

_NO_LOAD: Final = 4
"""RTLD_NOLOAD of Linux: use only libraries that the process has already loaded."""
TYPES: Final = {np.dtype(np.float32): 0, BF16: 14}
"""cudaDataType: CUDA_R_32F, CUDA_R_16BF."""
_FP32: Final = 68
_TF32: Final = 77
"""cublasComputeType: CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_FAST_TF32."""
_DEFAULT_ALGORITHM: Final = -1
_SUMS_IN_FP32: Final = 16
"""cublasMath_t: CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION; otherwise parts of a bf16 product may be added up in bf16."""
REFUSALS: Final = (7, 15)
"""cublasStatus_t: INVALID_VALUE and NOT_SUPPORTED, before anything has been started."""
_NAMES: Final = {1: "NOT_INITIALIZED", 3: "ALLOC_FAILED", 7: "INVALID_VALUE", 13: "EXECUTION_FAILED", 14: "INTERNAL_ERROR", 15: "NOT_SUPPORTED"}


class CublasError(RuntimeError):
    """A call of cuBLAS failed.

    Args:
        status: cublasStatus_t.
    """

    def __init__(self, status: int) -> None:
        super().__init__(f"CUBLAS_STATUS_{_NAMES.get(status, status)}")
        self.cublas_status = status


class ColumnMajor(NamedTuple):
    """A product in cuBLAS's terms: C = op(A) @ op(B) with C of m x n; lda, ldb and ldc are the distances of columns."""

    trans_a: int
    trans_b: int
    m: int
    n: int
    k: int
    a: DeviceArray
    lda: int
    b: DeviceArray
    ldb: int
    c: DeviceArray
    ldc: int


def column_major(
    a: DeviceArray, b: DeviceArray, out: DeviceArray, *, trans_a: bool, trans_b: bool, stride_a: int | None = None, stride_out: int | None = None
) -> ColumnMajor:
    """Return out = op(a) @ op(b) of row-major matrices in cuBLAS's terms.

    Raises:
        TypeError: the factors have different types.
    """
    if a.dtype != b.dtype:
        raise TypeError(f"cuBLAS multiplies matrices of one type, got {a.dtype} and {b.dtype}; give both the same type")
    rows, columns = out.shape
    inner = a.shape[0] if trans_a else a.shape[1]
    return ColumnMajor(int(trans_b), int(trans_a), columns, rows, inner, b, b.shape[1], a, stride_a or a.shape[1], out, stride_out or columns)


class Cublas:
    """cuBLAS for one thread and one stream.

    Args:
        workspace: address of `WORKSPACE_NBYTES` of the device's memory.
        tf32: whether products of fp32 matrices may round their factors to 10 bits of mantissa.

    Attributes:
        handle: cublasHandle_t.
        sums: cublasComputeType of products, by the bytes of a factor's element.

    Raises:
        CublasError: cuBLAS does not start.
    """

    def __init__(self, workspace: int, *, tf32: bool) -> None:
        self._library = _library()
        self._workspace = workspace
        self.sums = {4: _TF32 if tf32 else _FP32, 2: _FP32}
        self.handle = ctypes.c_void_p()
        self._zero, self._one = ctypes.c_float(0.0), ctypes.c_float(1.0)
        check(self._library.cublasCreate_v2(ctypes.byref(self.handle)))
        check(self._library.cublasSetMathMode(self.handle, _SUMS_IN_FP32))

    def use(self, stream: int) -> None:
        """Compute on `stream` from now on."""
        check(self._library.cublasSetStream_v2(self.handle, stream))
        check(self._library.cublasSetWorkspace_v2(self.handle, self._workspace, WORKSPACE_NBYTES))

    def multiply(self, product: ColumnMajor, alpha: float, accumulate: bool) -> None:
        """Start a product; sums are taken in fp32.

        Raises:
            CublasError: cuBLAS refused it.
        """
        opa, opb, m, n, k, a, lda, b, ldb, c, ldc = product
        factor = self._one if alpha == 1.0 else ctypes.c_float(alpha)
        status = self._library.cublasGemmEx(
            self.handle, opa, opb, m, n, k, ctypes.byref(factor), a.address, TYPES[a.dtype], lda, b.address, TYPES[b.dtype], ldb,
            ctypes.byref(self._one if accumulate else self._zero), c.address, TYPES[c.dtype], ldc,
            self.sums[a.dtype.itemsize], _DEFAULT_ALGORITHM,
        )  # fmt: skip
        check(status)

    def multiply_batch(self, product: ColumnMajor, addresses: DeviceArray, accumulate: bool) -> bool:
        """Start products of one shape; return False if cuBLAS refuses that.

        Args:
            product: the first of them.
            addresses: (3, count) addresses of all A, all B and all C, in device memory.

        Raises:
            CublasError: the call failed for another reason.
        """
        opa, opb, m, n, k, a, lda, b, ldb, c, ldc = product
        all_a, all_b, all_c = (addresses[number : number + 1].address for number in range(3))
        status = self._library.cublasGemmBatchedEx(
            self.handle, opa, opb, m, n, k, ctypes.byref(self._one), all_a, TYPES[a.dtype], lda, all_b, TYPES[b.dtype], ldb,
            ctypes.byref(self._one if accumulate else self._zero), all_c, TYPES[c.dtype], ldc, addresses.shape[1],
            self.sums[a.dtype.itemsize], _DEFAULT_ALGORITHM,
        )  # fmt: skip
        if status not in REFUSALS:
            check(status)
        return not status

    def close(self) -> None:
        """Release the resources of cuBLAS; idempotent."""
        handle, self.handle = self.handle, ctypes.c_void_p()
        if handle.value is not None:
            check(self._library.cublasDestroy_v2(handle))


def check(status: int) -> None:
    """Raise `CublasError` unless a call of cuBLAS or cuBLASLt has succeeded."""
    if status:
        raise CublasError(status)


@cache
def _library() -> Any:
    """Return cuBLAS.

    Raises:
        ImportError: it is not installed.
    """
    return typed_cublas(_cublas()[0])


@cache
def _cublas() -> tuple[ctypes.CDLL, int]:
    """Return cuBLAS and its major version, from the libraries that CuPy has loaded, or else from the system's loader."""
    from cupy_backends.cuda.libs import cublas  # noqa: F401

    for mode in (ctypes.DEFAULT_MODE | _NO_LOAD, ctypes.DEFAULT_MODE):
        for major in (13, 12, 11):
            with suppress(OSError):
                return ctypes.CDLL(f"libcublas.so.{major}", mode=mode), major
    raise ImportError("libcublas was not found; install CuPy with its libraries: pip install -e '.[cuda13]' or '.[cuda12]'")


def cublas_lt() -> ctypes.CDLL | None:
    """Return cuBLASLt of the same major version, which cuBLAS has loaded; None if it is missing."""
    with suppress(OSError):
        return ctypes.CDLL(f"libcublasLt.so.{_cublas()[1]}")
    return None


def typed_cublas(library: Any) -> Any:
    """Declare the types of the cuBLAS functions that nntask calls; without types ctypes truncates addresses to 32 bits."""
    handle, integer, pointer = ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p
    matrix = [pointer, integer, integer]
    signatures: dict[str, list[Any]] = {
        "cublasCreate_v2": [ctypes.POINTER(handle)],
        "cublasDestroy_v2": [handle],
        "cublasSetMathMode": [handle, integer],
        "cublasSetStream_v2": [handle, pointer],
        "cublasSetWorkspace_v2": [handle, pointer, ctypes.c_size_t],
        "cublasGemmEx": [handle, *[integer] * 5, pointer, *matrix, *matrix, pointer, *matrix, integer, integer],
        "cublasGemmBatchedEx": [handle, *[integer] * 5, pointer, *matrix, *matrix, pointer, *matrix, integer, integer, integer],
    }
    for name, argtypes in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = argtypes, integer
    return library
