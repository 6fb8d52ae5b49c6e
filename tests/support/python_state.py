"""What a module and the objects around it keep in Python, as plain values that two runs can be compared by."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
import re
from collections import deque
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

_OF_TORCH = frozenset(vars(torch.nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size, enum.Enum)


def state_of(value: Any) -> Any:
    """The state of an object: plain values and tensors as they are, containers and objects of user classes by their contents, others by type."""
    return _state(value, set())


def _state(value: Any, seen: set[int]) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.nn.Parameter):  # compared under its name
        return "Parameter"
    if isinstance(value, torch.Tensor):
        return value if isinstance(value, FakeTensor) else value.detach().clone()
    if isinstance(value, np.ndarray | np.generic):
        return torch.from_numpy(np.array(value)) if np.asarray(value).dtype.kind in "biuf" else repr(value)
    if isinstance(value, itertools.count):
        return repr(value)
    if id(value) in seen:
        return "seen"
    seen = {*seen, id(value)}
    if isinstance(value, torch.nn.Module):
        return _state_of_module(value, seen)
    if isinstance(value, Mapping):
        return {repr(_state(key, seen)): _state(content, seen) for key, content in value.items()}
    if isinstance(value, list | tuple | deque):
        return [_state(content, seen) for content in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if dataclasses.is_dataclass(value) or isinstance(value, SimpleNamespace) or type(value).__module__.startswith(("test_", "support", "tests")):
        return {name: _state(content, seen) for name, content in getattr(value, "__dict__", {}).items()}
    return type(value).__name__


def _state_of_module(module: torch.nn.Module, seen: set[int]) -> dict[str, Any]:
    """Attributes, mode, numbers of hooks, class attributes, and the same of all children."""
    found = {name: _state(content, seen) for name, content in vars(module).items() if name not in _OF_TORCH}
    found["training"] = module.training
    found.update({name: len(vars(module)[name]) for name in _HOOKS})
    kind = type(module)
    if not kind.__module__.startswith(("torch", "transformers")):
        found.update({f"class {name}": content for name, content in vars(kind).items() if isinstance(content, _PLAIN) and not name.startswith("__")})
    found.update({f"child {name}": _state(child, seen) for name, child in module.named_children()})
    return found


def difference(found: Any, expected: Any, tolerance: float, where: str = "", *, ignore: str = "") -> str:
    """The first place where two states differ, with both values; "" if they are equal.

    Args:
        tolerance: largest difference of numbers, relative to the largest of 1 and the expected values.
        ignore: pattern of places that may differ.
    """
    if ignore and re.search(ignore, where):
        return ""
    if isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor):
        return _difference_of_tensors(found, expected, tolerance, where)
    if isinstance(found, float) and isinstance(expected, float):
        is_near = found == expected or abs(found - expected) <= tolerance * max(1.0, abs(expected)) or (math.isnan(found) and math.isnan(expected))
        return "" if is_near else f"{where} is {found}, and {expected} by eager (by {abs(found - expected):.1e})"
    if isinstance(found, dict) and isinstance(expected, dict):
        if found.keys() != expected.keys():
            return f"{where} has {sorted(found.keys() - expected.keys())} more and {sorted(expected.keys() - found.keys())} less than by eager"
        pairs = [(found[key], expected[key], f"{where}.{key}" if where else str(key)) for key in expected]
    elif isinstance(found, list | tuple) and isinstance(expected, list | tuple):
        if len(found) != len(expected):
            return f"{where} has {len(found)} entries, and {len(expected)} by eager"
        pairs = [(left, right, f"{where}[{i}]") for i, (left, right) in enumerate(zip(found, expected, strict=True))]
    else:
        is_equal = type(found) is type(expected) and bool(found == expected)
        return "" if is_equal else f"{where} is {found!r}, and {expected!r} by eager"
    return next((text for left, right, place in pairs if (text := difference(left, right, tolerance, place, ignore=ignore))), "")


def _difference_of_tensors(found: torch.Tensor, expected: torch.Tensor, tolerance: float, where: str) -> str:
    if isinstance(found, FakeTensor):
        return f"{where} is a fake tensor"
    found, expected = (each.to_dense() if each.layout != torch.strided else each for each in (found, expected))
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"{where} is {found.dtype} of shape {tuple(found.shape)}, and {expected.dtype} of {tuple(expected.shape)} by eager"
    if found.numel() == 0 or torch.equal(found, expected):
        return ""
    kind = torch.complex128 if expected.is_complex() else torch.float64
    left, right = found.to(kind), expected.to(kind)
    largest = float((left - right).abs().nan_to_num(nan=0.0 if bool((left.isnan() == right.isnan()).all()) else math.inf).max())
    bound = tolerance * max(1.0, float(right.abs().nan_to_num().max()))
    return "" if largest <= bound else f"{where} differs from eager's by {largest:.1e}"
