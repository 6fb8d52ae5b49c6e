"""Snapshots of the state of Python, taken by `World`: comparable leaves, tensors with the slots that hold them, and watched objects."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Hashable, Mapping
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

State = tuple[Any, ...]
"""Content of an object, which is compared item by item."""
MISSING: Final = object()
"""Content of a slot that does not exist."""


class Same:
    """An object as a value that equals only itself, and that keeps the object alive."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value


class RandomState:
    """The state of the generators of Python and NumPy at construction."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()

    def restore(self) -> None:
        """Set both generators back."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)

    def differences(self, later: RandomState) -> list[str]:
        """Return the names of the generators that have advanced between two states."""
        mine, theirs = self._values(), later._values()
        return [f"random numbers of {name}" for name in mine if mine[name] != theirs[name]]

    def _values(self) -> dict[str, Any]:
        kind, words, *rest = self._numpy
        return {"Python": self._python, "NumPy": (kind, np.asarray(words).tobytes(), *rest)}


class Slot(NamedTuple):
    """A place that holds a value: an entry of a container, an attribute, a cell.

    Attributes:
        write: function that overwrites the slot, given `key` and a value; None if Python cannot do so.
        key: key of the place, such as an index or a name.
        value: content of the slot; a tensor may be a part of it (in a tuple).
    """

    write: Callable[[Any, Any], None] | None
    key: Any
    value: Any


NOWHERE: Final = Slot(None, None, None)
"""Slot of a value that cannot be replaced."""


class WatchedObject(NamedTuple):
    """A container or object that a `Walk` has visited, with its content at that time.

    Attributes:
        state: function that reads its content.
        held: content during the walk.
        restore: function that sets the content; None if Python cannot do so.
        by_value: whether contents are compared by value instead of by identity.
    """

    state: Callable[[], State]
    held: State
    restore: Callable[[State], object] | None
    by_value: bool

    def is_current(self) -> bool:
        """Return whether the content is unchanged."""
        now = self.state()
        return now == self.held if self.by_value else len(now) == len(self.held) and all(map(operator.is_, now, self.held))


class Snapshot:
    """A snapshot of all Python state that a module and a loss reach, as a `Walk` has found it.

    Attributes:
        leaves: path -> value that is compared.
        tensors: path -> (tensor that is not the module's own, slot that holds it).
        nodes: containers and objects.
    """

    def __init__(self) -> None:
        self.leaves: dict[str, Hashable] = {}
        self.tensors: dict[str, tuple[torch.Tensor, Slot]] = {}
        self.aliases: dict[str, list[Slot]] = {}
        self.nodes: list[WatchedObject] = []

    def is_current(self) -> bool:
        """Return whether nothing has been replaced since the walk."""
        with torch._C.DisableTorchFunctionSubclass(), _disable_current_modes():
            return all(node.is_current() for node in self.nodes)

    def restore(self) -> None:
        """Restore the content of containers and objects."""
        with torch._C.DisableTorchFunctionSubclass():
            for node in self.nodes:
                if node.restore is not None and not node.is_current():
                    node.restore(node.held)

    def differences(self, later: Snapshot) -> list[str]:
        """Return the paths at which a later walk has found a different leaf."""
        paths = dict.fromkeys((*self.leaves, *later.leaves))
        return [path for path in paths if self.leaves.get(path, MISSING) != later.leaves.get(path, MISSING)]

    @cached_property
    def key(self) -> WorldKey:
        """The leaves as one value."""
        return WorldKey(self.leaves)


class WorldKey:
    """The leaves of a snapshot as a key of dictionaries."""

    __slots__ = ("_hash", "leaves")

    def __init__(self, leaves: Mapping[str, Hashable]) -> None:
        self.leaves = leaves
        self._hash = hash(tuple(leaves.items()))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, WorldKey) and self._hash == other._hash and self.leaves == other.leaves)
