"""The Python state that a capture could read, as a value that can be compared: the module's tree, the loss, and what their code reaches.

A step is captured once and replayed, so whatever the capture read must be as it was. `World.now` walks everything that is reachable from the module
and the loss: attributes, containers, hooks, closures, globals that the program's own functions load, class attributes, generators, iterators. Leaves
are compared by value where Python can, else by identity. The walk takes milliseconds; while nothing has changed, which is checked by identity alone,
its last result is good.

Values of tensors are no part of it: those of the module live in the session, those of others are compared when a step begins (`constants`).
Not seen: what C code hides, what code of installed packages keeps in globals that are neither plain values nor containers of such, and the clock.
"""

from __future__ import annotations

import array
import collections
import copyreg
import enum
import functools
import itertools
import operator
import os
import random
import re
import sys
import threading
import types
import weakref
import zlib
from collections.abc import Callable, Hashable, Mapping
from contextvars import ContextVar
from functools import cached_property, partial
from pathlib import PurePath
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from nntask import UsageError

from .away import is_away
from .reach import loads_of, origin_of

MOST_NODES: Final = 500_000
"""Containers and objects of a world at most."""
_PLAIN: Final = (
    bool, int, str, bytes, complex, type(None), type(Ellipsis), type(NotImplemented), range, PurePath, re.Pattern,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_PLAIN_TYPES: Final = frozenset(_PLAIN)
_KEYS: Final = (bool, int, str, bytes, type(None), torch.dtype, torch.device)
"""Types of keys that are compared by value."""
_TABLES: Final = ("_parameters", "_buffers", "_modules")
_OPAQUE: Final = (
    torch.optim.lr_scheduler.LRScheduler, torch.utils.data.DataLoader, torch.utils.data.Dataset, types.ModuleType,
    torch.utils.hooks.RemovableHandle, torch._ops.OpOverload, torch._ops.OpOverloadPacket,
)  # fmt: skip
"""Their attributes are not looked at, unless the program's code loads one by name."""
_ITERATORS: Final = (
    itertools.count, itertools.cycle, itertools.repeat, type(iter([])), type(iter(())), type(iter(range(0))), type(iter("")),
)  # fmt: skip
_MISSING: Final = object()
_CALLABLES: Final = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial, functools._lru_cache_wrapper)


