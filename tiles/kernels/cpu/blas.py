"""Matrix products by direct calls of a BLAS: accumulation (beta = 1), transposes and strides without copies, the GIL released.

`np.matmul` cannot add to its output; a product followed by `+=` is one more pass over the output and a temporary. NumPy's wheels ship OpenBLAS
under names with a prefix and suffix (64-bit integers), which ctypes finds. If NumPy was built with another BLAS, products go through `np.matmul` in
pieces. Some fp32 products go to oneDNN (`quick_sgemm`).

Ladder for 1024 x 768 x 768 on one core: matmul then add 10.4 ms, gemm with beta = 1 10.1 ms (with OPENBLAS_CORETYPE=Haswell; 5.4 ms with the
AVX-512 kernels OpenBLAS picks by itself on the same machine), oneDNN's sgemm 4.7 ms. At 128 x 128 x 128 oneDNN reaches 213 GF/s and OpenBLAS
(Haswell) 120, at 64 x 64 x 64 both 83. Cost of a call besides the product: cblas through ctypes with converted arguments and addresses from
`ndarray.ctypes` 15.6 us; the Fortran interface with addresses from the array's own fields and all other arguments prepared per shape 2.2 us.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import threadpoolctl

from .elementwise import WORK_BYTES, cells
from .onednn import library as onednn

Array = npt.NDArray[Any]
Pair = tuple[int, int]
_Call = tuple[Callable[..., None], tuple[int, ...], int, int, int, int, object]
"""BLAS function; addresses of transposes, sizes and alpha; addresses of ldb, lda, beta and ldc; and the memory that holds these values."""

_NAMES: Final = ("scipy_{}_64_", "scipy_openblas_{}_64_", "{}_64_", "scipy_{}_", "{}_")
_DATA: Final = object.__basicsize__
"""Offset of the address of the elements in an array object: the first field after the object header, fixed by NumPy's binary interface."""
_PREPARED: Final = 4096
"""Number of shapes whose arguments are cached; a training step has some dozens."""


def set_blas_threads(num_threads: int) -> None:
    """Set the number of threads of each BLAS call, for the whole process. A task runtime needs one thread per worker."""
    threadpoolctl.threadpool_limits(num_threads, user_api="blas")


@cache
def _find(name: str) -> tuple[Callable[..., None], Any] | None:
    """Return the Fortran function `name` and its integer type; None if NumPy's BLAS is not an OpenBLAS that exports it."""
    for info in threadpoolctl.threadpool_info():
        if info["internal_api"] != "openblas" or "numpy" not in info["filepath"]:
            continue
        library = ctypes.CDLL(info["filepath"])
        for pattern in _NAMES:
            symbol = pattern.format(name)
            if hasattr(library, symbol):
                function = getattr(library, symbol)
                function.argtypes = [ctypes.c_void_p] * 13
                function.restype = None
                return function, ctypes.c_int64 if "64_" in symbol else ctypes.c_int
    return None


_WIDE: Final = frozenset({"SkylakeX", "Cooperlake", "SapphireRapids"})
"""OpenBLAS's names of its AVX-512 code."""


@cache
def quick_sgemm() -> Callable[..., int] | None:
    """Return oneDNN's fp32 product if oneDNN is installed and OpenBLAS runs code without AVX-512 on a processor that has AVX-512; else None.

    OpenBLAS does so if it does not know the processor, or if OPENBLAS_CORETYPE says so. The choice depends on the installation, never on
    measurements, since the sums of the two libraries differ in the last bits.
    """
    codes = {info["architecture"] for info in threadpoolctl.threadpool_info() if info["internal_api"] == "openblas" and "numpy" in info["filepath"]}
    return onednn.sgemm() if codes and not codes & _WIDE else None


def fp32_products() -> str:
    """Return the name of the library that computes fp32 products."""
    if quick_sgemm() is not None:
        return onednn.name()
    codes = [info for info in threadpoolctl.threadpool_info() if info["user_api"] == "blas" and "numpy" in info["filepath"]]
    return ", ".join(f"{info['internal_api']} {info['version']} (code for {info.get('architecture', 'any processor')})" for info in codes) or "NumPy"


_SGEMM: Final = _find("sgemm")
_DGEMM: Final = _find("dgemm")


def _address_in_fields(array: Array) -> int:
    """Return the address of the first element; this takes 0.1 us, `array.ctypes.data` 2."""
    return ctypes.c_void_p.from_address(id(array) + _DATA).value or 0


def _address_by_ctypes(array: Array) -> int:
    address: int = array.ctypes.data
    return address


def _choose_address() -> Callable[[Array], int]:
    """Return the fast function for an array's address if it is correct with this NumPy; else the slow one."""
    probe = np.zeros(3)[1:]
    return _address_in_fields if _address_in_fields(probe) == probe.ctypes.data else _address_by_ctypes


_address: Final = _choose_address()


