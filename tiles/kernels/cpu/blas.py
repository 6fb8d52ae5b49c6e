"""Matrix products straight from NumPy's own OpenBLAS: accumulation (beta = 1), transposes and strides without copies, the GIL released.

`np.matmul` cannot add to its output; a product followed by `+=` is one more pass over the output and a temporary. NumPy's wheels ship OpenBLAS
under names with a prefix and suffix (64-bit integers), which ctypes finds. Where NumPy was built on another BLAS, products go through
`np.matmul` in pieces. Ladder for 1024 x 768 x 768 on one core: matmul then add 10.4 ms, cblas with beta = 1 10.1 ms (with
OPENBLAS_CORETYPE=Haswell; 5.4 ms
with the AVX-512 kernels OpenBLAS picks by itself on the same machine); a call costs 4 us.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import threadpoolctl

from .elementwise import WORK_BYTES, cells

Array = npt.NDArray[Any]

_ROW_MAJOR: Final = 101
_TRANS: Final = (111, 112)
_NAMES: Final = ("scipy_cblas_{}64_", "scipy_openblas_cblas_{}64_", "cblas_{}64_", "scipy_cblas_{}", "cblas_{}")


def set_blas_threads(num_threads: int) -> None:
    """Set how many threads each BLAS call uses, for the whole process: one per worker is what a task runtime wants."""
    threadpoolctl.threadpool_limits(num_threads, user_api="blas")


@cache
def _find(name: str) -> Callable[..., None] | None:
    """The cblas function `name`, or None when NumPy's BLAS is not an OpenBLAS that exports it."""
    for info in threadpoolctl.threadpool_info():
        if info["internal_api"] != "openblas" or "numpy" not in info["filepath"]:
            continue
        library = ctypes.CDLL(info["filepath"])
        for pattern in _NAMES:
            symbol = pattern.format(name)
            if hasattr(library, symbol):
                integer = ctypes.c_int64 if "64_" in symbol else ctypes.c_int
                function = getattr(library, symbol)
                scalar = ctypes.c_float if name[0] == "s" else ctypes.c_double
                function.argtypes = [ctypes.c_int] * 3 + [integer] * 3
                function.argtypes += [scalar, ctypes.c_void_p, integer, ctypes.c_void_p, integer, scalar, ctypes.c_void_p, integer]
                function.restype = None
                found: Callable[..., None] = function
                return found
    return None


_SGEMM: Final = _find("sgemm")
_DGEMM: Final = _find("dgemm")


def gemm(a: Array, b: Array, out: Array, *, trans_a: bool = False, trans_b: bool = False, alpha: float = 1.0, beta: float = 0.0) -> None:
    """out = alpha * op(a) @ op(b) + beta * out.

    Args:
        a: (M, K), or (K, M) with `trans_a`; the last axis contiguous, any stride between rows, fp32 or fp64.
        b: (K, N), or (N, K) with `trans_b`; likewise.
        out: (M, N), likewise; with beta = 0 its contents are never read.
    """
    function = _SGEMM if out.dtype == np.float32 else _DGEMM
    size = out.itemsize
    m, n = out.shape
    k = a.shape[0] if trans_a else a.shape[1]
    if function is None or not a.strides[-1] == b.strides[-1] == out.strides[-1] == size:
        _fallback(a.T if trans_a else a, b.T if trans_b else b, out, alpha, beta)
        return
    function(
        _ROW_MAJOR,
        _TRANS[trans_a],
        _TRANS[trans_b],
        m,
        n,
        k,
        alpha,
        a.ctypes.data,
        max(a.strides[0] // size, a.shape[1]),
        b.ctypes.data,
        max(b.strides[0] // size, b.shape[1]),
        beta,
        out.ctypes.data,
        max(out.strides[0] // size, n),
    )


def _fallback(a: Array, b: Array, out: Array, alpha: float, beta: float) -> None:
    """`gemm` by `np.matmul`, a few rows and columns at a time to keep temporaries small."""
    for piece, columns in cells(out.shape[0], out.shape[1], out.itemsize, WORK_BYTES // 2):
        product, target = a[piece] @ b[:, columns], out[piece, columns]
        if alpha != 1.0:
            product *= out.dtype.type(alpha)
        if beta == 0.0:
            target[...] = product
        else:
            if beta != 1.0:
                target *= out.dtype.type(beta)
            target += product
