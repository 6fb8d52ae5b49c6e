"""The part of a walk that follows code: functions, classes, Python modules, and the globals and attributes that they load by name."""

from __future__ import annotations

import functools
import os
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from nntask import UsageError

from .reach import loads_of, names_in, origin_of, origin_of_class, origin_of_module
from .readers import content_of, entries_of, entry_of, fill, is_simple, set_attributes, set_entry, state_of_cache
from .snapshots import MISSING, NOWHERE, Same, Slot, Snapshot, State, WatchedObject

_FUNCTIONS: Final = (types.FunctionType, types.MethodType, functools.partial, torch.nn.Module)


class Narrow(NamedTuple):
    """An object that changes all the time, such as a trainer; only those of its attributes count that the program's own methods load by name.

    Attributes:
        value: the object.
        names: attributes that count in any case, with everything that they reach.
    """

    value: Any
    names: tuple[str, ...] = ()


class CodeWalk(ABC):
    """A walk that notes code; a subclass notes values.

    Attributes:
        found: snapshot of everything visited so far.
    """

    def __init__(self) -> None:
        self.found = Snapshot()
        self._classes: set[type] = set()
        self._codes: set[tuple[types.CodeType, int]] = set()
        self._names: set[str] = set()  # names that code of the program uses

    @abstractmethod
    def visit(self, path: str, value: Any, slot: Slot) -> None:
        """Note a value, and everything that is reachable from it."""

    def _watch(self, state: Callable[[], State], restore: Callable[[State], object] | None = None, *, by_value: bool = False) -> None:
        self.found.nodes.append(WatchedObject(state, state(), restore, by_value))

    def _visit_entry(self, path: str, content: dict[str, Any], name: str, value: Any, *, restores: bool = True) -> None:
        """Note an entry of a dictionary of attributes or globals; a module may compute the value when it is first read, and so lack the entry."""
        self._watch(partial(entry_of, content, name), partial(set_entry, content, name) if restores else None)
        self.visit(path, value, Slot(content.__setitem__, name, value))

    def _visit_class(self, path: str, value: type) -> None:
        self.found.leaves[path] = Same(value)
        self._visit_code_of(value)

    def _visit_code_of(self, kind: type) -> None:
        """Note the attributes of a class and its bases, and everything that the functions among them reach."""
        for base in kind.__mro__[:-1]:
            if base in self._classes:
                continue
            self._classes.add(base)
            origin = origin_of_class(base)
            if origin == "torch":
                continue
            content = vars(base)
            self._watch(partial(entries_of, content))
            for name, value in list(content.items()):
                if name.startswith("__") and not isinstance(value, types.FunctionType):
                    continue
                path = f"{base.__qualname__}.{name}"
                value = getattr(value, "__func__", getattr(value, "fget", getattr(value, "func", value)))
                if isinstance(value, types.FunctionType):
                    self._visit_function(path, value)
                elif origin == "user" or is_simple(value):
                    self.visit(path, value, Slot(partial(setattr, base), name, value))

    def _visit_method(self, path: str, value: types.MethodType) -> None:
        self.found.leaves[path] = ("method", value.__func__.__qualname__)
        self.visit(f"{path}.__self__", value.__self__, NOWHERE)
        if isinstance(value.__func__, types.FunctionType):
            self._visit_function(f"{path}.{value.__name__}", value.__func__)

    def _visit_partial(self, path: str, value: functools.partial[Any]) -> None:
        self.found.leaves[path] = ("partial", len(value.args))
        for name in ("func", "args", "keywords"):
            self.visit(f"{path}.{name}", getattr(value, name), NOWHERE)

    def _visit_cached_function(self, path: str, value: functools._lru_cache_wrapper[Any]) -> None:
        self.found.leaves[path] = (Same(value), *state_of_cache(value))
        self._watch(lambda: state_of_cache(value), by_value=True)
        self.visit(f"{path}.__wrapped__", value.__wrapped__, NOWHERE)

    def _visit_function(self, path: str, value: types.FunctionType) -> None:
        """Note a function's code, closure and defaults, and the globals that it loads."""
        self.found.leaves[path] = Same(value.__code__)
        self._watch(lambda: (value.__code__, value.__defaults__, value.__kwdefaults__))
        origin = origin_of(value.__code__.co_filename)
        wrapped = vars(value).get("__wrapped__")
        if wrapped is not None:
            self.visit(f"{path}.__wrapped__", wrapped, NOWHERE)
        if origin == "torch":  # a decorator of PyTorch, whose arguments are the program's
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                if isinstance(content_of(cell)[0], _FUNCTIONS):
                    self.visit(f"{path}.{name}", content_of(cell)[0], NOWHERE)
            return
        self._watch(partial(entries_of, vars(value)), partial(set_attributes, vars(value)))
        for name, content in list(vars(value).items()):
            if name != "__wrapped__" and origin == "user":
                self.visit(f"{path}.{name}", content, Slot(vars(value).__setitem__, name, content))
        for name in ("__defaults__", "__kwdefaults__"):
            self.visit(f"{path}.{name}", getattr(value, name), NOWHERE)
        self._visit_cells(path, value)
        if (value.__code__, id(value.__globals__)) not in self._codes:
            self._codes.add((value.__code__, id(value.__globals__)))
            if origin == "user":
                self._names.update(names_in(value.__code__))
                _check_types(value)
            self._visit_globals(path, value, origin)

    def _visit_cells(self, path: str, value: types.FunctionType) -> None:
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            content = content_of(cell)[0]
            if isinstance(content, types.ModuleType):
                for chain in loads_of(value.__code__).of_cells:
                    if chain[0] == name:
                        self._visit_module(name, content, chain[1:])
            self._watch(partial(content_of, cell), partial(fill, cell))
            self.visit(f"{path}.{name}", content, Slot(partial(setattr, cell), "cell_contents", content))

    def _visit_globals(self, path: str, value: types.FunctionType, origin: str) -> None:
        content = value.__globals__
        loads = loads_of(value.__code__)
        for chain in loads.imports:
            if (module := sys.modules.get(chain[0])) is not None:
                self._visit_module(chain[0], module, chain[1:])
        for chain in loads.of_globals:
            name, loaded = chain[0], content.get(chain[0], MISSING)
            where = f"{content.get('__name__', '')}.{name}"
            if loaded is MISSING:
                continue
            if isinstance(loaded, types.ModuleType):
                self._visit_module(where, loaded, chain[1:])
            elif origin == "user" or is_simple(loaded):
                if where not in self.found.leaves:
                    self._visit_entry(where, content, name, loaded)
                else:
                    self._watch(partial(entry_of, content, name), partial(set_entry, content, name))

    def _visit_module(self, path: str, module: types.ModuleType, names: tuple[str, ...]) -> None:
        """Note the attributes of a Python module that are loaded by name."""
        if module is os and names[:1] in (("environ",), ("getenv",)):
            self.found.leaves["os.environ"] = frozenset(os.environ.items())
            self._watch(lambda: (frozenset(os.environ.items()),), by_value=True)
            return
        origin = origin_of_module(module)
        if not names and origin == "user" and path not in self.found.leaves:
            self._visit_python_module(path, module)
        if not names or origin == "torch" or not hasattr(module, names[0]):
            return
        member = getattr(module, names[0])
        if isinstance(member, types.ModuleType):
            self._visit_module(f"{path}.{names[0]}", member, names[1:])
        elif (origin == "user" or is_simple(member)) and f"{path}.{names[0]}" not in self.found.leaves:
            self._visit_entry(f"{path}.{names[0]}", vars(module), names[0], member)

    def _visit_narrow(self, path: str, narrow: Narrow) -> None:
        """Note the attributes of an object that the functions of its class load, and the attributes of those that they load in turn."""
        self.found.leaves[path] = Same(narrow.value)
        value, kind = narrow.value, type(narrow.value)
        chains: dict[tuple[str, ...], None] = {(name,): None for name in narrow.names}
        for base in kind.__mro__[:-1]:
            if origin_of_class(base) == "user":
                for member in vars(base).values():
                    member = getattr(member, "__func__", getattr(member, "fget", member))
                    if isinstance(member, types.FunctionType):
                        chains.update(dict.fromkeys(loads_of(member.__code__).of_self))
        self._visit_code_of(kind)
        for chain in chains:
            owner, where = value, path
            for number, name in enumerate(chain):
                content = getattr(owner, "__dict__", {})
                if name not in content:
                    break
                owner, where = content[name], f"{where}.{name}"
                self._watch(partial(entry_of, content, name))
                is_last = number == len(chain) - 1
                if is_last and (chain[0] in narrow.names or is_simple(owner) or isinstance(owner, torch.Tensor)):
                    self.visit(where, owner, Slot(content.__setitem__, name, owner))

    def _visit_python_module(self, path: str, value: types.ModuleType) -> None:
        """Note a Python module that is used as a value: if it is the program's, all its plain values."""
        self.found.leaves[path] = Same(value)
        content = vars(value)
        for name, each in list(content.items()) if origin_of_module(value) == "user" else ():
            if not name.startswith("__") and is_simple(each):
                self._visit_entry(f"{path}.{name}", content, name, each)


def _check_types(value: types.FunctionType) -> None:
    """Check that a function does not compare the exact class of a parameter, which differs in a capture.

    Raises:
        UsageError: it does; the message names the function.
    """
    code = value.__code__
    is_setup = value.__name__.startswith(("__", "_init", "init", "reset"))
    if not is_setup and ("type",) in loads_of(code).of_globals and "Parameter" in names_in(code):
        raise UsageError(
            f"{code.co_filename}:{code.co_firstlineno} asks for the exact type of a parameter", "use isinstance(..., torch.nn.Parameter)"
        )