def _are_rows(size: int, shapes: tuple[Pair, Pair, Pair], strides: tuple[Pair, Pair, Pair]) -> bool:
    """Return whether every matrix consists of contiguous rows that do not overlap, as a leading dimension requires."""
    return all(last == size and (rows < 2 or step >= columns * size) for (rows, columns), (step, last) in zip(shapes, strides, strict=True))


@lru_cache(_PREPARED)
def _prepared(
    size: int, shapes: tuple[Pair, Pair, Pair], strides: tuple[Pair, Pair, Pair], trans_a: bool, trans_b: bool, alpha: float, beta: float
) -> _Call | None:
    """Return the arguments of a product for a, b and out of these shapes and strides, except their addresses; None if a stride does not fit.

    Fortran stores columns first and so computes out^T = op(b)^T op(a)^T.
    """
    blas = _SGEMM if size == 4 else _DGEMM
    if blas is None or not _are_rows(size, shapes, strides):
        return None
    function, integer = blas
    (rows_a, columns_a), _, (m, n) = shapes
    lda, ldb, ldc = (max(step // size, columns) for (step, _), (_, columns) in zip(strides, shapes, strict=True))
    sizes = (integer * 6)(n, m, rows_a if trans_a else columns_a, ldb, lda, ldc)
    scalars = ((ctypes.c_float if size == 4 else ctypes.c_double) * 2)(alpha, beta)
    letters = (ctypes.c_char * 2)(b"T" if trans_b else b"N", b"T" if trans_a else b"N")
    at_size, at_scalar, at_letter = ctypes.addressof(sizes), ctypes.addressof(scalars), ctypes.addressof(letters)
    width, step = ctypes.sizeof(integer), ctypes.sizeof(scalars) // 2
    first = (at_letter, at_letter + 1, at_size, at_size + width, at_size + 2 * width, at_scalar)
    return function, first, at_size + 3 * width, at_size + 4 * width, at_scalar + step, at_size + 5 * width, (sizes, scalars, letters)


class _Joined(threading.local):
    """State of a thread: whether it has limited oneDNN to itself alone."""

    done = False

    def join(self) -> None:
        """Limit oneDNN to this thread."""
        onednn.join()
        self.done = True


_joined: Final = _Joined()


@lru_cache(_PREPARED)
def _quick_call(
    shapes: tuple[Pair, Pair, Pair], strides: tuple[Pair, Pair, Pair], trans_a: bool, trans_b: bool
) -> tuple[Callable[..., int], bytes, bytes, int, int, int, int, int, int] | None:
    """Return the arguments of an fp32 product by oneDNN except addresses and factors; None if BLAS computes it."""
    function = quick_sgemm()
    if function is None or not _are_rows(4, shapes, strides) or not all(all(shape) for shape in shapes):
        return None
    (rows_a, columns_a), _, (m, n) = shapes
    lda, ldb, ldc = (max(step // 4, columns) for (step, _), (_, columns) in zip(strides, shapes, strict=True))
    return function, b"T" if trans_a else b"N", b"T" if trans_b else b"N", m, n, rows_a if trans_a else columns_a, lda, ldb, ldc


def gemm(a: Array, b: Array, out: Array, *, trans_a: bool = False, trans_b: bool = False, alpha: float = 1.0, beta: float = 0.0) -> None:
    """out = alpha * op(a) @ op(b) + beta * out.

    Args:
        a: (M, K), or (K, M) with `trans_a`; fp32 or fp64. Any strides are correct; a contiguous last axis and rows that do not overlap are fast.
        b: (K, N), or (N, K) with `trans_b`; types and strides as for `a`.
        out: (M, N); types and strides as for `a`. With beta = 0 its contents are never read.
    """
    shapes, strides = (a.shape, b.shape, out.shape), (a.strides, b.strides, out.strides)
    if out.itemsize == 4:
        quick = _quick_call(shapes, strides, trans_a, trans_b)
        if quick is not None:
            joined = _joined
            if not joined.done:
                joined.join()
            product, transa, transb, m, n, k, lda, ldb, ldc = quick
            status = product(transa, transb, m, n, k, alpha, _address(a), lda, _address(b), ldb, beta, _address(out), ldc)
            if status:
                raise onednn.OneDnnError(f"dnnl_sgemm failed with status {status}; set NNTASK_ONEDNN=off to do without it")
            return
    call = _prepared(out.itemsize, shapes, strides, trans_a, trans_b, alpha, beta)
    if call is None:
        _fallback(a.T if trans_a else a, b.T if trans_b else b, out, alpha, beta)
        return
    function, first, at_ldb, at_lda, at_beta, at_ldc, _ = call
    function(*first, _address(b), at_ldb, _address(a), at_lda, at_beta, _address(out), at_ldc)


def _fallback(a: Array, b: Array, out: Array, alpha: float, beta: float) -> None:
    """Compute `gemm` with `np.matmul`, a few rows and columns at a time to keep temporaries small."""
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
