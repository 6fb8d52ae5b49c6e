"""The walk over everything that is reachable from a module and a loss: objects and containers. `walk_code` has functions, classes and modules."""

from __future__ import annotations

import argparse
import collections
import copyreg
import enum
import functools
import io
import threading
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from nntask import UsageError

from .away import is_away
from .reach import is_foreign, origin_of_class
from .readers import (
    PLAIN,
    access_to,
    entries_of,
    is_simple,
    options_of,
    plain_entries,
    replace_item,
    set_attributes,
)
from .snapshots import MISSING, NOWHERE, Same, Slot
from .walk_code import CodeWalk, Narrow

MOST_NODES: Final = 500_000
"""Largest number of containers and objects in a walk."""
_PLAIN_TYPES: Final = frozenset(PLAIN)
_KEYS: Final = (bool, int, str, bytes, type(None), torch.dtype, torch.device)
"""Types of keys that are compared by value."""
_TABLES: Final = ("_parameters", "_buffers", "_modules")
_UNREAD: Final = "_load_state_dict_pre_hooks"
"""Attribute of modules that no pass reads: hooks of `load_state_dict`, where a session adds the one that refuses loading."""
_CHANGING: Final = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.utils.data.DataLoader, torch.utils.data.Dataset)
"""Types of objects that change all the time; only those of their attributes count that the program's code names."""
_OPAQUE: Final = (torch.utils.hooks.RemovableHandle, torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_OF_TORCH_COUNT: Final = (torch.nn.Module, torch.distributions.Distribution, torch.distributions.Transform)
"""Classes of PyTorch whose objects are noted by their attributes."""
_CONTAINERS: Final = (dict, list, collections.deque, set)
_ATTRIBUTES_COUNT: Final = (
    types.SimpleNamespace, threading.local, argparse.Namespace, collections.UserDict, collections.UserList, collections.UserString,
    collections.ChainMap,
)  # fmt: skip
"""Classes of the standard library whose objects are noted by their attributes."""


class Walk(CodeWalk):
    """One walk over the Python objects that a module and a loss reach.

    Args:
        own: id -> name of the module's tensors that the session holds.

    Attributes:
        last_path: path of the last object.
    """

    def __init__(self, own: Mapping[int, str]) -> None:
        super().__init__()
        self._own, self.last_path = own, ""
        self._seen: dict[int, str] = {}
        self._changing: dict[str, Any] = {}  # objects that change all the time; only attributes count that code of the program names
        self._keep: list[Any] = []  # keeps temporary objects such as bound methods alive; otherwise another object could get their id

    def visit(self, path: str, value: Any, slot: Slot) -> None:
        """Note a value, and everything that is reachable from it."""
        kind = type(value)
        if isinstance(value, float):
            self.found.leaves[path] = (kind, value.hex())
        elif kind in _PLAIN_TYPES or isinstance(value, PLAIN):
            self.found.leaves[path] = (kind, value)
        elif isinstance(value, np.generic | slice):
            self.found.leaves[path] = (kind, repr(value))
        elif isinstance(value, enum.Enum):
            self.found.leaves[path] = Same(value)
        elif kind is not Narrow and isinstance(value, tuple):
            self.found.leaves[path] = (kind, len(value))
            for number, item in enumerate(value):
                self.visit(f"{path}[{number}]", item, slot)
        else:
            self._visit_object(path, value, slot)

    def visit_options(self) -> None:
        """Note those attributes of optimizers, schedulers and data sets that the program's code names."""
        for path, value in self._changing.items():
            if isinstance(value, torch.optim.Optimizer) and "param_groups" in self._names:
                for number, group in enumerate(value.param_groups):
                    self._watch(partial(options_of, group))
                    for name, option in group.items():
                        if name != "params":
                            self.visit(f"{path}.param_groups[{number}][{name!r}]", option, Slot(group.__setitem__, name, option))
            content = getattr(value, "__dict__", {})
            for name, option in list(content.items()):
                if not self._names.isdisjoint((name, name.lstrip("_"), f"get{name}")) and is_simple(option):
                    self._visit_entry(f"{path}.{name}", content, name, option, restores=False)

    def _visit_object(self, path: str, value: Any, slot: Slot) -> None:
        known = self._seen.get(id(value))
        if known is not None:
            self.found.leaves[path] = ("same as", known)
            if known in self.found.tensors and isinstance(value, torch.Tensor):
                self.found.aliases.setdefault(known, []).append(slot)
            return
        self._seen[id(value)] = self.last_path = path
        self._keep.append(value)
        if len(self._keep) > MOST_NODES:
            raise UsageError(
                f"the module and the loss reach more than {MOST_NODES:,} Python objects, the last one at {path}, and a session looks at each before "
                "a step",
                "keep large data (datasets, tables, logs) outside of the module",
            )
        if isinstance(value, torch.Tensor):
            self._visit_tensor(path, value, slot)
            return
        for kinds, visit in _VISITS:
            if isinstance(value, kinds):
                visit(self, path, value)
                if isinstance(value, _CONTAINERS) and getattr(value, "__dict__", None):
                    self._visit_entries(f"{path}.", value.__dict__, lambda key: f"{path}.{key}")
                return
        self._visit_other(path, value)

    def _visit_tensor(self, path: str, value: torch.Tensor, slot: Slot) -> None:
        """Note a tensor, which belongs to the module, to another session, or to the program."""
        hooks = len(value._backward_hooks or ()) + len(getattr(value, "_post_accumulate_grad_hooks", None) or ())
        if (name := self._own.get(id(value))) is not None:
            self.found.leaves[path] = ("own", name, value.requires_grad, hooks)
            if value._backward_hooks:
                self.visit(f"{path}._backward_hooks", value._backward_hooks, NOWHERE)
            self._watch(lambda: (value.requires_grad,), by_value=True)
        elif is_away(value):
            self.found.leaves[path] = ("away", Same(value))
        else:
            self.found.leaves[path] = ("tensor", tuple(value.shape), _layout_of(value), value.dtype, value.layout, value.requires_grad, hooks)
            self.found.tensors[path] = (value, slot)
            if not isinstance(value, FakeTensor):
                self._watch(
                    lambda: (value.requires_grad, value.shape, torch._C.TensorBase.data_ptr(value) if value.layout == torch.strided else 0),
                    by_value=True,
                )

    def _visit_dict(self, path: str, value: dict[Any, Any]) -> None:
        self._visit_entries(path, value, lambda key: f"{path}[{key!r}]" if isinstance(key, _KEYS) else f"{path}[{type(key).__name__} {id(key)}]")

    def _visit_entries(self, path: str, value: dict[Any, Any], path_of: Callable[[Any], str]) -> None:
        """Note a dictionary; `path_of` returns the path of a key."""
        entries = plain_entries(value)
        keys = entries[: len(entries) // 2]
        self.found.leaves[path] = (type(value), *(key if isinstance(key, _KEYS) else Same(key) for key in keys))
        if any(id(key) in self._own for key in keys):
            raise UsageError(f"{path} has parameters as keys, which a capture looks up by other tensors", "use their names as keys")
        self._watch(partial(plain_entries, value), partial(set_attributes, value))
        write = value.__setitem__
        for key, each in zip(keys, entries[len(keys) :], strict=True):
            self.visit(path_of(key), each, Slot(write, key, each))

    def _visit_attributes(self, path: str, value: Any) -> None:
        """Note the attributes of an object; parameters, buffers and submodules of a module get paths under its own."""
        is_module = isinstance(value, torch.nn.Module)
        if is_module:
            self._note_seen(f"{path}.{_UNREAD}", value.__dict__.get(_UNREAD))
        for name in _TABLES if is_module else ():
            table = value.__dict__[name]
            self._note_seen(f"{path}.{name}", table)
            self._visit_entries(f"{path}.{name}", table, lambda key: f"{path}.{key}")
        self._visit_entries(f"{path}.", value.__dict__, lambda key: f"{path}.{key}" if not (is_module and key in _TABLES) else f"{path}.{key}.")

    def _note_seen(self, path: str, value: Any) -> None:
        """Note an object by its path alone, so that a visit does not enter it."""
        self._seen[id(value)] = path
        self._keep.append(value)

    def _visit_list(self, path: str, value: Any) -> None:
        self.found.leaves[path] = (type(value), len(value))

        def restore(held: tuple[Any, ...]) -> None:
            value.clear()
            value.extend(held)

        self._watch(lambda: tuple(value), restore)
        write = value.__setitem__
        for number, each in enumerate(list(value)):
            self.visit(f"{path}[{number}]", each, Slot(write, number, each))

    def _visit_set(self, path: str, value: set[Any] | frozenset[Any]) -> None:
        self.found.leaves[path] = (type(value), frozenset(each if isinstance(each, _KEYS) else Same(each) for each in value))
        if isinstance(value, set):

            def restore(held: tuple[Any, ...]) -> None:
                value.clear()
                value.update(held[0])

            self._watch(lambda: (frozenset(value),), restore, by_value=True)
        write = partial(replace_item, value) if isinstance(value, set) else None
        for number, each in enumerate([each for each in value if not isinstance(each, _KEYS)]):
            self.visit(f"{path}{{{number}}}", each, Slot(write, each, each))

    def _visit_identity(self, path: str, value: Any) -> None:
        """Note an object that is compared by identity alone."""
        self.found.leaves[path] = Same(value)

    def _visit_changing(self, path: str, value: Any) -> None:
        self.found.leaves[path] = Same(value)
        self._changing[path] = value

    def _visit_proxy(self, path: str, value: Mapping[Any, Any]) -> None:
        self.found.leaves[path] = (type(value), *(key if isinstance(key, _KEYS) else Same(key) for key in value))
        self._visit_fixed_entries(path, value)

    def _visit_fixed_entries(self, path: str, value: Mapping[Any, Any]) -> None:
        """Note the entries of a mapping that cannot be restored."""
        self._watch(partial(entries_of, value))
        for key, each in list(value.items()):
            self.visit(f"{path}[{key!r}]" if isinstance(key, _KEYS) else f"{path}[{type(key).__name__}]", each, NOWHERE)

    def _visit_weak_reference(self, path: str, value: weakref.ReferenceType[Any]) -> None:
        self.found.leaves[path] = Same(value)
        self._watch(lambda: (value(),))
        self.visit(f"{path}()", value(), NOWHERE)

    def _visit_weak_dict(self, path: str, value: Mapping[Any, Any]) -> None:
        self.found.leaves[path] = Same(value)
        self._visit_fixed_entries(path, value)

    def _visit_other(self, path: str, value: Any) -> None:
        """Note an object by its state, its attributes or its slots; by its identity if it hides all of them."""
        kind: type = type(value)
        is_of_torch = origin_of_class(kind) == "torch" and not isinstance(value, _OF_TORCH_COUNT)
        has_attributes = hasattr(value, "__dict__") and (is_foreign(kind) or isinstance(value, _ATTRIBUTES_COUNT))
        names = [name for name in copyreg._slotnames(kind) if hasattr(value, name)]  # type: ignore[attr-defined]
        if (access := access_to(value)) is not None:
            self.found.leaves[path] = (kind, *access.read())
            self._watch(access.read, access.write, by_value=True)
        elif is_of_torch:
            self._visit_identity(path, value)
        elif has_attributes:
            self.found.leaves[path] = Same(kind)
            self._visit_code_of(kind)
            self._visit_attributes(path, value)
            self._visit_slots(path, value, names)
        elif names:
            self.found.leaves[path] = Same(kind)
            self._visit_slots(path, value, names)
        elif hasattr(kind, "__next__") and not isinstance(value, io.IOBase):
            raise UsageError(
                f"{path} is an iterator of type {kind.__name__}, whose state cannot be read", "keep a list and a number, or itertools.count"
            )
        else:
            self._visit_identity(path, value)

    def _visit_slots(self, path: str, value: Any, names: Sequence[str]) -> None:
        self._watch(lambda: tuple(getattr(value, name, MISSING) for name in names))
        for name in names:
            each = getattr(value, name)
            self.visit(f"{path}.{name}", each, Slot(partial(setattr, value), name, each))


def _layout_of(value: torch.Tensor) -> tuple[Any, ...]:
    """Return the position of a tensor in its memory; for a fake tensor, the position that its value will have (`python_state`)."""
    if value.layout != torch.strided:
        return ()
    if isinstance(value, FakeTensor):
        return tuple(torch.empty(value.shape, device="meta").stride()), 0, value.numel() * value.element_size(), False, False
    return tuple(value.stride()), value.storage_offset(), value.untyped_storage().nbytes(), value.is_conj(), value.is_neg()


_VISITS: Final[tuple[tuple[Any, Callable[[Walk, str, Any], None]], ...]] = (
    (dict, Walk._visit_dict),
    (list | collections.deque, Walk._visit_list),
    (set | frozenset, Walk._visit_set),
    (type, Walk._visit_class),
    (types.MethodType, Walk._visit_method),
    (functools.partial, Walk._visit_partial),
    (functools._lru_cache_wrapper, Walk._visit_cached_function),
    (types.FunctionType, Walk._visit_function),
    (types.BuiltinFunctionType, Walk._visit_identity),
    (Narrow, Walk._visit_narrow),
    (_CHANGING, Walk._visit_changing),
    (types.ModuleType, Walk._visit_python_module),
    (types.MappingProxyType, Walk._visit_proxy),
    (_OPAQUE, Walk._visit_identity),
    (weakref.ReferenceType, Walk._visit_weak_reference),
    (weakref.WeakKeyDictionary | weakref.WeakValueDictionary, Walk._visit_weak_dict),
)
"""Types -> method that notes their objects; the first entry that matches counts."""
