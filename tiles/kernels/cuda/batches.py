"""Several products of one shape in one launch of cuBLAS, which reads the addresses of the operands from device memory.

An entry of the table of addresses is written once and stays, because graphs refer to it. If the table is full, or a graph is being recorded, a kernel
writes the last entry before each launch. Whether products are batched, and so their bits, depends on sizes, types and distances of rows alone, since
tiles begin at multiples of a page.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from .array import DeviceArray
from .launch import KernelSource
from .products import ColumnMajor, Cublas

_source = KernelSource("elementwise")
_MOST_ADDRESSES: Final = 32
"""`MOST_ADDRESSES` of elementwise.cu, the addresses of an entry."""
MOST_PRODUCTS: Final = _MOST_ADDRESSES // 3
"""Largest number of products of a launch."""
_ENTRIES: Final = 1024
TABLE_NBYTES: Final = _ENTRIES * _MOST_ADDRESSES * 8
_ALIGNMENT: Final = 16
"""Kernels for tensor cores read 16 bytes at a time; cuBLAS cannot see the alignment of matrices whose addresses are in device memory."""
_ADDRESSES: Final = np.dtype([("numbers", np.uint64, _MOST_ADDRESSES)])


class Batches:
    """Batched products for one thread and one stream.

    Args:
        blas: cuBLAS on that stream.
        table: address of `TABLE_NBYTES` of the device's memory.
    """

    def __init__(self, blas: Cublas, table: int) -> None:
        self._blas = blas
        self._table = DeviceArray(table, (_ENTRIES, _MOST_ADDRESSES), np.dtype(np.uint64))
        self._entries: dict[tuple[int, ...], int] = {}
        self._refused: set[tuple[Any, ...]] = set()

    def multiply(self, products: Sequence[ColumnMajor], accumulate: bool, *, captures: bool) -> bool:
        """Start products of one shape and type; return False if cuBLAS does not compute them together.

        Args:
            captures: whether a graph is being recorded, so that a kernel that is started now does not run now.

        Raises:
            CublasError: the call failed for another reason than the shape.
        """
        first = products[0]
        sides = (first.a, first.b, first.c)
        shape = (first.trans_a, first.trans_b, first.m, first.n, first.k, len(products), accumulate, *(side.dtype for side in sides))
        if shape in self._refused or not 1 < len(products) <= MOST_PRODUCTS or not all(map(_is_aligned, products)):
            return False
        entry = self._entry([product.a.address for product in products], [product.b.address for product in products],
                            [product.c.address for product in products], captures)  # fmt: skip
        if self._blas.multiply_batch(first, entry, accumulate):
            return True
        if not self._refused:
            fact = f"cuBLAS has no batch of {len(products)} products of {first.n} by {first.k} by {first.m} numbers of {first.a.dtype}"
            warnings.warn(f"{fact}; such products are started one by one, which takes longer", RuntimeWarning, stacklevel=2)
        self._refused.add(shape)
        return False

    def _entry(self, a: Sequence[int], b: Sequence[int], c: Sequence[int], captures: bool) -> DeviceArray:
        """Return the entry with these addresses, (3, count), which is written if it is new."""
        addresses = (*a, *b, *c)
        number = self._entries.get(addresses)
        may_stay = len(self._entries) < _ENTRIES - 1 and not captures
        index = number if number is not None else len(self._entries) if may_stay else _ENTRIES - 1
        entry = self._table[index : index + 1].at(np.uint64, 3, len(a))
        if number is None:
            given = np.zeros((), _ADDRESSES)
            given["numbers"][: len(addresses)] = addresses
            numbers: Any = given[()]
            _source.start("write_addresses", np.dtype(np.float32), numbers, entry, np.int32(len(addresses)), grid=(1, 1, 1), threads=_MOST_ADDRESSES)
            if may_stay:
                self._entries[addresses] = index
        return entry


def _is_aligned(product: ColumnMajor) -> bool:
    """Return whether all rows of all operands begin at multiples of 16 bytes."""
    sides = ((product.a, product.lda), (product.b, product.ldb), (product.c, product.ldc))
    return all(side.address % _ALIGNMENT == 0 and distance * side.dtype.itemsize % _ALIGNMENT == 0 for side, distance in sides)
