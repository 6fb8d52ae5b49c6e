"""Matrix products straight from a BLAS: accumulation (beta = 1), transposes and strides without copies, the GIL released.

`np.matmul` cannot add to its output; a product followed by `+=` is one more pass over the output and a temporary. NumPy's wheels ship OpenBLAS
under names with a prefix and suffix (64-bit integers), which ctypes finds. Where NumPy was built on another BLAS, products go through
`np.matmul` in pieces. Where OpenBLAS runs code for processors without AVX-512 on one that has it (it does not know the processor, or
OPENBLAS_CORETYPE says so) and oneDNN is installed, fp32 products go to oneDNN's sgemm: which of the two is a matter of the installation, never of
measurements, since their sums differ in the last bits.

Ladder for 1024 x 768 x 768 on one core: matmul then add 10.4 ms, gemm with beta = 1 10.1 ms (with OPENBLAS_CORETYPE=Haswell; 5.4 ms with the
AVX-512 kernels OpenBLAS picks by itself on the same machine), oneDNN's sgemm 4.7 ms. At 128 x 128 x 128 oneDNN reaches 213 GF/s and OpenBLAS
(Haswell) 120, at 64 x 64 x 64 both 83.

Ladder for what a call of the `matmul` kernel costs besides the product: cblas through ctypes with converted arguments, addresses from
`ndarray.ctypes` 15.6 us; addresses read from the array's own fields, everything else prepared once per shape and passed by reference, as the
Fortran interface takes it, 2.2 us.
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
"""A BLAS function; addresses of transposes, sizes and alpha; of ldb, lda, beta and ldc, each on its own; and the memory they are all in."""

_NAMES: Final = ("scipy_{}_64_", "scipy_openblas_{}_64_", "{}_64_", "scipy_{}_", "{}_")
_DATA: Final = object.__basicsize__
"""Where an array keeps the address of its elements: the first field behind the object's head, fixed by NumPy's binary interface."""
_PREPARED: Final = 4096
"""Shapes whose arguments are kept; a training step has some dozens."""


def set_blas_threads(num_threads: int) -> None:
    """Set how many threads each BLAS call uses, for the whole process: one per worker is what a task runtime wants."""
    threadpoolctl.threadpool_limits(num_threads, user_api="blas")


@cache
def _find(name: str) -> tuple[Callable[..., None], Any] | None:
    """The Fortran function `name` and its type of integers, or None when NumPy's BLAS is not an OpenBLAS that exports it."""
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
    """oneDNN's fp32 product, where it is to be used."""
    codes = {info["architecture"] for info in threadpoolctl.threadpool_info() if info["internal_api"] == "openblas" and "numpy" in info["filepath"]}
    return onednn.sgemm() if codes and not codes & _WIDE else None


def fp32_products() -> str:
    """Who computes fp32 products, in words."""
    if quick_sgemm() is not None:
        return onednn.name()
    codes = [info for info in threadpoolctl.threadpool_info() if info["user_api"] == "blas" and "numpy" in info["filepath"]]
    return ", ".join(f"{info['internal_api']} {info['version']} (code for {info.get('architecture', 'any processor')})" for info in codes) or "NumPy"


_SGEMM: Final = _find("sgemm")
_DGEMM: Final = _find("dgemm")


def _address_in_fields(array: Array) -> int:
    """Address of the first element; 0.1 us, `array.ctypes.data` takes 2."""
    return ctypes.c_void_p.from_address(id(array) + _DATA).value or 0


def _address_by_ctypes(array: Array) -> int:
    address: int = array.ctypes.data
    return address


def _choose_address() -> Callable[[Array], int]:
    """The quick way to an array's address, where it is right."""
    probe = np.zeros(3)[1:]
    return _address_in_fields if _address_in_fields(probe) == probe.ctypes.data else _address_by_ctypes


_address: Final = _choose_address()


def _are_rows(size: int, shapes: tuple[Pair, Pair, Pair], strides: tuple[Pair, Pair, Pair]) -> bool:
    """Whether every matrix has contiguous rows that lie one behind the other: what a leading dimension can say."""
    return all(last == size and (rows < 2 or step >= columns * size) for (rows, columns), (step, last) in zip(shapes, strides, strict=True))


@lru_cache(_PREPARED)
def _prepared(
    size: int, shapes: tuple[Pair, Pair, Pair], strides: tuple[Pair, Pair, Pair], trans_a: bool, trans_b: bool, alpha: float, beta: float
) -> _Call | None:
    """What a product of a, b and out of these shapes and strides passes besides their addresses; None where a stride does not suit.

    Fortran stores columns first and so computes out^T = op(b)^T op(a)^T.
    """
    found = _SGEMM if size == 4 else _DGEMM
    if found is None or not _are_rows(size, shapes, strides):
        return None
    function, integer = found
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
    """Whether a thread computes alone in oneDNN."""

    done = False

    def join(self) -> None:
        """It does from now on."""
        onednn.join()
        self.done = True


_joined: Final = _Joined()


@lru_cache(_PREPARED)
def _quick_call(
    shapes: tuple[Pair, Pair, Pair], strides: tuple[Pair, Pair, Pair], trans_a: bool, trans_b: bool
) -> tuple[Callable[..., int], bytes, bytes, int, int, int, int, int, int] | None:
    """What an fp32 product by oneDNN passes besides addresses and factors; None where it goes to BLAS."""
    function = quick_sgemm()
    if function is None or not _are_rows(4, shapes, strides) or not all(all(shape) for shape in shapes):
        return None
    (rows_a, columns_a), _, (m, n) = shapes
    lda, ldb, ldc = (max(step // 4, columns) for (step, _), (_, columns) in zip(strides, shapes, strict=True))
    return function, b"T" if trans_a else b"N", b"T" if trans_b else b"N", m, n, rows_a if trans_a else columns_a, lda, ldb, ldc


def gemm(a: Array, b: Array, out: Array, *, trans_a: bool = False, trans_b: bool = False, alpha: float = 1.0, beta: float = 0.0) -> None:
    """out = alpha * op(a) @ op(b) + beta * out.

    Args:
        a: (M, K), or (K, M) with `trans_a`; fp32 or fp64. Quick where the last axis is contiguous and rows do not overlap, right everywhere.
        b: (K, N), or (N, K) with `trans_b`; likewise.
        out: (M, N), likewise; with beta = 0 its contents are never read.
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