class Same:
    """An object as a value: equal to itself alone, and alive as long as this is."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value


class Narrow(NamedTuple):
    """An object that changes all the time, such as a trainer: of its attributes those count that the program's own methods load by name.

    Attributes:
        value: the object.
        names: attributes that count in any case, with all that they reach.
    """

    value: Any
    names: tuple[str, ...] = ()


class Slot(NamedTuple):
    """A place that holds a value: an entry of a container, an attribute, a cell.

    Attributes:
        write: overwrites it, given `key` and a value; None where Python cannot.
        key: of the place.
        value: what it held, of which a tensor may be a part (a tuple of them).
    """

    write: Callable[[Any, Any], None] | None
    key: Any
    value: Any


_NOWHERE: Final = Slot(None, None, None)


class _Node(NamedTuple):
    """A container or object.

    Attributes:
        state: reads what it holds.
        held: what that was.
        restore: writes it; None where Python cannot.
        by_value: whether the state is compared by value, not by identity.
    """

    state: Callable[[], tuple[Any, ...]]
    held: tuple[Any, ...]
    restore: Callable[[tuple[Any, ...]], None] | None
    by_value: bool

    def is_current(self) -> bool:
        """Return whether it holds what it held."""
        now = self.state()
        return now == self.held if self.by_value else len(now) == len(self.held) and all(map(operator.is_, now, self.held))


class Snapshot:
    """What a walk has found.

    Attributes:
        leaves: path -> what is compared.
        tensors: path -> a tensor that is not the module's own, and its slot.
        nodes: containers and objects.
    """

    def __init__(self) -> None:
        self.leaves: dict[str, Hashable] = {}
        self.tensors: dict[str, tuple[torch.Tensor, Slot]] = {}
        self.nodes: list[_Node] = []

    def is_current(self) -> bool:
        """Return whether nothing has been replaced since the walk."""
        with torch._C.DisableTorchFunctionSubclass(), _disable_current_modes():
            return all(node.is_current() for node in self.nodes)

    def restore(self) -> None:
        """Give containers and objects what they held."""
        with torch._C.DisableTorchFunctionSubclass():
            for node in self.nodes:
                if node.restore is not None and not node.is_current():
                    node.restore(node.held)

    def differences(self, later: Snapshot) -> list[str]:
        """Return the paths at which a later walk has found something else."""
        paths = dict.fromkeys((*self.leaves, *later.leaves))
        return [path for path in paths if self.leaves.get(path, _MISSING) != later.leaves.get(path, _MISSING)]

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


class World:
    """What is reachable from a module and a loss.

    Args:
        roots: name -> module or function.
        own: id -> name of the module's tensors that the session has.
    """

    def __init__(self, roots: Mapping[str, Any], own: Mapping[int, str]) -> None:
        self._roots, self._own = roots, own
        self._last: Snapshot | None = None

    def now(self) -> Snapshot:
        """Return the state as it is; the last snapshot if nothing has been replaced since."""
        if self._last is None or not self._last.is_current():
            self._last = self.walked()
        return self._last

    def walked(self) -> Snapshot:
        """Return the state as it is, from a new walk.

        Raises:
            UsageError: more is reachable than can be looked at before each step.
        """
        walk = _Walk(self._own)
        with torch._C.DisableTorchFunctionSubclass(), _disable_current_modes():
            for name, root in self._roots.items():
                walk.visit(name, root, Slot(None, None, root))
            walk.visit_options()
        return walk.found


class _Walk:
    """One walk; `found` is its result."""

    def __init__(self, own: Mapping[int, str]) -> None:
        self.found, self._own = Snapshot(), own
        self._seen: dict[int, str] = {}
        self._classes: set[type] = set()
        self._codes: set[types.CodeType] = set()
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._reads_options = False
        self._keep: list[Any] = []  # bound methods and the like are made for the asking: alive, or another object would get their id

    def visit(self, path: str, value: Any, slot: Slot) -> None:
        """Note a value, and what is reachable from it."""
        kind = type(value)
        if kind is float:
            self.found.leaves[path] = (kind, value.hex())
        elif kind in _PLAIN_TYPES or isinstance(value, _PLAIN):
            self.found.leaves[path] = (kind, value)
        elif isinstance(value, np.generic | slice):
            self.found.leaves[path] = (kind, repr(value))
        elif isinstance(value, enum.Enum):
            self.found.leaves[path] = Same(value)
        elif kind is not Narrow and (kind is tuple or (isinstance(value, tuple) and hasattr(value, "_fields"))):
            self.found.leaves[path] = (kind, len(value))
            for number, each in enumerate(value):
                self.visit(f"{path}[{number}]", each, slot)
        else:
            self._visit_object(path, value, slot)

    def visit_options(self) -> None:
        """Note the options of optimizers, if the program's code reads some."""
        for path, optimizer in self._optimizers.items() if self._reads_options else ():
            for number, group in enumerate(optimizer.param_groups):
                self._watch(lambda group=group: tuple(each for name, each in group.items() if name != "params"))
                for name, each in group.items():
                    if name != "params":
                        self.visit(f"{path}.param_groups[{number}][{name!r}]", each, Slot(group.__setitem__, name, each))

    def _visit_object(self, path: str, value: Any, slot: Slot) -> None:
        known = self._seen.get(id(value))
        if known is not None:
            self.found.leaves[path] = ("same as", known)
            return
        self._seen[id(value)] = path
        self._keep.append(value)
        if len(self._keep) > MOST_NODES:
            raise UsageError(
                f"the module and the loss reach more than {MOST_NODES:,} Python objects, the last one at {path}, and a session looks at each before a "
                "step; keep large data (datasets, tables, logs) outside of the module"
            )
        if isinstance(value, torch.Tensor):
            self._visit_tensor(path, value, slot)
        elif isinstance(value, dict):
            self._visit_dict(path, value, lambda key: f"{path}[{key!r}]" if isinstance(key, _KEYS) else f"{path}[{type(key).__name__} {id(key)}]")
        elif isinstance(value, list | collections.deque):
            self._visit_list(path, value)
        elif isinstance(value, set | frozenset):
            self._visit_set(path, value)
        elif isinstance(value, type):
            self._visit_class(path, value)
        elif isinstance(value, _CALLABLES):
            self._visit_callable(path, value)
        else:
            self._visit_other(path, value)

    def _visit_tensor(self, path: str, value: torch.Tensor, slot: Slot) -> None:
        hooks = len(value._backward_hooks or ()) + len(getattr(value, "_post_accumulate_grad_hooks", None) or ())
        if (name := self._own.get(id(value))) is not None:
            self.found.leaves[path] = ("own", name, value.requires_grad, hooks)
            self._watch(lambda: (value.requires_grad,), by_value=True)
        elif is_away(value):
            self.found.leaves[path] = ("away", Same(value))
        else:
            strides = tuple(value.stride()) if value.layout == torch.strided else ()
            self.found.leaves[path] = ("tensor", tuple(value.shape), strides, value.dtype, value.layout, value.requires_grad, hooks)
            self.found.tensors[path] = (value, slot)
            if not isinstance(value, FakeTensor):
                self._watch(
                    lambda: (value.requires_grad, value.shape, torch._C.TensorBase.data_ptr(value) if value.layout == torch.strided else 0),
                    by_value=True,
                )

    def _visit_dict(self, path: str, value: dict[Any, Any], place_of: Callable[[Any], str]) -> None:
        """Note a dictionary; `place_of` makes a path of a key."""
        self.found.leaves[path] = (type(value), *(key if isinstance(key, _KEYS) else Same(key) for key in value))

        def restore(held: tuple[Any, ...]) -> None:
            half = len(held) // 2
            value.clear()
            value.update(zip(held[:half], held[half:], strict=True))

        self._watch(lambda: (*value, *value.values()), restore)
        write = value.__setitem__
        for key, each in list(value.items()):
            self.visit(place_of(key), each, Slot(write, key, each))

    def _visit_attributes(self, path: str, value: Any) -> None:
        """Note the attributes of an object; parameters, buffers and parts of a module under its own path."""
        is_module = isinstance(value, torch.nn.Module)
        for name in _TABLES if is_module else ():
            table = value.__dict__[name]
            self._seen[id(table)] = f"{path}.{name}"
            self._keep.append(table)
            self._visit_dict(f"{path}.{name}", table, lambda key: f"{path}.{key}")
        self._visit_dict(f"{path}.", value.__dict__, lambda key: f"{path}.{key}" if not (is_module and key in _TABLES) else f"{path}.{key}.")

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

    def _visit_class(self, path: str, value: type) -> None:
        self.found.leaves[path] = Same(value)
        self._visit_code_of(value)

    def _visit_code_of(self, kind: type) -> None:
        """Note the attributes of a class and its bases, and what the functions among them reach."""
        for base in kind.__mro__[:-1]:
            if base in self._classes:
                continue
            self._classes.add(base)
            origin = _origin_of_class(base)
            if origin == "torch":
                continue
            content = vars(base)
            if origin == "user":
                self._watch(lambda content=content: (*content, *content.values()))
            for name, each in list(content.items()):
                if name.startswith("__") and not isinstance(each, types.FunctionType):
                    continue
                path = f"{base.__qualname__}.{name}"
                each = getattr(each, "__func__", getattr(each, "fget", getattr(each, "func", each)))
                if isinstance(each, types.FunctionType):
                    self._visit_function(path, each)
                elif origin == "user" or _is_simple(each):
                    self.visit(path, each, Slot(partial(_set_class_attribute, base), name, each))

    def _visit_callable(self, path: str, value: Any) -> None:
        if isinstance(value, types.MethodType):
            self.found.leaves[path] = ("method", value.__func__.__qualname__)
            self.visit(f"{path}.__self__", value.__self__, _NOWHERE)
            if isinstance(value.__func__, types.FunctionType):
                self._visit_function(f"{path}.{value.__name__}", value.__func__)
        elif isinstance(value, functools.partial):
            self.found.leaves[path] = ("partial", len(value.args))
            self.visit(f"{path}.func", value.func, _NOWHERE)
            self.visit(f"{path}.args", value.args, _NOWHERE)
            self.visit(f"{path}.keywords", value.keywords, _NOWHERE)
        elif isinstance(value, functools._lru_cache_wrapper):
            self.found.leaves[path] = (Same(value), *_cache_state(value))
            self._watch(lambda: _cache_state(value), by_value=True)
            self.visit(f"{path}.__wrapped__", value.__wrapped__, _NOWHERE)
        elif isinstance(value, types.FunctionType):
            self._visit_function(path, value)
        else:
            self.found.leaves[path] = Same(value)

    def _visit_function(self, path: str, value: types.FunctionType) -> None:
        """Note what a function is, its closure and defaults, and what it loads of globals."""
        self.found.leaves[path] = Same(value.__code__)
        self._watch(lambda: (value.__code__, value.__defaults__, value.__kwdefaults__))
        if value.__code__ in self._codes and not value.__closure__:
            return
        self._codes.add(value.__code__)
        origin = origin_of(value.__code__.co_filename)
        if origin == "torch":
            return
        self._reads_options = self._reads_options or (origin == "user" and "param_groups" in value.__code__.co_names)
        wrapped = vars(value).get("__wrapped__")
        if wrapped is not None:
            self.visit(f"{path}.__wrapped__", wrapped, _NOWHERE)
        for name, content in vars(value).items():
            if name != "__wrapped__" and origin == "user":
                self.visit(f"{path}.{name}", content, Slot(vars(value).__setitem__, name, content))
        for name in ("__defaults__", "__kwdefaults__"):
            self.visit(f"{path}.{name}", getattr(value, name), _NOWHERE)
        self._visit_cells(path, value)
        self._visit_globals(path, value, origin)

    def _visit_cells(self, path: str, value: types.FunctionType) -> None:
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            content = _content_of(cell)
            if isinstance(content, types.ModuleType):
                for chain in loads_of(value.__code__).of_cells:
                    if chain[0] == name:
                        self._visit_module(name, content, chain[1:])
            self._watch(lambda cell=cell: (_content_of(cell),), partial(_fill_cell, cell))
            self.visit(f"{path}.{name}", content, Slot(lambda _, new, cell=cell: _fill_cell(cell, (new,)), None, content))

    def _visit_globals(self, path: str, value: types.FunctionType, origin: str) -> None:
        content = value.__globals__
        loads = loads_of(value.__code__)
        for chain in loads.imports:
            if (module := sys.modules.get(chain[0])) is not None:
                self._visit_module(chain[0], module, chain[1:])
        for chain in loads.of_globals:
            name, each = chain[0], content.get(chain[0], _MISSING)
            where = f"{content.get('__name__', '')}.{name}"
            if each is _MISSING:
                continue
            if isinstance(each, types.ModuleType):
                self._visit_module(where, each, chain[1:])
            elif origin == "user" or _is_simple(each):
                self._watch(
                    lambda content=content, name=name: (content.get(name, _MISSING),),
                    lambda held, content=content, name=name: content.__setitem__(name, held[0]),
                )
                if where not in self.found.leaves:
                    self.visit(where, each, Slot(content.__setitem__, name, each))

    def _visit_module(self, path: str, module: types.ModuleType, names: tuple[str, ...]) -> None:
        """Note what is loaded of a Python module by name."""
        if module is os and names[:1] in (("environ",), ("getenv",)):
            self.found.leaves["os.environ"] = frozenset(os.environ.items())
            self._watch(lambda: (frozenset(os.environ.items()),), by_value=True)
            return
        origin = _origin_of_module(module)
        if not names or origin == "torch" or not hasattr(module, names[0]):
            return
        each = getattr(module, names[0])
        if isinstance(each, types.ModuleType):
            self._visit_module(f"{path}.{names[0]}", each, names[1:])
        elif (origin == "user" or _is_simple(each)) and f"{path}.{names[0]}" not in self.found.leaves:
            content = vars(module)
            self._watch(lambda: (content.get(names[0], _MISSING),), lambda held: content.__setitem__(names[0], held[0]))
            self.visit(f"{path}.{names[0]}", each, Slot(content.__setitem__, names[0], each))

    def _visit_narrow(self, path: str, narrow: Narrow) -> None:
        """Note the attributes of an object that the functions of its class load, and what they load of those."""
        value, kind = narrow.value, type(narrow.value)
        chains: dict[tuple[str, ...], None] = {(name,): None for name in narrow.names}
        for base in kind.__mro__[:-1]:
            if _origin_of_class(base) == "user":
                for each in vars(base).values():
                    each = getattr(each, "__func__", getattr(each, "fget", each))
                    if isinstance(each, types.FunctionType):
                        chains.update(dict.fromkeys(loads_of(each.__code__).of_self))
        self._visit_code_of(kind)
        for chain in chains:
            owner, place = value, path
            for number, name in enumerate(chain):
                content = getattr(owner, "__dict__", {})
                if name not in content:
                    break
                owner, place = content[name], f"{place}.{name}"
                self._watch(lambda content=content, name=name: (content.get(name, _MISSING),))
                is_last = number == len(chain) - 1
                if is_last and (chain[0] in narrow.names or _is_simple(owner) or isinstance(owner, torch.Tensor)):
                    self.visit(place, owner, Slot(content.__setitem__, name, owner))

    def _visit_other(self, path: str, value: Any) -> None:
        """Note an object by its state."""
        kind = type(value)
        if isinstance(value, Narrow):
            self.found.leaves[path] = Same(value.value)
            self._visit_narrow(path, value)
        elif (reader := _state_reader(value)) is not None:
            read, restore = reader
            self.found.leaves[path] = (kind, *read())
            self._watch(read, restore, by_value=True)
        elif isinstance(value, torch.optim.Optimizer):
            self.found.leaves[path] = Same(value)
            self._optimizers[path] = value
        elif isinstance(value, _OPAQUE) or (_origin_of_class(kind) == "torch" and not isinstance(value, torch.nn.Module)):
            self.found.leaves[path] = Same(value)
        elif isinstance(value, weakref.ReferenceType):
            self.found.leaves[path] = Same(value)
            self._watch(lambda: (value(),))
            self.visit(f"{path}()", value(), _NOWHERE)
        elif isinstance(value, weakref.WeakKeyDictionary | weakref.WeakValueDictionary):
            self.found.leaves[path] = Same(value)
            self._watch(lambda: (*value.keys(), *value.values()))
            for key, each in list(value.items()):
                self.visit(f"{path}[{key if isinstance(key, _KEYS) else type(key).__name__}]", each, _NOWHERE)
        elif hasattr(value, "__dict__") and (_is_foreign(kind) or isinstance(value, types.SimpleNamespace | threading.local | collections.UserDict)):
            self.found.leaves[path] = Same(kind)
            self._visit_code_of(kind)
            self._visit_attributes(path, value)
        elif names := [name for name in copyreg._slotnames(kind) if hasattr(value, name)]:  # type: ignore[attr-defined]
            self.found.leaves[path] = Same(kind)
            self._watch(lambda: tuple(getattr(value, name, _MISSING) for name in names))
            for name in names:
                each = getattr(value, name)
                self.visit(f"{path}.{name}", each, Slot(lambda key, new: setattr(value, key, new), name, each))
        else:
            self.found.leaves[path] = Same(value)

    def _watch(
        self, state: Callable[[], tuple[Any, ...]], restore: Callable[[tuple[Any, ...]], None] | None = None, *, by_value: bool = False
    ) -> None:
        self.found.nodes.append(_Node(state, state(), restore, by_value))


