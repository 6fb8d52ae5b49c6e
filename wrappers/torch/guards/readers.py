"""Readers and writers of the state of single objects: arrays, generators of random numbers, iterators, caches, and entries of dictionaries."""

from __future__ import annotations

import array
import ctypes
import datetime
import enum
import itertools
import random
import re
import types
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from decimal import Decimal
from fractions import Fraction
from functools import partial
from multiprocessing.sharedctypes import SynchronizedBase
from pathlib import PurePath
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from .snapshots import MISSING, Same, State

PLAIN: Final = (
    bool, int, str, bytes, complex, type(None), type(Ellipsis), type(NotImplemented), range, PurePath, re.Pattern,
    torch.dtype, torch.device, torch.layout, torch.memory_format, datetime.date, datetime.time, datetime.timedelta, Decimal, Fraction,
)  # fmt: skip
"""Types whose objects are compared by value."""
_ITERATORS: Final[tuple[type, ...]] = (
    itertools.count, itertools.cycle, itertools.repeat, type(iter([])), type(iter(())), type(iter(range(0))), type(iter("")),
)  # fmt: skip


class StateAccess(NamedTuple):
    """Functions that read and write the state of an object.

    Attributes:
        read: function that returns the state, which is compared by value.
        write: function that sets the object to a state returned by `read`; None if Python cannot do so.
    """

    read: Callable[[], State]
    write: Callable[[State], object] | None


def access_to(value: Any) -> StateAccess | None:
    """Return the access to the state of an object of Python, NumPy or PyTorch; None for objects of other types."""
    for kinds, read, write in _ACCESS:
        if isinstance(value, kinds):
            if isinstance(value, np.ndarray) and value.dtype == object:
                return None
            return StateAccess(partial(read, value), None if write is None else partial(write, value))
    return None


def _state_of_array(value: np.ndarray[Any, Any]) -> State:
    return value.shape, value.dtype.str, zlib.crc32(np.ascontiguousarray(value).view(np.uint8).reshape(-1).data)


def _state_of_numpy_generator(value: np.random.Generator | np.random.RandomState) -> State:
    bits: Any = value.bit_generator if isinstance(value, np.random.Generator) else value._bit_generator
    return (repr(bits.state),)


def _set_bytes(value: bytearray | array.array[Any], state: State) -> None:
    if isinstance(value, bytearray):
        value[:] = state[0]
    else:
        value[:] = array.array(value.typecode, state[0])


def _state_of_running_generator(value: types.GeneratorType[Any, Any, Any]) -> State:
    """Return the current instruction of a generator of Python, and its plain variables."""
    frame = value.gi_frame
    if frame is None:
        return ("ended",)
    return (frame.f_lasti, *((name, each if isinstance(each, (*PLAIN, float)) else Same(each)) for name, each in frame.f_locals.items()))


def state_of_cache(value: Any) -> State:
    """Return the state of a function's cache; a call that hits the cache does not change it."""
    return value.cache_info().misses, value.cache_info().currsize


def entry_of(content: Mapping[str, Any], name: str) -> State:
    """Return an entry of a dictionary."""
    return (content.get(name, MISSING),)


def set_entry(content: dict[str, Any], name: str, state: State) -> None:
    """Write an entry of a dictionary."""
    content[name] = state[0]


def set_attributes(content: dict[str, Any], state: State) -> None:
    """Write the keys and the values of a dictionary."""
    half = len(state) // 2
    content.clear()
    content.update(zip(state[:half], state[half:], strict=True))


def entries_of(content: Mapping[str, Any]) -> State:
    """Return the keys and the values of a dictionary."""
    return (*content, *content.values())


def plain_entries(content: dict[Any, Any]) -> State:
    """Return the keys and the values that a dictionary holds, bypassing overridden methods (those of a lazy dictionary may import, and fail)."""
    is_usual = type(content).values in (dict.values, OrderedDict.values)
    return (*content, *content.values()) if is_usual else (*dict.keys(content), *dict.values(content))


def options_of(group: Mapping[str, Any]) -> State:
    """Return the options of a parameter group of an optimizer."""
    return tuple(each for name, each in group.items() if name != "params")


def replace_item(content: set[Any], item: Any, other: Any) -> None:
    """Replace an item of a set by `other`."""
    content.discard(item)
    content.add(other)


def content_of(cell: types.CellType) -> State:
    """Return the content of a cell; None if it is not filled yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return (None,)


def fill(cell: types.CellType, state: State) -> None:
    """Write the content of a cell."""
    cell.cell_contents = state[0]


_ACCESS: Final[tuple[tuple[Any, Callable[[Any], State], Callable[[Any, State], object] | None], ...]] = (
    (np.ndarray, _state_of_array, None),
    (
        torch.Generator,
        lambda value: (bytes(value.get_state().numpy()),),
        lambda value, state: value.set_state(torch.frombuffer(bytearray(state[0]), dtype=torch.uint8)),
    ),
    (random.Random, lambda value: (value.getstate(),), lambda value, state: value.setstate(state[0])),
    (np.random.Generator | np.random.RandomState, _state_of_numpy_generator, None),
    (bytearray | array.array, lambda value: (bytes(value),), _set_bytes),
    (memoryview, lambda value: (bytes(value),), None),
    (ctypes._SimpleCData | SynchronizedBase, lambda value: (repr(value.value if hasattr(value, "value") else list(value)),), None),
    (_ITERATORS, lambda value: (repr(value.__reduce__()),), None),
    (types.GeneratorType, _state_of_running_generator, None),
    (ContextVar, lambda value: (Same(value.get(None)),), None),
)
"""(types, function that reads the state of their objects, function that writes it)."""


def is_simple(value: Any, depth: int = 2) -> bool:
    """Return whether a value is plain, or a small container of plain values."""
    if isinstance(value, (*PLAIN, float, np.generic, enum.Enum)):
        return True
    if not isinstance(value, dict | list | tuple | set | frozenset) or depth == 0 or len(value) > 1000:
        return False
    return all(is_simple(each, depth - 1) for each in (dict.values(value) if isinstance(value, dict) else value))
