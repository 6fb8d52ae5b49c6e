"""Results as blocks of memory, which may leave to the disk and come back.

A *block* is the memory of one NumPy array that owns it, or one object of another kind as a whole. A large result becomes a template over its blocks:
for an array its offset, shape and strides in the block, for a tuple, list or dict its items. So views share the block of their base, be it the
result of this task or of another one: memory is counted once, as long as any result needs some of it, and no view is copied for the bookkeeping.
Only a small view is copied, so that it does not keep a large block alive.

Small results are no blocks: they are kept as they are, and only counted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import Any, Final

import numpy as np
from dask._task_spec import GraphNode
from dask.sizeof import sizeof

from .blocks import MemoryBlock

SMALL: Final = 16 << 10
"""A result of fewer bytes is small."""

MOST: Final = 64
"""Tuples, lists and dicts of more items are one block each."""

_SCALARS: Final = frozenset({int, float, bool, complex, type(None), np.float64, np.float32, np.int64, np.bool_})
_COLLECTIONS: Final = frozenset({list, tuple, set, frozenset})
_SCALAR_BYTES: Final = 32
_ARRAY_BYTES: Final = 112
_NOTHING: Final = object()

Find = Callable[[Any, int, bool], MemoryBlock | None]
"""(owner, its bytes, whether it is an array) -> its block; None for memory that must not be moved."""


class Held:
    """A result that lies in blocks.

    Attributes:
        value: the result itself, while its blocks are in host memory.
        template: builds the result from its blocks.
        blocks: the blocks.
    """

    __slots__ = ("blocks", "template", "value")

    def __init__(self, value: Any, template: Callable[[], Any], blocks: Sequence[MemoryBlock]) -> None:
        self.value = value
        self.template = template
        self.blocks = blocks

    def get(self) -> Any:
        """Return the result. Its blocks must be in host memory, and stay there while the result is used."""
        if self.value is _NOTHING:
            self.value = self.template()
        return self.value


def forget(block: MemoryBlock) -> None:
    """Drop the memory of a block; results in it are rebuilt when it has been read back."""
    block.owner = None
    for held in block.holders:
        held.value = _NOTHING


def weigh(value: Any) -> int:
    """Return the bytes of a result, as precisely as `dask.sizeof`; for a view, the bytes that it keeps alive."""
    kind = type(value)
    if kind in _SCALARS:
        return _SCALAR_BYTES
    if kind is np.ndarray and not value.dtype.hasobject:
        return max(int(value.nbytes), int(owner_of(value).nbytes)) + _ARRAY_BYTES
    if kind in _COLLECTIONS:
        return sys.getsizeof(value) + _weigh_items(value)
    if kind is dict:
        return sys.getsizeof(value) + _weigh_items(value) + _weigh_items(value.values())
    try:
        return int(sizeof(value))
    except Exception:  # an error of the object's own __sizeof__
        return _ARRAY_BYTES


def _weigh_items(items: Collection[Any]) -> int:
    """Return the bytes of items; of many items, an estimate from equidistant samples.

    `dask.sizeof` draws its samples with Python's global generator, and so would change the program's random numbers.
    """
    step = max(len(items) // MOST, 1)
    sample = list(islice(items, 0, None, step))
    return sum(map(weigh, sample)) * len(items) // max(len(sample), 1)


def hold(value: Any, find: Find) -> Any:
    """Return a result as a `Held` over its blocks; the result itself if none of it lies in blocks.

    Args:
        find: finds or makes the block of an owner.
    """
    blocks: dict[MemoryBlock, None] = {}
    template = _template(value, find, blocks)
    if not blocks:
        return template()
    held = Held(value, template, tuple(blocks))
    for block in blocks:
        block.holders.append(held)
    return held


def _template(value: Any, find: Find, blocks: dict[MemoryBlock, None]) -> Callable[[], Any]:
    """Return a function that builds the result from its blocks, which are added to `blocks`."""
    kind = type(value)
    if kind is np.ndarray and not value.dtype.hasobject:
        return _array_template(value, find, blocks)
    if (kind is tuple or kind is list) and len(value) <= MOST:
        items = [_template(each, find, blocks) for each in value]
        return lambda: kind([item() for item in items])
    if kind is dict and len(value) <= MOST:
        named = {name: _template(each, find, blocks) for name, each in value.items()}
        return lambda: {name: item() for name, item in named.items()}
    nbytes = weigh(value)
    block = find(value, nbytes, False) if nbytes >= SMALL else None
    if block is None:
        return lambda: value
    blocks[block] = None
    return lambda: block.owner


def _array_template(array: np.ndarray[Any, Any], find: Find, blocks: dict[MemoryBlock, None]) -> Callable[[], Any]:
    owner = owner_of(array)
    if owner.nbytes < SMALL:
        return lambda: array
    if owner.flags.owndata and not owner.dtype.hasobject and _fills(owner):
        if array.nbytes < SMALL and owner is not array:
            copy = array.copy()
            return lambda: copy
        block = find(owner, owner.nbytes, True)
    elif getattr(owner.base, "is_borrowed", False):  # a tile, which its own runtime counts
        return lambda: array
    else:  # memory of another owner: a mapped file, an object with a buffer
        block = find(array, array.nbytes, False)
    if block is None:
        return lambda: array
    blocks[block] = None
    if not block.is_array:
        return lambda: block.owner
    shape, dtype, strides, writeable = array.shape, array.dtype, array.strides, array.flags.writeable
    offset = address_of(array) - address_of(block.owner)

    def build() -> np.ndarray[Any, Any]:
        rebuilt: np.ndarray[Any, Any] = np.ndarray(shape, dtype, raw_bytes(block.owner), offset, strides)
        if not writeable:
            rebuilt.flags.writeable = False
        return rebuilt

    return build


def owner_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the array that owns the memory of an array; the array itself if it is no view."""
    while type(array.base) is np.ndarray:
        array = array.base
    return array


def is_partial_view(value: Any, block: MemoryBlock) -> bool:
    """Return whether a result is an array over a part of a block's memory."""
    return type(value) is np.ndarray and block.is_array and value.nbytes < block.nbytes


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Return the address of the first item of an array."""
    return int(array.__array_interface__["data"][0])


def raw_bytes(owner: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the memory that an array owns, as bytes in the order of their addresses; no copy."""
    return owner.ravel(order="K").view(np.uint8)


def _fills(owner: np.ndarray[Any, Any]) -> bool:
    """Return whether an array's items fill its memory without gaps."""
    span = sum((extent - 1) * stride for extent, stride in zip(owner.shape, owner.strides, strict=True)) + owner.itemsize
    return span == owner.nbytes and min(owner.strides, default=0) > 0


def holds(node: GraphNode, owner: Any) -> bool:
    """Return whether a node's own arguments hold the owner or a view of it."""
    return any(is_of(each, owner) for each in (*getattr(node, "args", ()), *getattr(node, "kwargs", {}).values()))


def is_of(value: Any, owner: Any) -> bool:
    """Return whether a value is the owner, a view of it, or a node that holds either."""
    if isinstance(value, GraphNode):
        return holds(value, owner) or is_of(getattr(value, "value", None), owner)
    if type(value) is dict:
        return any(is_of(each, owner) for each in value.values())
    return value is owner or (type(value) is np.ndarray and owner_of(value) is owner)