def _state_reader(value: Any) -> tuple[Callable[[], tuple[Any, ...]], Callable[[tuple[Any, ...]], None] | None] | None:
    """Return how the state of an object of Python, NumPy or PyTorch is read and written; None for others."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        return lambda: (value.shape, value.dtype.str, zlib.crc32(np.ascontiguousarray(value).view(np.uint8).reshape(-1).data)), None  # type: ignore[arg-type]
    if isinstance(value, torch.Generator):
        return lambda: (bytes(value.get_state().numpy()),), lambda held: _set_generator(value, held[0])
    if isinstance(value, random.Random):
        return lambda: (value.getstate(),), lambda held: value.setstate(held[0])
    if isinstance(value, np.random.Generator | np.random.RandomState):
        bits = value.bit_generator if isinstance(value, np.random.Generator) else value._bit_generator
        return lambda: (repr(bits.state),), None
    if isinstance(value, bytearray | array.array):
        return lambda: (bytes(value),), lambda held: value.__setitem__(slice(None), type(value)(*_typecode(value), held[0]))
    if isinstance(value, _ITERATORS):
        return lambda: (repr(value.__reduce__()),), None
    if isinstance(value, types.GeneratorType):
        return lambda: _generator_state(value), None
    if isinstance(value, ContextVar):
        return lambda: (Same(value.get(None)),), None
    return None


def _typecode(value: bytearray | array.array[Any]) -> tuple[str, ...]:
    return () if isinstance(value, bytearray) else (value.typecode,)


def _cache_state(value: Any) -> tuple[int, int]:
    """What a call of a cached function that finds its result leaves alone."""
    return value.cache_info().misses, value.cache_info().currsize


def _generator_state(value: types.GeneratorType[Any, Any, Any]) -> tuple[Any, ...]:
    frame = value.gi_frame
    if frame is None:
        return ("ended",)
    return (frame.f_lasti, *((name, each) for name, each in frame.f_locals.items() if isinstance(each, (*_PLAIN, float))))


def _set_generator(value: torch.Generator, state: bytes) -> None:
    value.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _set_class_attribute(kind: type, name: str, value: Any) -> None:
    setattr(kind, name, value)


def _content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _fill_cell(cell: types.CellType, held: tuple[Any, ...]) -> None:
    cell.cell_contents = held[0]


def _is_simple(value: Any, depth: int = 2) -> bool:
    """Return whether a value is plain, or a small container of such."""
    if isinstance(value, (*_PLAIN, float, np.generic, enum.Enum)):
        return True
    if isinstance(value, dict):
        return depth > 0 and len(value) <= 1000 and all(_is_simple(each, depth - 1) for each in value.values())
    return (
        isinstance(value, list | tuple | set | frozenset) and depth > 0 and len(value) <= 1000 and all(_is_simple(each, depth - 1) for each in value)
    )


def _is_foreign(kind: type) -> bool:
    """Return whether a class is not one of Python's standard library."""
    return kind.__module__.partition(".")[0] not in sys.stdlib_module_names or kind.__module__ == "__main__"


@functools.lru_cache(maxsize=4096)
def _origin_of_class(kind: type) -> str:
    module = sys.modules.get(kind.__module__)
    return "user" if module is None else _origin_of_module(module)


def _origin_of_module(module: types.ModuleType) -> str:
    name = module.__name__.partition(".")[0]
    if getattr(module, "__file__", None) is None:
        return "library" if name in sys.stdlib_module_names and name != "__main__" else "user"
    return origin_of(module.__file__)  # type: ignore[arg-type]
