"""What stands for parts of PyTorch that cannot run over fake tensors, or that compute by another way than the operations they are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from .recorder import Recorder


@contextmanager
def plain_python(recorder: Recorder) -> Iterator[None]:
    """While a module is captured: control flow operators and re-entrant checkpoints run as plain Python, and reading values makes guards."""
    with ExitStack() as stack:

        def replaced(owner: Any, name: str, value: Any) -> None:
            has, before = name in vars(owner), getattr(owner, name)
            setattr(owner, name, value)
            stack.callback(lambda: setattr(owner, name, before) if has else delattr(owner, name))

        replaced(torch, "cond", _cond)
        replaced(torch.utils.checkpoint.CheckpointFunction, "apply", _run_plainly)
        replaced(torch, "manual_seed", _seeding(recorder, torch.manual_seed))
        replaced(torch.random, "manual_seed", _seeding(recorder, torch.random.manual_seed))
        for name in ("numpy", "tolist", "__array__"):
            replaced(torch.Tensor, name, _reading(recorder, name, getattr(torch.Tensor, name)))
        stack.enter_context(_fast_paths_off())
        yield


def _cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any = ()) -> Any:
    """`torch.cond` by the value of the predicate."""
    return (true_fn if bool(pred) else false_fn)(*operands)


def _run_plainly(run: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    """A re-entrant checkpoint without its recomputation, which the planner decides about; without an input that has a gradient it gives none."""
    if any(isinstance(each, torch.Tensor) and each.requires_grad for each in args):
        return run(*args)
    with torch.no_grad():
        return run(*args)


def _seeding(recorder: Recorder, seed: Callable[[int], Any]) -> Callable[[int], Any]:
    def manual_seed(number: int) -> Any:
        recorder.is_seeded = True
        return seed(number)

    return manual_seed


def _reading(recorder: Recorder, name: str, read: Callable[..., Any]) -> Callable[..., Any]:
    """A method of tensors that reads values without an operation."""

    def reading(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if name == "numpy" and tensor.requires_grad and not kwargs.get("force", False):
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        if not isinstance(tensor, FakeTensor) and not recorder.is_watched(tensor):
            return read(tensor, *args, **kwargs)
        with torch.no_grad():
            value = recorder.value(tensor.detach())
        with _disable_current_modes():
            return read(value.clone(), *args, **kwargs)

    return reading


@contextmanager
def _fast_paths_off() -> Iterator[None]:
    """Let attention of evaluation compute by operations that are known here, instead of one for everything."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def with_plain_classes(value: Any) -> Any:
    """A result in which dataclasses that hold tensors, and are no containers of PyTorch's, are namespaces of their fields."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type | dict | list | tuple) and tree_leaves(value) == [value]:
        fields = {field.name: with_plain_classes(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return SimpleNamespace(**fields)
    return value
